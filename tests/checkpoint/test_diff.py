"""Boxes of tensors read from storage without torch, and the comparison of two checkpoints that is built on them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.checkpoint import diff
from elastic.checkpoint.blocks import SUB_BLOCK, Box
from elastic.checkpoint.boxes import Boxes, slabs
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.store import MemoryStore
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import State, save

LARGE = {"w": ("float32", np.random.default_rng(0).standard_normal((1000, 1500), dtype=np.float32))}


def boxes(state: State, *, world: int = 2, dim: int = 0) -> Boxes:
    store = MemoryStore()
    return Boxes(store, save(store, key(1, 10), state, world=world, dim=dim))


@pytest.fixture(scope="module", params=[(1, 0), (3, 0), (3, 1)], ids=["whole", "rows", "columns"])
def large(request: pytest.FixtureRequest) -> Boxes:
    world, dim = request.param
    return boxes(LARGE, world=world, dim=dim)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_box_is_read_from_any_layout(large: Boxes, data: st.DataObject) -> None:
    whole = LARGE["w"][1]
    offsets = tuple(data.draw(st.integers(0, size)) for size in whole.shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(whole.shape, offsets))
    want = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
    assert np.array_equal(large.read("w", (offsets, sizes)), want.view(np.uint32))


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 8), st.integers(1, 64))
def test_slabs_cover_everything_once_and_none_is_too_large(shape: list[int], item: int, limit: int) -> None:
    seen = np.zeros(shape, dtype=int)
    for offsets, sizes in slabs(tuple(shape), item, limit):
        seen[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))] += 1
        assert math.prod(sizes) * item <= limit or math.prod(sizes) == 1
    assert (seen == 1).all()


def test_damage_is_never_read() -> None:
    store = MemoryStore()
    found = Boxes(store, save(store, key(1, 10), LARGE))
    everything: Box = ((0, 0), (1000, 1500))
    raw = bytearray(store.get("data/1-1-10/0.bin"))
    raw[SUB_BLOCK + 7] ^= 1
    store.put("data/1-1-10/0.bin", bytes(raw))
    assert found.read("w", ((0, 0), (100, 1500))).shape == (100, 1500), "what is not touched does no harm"
    with pytest.raises(CheckpointError, match=f"0.bin: bytes {SUB_BLOCK} to {2 * SUB_BLOCK} fail their CRC"):
        found.read("w", everything)
    store.put("data/1-1-10/0.bin", bytes(raw[:-1]))
    with pytest.raises(CheckpointError, match=r"0.bin ends after"):
        found.read("w", ((400, 0), (100, 1500)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3fn", "float16"])
def test_values_are_decoded_as_torch_does(dtype: str) -> None:
    width = torch.tensor([], dtype=getattr(torch, dtype)).element_size()
    bits = np.arange(1 << (8 * width)).astype(f"<u{width}")
    want = torch.from_numpy(bits.view(f"<i{width}").copy()).view(getattr(torch, dtype)).double().numpy()
    assert np.array_equal(diff.decode(bits, dtype), want, equal_nan=True)


def test_values_differ_across_layouts_with_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured(MemoryStore):
        largest = 0

        def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            if key.endswith(".bin"):
                Measured.largest = max(Measured.largest, (stop or 0) - start)
            return super().get(key, start, stop)

    monkeypatch.setattr(diff, "SLAB_BYTES", 1 << 18)
    other = {
        "w": ("float32", LARGE["w"][1].copy()),
        "n": ("float32", np.array([1.0, np.nan], dtype=np.float32)),
        "e": ("int64", np.zeros((0, 4), dtype=np.int64)),
    }
    same = {**other, "w": LARGE["w"]}
    other["w"][1][[3, 999], [0, 1499]] += np.float32(2.0)
    other["n"] = ("float32", np.array([1.0, 7.0], dtype=np.float32))
    store = Measured()
    a = Boxes(store, save(store, key(1, 10), same, world=2))
    b = Boxes(store, save(store, key(1, 20), other, world=3, dim=1))
    assert list(diff.tensors_differ(a, b)) == [] and list(diff.values_differ(a, a)) == []
    n, w = diff.values_differ(a, b)
    assert (w.name, w.differing, w.elements) == ("w", 2, 1_500_000) and w.max_abs == pytest.approx(2.0, rel=1e-6)
    assert (n.name, n.differing, n.elements) == ("n", 1, 2) and math.isnan(n.max_abs)
    assert 0 < Measured.largest <= (1 << 18) + 2 * SUB_BLOCK
