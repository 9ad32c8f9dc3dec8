"""Whatever is damaged in a checkpoint, verification and restore both notice: hundreds of injected corruptions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from elastic.checkpoint.arena import Arena
from elastic.checkpoint.blocks import SUB_BLOCK
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import restore_plan
from elastic.checkpoint.restore import restore
from elastic.checkpoint.verify import damages
from elastic.storage.errors import StorageUnavailable
from elastic.storage.store import MemoryStore
from tests.checkpoint.hosts import TOKEN, key
from tests.checkpoint.stored import State, save

FLIPS, CUTS = 50, 12


def state_at(step: int) -> State:
    """More than one sub-block a rank, ends that are no multiple of the alignment, a scalar on both ranks."""
    generator = np.random.default_rng(step)
    return {
        "model.w": ("float32", generator.standard_normal((601, 900), dtype=np.float32)),
        "model.b": ("bfloat16", generator.integers(0, 1 << 14, 13, dtype=np.uint16)),
        "optimizer.w.step": ("float32", np.float32(step) + np.zeros((), dtype=np.float32)),
    }


WANTED = {step: state_at(step) for step in (10, 20)}


@pytest.fixture
def store() -> MemoryStore:
    """Checkpoints of steps 10 and 20, then the claim of the next attempt."""
    made = MemoryStore()
    log = CommitLog(made)
    log.claim("a")
    for step, state in WANTED.items():
        log.commit(1, save(made, key(1, step), state))
    log.claim("b")
    return made


@pytest.fixture
def arena() -> Iterator[Arena]:
    yield Arena.create(own_bytes=64, received_bytes=64, received_buffers=0)


def restored_step(store: MemoryStore, arena: Arena) -> tuple[int, list[str]]:
    """What a new attempt does. The step that it got, whose every bit is then right, and what was said."""
    said: list[str] = []
    newest = CommitLog(store, said.append).newest()
    assert newest is not None
    found = [
        (name, torch.zeros(values.shape, dtype=getattr(torch, dtype))) for name, (dtype, values) in state_at(0).items()
    ]
    restore(found, restore_plan(newest), rank=0, world=1, arena=arena, store=store, token=TOKEN)
    for name, tensor in found:
        want = np.ascontiguousarray(WANTED[newest.key.step][name][1])
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == want.tobytes(), name
    return newest.key.step, said


def verified(store: MemoryStore) -> list[str]:
    said: list[str] = []
    found = [entry.manifest for entry in CommitLog(store, said.append).checkpoints() if entry.manifest]
    return [*(line for one in found if one.key.step == 20 for line in damages(store, one)), *said]


def corruptions(raw: bytes, rng: random.Random) -> Iterator[bytes | None]:
    """None: the object is not there."""
    yield None
    for cut in {0, 1, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(CUTS - 3))}:
        yield raw[:cut]
    yield raw + b"\0"
    for bit in (0, 8 * len(raw) - 1, *(rng.randrange(8 * len(raw)) for _ in range(FLIPS - 2))):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


OBJECTS = ("0.bin", "1.bin", "0.json", "1.json", "index.json", "log/00000003.json")


@pytest.mark.parametrize("which", OBJECTS)
def test_every_corruption_is_noticed_by_verification_and_by_restore(
    store: MemoryStore, arena: Arena, which: str
) -> None:
    """Of the checkpoint and of its log entry. (The newest entry of all, lost whole, is as if it had never been.)"""
    name = which if "/" in which else f"data/1-1-20/{which}"
    raw = store.get(name)
    assert verified(store) == [] and restored_step(store, arena) == (20, [])
    injected = 0
    for damaged in corruptions(raw, random.Random(which)):
        store.delete(name) if damaged is None else store.put(name, damaged)
        told = verified(store)
        assert told and all(name in line for line in told[:1]), "verification says it, and where"
        try:
            step, said = restored_step(store, arena)
        except CheckpointError as error:
            assert name in str(error)
        else:
            assert (step, len(said)) == (10, 1) and name in said[0], "the older one, loudly"
        injected += 1
    store.put(name, raw)
    assert verified(store) == [] and injected >= FLIPS + CUTS - 2


def test_a_damaged_newest_entry_is_said_and_the_one_before_tells_what_counts(store: MemoryStore, arena: Arena) -> None:
    name = "log/00000004.json"
    raw = store.get(name)
    for damaged in corruptions(raw, random.Random(4)):
        if damaged is not None:
            store.put(name, damaged)
            step, said = restored_step(store, arena)
            assert step == 20 and len(said) == 1 and name in said[0] and name in verified(store)[-1]


def test_several_damages_of_one_checkpoint_are_all_named(store: MemoryStore) -> None:
    name = "data/1-1-20/1.bin"
    raw = bytearray(store.get(name))
    raw[5] ^= 1
    raw[SUB_BLOCK + 5] ^= 1
    store.put(name, bytes(raw))
    store.delete("data/1-1-20/0.bin")
    told = verified(store)
    assert (
        told[0] == f"data/1-1-20/0.bin does not exist, the manifest says {len(raw) - 3456} bytes"
        or "0.bin does not" in told[0]
    )
    assert len(told) == 3
    assert (
        told[1].startswith(f"{name}: bytes 0 to {SUB_BLOCK} of rank 1's shard")
        and "(model.w[300:601, 0:900])" in told[1]
    )
    assert f"bytes {SUB_BLOCK} to {len(raw)}" in told[2]
    assert "(one of model.w[300:601, 0:900], model.b[6:13], optimizer.w.step[])" in told[2]


def test_an_outage_is_no_damage(store: MemoryStore) -> None:
    (_, entry) = CommitLog(store).checkpoints()
    assert entry.manifest is not None

    class Away(MemoryStore):
        def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            if key.endswith(self.away):
                raise StorageUnavailable("storage does not answer")
            return store.get(key, start, stop)

        def list(self, prefix: str) -> dict[str, int]:
            return store.list(prefix)

    for Away.away in (".bin", "0.json", "index.json"):  # type: ignore[attr-defined]
        with pytest.raises(StorageUnavailable):
            list(damages(Away(), entry.manifest))


def test_progress_counts_every_byte(store: MemoryStore) -> None:
    (_, entry) = CommitLog(store).checkpoints()
    assert entry.manifest is not None
    looked: list[int] = []
    count: Callable[[int], None] = looked.append
    assert list(damages(store, entry.manifest, count)) == []
    assert sum(looked) == sum(record.nbytes for record in entry.manifest.shards)
