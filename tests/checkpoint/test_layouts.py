"""Any layout to any layout through storage, with real DTensors: replicas, stages, uneven and empty parts, scalars."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from elastic.checkpoint.errors import CheckpointError, StateError
from elastic.checkpoint.restore import Restored, restore
from elastic.checkpoint.save import Entry
from elastic.storage.store import MemoryStore
from tests.checkpoint.hosts import TOKEN
from tests.checkpoint.layouts import Layout, Tensors, ddp, fsdp, hsdp, nowhere, of_rank, right, save

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to three axes of ranks (as FSDP x TP x replicas), up to three stages, at most twelve ranks."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: torch.Size(sizes).numel() < 9))
    stages = draw(st.integers(1, max(1, 12 // torch.Size(mesh).numel())).filter(lambda count: count < 4))
    one: st.SearchStrategy[Placement] = st.builds(Shard, st.integers(0, 2)) | st.just(Replicate())
    placements = draw(st.just(()) | st.tuples(*(one for _ in mesh)))
    return Layout(mesh=tuple(mesh), placements=placements, stages=stages if placements else 1)


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 7), max_size=3))
        values = torch.randint(0, 127, shape, generator=generator)
        found[f"w{i}"] = values.to(draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        found["large"] = torch.randint(0, 127, (5, 3 << 14), generator=generator)  # of its copies only one is stored
    return found


def restored(store: Any, plan: Any, entries: list[Entry], rank: int, world: int) -> Restored:
    arena = nowhere()
    try:
        return restore(entries, plan, rank=rank, world=world, arena=arena, store=store, token=TOKEN)
    finally:
        os.close(arena.fd)


@settings(max_examples=60, deadline=None)
@given(states(), layouts(), layouts())
def test_any_layout_to_any_other(tensors: Tensors, old: Layout, new: Layout) -> None:
    store = MemoryStore()
    plan = save(store, tensors, old)
    for rank in range(new.world):
        entries = of_rank(tensors, new, rank, empty=True)
        restored(store, plan, entries, rank, new.world)
        assert right(entries, tensors, new, rank)


def test_one_state_through_all_kinds_of_layout() -> None:
    """DDP to FSDP to HSDP to stages and back: each saves what it restored."""
    tensors: Tensors = {"a": torch.randn(13, 5000), "b": torch.randn(3, 2, 7).bfloat16(), "c": torch.tensor(3)}
    stages = Layout(mesh=(2,), placements=(Shard(1),), stages=2)
    kinds = [ddp(2), fsdp(4), hsdp(2, 2), stages, fsdp(3), ddp(3), ddp(2)]
    for old, new in itertools.pairwise(kinds):
        store = MemoryStore()
        plan = save(store, tensors, old)
        for rank in range(new.world):
            entries = of_rank(tensors, new, rank, empty=True)
            restored(store, plan, entries, rank, new.world)
            assert right(entries, tensors, new, rank), (old, new, rank)


def test_a_shard_that_is_not_there_and_state_that_nobody_saved_are_said() -> None:
    tensors: Tensors = {"a": torch.randn(8, 4), "b": torch.randn(4)}
    store = MemoryStore()
    plan = save(store, tensors, fsdp(4))
    part = type(plan)(key=plan.key, world=4, sources=plan.sources[:3])
    with pytest.raises(CheckpointError, match=r"no source for a \(8 elements\), b \(1 elements\)"):
        restored(store, part, of_rank(tensors, ddp(1), 0, empty=True), 0, 1)
    with pytest.raises(StateError, match="has b, which this task does not have"):
        restored(store, plan, of_rank({"a": tensors["a"]}, ddp(1), 0), 0, 1)
    store.put("data/1-1-3/2.json", store.get("data/1-1-3/1.json"))
    with pytest.raises(CheckpointError, match=r"data/1-1-3/2\.json describes rank 1 of .*, wanted rank 2 of"):
        restored(store, plan, of_rank(tensors, ddp(1), 0, empty=True), 0, 1)
