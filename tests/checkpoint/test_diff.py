"""The comparison of two checkpoints, of any layouts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from elastic.checkpoint import diff
from elastic.checkpoint.blocks import SUB_BLOCK
from elastic.checkpoint.reader import Reader
from elastic.storage.store import MemoryStore
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import save

LARGE = {"w": ("float32", np.random.default_rng(0).standard_normal((1000, 1500), dtype=np.float32))}


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

    monkeypatch.setattr(diff, "SIDE_BYTES", 1 << 18)
    other = {
        "w": ("float32", LARGE["w"][1].copy()),
        "n": ("float32", np.array([1.0, np.nan], dtype=np.float32)),
        "e": ("int64", np.zeros((0, 4), dtype=np.int64)),
    }
    same = {**other, "w": LARGE["w"]}
    other["w"][1][[3, 999], [0, 1499]] += np.float32(2.0)
    other["n"] = ("float32", np.array([1.0, 7.0], dtype=np.float32))
    store = Measured()
    a = Reader(store, save(store, key(1, 10), same, world=2))
    b = Reader(store, save(store, key(1, 20), other, world=3, dim=1))
    assert list(diff.tensors_differ(a, b)) == [] and list(diff.values_differ(a, a)) == []
    n, w = diff.values_differ(a, b)
    assert (w.name, w.differing, w.elements) == ("w", 2, 1_500_000) and w.max_abs == pytest.approx(2.0, rel=1e-6)
    assert (n.name, n.differing, n.elements) == ("n", 1, 2) and math.isnan(n.max_abs)
    assert 0 < Measured.largest <= (1 << 18) + 2 * SUB_BLOCK
