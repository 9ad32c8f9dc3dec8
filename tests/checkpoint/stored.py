"""Checkpoints as movers leave them in a store, without movers."""

from __future__ import annotations

import zlib

import numpy as np

from elastic.checkpoint.blocks import Block, encode_bytes, place
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import About, Manifest, build
from elastic.checkpoint.shard import Shard, table_object, to_object
from elastic.checkpoint.store import Store
from elastic.events import Uploaded
from elastic.plan import SnapshotKey
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
