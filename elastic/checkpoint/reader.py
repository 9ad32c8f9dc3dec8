"""A checkpoint's tensors by name, from whatever layout saved them: a window at a time, every byte verified.

For whoever takes a checkpoint elsewhere: no torch, no process group, no more memory than a window and its edges.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.blocks import ITEM_BYTES, Block, Box, Ints, Read, check_coverage, index, reads
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.manifest import Manifest, read_index
from elastic.storage.store import Store

Bytes = npt.NDArray[np.uint8]

WINDOW_BYTES = 32 << 20
REQUESTS_AT_ONCE = 8
KEPT_MAX = 64  # sub-blocks that are kept for the next window


class Source(Protocol):
    """Tensors that lie somewhere. blocks: boxes that together are all of them, in the order in which they lie."""

    blocks: tuple[Block, ...]

    def read(self, window: Block) -> Bytes:
        """The bytes of `window`, one of `windows` of a block. CheckpointError: damaged, or not there."""


def whole(name: str, dtype: str, shape: Ints) -> Block:
    """The block that is all of a tensor."""
    return Block(name=name, dtype=dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape)


def windows(block: Block, nbytes_max: int = WINDOW_BYTES) -> Iterator[Block]:
    """`block` in row-major order, in windows of at most so many bytes each, one element at least."""
    dim = next((dim for dim, size in enumerate(block.sizes) if size > 1), None)
    if dim is None or block.nbytes <= nbytes_max:
        if block.nbytes:
            yield block
        return
    rows = block.sizes[dim]
    step = max(1, nbytes_max * rows // max(1, block.nbytes))
    for row in range(0, rows, step):
        offsets = (*block.offsets[:dim], block.offsets[dim] + row, *block.offsets[dim + 1 :])
        sizes = (*block.sizes[:dim], min(step, rows - row), *block.sizes[dim + 1 :])
        yield from windows(replace(block, offsets=offsets, sizes=sizes), nbytes_max)


def strides(sizes: Ints, item_bytes: int) -> Ints:
    """Bytes from one element to the next along each dim, of what lies in row-major order."""
    return tuple(item_bytes * math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def slices(box: Box, origin: Ints) -> tuple[slice, ...]:
    """`box`, global, as indices into an array that begins at `origin`."""
    return tuple(slice(start - first, start - first + size) for start, size, first in zip(*box, origin))


class Reader:
    """The `Source` of a committed checkpoint: every block is a whole tensor. One thread at a time."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        """CheckpointError: the index is damaged, or does not cover every tensor."""
        body, tables = read_index(store, manifest)
        check_coverage(tables)
        self._store = store
        self._objects = body["objects"]
        self._sub_block = int(body["sub_block"])
        self._have = index(tables)
        self._kept: dict[tuple[int, int], bytes] = {}
        first = sorted(self._have.values(), key=lambda found: min((block.at, rank) for rank, block in found))
        self.blocks = tuple(whole(b.name, b.dtype, b.global_shape) for ((_, b), *_) in first)

    @property
    def tensors(self) -> Mapping[str, Block]:
        return {block.name: block for block in self.blocks}

    def read(self, window: Block) -> Bytes:
        item = ITEM_BYTES[window.dtype]
        out = np.empty((*window.sizes, item), dtype=np.uint8)
        found = [read for read in reads(window, self._have) if math.prod(read.box[1])]
        for at in range(0, len(found), REQUESTS_AT_ONCE):
            some = found[at : at + REQUESTS_AT_ONCE]
            for read, part in zip(some, self._each(some)):
                out[slices(read.box, window.offsets)] = part
        return out.reshape(-1)

    def _each(self, found: list[Read]) -> list[Bytes]:
        if len(found) == 1:
            return [self._part(found[0])]
        with ThreadPoolExecutor(len(found)) as pool:
            return list(pool.map(self._part, found))

    def _part(self, read: Read) -> Bytes:
        """The box of `read`, in its shape, the bytes of one element last."""
        source, item = read.source, ITEM_BYTES[read.source.dtype]
        offsets, sizes = read.box
        apart = strides(source.sizes, item)
        start = source.at + sum((at - first) * step for at, first, step in zip(offsets, source.offsets, apart))
        stop = start + sum((size - 1) * step for size, step in zip(sizes, apart)) + item
        raw = self._bytes(read.rank, start, stop, source.name)
        return np.ndarray((*sizes, item), dtype=np.uint8, buffer=raw, strides=(*apart, 1))

    def _bytes(self, rank: int, start: int, stop: int, name: str) -> Bytes:
        """Of a rank's object, after the sub-blocks that they lie in were held against their CRCs."""
        size, object_ = self._sub_block, self._objects[rank]
        first, last = start // size, (stop - 1) // size
        kept = self._kept.pop((rank, first), b"")
        low, high = (first + bool(kept)) * size, min((last + 1) * size, object_["nbytes"])
        data = kept + self._store.get(object_["name"], low, high) if low < high else kept
        if len(data) != high - first * size:
            raise CheckpointError(
                f"{object_['name']} ends at byte {first * size + len(data)}, {name} needs it up to {high}; "
                "use an older checkpoint"
            )
        for number in range(first + bool(kept), last + 1):
            at = (number - first) * size
            if zlib.crc32(memoryview(data)[at : at + size]) != object_["crc32"][number]:
                raise CheckpointError(
                    f"{object_['name']}: bytes {number * size} to {min((number + 1) * size, object_['nbytes'])} fail "
                    f"their CRC, {name} has some of them; use an older checkpoint"
                )
        while len(self._kept) >= KEPT_MAX:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[rank, last] = data[(last - first) * size :]
        return np.frombuffer(data, dtype=np.uint8)[start - first * size : stop - first * size]
