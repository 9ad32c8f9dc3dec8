"""Tensors of a checkpoint in storage, box by box: every byte verified, memory bounded by the box. No torch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.blocks import (
    ITEM_BYTES,
    SUB_BLOCK,
    Block,
    Box,
    Ints,
    Read,
    index,
    missing,
    reads,
    spans,
    sub_blocks,
    touched,
)
from elastic.checkpoint.errors import Damaged
from elastic.checkpoint.manifest import Manifest, read_index
from elastic.checkpoint.store import Store

Raw = npt.NDArray[np.unsignedinteger]


class Boxes:
    """`tensors`: (dtype, global shape) by name. Damaged, here and in `read`: not what was committed."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        body, tables = read_index(store, manifest)
        self._objects = body["objects"]
        self._have = index(tables)
        self.tensors = {name: (found[0][1].dtype, found[0][1].global_shape) for name, found in self._have.items()}

    def read(self, name: str, box: Box) -> Raw:
        """The elements' bits, as unsigned integers of their width, in the box's shape."""
        dtype, shape = self.tensors[name]
        wanted = Block(name=name, dtype=dtype, global_shape=shape, offsets=box[0], sizes=box[1])
        found = reads(wanted, self._have)
        if lacking := missing(wanted, found):
            raise Damaged(f"{name}: {lacking} elements of {box} lie nowhere; the index is not whole")
        out: Raw = np.empty(wanted.sizes, dtype=f"<u{ITEM_BYTES[dtype]}")
        for part in found:
            if math.prod(part.box[1]):
                place = tuple(slice(at - first, at - first + size) for at, size, first in zip(*part.box, box[0]))
                out[place] = self._part(part, wanted)
        return out

    def _part(self, part: Read, wanted: Block) -> Raw:
        source, item = part.source, ITEM_BYTES[wanted.dtype]
        nbytes = self._objects[part.rank]["nbytes"]
        mask = np.zeros(sub_blocks(nbytes), dtype=np.bool_)
        touched(part, mask)
        wanted_spans = spans(mask, nbytes)
        first = wanted_spans[0][0]
        data = np.empty(wanted_spans[-1][1] - first, dtype=np.uint8)
        for start, stop in wanted_spans:
            self._fetch(part.rank, start, stop, data[start - first : stop - first])
        strides = tuple(item * math.prod(source.sizes[dim + 1 :]) for dim in range(len(source.sizes)))
        at = source.at + sum((o - b) * stride for o, b, stride in zip(part.box[0], source.offsets, strides))
        return np.ndarray(part.box[1], dtype=f"<u{item}", buffer=data, offset=at - first, strides=strides)

    def _fetch(self, rank: int, start: int, stop: int, into: npt.NDArray[np.uint8]) -> None:
        described = self._objects[rank]
        got = self._store.get(described["name"], start, stop)
        name = described["name"]
        if len(got) != stop - start:
            raise Damaged(f"{name} ends after {start + len(got)} bytes, the index says {described['nbytes']}")
        for at in range(start, stop, SUB_BLOCK):
            part = got[at - start : at - start + SUB_BLOCK]
            if zlib.crc32(part) != described["crc32"][at // SUB_BLOCK]:
                raise Damaged(
                    f"{name}: bytes {at} to {at + len(part)} fail their CRC; `elastic ckpt verify` says what lies there"
                )
        into[:] = np.frombuffer(got, dtype=np.uint8)


def slabs(shape: Ints, item_bytes: int, nbytes_max: int) -> Iterator[Box]:
    """The whole tensor in row-major order, in boxes of at most `nbytes_max` each (at least one element)."""
    yield from _halves((0,) * len(shape), shape, nbytes_max // item_bytes)


def _halves(offsets: Ints, sizes: Ints, elements_max: int) -> Iterator[Box]:
    count = math.prod(sizes)
    if count == 0:
        return
    if count <= max(elements_max, 1):
        yield offsets, sizes
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    half = sizes[dim] // 2
    yield from _halves(offsets, (*sizes[:dim], half, *sizes[dim + 1 :]), elements_max)
    rest = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])
    yield from _halves(rest, (*sizes[:dim], sizes[dim] - half, *sizes[dim + 1 :]), elements_max)
