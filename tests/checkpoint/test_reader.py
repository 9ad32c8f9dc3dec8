"""Windows of tensors out of any layout of boxes, each byte fetched about once."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.checkpoint import importing
from elastic.checkpoint.blocks import Block
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.manifest import Manifest
from elastic.checkpoint.reader import Reader, slices, whole, windows
from elastic.storage.store import DirectoryStore, MemoryStore, Store
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import ABOUT, save

LARGE = {"w": ("float32", np.random.default_rng(0).standard_normal((1000, 1500), dtype=np.float32))}
Arrays = dict[str, np.ndarray]


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().get(key, start, stop)
        self.nbytes += len(data) if key.endswith(".bin") else 0
        return data


def grid(name: str, values: np.ndarray, chance: random.Random) -> list[importing.Part]:
    """Boxes of uneven sizes that tile the tensor, in random order: what FSDP, TP and their products leave."""
    cuts = [sorted({0, n, *(chance.randrange(n + 1) for _ in range(chance.randrange(3)))}) for n in values.shape]
    boxes = itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
    parts = []
    for box in boxes:
        offsets, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
        block = Block(name=name, dtype=str(values.dtype), global_shape=values.shape, offsets=offsets, sizes=sizes)
        part = np.ascontiguousarray(values[slices((offsets, sizes), (0,) * values.ndim)]).reshape(-1).view(np.uint8)
        parts.append((block, lambda part=part: part))
    chance.shuffle(parts)
    return parts


def write(store: Store, arrays: Arrays, *, seed: int, shard_bytes_max: int) -> Manifest:
    chance = random.Random(seed)
    parts = [part for name, values in arrays.items() for part in grid(name, values, chance)]
    return importing.write(store, parts, about=ABOUT, step=1, samples=1, shard_bytes_max=shard_bytes_max)


@pytest.mark.parametrize("seed", range(20))
def test_windows_of_any_layout(seed: int) -> None:
    chance, store = np.random.default_rng(seed), MemoryStore()
    arrays = {
        "cube": chance.integers(0, 99, (7, 5, 3)).astype(np.float64),
        "table": chance.integers(0, 99, (13, 4)).astype(np.int16),
        "row": chance.integers(0, 99, (11,)).astype(np.float32),
        "scalar": np.array(7.5, dtype=np.float32),
    }
    reader = Reader(store, write(store, arrays, seed=seed, shard_bytes_max=300))
    assert reader.tensors.keys() == arrays.keys()
    for block in reader.blocks:
        for nbytes_max in (1, 100, 1 << 20):
            found = [reader.read(window) for window in windows(block, nbytes_max)]
            assert all(len(part) <= max(nbytes_max, arrays[block.name].itemsize) for part in found)
            assert np.concatenate(found).tobytes() == arrays[block.name].tobytes()


@pytest.fixture(scope="module", params=[(1, 0), (3, 0), (3, 1)], ids=["whole", "rows", "columns"])
def large(request: pytest.FixtureRequest) -> Reader:
    (world, dim), store = request.param, MemoryStore()
    return Reader(store, save(store, key(1, 10), LARGE, world=world, dim=dim))


@settings(max_examples=40)
@given(data=st.data())
def test_any_box_is_read_from_any_layout(large: Reader, data: st.DataObject) -> None:
    values, block = LARGE["w"][1], large.tensors["w"]
    offsets = tuple(data.draw(st.integers(0, size)) for size in values.shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(values.shape, offsets))
    want = values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
    assert large.read(replace(block, offsets=offsets, sizes=sizes)).tobytes() == want.tobytes()


@given(st.lists(st.integers(0, 7), max_size=4), st.sampled_from(["uint8", "int16", "float32"]), st.integers(1, 64))
def test_windows_cover_everything_once_in_order_and_none_is_too_large(shape: list[int], dtype: str, limit: int) -> None:
    places = np.arange(math.prod(shape)).reshape(shape)
    seen = []
    for window in windows(whole("w", dtype, tuple(shape)), limit):
        seen.append(places[slices((window.offsets, window.sizes), (0,) * len(shape))].reshape(-1))
        assert window.nbytes <= limit or math.prod(window.sizes) == 1
    assert np.array_equal(np.concatenate([*seen, []]), places.reshape(-1))


def test_each_byte_is_fetched_about_once() -> None:
    store = Counting()
    values = np.random.default_rng(1).integers(0, 255, 24 << 20).astype(np.uint8)
    arrays = {f"small{number}": values[:5000] + number for number in range(100)} | {"big": values.reshape(-1, 1024)}
    manifest = importing.write(
        store,
        [part for name, value in arrays.items() for part in grid(name, value, random.Random(0))],
        about=ABOUT,
        step=1,
        samples=1,
        shard_bytes_max=7 << 20,
    )
    reader, store.nbytes = Reader(store, manifest), 0
    for block in reader.blocks:
        for window in windows(block, 3 << 19):
            reader.read(window)
    assert store.nbytes <= 1.2 * sum(value.nbytes for value in arrays.values())


def test_damage_anywhere_is_found_and_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    values = np.arange(3 << 19, dtype=np.float32)
    manifest = write(store, {"w": values}, seed=3, shard_bytes_max=2 << 20)
    for path in sorted(tmp_path.rglob("*.bin")):
        sound = path.read_bytes()
        for at in (0, len(sound) // 2, len(sound) - 1):
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
            with pytest.raises(CheckpointError, match=rf"{path.name}: bytes \d+ to \d+ fail their CRC, w has some"):
                Reader(store, manifest).read(whole("w", "float32", values.shape))
        path.write_bytes(sound[:-1])
        with pytest.raises(CheckpointError, match=rf"{path.name} ends at byte {len(sound) - 1}, w needs it up to"):
            Reader(store, manifest).read(whole("w", "float32", values.shape))
        path.write_bytes(sound)
