"""The arena: shared memory of one host that outlives its trainers and movers, and the rule for reusing it.

One memfd: page 0 is the control board, page 1 + i the header of buffer i, then per buffer its data, its
block table (JSON) and its CRCs. Buffers 0 and 1 are the trainer's own, the rest hold partners' shards.
All words are aligned int64, each written by one process only; see board.py and `_Head` for the layout.
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.blocks import SUB_BLOCK, sub_blocks
from elastic.checkpoint.board import Board, Word, Words, pack, unpack
from elastic.checkpoint.errors import CheckpointError, StateError
from elastic.events import Holding
from elastic.plan import SnapshotKey

Tier = Literal["own", "received"]
Bytes = npt.NDArray[np.uint8]

MAGIC = 0x454C4152454E4131  # "ELARENA1"
VERSION = 1
PAGE = mmap.PAGESIZE
OWN_BUFFERS = 2
TABLE_BYTES = 8 << 20  # room for about 80,000 blocks; pages that nobody writes cost nothing
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class _Head:
    """Places in a buffer's header. Who writes: its writer (0-7: trainer or, received, mover), mover (8-10)."""

    STATE = 0
    SEQUENCE = 1  # counts the writes begun here: lets a reader see that the buffer changed under it
    KEY = 2
    RANK = 3
    WORLD = 4
    NBYTES = 5
    TABLE_NBYTES = 6
    WRITER_PID = 7
    SEALED_SEQUENCE = 8  # SEALED is WRITTEN with the CRCs of this very sequence: no lost update can fake it
    FACTS_CRC = 9  # over the table and the array of CRCs
    PIN = 10  # incarnation of the mover that uploads from here
    WORDS = 11


class State(IntEnum):
    FREE = 0
    WRITING = 1
    WRITTEN = 2
    SEALED = 3


_STATES = tuple(State)


def reusable(state: State, key: SnapshotKey, *, generation: int, keep: SnapshotKey | None) -> bool:
    """May this buffer be overwritten? `keep`: the newest safe snapshot; `generation`: the current one.

    Protected: what is safe, whatever of this generation is newer (it may become safe, and a report of it
    may be under way), and what this generation's writer is writing. A write that an older generation left
    unfinished is worth nothing.
    """
    if state == State.FREE:
        return True
    if key.generation != generation:
        return key.generation < generation and (state == State.WRITING or key != keep)
    if state == State.WRITING or keep is None or keep.generation != generation:
        return False
    return key.step < keep.step


class Buffer:
    """One shard's place: whole `data` (uint8), its table and CRCs. One writer, any number of readers."""

    def __init__(self, memory: mmap.mmap, board: Board, place: _Place) -> None:
        self.tier: Tier = place.tier
        self.offset = place.data  # of `data` in the arena's memory
        self._board = board
        self._head = np.frombuffer(memory, dtype=np.int64, count=PAGE // 8, offset=place.head)
        raw = np.frombuffer(memory, dtype=np.uint8, count=place.stop - place.data, offset=place.data)
        self._room = raw[: place.nbytes]
        self._table = raw[place.table - place.data : place.crcs - place.data]
        self._crcs = raw[place.crcs - place.data :].view(np.uint32)

    @property
    def sequence(self) -> int:
        return int(self._head[_Head.SEQUENCE])

    @property
    def state(self) -> State:
        state = _STATES[self._head[_Head.STATE]]
        sealed = self._head[_Head.SEALED_SEQUENCE] == self._head[_Head.SEQUENCE]
        return State.SEALED if state == State.WRITTEN and sealed else state

    @property
    def key(self) -> SnapshotKey:
        key = unpack(int(self._head[_Head.KEY]))
        assert key is not None
        return key

    @property
    def rank(self) -> int:
        return int(self._head[_Head.RANK])

    @property
    def world(self) -> int:
        return int(self._head[_Head.WORLD])

    @property
    def nbytes(self) -> int:
        return int(self._head[_Head.NBYTES])

    @property
    def writer_pid(self) -> int:
        return int(self._head[_Head.WRITER_PID])

    @property
    def data(self) -> Bytes:
        return self._room[: self.nbytes]

    @property
    def view(self) -> memoryview:
        """`data` as a memoryview, for sockets and files."""
        return self.data.data

    @property
    def room(self) -> Bytes:
        """All bytes that a shard may fill here, whatever fills it now."""
        return self._room

    @property
    def crcs(self) -> npt.NDArray[np.uint32]:
        """zlib.crc32 of each SUB_BLOCK bytes of `data`; they hold while the state is SEALED."""
        return self._crcs[: sub_blocks(self.nbytes)]

    @property
    def facts_crc(self) -> int:
        return int(self._head[_Head.FACTS_CRC])

    def table(self) -> bytes:
        """The block table as it was given to `begin`."""
        return self._table[: int(self._head[_Head.TABLE_NBYTES])].tobytes()

    def reusable(self) -> bool:
        pinned = self._head[_Head.PIN] != 0 and self._head[_Head.PIN] == self._board.mover
        keep, generation = self._board.keep, self._board.generation
        return not pinned and reusable(self.state, self.key, generation=generation, keep=keep)

    def check_fits(self, nbytes: int, table_nbytes: int) -> None:
        if nbytes > len(self._room) or table_nbytes > len(self._table):
            raise StateError(
                f"a shard is {nbytes} bytes with a table of {table_nbytes}; this arena's {self.tier} buffers "
                f"take {len(self._room)} and {len(self._table)}; give the host a larger arena (sizes.shard_bytes)"
            )

    def begin(self, key: SnapshotKey, *, rank: int, world: int, nbytes: int, table: bytes) -> Bytes:
        """Takes the buffer: from here until `finish` it holds nothing. Returns `data` to be filled."""
        self.check_fits(nbytes, len(table))
        head = self._head
        head[_Head.STATE] = State.WRITING
        head[_Head.SEQUENCE] += 1
        head[_Head.KEY] = pack(key)
        head[_Head.RANK], head[_Head.WORLD], head[_Head.NBYTES] = rank, world, nbytes
        head[_Head.WRITER_PID] = os.getpid()
        self._table[: len(table)] = np.frombuffer(table, dtype=np.uint8)
        head[_Head.TABLE_NBYTES] = len(table)
        return self.data

    def finish(self) -> None:
        """The data is whole. Written last: whoever sees WRITTEN sees all of it."""
        assert self._head[_Head.STATE] == State.WRITING, self.state
        self._head[_Head.STATE] = State.WRITTEN

    def seal(self, sequence: int, crcs: npt.NDArray[np.uint32], facts_crc: int) -> bool:
        """Mover: `crcs` are those of write `sequence`. False where the buffer was taken again meanwhile."""
        if self.sequence != sequence or self.state != State.WRITTEN:
            return False
        self._crcs[: len(crcs)] = crcs
        self._head[_Head.FACTS_CRC] = facts_crc
        self._head[_Head.SEALED_SEQUENCE] = sequence
        return self.sequence == sequence

    def free(self) -> None:
        self._head[_Head.STATE] = State.FREE

    def pin(self, incarnation: int) -> None:
        """Mover: no reuse while this mover lives, until `unpin`. Check `sequence` afterwards: a writer may be in."""
        self._head[_Head.PIN] = incarnation

    def unpin(self) -> None:
        self._head[_Head.PIN] = 0

    def holding(self) -> Holding | None:
        """What can be restored from here; None where nothing is whole (a received shard counts sealed only)."""
        sequence = self.sequence  # before all else, and again at the end: a writer may come in meanwhile
        state, _, key, rank, world, nbytes, _, _, sealed_sequence, *_ = self._head[: _Head.WORDS].tolist()
        sealed = sealed_sequence == sequence
        if state != State.WRITTEN or (self.tier == "received" and not sealed):
            return None
        if self.sequence != sequence or self._head[_Head.STATE] != State.WRITTEN:
            return None
        told = unpack(key)
        assert told is not None
        return Holding(key=told, rank=rank, world=world, tier=self.tier, sealed=sealed, nbytes=nbytes)


class Arena:
    """All buffers of one host. `fd` is handed to the mover and the template; the memory dies with its last holder."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.memory = mmap.mmap(fd, 0)
        words = np.frombuffer(self.memory, dtype=np.int64, count=PAGE // 8)
        if words[Word.MAGIC] != MAGIC or words[Word.VERSION] != VERSION:
            got, version = hex(int(words[Word.MAGIC])), int(words[Word.VERSION])
            raise CheckpointError(
                f"fd {fd} is no arena of version {VERSION}: got magic {got}, version {version}; if elastic was "
                "upgraded while this host ran, end the host: a new one makes its own arena"
            )
        self.board = Board(words)
        buffers = [Buffer(self.memory, self.board, place) for place in _places(words)]
        self.own, self.received = tuple(buffers[:OWN_BUFFERS]), tuple(buffers[OWN_BUFFERS:])

    @classmethod
    def create(cls, *, own_bytes: int, received_bytes: int, received_buffers: int, prefault: bool = True) -> Arena:
        """A new arena: two own buffers of `own_bytes`, `received_buffers` of `received_bytes`.

        prefault: own buffers get their memory now, so that the first snapshot is as fast as the next.
        """
        fd = os.memfd_create("elastic-arena")
        os.ftruncate(fd, PAGE)
        with mmap.mmap(fd, PAGE) as page:
            words = np.frombuffer(page, dtype=np.int64)
            words[Word.RECEIVED_BUFFERS] = received_buffers
            words[Word.OWN_BYTES], words[Word.RECEIVED_BYTES] = own_bytes, received_bytes
            words[Word.TABLE_BYTES] = TABLE_BYTES
            words[Word.KEEP] = pack(None)
            words[Word.VERSION], words[Word.MAGIC] = VERSION, MAGIC
            places = _places(words)
            del words
        os.ftruncate(fd, places[-1].stop)
        try:
            if prefault:
                for place in places[:OWN_BUFFERS]:
                    _reserve(fd, place.data, place.nbytes)
            return cls(fd)
        except CheckpointError:
            os.close(fd)  # with what it did get
            raise

    @classmethod
    def attach(cls, fd: int) -> Arena:
        return cls(fd)

    def map_own(self) -> None:
        """Standby: enters the own buffers into this process's page table ahead of the first restore and snapshot.

        About 1 ms per MB, which is why it is not done when a trainer has to be quick.
        """
        for place in _places(np.frombuffer(self.memory, dtype=np.int64, count=PAGE // 8))[:OWN_BUFFERS]:
            try:
                self.memory.madvise(_MADV_POPULATE_WRITE, place.data, max(place.nbytes, 1))
            except OSError as error:
                if error.errno != errno.EINVAL:  # an older kernel: the first snapshot pays instead
                    raise

    def holdings(self) -> tuple[Holding, ...]:
        found = (buffer.holding() for buffer in (*self.own, *self.received))
        return tuple(holding for holding in found if holding is not None)

    def find(self, key: SnapshotKey, rank: int) -> Buffer | None:
        """The buffer from which `rank`'s shard of `key` can be restored here; own before received."""
        for buffer in (*self.own, *self.received):
            holding = buffer.holding()
            if holding is not None and (holding.key, holding.rank) == (key, rank):
                return buffer
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Byte offsets of one buffer's parts in the arena."""

    tier: Tier
    nbytes: int
    head: int
    data: int
    table: int
    crcs: int
    stop: int


def _places(words: Words) -> list[_Place]:
    received = int(words[Word.RECEIVED_BUFFERS])
    sizes = [int(words[Word.OWN_BYTES])] * OWN_BUFFERS + [int(words[Word.RECEIVED_BYTES])] * received
    places, at = [], PAGE * (1 + len(sizes))
    for i, nbytes in enumerate(sizes):
        table = at + _pages(nbytes)
        crcs = table + int(words[Word.TABLE_BYTES])
        stop = crcs + _pages(4 * (nbytes // SUB_BLOCK + 1))
        tier: Tier = "own" if i < OWN_BUFFERS else "received"
        places.append(_Place(tier=tier, nbytes=nbytes, head=PAGE * (1 + i), data=at, table=table, crcs=crcs, stop=stop))
        at = stop
    return places


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _reserve(fd: int, at: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, at, max(nbytes, 1))
    except OSError as error:
        raise CheckpointError(
            f"can't reserve {nbytes} bytes of memory for snapshots: {error.strerror}; lower the model's size "
            "per host or raise the memory limit"
        ) from error
