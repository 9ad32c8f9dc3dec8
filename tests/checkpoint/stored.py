"""Checkpoints as movers leave them in a store, without movers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.blocks import SUB_BLOCK, Block, encode_bytes, place
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import About, Manifest, build
from elastic.checkpoint.shard import Shard, table_object, to_object
from elastic.events import Uploaded
from elastic.plan import SnapshotKey
from elastic.storage.store import Store
from tests.checkpoint.hosts import key

ABOUT = About(run="r", fingerprint="f")


def upload(store: Store, at: SnapshotKey, *, attempt: int = 1, world: int = 2) -> tuple[Uploaded, ...]:
    """What the movers of `world` hosts put there."""
    found = []
    for rank in range(world):
        data = np.full(8, at.step, dtype=np.uint8)
        block = Block(name="w", dtype="uint8", global_shape=(8 * world,), offsets=(8 * rank,), sizes=(8,))
        table, nbytes = place([block])
        padded = np.zeros(nbytes, dtype=np.uint8)
        padded[:8] = data
        crcs = np.array([zlib.crc32(padded.tobytes())], dtype=np.uint32)
        shard = Shard(key=at, rank=rank, world=world, nbytes=nbytes, table=encode_bytes(table), crcs=crcs)
        name = f"data/{attempt}-{at.generation}-{at.step}/{rank}.bin"
        store.put(name, padded.tobytes())
        store.put(table_object(name), to_object(shard))
        found.append(Uploaded(key=at, rank=rank, object=name, nbytes=nbytes))
    return tuple(found)


def manifest(store: Store, at: SnapshotKey, attempt: int = 1) -> Manifest:
    uploads = upload(store, at, attempt=attempt)
    return build(store, uploads, about=ABOUT, attempt=attempt, key=at, samples=at.step * 24)


def commits(store: Store, *at: int, attempt: int = 1) -> None:
    """A checkpoint of `attempt` at each of the steps."""
    for step in at:
        CommitLog(store).commit(attempt, manifest(store, key(attempt, step), attempt))


State = Mapping[str, tuple[str, npt.NDArray[Any]]]  # by name: torch's dtype, and the values or their bits


def save(store: Store, at: SnapshotKey, state: State, *, attempt: int = 1, world: int = 2, dim: int = 0) -> Manifest:
    """Every tensor cut along `dim` (a shorter one along its first) over `world` ranks; scalars lie on each."""
    uploads = []
    for rank in range(world):
        parts = [_part(name, dtype, values, rank, world, dim) for name, (dtype, values) in state.items()]
        table, nbytes = place(block for block, _ in parts)
        data = np.zeros(nbytes, dtype=np.uint8)
        for block, (_, values) in zip(table, parts):
            data[block.at : block.at + block.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        crcs = [zlib.crc32(data[start : start + SUB_BLOCK].tobytes()) for start in range(0, nbytes, SUB_BLOCK)]
        shard = Shard(
            key=at,
            rank=rank,
            world=world,
            nbytes=nbytes,
            table=encode_bytes(table),
            crcs=np.array(crcs, dtype=np.uint32),
        )
        name = f"data/{attempt}-{at.generation}-{at.step}/{rank}.bin"
        store.put(name, data.tobytes())
        store.put(table_object(name), to_object(shard))
        uploads.append(Uploaded(key=at, rank=rank, object=name, nbytes=nbytes))
    return build(store, uploads, about=ABOUT, attempt=attempt, key=at, samples=at.step * 24)


def _part(
    name: str, dtype: str, values: npt.NDArray[Any], rank: int, world: int, dim: int
) -> tuple[Block, npt.NDArray[Any]]:
    shape = values.shape
    offsets, sizes = [0] * len(shape), list(shape)
    if shape:
        dim = dim if dim < len(shape) else 0
        edges = [shape[dim] * at // world for at in (rank, rank + 1)]
        offsets[dim], sizes[dim] = edges[0], edges[1] - edges[0]
    block = Block(name=name, dtype=dtype, global_shape=shape, offsets=tuple(offsets), sizes=tuple(sizes))
    return block, values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
