"""The whole protocol of one attempt, as movers and coordinator run it, over a state whose every byte is known; and what
must be true of the storage that it left, whatever happened to it.

No torch here: it is imported by processes that are started to be killed.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.arena import Arena, Buffer
from elastic.checkpoint.blocks import SUB_BLOCK, Block, encode_bytes, place
from elastic.checkpoint.committer import Committer
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.manifest import read_index
from elastic.checkpoint.shard import put_shard
from elastic.checkpoint.upkeep import collect
from elastic.checkpoint.verify import damages
from elastic.config_sections import Checkpoint
from elastic.events import CheckpointCommitted, Uploaded
from elastic.plan import SnapshotKey
from elastic.segments import Sealer, recover
from elastic.storage.errors import StorageError
from elastic.storage.object_store import ObjectStore
from elastic.storage.store import DirectoryStore, Store
from elastic.telemetry import journal
from tests.checkpoint.stored import ABOUT

KEEP, WORLD = 2, 2
ROWS = 7  # uneven over two ranks
LARGE_BYTES = 3000
LIMIT_S = 60.0
HOUR_S = 3600.0

Tell = Callable[..., None]
State = dict[str, npt.NDArray[Any]]


class FencedOff(Exception):
    """The writer was told that a newer attempt has claimed the log."""


def state(attempt: int, step: int, large_bytes: int = LARGE_BYTES) -> State:
    """No two checkpoints have the same bytes: neither those of two steps nor those of two attempts."""
    chance = np.random.default_rng([attempt, step])
    return {
        "model.large": np.frombuffer(chance.bytes(large_bytes), dtype=np.uint8),
        "model.w": chance.standard_normal((ROWS, 5)).astype(np.float32),
        "optimizer.w.step": np.array(1000 * attempt + step, dtype=np.int64),
    }


def parts(whole: State, rank: int) -> Iterator[tuple[Block, npt.NDArray[Any]]]:
    """What a rank saves: its rows, copies of what is small and whole, and the first all of what is large."""
    for name, values in whole.items():
        first, last = 0, values.shape[0] if values.ndim else 1
        if name == "model.w":
            first, last = ROWS * rank // WORLD, ROWS * (rank + 1) // WORLD
        if name == "model.large" and rank:
            continue
        mine = values[first:last] if values.ndim else values
        offsets = (first,) + (0,) * (values.ndim - 1) if values.ndim else ()
        yield (
            Block(name=name, dtype=str(values.dtype), global_shape=values.shape, offsets=offsets, sizes=mine.shape),
            mine,
        )


class Hosts:
    """An arena for each rank; what a mover does with it is done here, in this thread."""

    def __init__(self, store: Store, large_bytes: int) -> None:
        self._store, self._large_bytes = store, large_bytes
        room = large_bytes + (4 << 10)
        self._arenas = [
            Arena.create(own_bytes=room, received_bytes=64, received_buffers=0, prefault=False) for _ in range(WORLD)
        ]

    def upload(self, key: SnapshotKey, attempt: int) -> tuple[Uploaded, ...]:
        found = []
        for rank, arena in enumerate(self._arenas):
            buffer = _snapshot(arena, rank, key, state(attempt, key.step, self._large_bytes))
            found.append(put_shard(self._store, buffer, key, sequence=buffer.sequence, attempt=attempt))
            arena.board.order(generation=key.generation, keep=key)
        return tuple(found)

    def close(self) -> None:
        for arena in self._arenas:
            os.close(arena.fd)


def _snapshot(arena: Arena, rank: int, key: SnapshotKey, whole: State) -> Buffer:
    mine = list(parts(whole, rank))
    table, nbytes = place(block for block, _ in mine)
    buffer = next(own for own in arena.own if own.reusable())
    data = buffer.begin(key, rank=rank, world=WORLD, nbytes=nbytes, table=encode_bytes(table))
    data[:] = 0
    for block, (_, values) in zip(table, mine):
        data[block.at : block.at + block.nbytes] = np.frombuffer(values.tobytes(), dtype=np.uint8)
    buffer.finish()
    crcs = [zlib.crc32(data[at : at + SUB_BLOCK].data) for at in range(0, nbytes, SUB_BLOCK)]
    array = np.array(crcs, dtype=np.uint32)
    assert buffer.seal(buffer.sequence, array, zlib.crc32(buffer.table() + array.tobytes()))
    return buffer


def attempt(store: Store, aside: Path, *, steps: int, tell: Tell, large_bytes: int = LARGE_BYTES) -> None:
    """Claims the log and commits `steps` more checkpoints. aside: a directory for this head's copy of the journal.

    tell: ("claimed", attempt, [(attempt, step)] of what it starts from), ("committing", attempt, step) before each
    upload and ("committed", attempt, step, number) after it; or ("failed", sentence), and on it goes, as a run does.
    FencedOff: a newer attempt has claimed the log.
    """
    log = CommitLog(store, loudly=_unexpected)
    number = log.claim("crash test")
    found = [(newest.attempt, newest.key.step)] if (newest := log.newest()) else []
    tell("claimed", number, found)
    first = 1 + (found[0][1] if found else 0)
    path = aside / "journal.jsonl"
    recover(path, store)
    hosts, sealer = Hosts(store, large_bytes), None
    try:
        with journal.open_for_append(path) as lines:
            _note(lines, {"event": {"kind": "RunStarted", "attempt": number}})
            sealer = Sealer(path, store, attempt=number, every_s=3600.0)
            committer = Committer(
                store,
                log,
                number,
                about=ABOUT,
                samples_per_step=24,
                keep=Checkpoint(keep=KEEP),
                before_commit=sealer.seal,
            )
            for step in range(first, first + steps):
                key = SnapshotKey(generation=number, step=step)
                _note(lines, {"attempt": number, "step": step})
                tell("committing", number, step)
                try:
                    committer.submit(key, hosts.upload(key, number), {})
                    tell("committed", number, step, _number(committer))
                except StorageError as error:
                    tell("failed", str(error))
            assert committer.close(LIMIT_S)
    finally:
        hosts.close()
        if sealer is not None:
            sealer._closed.set()


def _note(lines: Any, entry: dict[str, Any]) -> None:
    lines.write(journal.encode(entry))
    lines.flush()


def _number(committer: Committer) -> int:
    until_s = time.monotonic() + LIMIT_S
    while not (results := committer.results()):
        assert time.monotonic() < until_s, "the commit did not end"
        time.sleep(0.0005)
    (result,) = results
    if isinstance(result, CheckpointCommitted):
        return result.number
    if result.fenced_by:
        raise FencedOff(result.reason)
    raise CheckpointError(result.reason)


def _unexpected(sentence: str) -> None:
    raise AssertionError(f"nothing may be damaged, yet: {sentence}")


# ---------------------------------------------------------------- what must be true


def found_whole(store: Store, aside: Path) -> list[Entry]:
    """The checkpoints that count, by number; every byte of each is what its attempt saved at its step, and the journal
    in storage knows of it."""
    log = CommitLog(store, loudly=_unexpected)
    entries = log.checkpoints()
    assert log.newest_entry() == (entries[-1] if entries else None)
    recover(aside / "journal.jsonl", store)
    told = journal.read_file(aside / "journal.jsonl")
    for entry in entries:
        manifest = entry.manifest
        assert manifest is not None and manifest.attempt == entry.attempt
        assert list(damages(store, manifest)) == []
        whole = expected(store, entry)
        for record in manifest.shards:
            data = store.get(record.object)
            for block, values in _placed(parts(whole, record.rank)):
                assert data[block.at : block.at + block.nbytes] == values.tobytes(), (record.object, block.name)
        assert {"attempt": entry.attempt, "step": manifest.key.step} in told
    return entries


def expected(store: Store, entry: Entry) -> State:
    """Of the size that was saved."""
    assert entry.manifest is not None
    (large_bytes,) = read_index(store, entry.manifest)[0]["tensors"]["model.large"]["shape"]
    return state(entry.attempt, entry.manifest.key.step, large_bytes)


def _placed(mine: Iterator[tuple[Block, npt.NDArray[Any]]]) -> Iterator[tuple[Block, npt.NDArray[Any]]]:
    found = list(mine)
    yield from zip(place(block for block, _ in found)[0], (values for _, values in found))


def garbage(store: Store) -> set[str]:
    """Objects under data/ that no checkpoint which counts names. All that those name must be there."""
    named = {name for entry in CommitLog(store).checkpoints() if entry.manifest for name in entry.manifest.objects()}
    there = set(store.list("data/"))
    assert named <= there, named - there
    return there - named


def unfinished_after_gc(store: DirectoryStore | ObjectStore) -> Sequence[str]:
    """Writes that never ended, after `elastic ckpt gc`, for which the commits have left no object."""
    found = collect(store, CommitLog(store), unfinished_before_s=time.time() + HOUR_S, dry_run=False)
    assert not found.objects
    return store.unfinished(time.time() + HOUR_S, delete=False)
