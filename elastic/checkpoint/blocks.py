"""State as blocks: boxes of named tensors in one flat byte range, and which bytes a reader needs of them.

A block is one rank's box of a tensor, addressed by (fully qualified name, global offsets), row-major and
little-endian. So a reader with any layout can find its boxes in the tables of any other. All pure.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.errors import CheckpointError, StateError

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]  # global offsets, sizes

ALIGN = 64  # a block starts on a cache line, so that views of any dtype are aligned
SUB_BLOCK = 1 << 20  # bytes under one CRC: the smallest verified read
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The box `[offsets, offsets + sizes)` of tensor `name`, at bytes `[at, at + nbytes)` of a rank's shard."""

    name: str
    dtype: str
    global_shape: Ints
    offsets: Ints
    sizes: Ints
    at: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


Table = tuple[Block, ...]
Index = dict[str, list[tuple[int, Block]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One box to take from `source`, a block of rank `rank`'s shard; `box` is in global coordinates."""

    rank: int
    source: Block
    box: Box


def place(blocks: Iterable[Block]) -> tuple[Table, int]:
    """Gives each block its byte range, in order; returns the table and the shard's size in bytes."""
    table, at = [], 0
    for b in blocks:  # dataclasses.replace takes twice as long
        whole = b.global_shape
        table.append(Block(name=b.name, dtype=b.dtype, global_shape=whole, offsets=b.offsets, sizes=b.sizes, at=at))
        at += -(-b.nbytes // ALIGN) * ALIGN
    return tuple(table), at


def encode(table: Table) -> list[list[Any]]:
    """Plain JSON values: one short list a block, in the order of the fields of `Block`."""
    return [[b.name, b.dtype, b.global_shape, b.offsets, b.sizes, b.at] for b in table]


def decode(raw: Any) -> Table:
    """The inverse of `encode`. CheckpointError: not a table, or a block that can't be."""
    try:
        table = tuple(
            Block(
                name=str(name),
                dtype=str(dtype),
                global_shape=tuple(map(int, shape)),
                offsets=tuple(map(int, offsets)),
                sizes=tuple(map(int, sizes)),
                at=int(at),
            )
            for name, dtype, shape, offsets, sizes, at in raw
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a block table can't be read ({error}); try an older checkpoint") from error
    for block in table:
        _check(block)
    return table


def encode_bytes(table: Table) -> bytes:
    return json.dumps(encode(table), separators=(",", ":")).encode()


def decode_bytes(raw: bytes) -> Table:
    try:
        return decode(json.loads(raw))
    except ValueError as error:
        raise CheckpointError(f"a block table is not JSON ({error}); try an older checkpoint") from error


def _check(block: Block) -> None:
    fits = len(block.global_shape) == len(block.offsets) == len(block.sizes) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for whole, offset, size in zip(block.global_shape, block.offsets, block.sizes)
    )
    if not fits or block.dtype not in ITEM_BYTES or block.at < 0:
        raise CheckpointError(f"{block} can't be: wanted a known dtype and a box inside the global shape")


def intersect(a: Box, b: Box) -> Box | None:
    """The common box; None where it would be empty. Scalars (no dims) always meet."""
    starts, sizes = [], []
    for x, n, y, m in zip(a[0], a[1], b[0], b[1]):  # most boxes of a large layout do not meet: out at the first dim
        start = x if x > y else y
        size = (x + n if x + n < y + m else y + m) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return tuple(starts), tuple(sizes)


def box_of(block: Block) -> Box:
    return block.offsets, block.sizes


def index(tables: Mapping[int, Table]) -> Index:
    """Blocks by tensor name, in the order of `tables`: `reads` prefers the ranks that come first."""
    found: Index = {}
    for rank, table in tables.items():
        for block in table:
            found.setdefault(block.name, []).append((rank, block))
    return found


def reads(wanted: Block, have: Index) -> list[Read]:
    """Boxes that together fill `wanted` as far as `have` reaches (see `missing`), none read twice.

    StateError: the tensor has another shape or dtype there. CheckpointError: blocks overlap without being copies.
    """
    found: dict[Box, Read] = {}
    for rank, source in have.get(wanted.name, ()):
        if (source.global_shape, source.dtype) != (wanted.global_shape, wanted.dtype):
            raise StateError(
                f"{wanted.name} was saved as {source.dtype}{list(source.global_shape)}, this model has "
                f"{wanted.dtype}{list(wanted.global_shape)}; restore into the model that was saved"
            )
        box = intersect(box_of(wanted), box_of(source))
        if box is not None and box not in found:
            found[box] = Read(rank=rank, source=source, box=box)
    if pair := overlap(list(found)):
        (a, b) = (found[box] for box in pair)
        raise CheckpointError(
            f"{wanted.name}: rank {a.rank}'s block {box_of(a.source)} overlaps rank {b.rank}'s {box_of(b.source)}"
        )
    return list(found.values())


def missing(wanted: Block, found: Sequence[Read]) -> int:
    """Elements of `wanted` that no read fills (reads never overlap)."""
    return math.prod(wanted.sizes) - sum(math.prod(read.box[1]) for read in found)


def touched(read: Read, mask: npt.NDArray[np.bool_]) -> None:
    """Marks in `mask` (one flag per sub-block of the source's shard) the sub-blocks that hold bytes of the box."""
    source, item = read.source, ITEM_BYTES[read.source.dtype]
    strides = [item * math.prod(source.sizes[dim + 1 :]) for dim in range(len(source.sizes))]
    at = source.at + sum((o - b) * s for o, b, s in zip(read.box[0], source.offsets, strides))
    _mark(mask, at, read.box[1], strides, item)


def _mark(mask: npt.NDArray[np.bool_], at: int, sizes: Sequence[int], strides: Sequence[int], item: int) -> None:
    """Rows that lie at most a sub-block apart leave out none between them; larger ones are looked at one by one."""
    if strides and strides[0] > SUB_BLOCK:
        for row in range(sizes[0]):
            _mark(mask, at + row * strides[0], sizes[1:], strides[1:], item)
        return
    last = at + item - 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    mask[at // SUB_BLOCK : last // SUB_BLOCK + 1] = True


def spans(mask: npt.NDArray[np.bool_], nbytes: int) -> list[tuple[int, int]]:
    """Byte ranges `[start, stop)` of the marked sub-blocks of a shard of `nbytes`, neighbours joined."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(a) * SUB_BLOCK, min(int(b) * SUB_BLOCK, nbytes)) for a, b in zip(edges[::2], edges[1::2])]


def sub_blocks(nbytes: int) -> int:
    return -(-nbytes // SUB_BLOCK)


def check_coverage(tables: Mapping[int, Table]) -> None:
    """CheckpointError unless every tensor is covered fully; blocks may be exact copies, never overlap."""
    for name, found in index(tables).items():
        shapes = {(block.dtype, block.global_shape) for _, block in found}
        if len(shapes) > 1:
            raise CheckpointError(f"{name} has several shapes or dtypes: {sorted(shapes)}")
        boxes = list({box_of(block) for _, block in found})
        if pair := overlap(boxes):
            raise CheckpointError(f"{name}: blocks {pair[0]} and {pair[1]} overlap")
        got = sum(math.prod(sizes) for _, sizes in boxes)
        want = math.prod(found[0][1].global_shape)
        if got != want:
            raise CheckpointError(f"{name}: blocks cover {got} of {want} elements; a rank's shard is missing")


def overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two of the (different) boxes that meet. Parted along one dim after the other, so that a grid of n is n log n."""
    if len(boxes) <= 2:  # as most are
        return (boxes[0], boxes[1]) if len(boxes) == 2 and intersect(*boxes) else None
    for dim in range(len(boxes[0][0])):
        groups = _parted(boxes, dim)
        if len(groups) > 1:
            return next(filter(None, map(overlap, groups)), None)
    return next((pair for pair in itertools.combinations(boxes, 2) if intersect(*pair)), None)


def _parted(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups of boxes between which one could cut the space across `dim` without cutting a box."""
    groups: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        start = box[0][dim]
        if start >= end:
            groups.append([])
        groups[-1].append(box)
        end = max(end, start + box[1][dim])
    return groups
