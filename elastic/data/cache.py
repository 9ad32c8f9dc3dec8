"""Shards of a corpus behind a URL as they lie on this node, piece by piece.

A sparse file for each shard, named by its content, of its full size and mapped by every process of the node; beside it
a state file: a header and a byte for each piece, set when its bytes are there and were held against their CRC. What was
written before the node last started counts as not held against it: the byte may have come to the disk before the piece.
Where files can't be written the same is done in memory of the process, which forgets old pieces (`Stream`).
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.data.shards import PIECE_BYTES, Shard
from elastic.storage.files import replace_file

HEADER_BYTES = 64
ABSENT, PRESENT, OF_EARLIER_BOOT = 0, 1, 2
STREAM_BYTES = 64 << 20
UNUSED_S = 60.0  # who reads a shard says so more often
LOOK_EVERY_BYTES = 64 << 20  # that are written: then all files are looked at, whether they are too many
KEPT_RATIO = 0.9  # of the bytes allowed, after old ones were deleted
_SCHEMA = b"elastic pieces 1"
_FLOCK = struct.Struct("hhqqi0q")  # struct flock of 64-bit Linux
_LOCK_WAIT_S, _LOCK_POLL_S = 10.0, 0.005
_TRIES = 10
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TMP_KEPT_S = 3600.0

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """One shard in this process. present: which pieces of `whole` may be read; they stay while it is mapped."""

    shard: Shard
    memory: mmap.mmap
    whole: NDArray[np.uint8]
    present: NDArray[np.bool_]
    inode: int = 0
    used_s: float = 0.0


def pieces_of(shard: Shard) -> int:
    return -(-shard.nbytes // PIECE_BYTES)


def code_of(index: int, number: int) -> int:
    """Of a piece: which shard, which piece of it."""
    return index << 32 | number


def index_of(code: int) -> int:
    return code >> 32


def number_of(code: int) -> int:
    return code & 0xFFFFFFFF


def span_of(shard: Shard, number: int) -> tuple[int, int]:
    """Bytes of a piece."""
    return number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, shard.nbytes)


class Cache:
    """The files of a directory on the node's own disk, for any number of processes and threads. Every method may raise
    OSError: the disk refuses."""

    def __init__(self, directory: str, bytes_max: int) -> None:
        self.directory = Path(directory)
        self._bytes_max = bytes_max
        self._unseen_bytes = LOOK_EVERY_BYTES  # look at the first piece already

    def hold(self, shard: Shard) -> Held:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(_TRIES):
            with ExitStack() as opened:
                state = self._opened(opened, self._state(shard), os.O_CREAT)
                if not _lock(state, 0, HEADER_BYTES, wait_s=_LOCK_WAIT_S):
                    raise TimeoutError(f"another process keeps {self._state(shard)} locked")
                if not os.fstat(state).st_nlink:
                    continue  # deleted while the lock was waited for
                data = self._opened(opened, self._data(shard), os.O_CREAT)
                found = _settled(state, data, shard)
                memory = mmap.mmap(data, shard.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                return Held(
                    shard=shard,
                    memory=memory,
                    whole=np.frombuffer(memory, np.uint8),
                    present=found == PRESENT,
                    inode=os.fstat(state).st_ino,
                )
        raise TimeoutError(f"{self._state(shard)} is deleted again and again")

    def refresh(self, held: Held) -> bool:
        """What other processes brought. False: the shard was deleted to make room, hold it anew."""
        with ExitStack() as opened:
            try:
                state = self._opened(opened, self._state(held.shard), 0)
            except FileNotFoundError:
                return False
            if os.fstat(state).st_ino != held.inode:
                return False
            found = np.frombuffer(os.pread(state, len(held.present), HEADER_BYTES), np.uint8)
            held.present[: len(found)] |= found == PRESENT
            return True

    @contextmanager
    def locked(self, held: Held, number: int) -> Iterator[bool]:
        """False: another process fetches this piece. The kernel takes the lock from one that dies."""
        with ExitStack() as opened:
            try:
                state = self._opened(opened, self._state(held.shard), 0)
            except FileNotFoundError:
                yield True
                return
            yield _lock(state, HEADER_BYTES + number, 1)

    def write(self, held: Held, number: int, data: bytes) -> bool:
        """False: the shard was deleted to make room, hold it anew. Several may write the same piece at once: only right
        bytes are ever written."""
        with ExitStack() as opened:
            try:
                state = self._opened(opened, self._state(held.shard), 0)
                file = self._opened(opened, self._data(held.shard), 0)
            except FileNotFoundError:
                return False
            if os.fstat(state).st_ino != held.inode:
                return False
            start, _ = span_of(held.shard, number)
            view = memoryview(data)
            while view:
                view = view[(written := os.pwrite(file, view, start)) :]
                start += written
            os.pwrite(state, bytes([PRESENT]), HEADER_BYTES + number)
        held.present[number] = True
        self._unseen_bytes += len(data)
        return True

    def is_whole(self, held: Held, number: int, crc: int) -> bool:
        """Whether the bytes that an earlier boot left are right; then they are present."""
        with ExitStack() as opened:
            try:
                state = self._opened(opened, self._state(held.shard), 0)
            except FileNotFoundError:
                return False
            if os.pread(state, 1, HEADER_BYTES + number) != bytes([OF_EARLIER_BOOT]):
                return False
            start, stop = span_of(held.shard, number)
            if os.fstat(state).st_ino != held.inode or zlib.crc32(held.memory[start:stop]) != crc:
                return False
            os.pwrite(state, bytes([PRESENT]), HEADER_BYTES + number)
        held.present[number] = True
        return True

    def stored(self, shard: Shard, number: int, crc: int) -> bytes | None:
        """A piece as it lies here, by somebody who does not write here."""
        with ExitStack() as opened, suppress(OSError):
            state = _opened(opened, self._state(shard), os.O_RDONLY)
            file = _opened(opened, self._data(shard), os.O_RDONLY)
            if os.pread(state, 1, HEADER_BYTES + number) in (bytes([PRESENT]), bytes([OF_EARLIER_BOOT])):
                start, stop = span_of(shard, number)
                data = os.pread(file, stop - start, start)
                return data if zlib.crc32(data) == crc else None
        return None

    def sidecar(self, shard: Shard) -> bytes:
        """b"": it is not here."""
        with suppress(OSError):
            return self._sidecar(shard).read_bytes()
        return b""

    def keep_sidecar(self, shard: Shard, content: bytes) -> None:
        replace_file(self._sidecar(shard), content)

    def touch(self, held: Held) -> bool:
        """It is in use. False: it was deleted."""
        try:
            if os.stat(self._state(held.shard)).st_ino != held.inode:
                return False
            os.utime(self._state(held.shard))
        except FileNotFoundError:
            return False
        return True

    def make_room(self, in_use: Collection[str], *, is_full: bool = False) -> list[str]:
        """Delete the shards that were not used for longest, where there are more bytes than allowed; which. Their maps
        stay readable. in_use: those of this process that may not go now. is_full: the disk is; all go that nobody on
        the node used for UNUSED_S."""
        if not is_full and self._unseen_bytes < min(LOOK_EVERY_BYTES, self._bytes_max // 4):
            return []
        self._unseen_bytes = 0
        found: list[tuple[float, int, str]] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.name.endswith(".bin"):
                        name = entry.name.removesuffix(".bin")
                        found.append((self._used_s(name), 512 * entry.stat().st_blocks, name))
                    elif entry.name.endswith(".tmp") and entry.stat().st_mtime < time.time() - _TMP_KEPT_S:
                        os.unlink(entry.path)  # of a process that died
        total, deleted = sum(nbytes for _, nbytes, _ in found), []
        if total <= self._bytes_max and not is_full:
            return []
        for used_s, nbytes, name in sorted(found):
            if used_s > time.time() - UNUSED_S if is_full else total <= KEPT_RATIO * self._bytes_max:
                break
            if name not in in_use and self._delete(name):
                total -= nbytes
                deleted.append(name)
        return deleted

    def _used_s(self, name: str) -> float:
        try:
            return os.stat(self.directory / f"{name}.state").st_mtime
        except FileNotFoundError:
            return 0.0

    def _delete(self, name: str) -> bool:
        with ExitStack() as opened:
            state = _opened(opened, self.directory / f"{name}.state", os.O_RDWR | os.O_CREAT)
            if not _lock(state, 0, HEADER_BYTES):
                return False
            for suffix in ("state", "bin", "crc"):
                (self.directory / f"{name}.{suffix}").unlink(missing_ok=True)
        return True

    def _opened(self, opened: ExitStack, path: Path, flags: int) -> int:
        return _opened(opened, path, os.O_RDWR | flags)

    def _data(self, shard: Shard) -> Path:
        return self.directory / f"{shard.sha256}.bin"

    def _state(self, shard: Shard) -> Path:
        return self.directory / f"{shard.sha256}.state"

    def _sidecar(self, shard: Shard) -> Path:
        return self.directory / f"{shard.sha256}.crc"


class Stream:
    """The same for one process in its own memory, of about `bytes_max`; what is read from it just now stays.

    pinned: how many readers need a piece, by its code.
    """

    def __init__(self, pinned: Counter[int], bytes_max: int) -> None:
        self._pinned = pinned
        self._bytes_max = bytes_max
        self._there: OrderedDict[int, tuple[Held, int]] = OrderedDict()
        self.nbytes = 0

    def hold(self, shard: Shard) -> Held:
        memory = mmap.mmap(-1, shard.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(memory, np.uint8)
        whole.flags.writeable = False
        return Held(shard=shard, memory=memory, whole=whole, present=np.zeros(pieces_of(shard), np.bool_))

    def write(self, held: Held, code: int, data: bytes) -> None:
        number = number_of(code)
        start, stop = span_of(held.shard, number)
        held.memory[start:stop] = data
        held.present[number] = True
        self._there[code] = (held, len(data))
        self.nbytes += len(data)
        self.trim()

    def trim(self) -> None:
        for key in [key for key in self._there if key not in self._pinned]:
            if self.nbytes <= self._bytes_max:
                break
            self._forget(key)

    def _forget(self, code: int) -> None:
        held, nbytes = self._there.pop(code)
        held.present[number_of(code)] = False
        # A private page that is not needed reads as zeros again, and takes no memory.
        held.memory.madvise(mmap.MADV_DONTNEED, number_of(code) * PIECE_BYTES, nbytes)
        self.nbytes -= nbytes


def _opened(opened: ExitStack, path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    opened.callback(os.close, descriptor)
    return descriptor


def _settled(state: int, data: int, shard: Shard) -> NDArray[np.uint8]:
    """The byte of each piece; files that are new, cut, or of another version begin anew. Under the header's lock."""
    header = (_SCHEMA + b" " + _boot_id()).ljust(HEADER_BYTES)
    raw = os.pread(state, HEADER_BYTES + pieces_of(shard) + 1, 0)
    found = np.frombuffer(raw, np.uint8, offset=min(HEADER_BYTES, len(raw))).copy()
    is_sound = len(found) == pieces_of(shard) and raw.startswith(_SCHEMA + b" ")
    if not is_sound or os.fstat(data).st_size != shard.nbytes:
        found = np.zeros(pieces_of(shard), np.uint8)
        os.ftruncate(state, 0)
        os.ftruncate(data, shard.nbytes)
    elif raw[:HEADER_BYTES] != header:
        found[found == PRESENT] = OF_EARLIER_BOOT
    else:
        return found
    os.pwrite(state, header + found.tobytes(), 0)
    return found


def _boot_id() -> bytes:
    return _BOOT_ID.read_bytes().strip()


def _lock(descriptor: int, start: int, length: int, wait_s: float = 0.0) -> bool:
    """An exclusive lock of these bytes, for as long as this descriptor is open: two threads that open a file for
    themselves exclude each other as two processes do."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline_s:
                return False
        time.sleep(_LOCK_POLL_S)
