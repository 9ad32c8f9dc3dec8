"""Boxes and byte ranges: any layout to any layout gives equal arrays."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint import blocks
from elastic.checkpoint.blocks import (
    SUB_BLOCK,
    Block,
    Box,
    Table,
    check_coverage,
    decode,
    decode_bytes,
    encode_bytes,
    index,
    intersect,
    missing,
    overlap,
    place,
    reads,
    spans,
    sub_blocks,
    touched,
)
from elastic.checkpoint.errors import CheckpointError

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def cut(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    points = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True)) if size > 1 else []
    edges = [0, *sorted(points), size]
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Boxes:
    """A partition of the shape into boxes: a grid whose cells were each cut once more along one dim."""
    boxes: Boxes = [((), ())]
    for size in shape:
        boxes = [((*o, a), (*s, n)) for o, s in boxes for a, n in cut(draw, size)]
    return draw(st.permutations(boxes))


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes, Boxes]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    return shape, draw(layouts(shape)), draw(layouts(shape))


def block(shape: tuple[int, ...], box: tuple[tuple[int, ...], tuple[int, ...]], dtype: str = "int32") -> Block:
    return Block(name="w", dtype=dtype, global_shape=shape, offsets=box[0], sizes=box[1])


def slices(b: Block) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(b.offsets, b.sizes))


def inside(box: Box, b: Block) -> Any:
    """The box as an index that gives a view, of a scalar too."""
    return (*(slice(at - o, at - o + n) for at, n, o in zip(box[0], box[1], b.offsets)), ...)


def shards(array: np.ndarray, boxes: Boxes, ranks: int) -> tuple[dict[int, Table], dict[int, np.ndarray]]:
    tables, data = {}, {}
    for rank in range(ranks):
        table, nbytes = place(block(array.shape, box) for box in boxes[rank::ranks])
        flat = np.zeros(nbytes, dtype=np.uint8)
        for b in table:
            flat[b.at : b.at + b.nbytes] = np.ascontiguousarray(array[slices(b)]).reshape(-1).view(np.uint8)
        tables[rank], data[rank] = table, flat
    return tables, data


@given(problems(), st.integers(1, 4))
def test_any_layout_to_any_layout(problem: tuple[tuple[int, ...], Boxes, Boxes], ranks: int) -> None:
    shape, saved, new = problem
    array = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    tables, data = shards(array, saved, ranks)
    check_coverage(tables)
    have = index({rank: decode_bytes(encode_bytes(table)) for rank, table in tables.items()})
    for box in new:
        wanted = block(shape, box)
        into = np.zeros(wanted.nbytes, dtype=np.uint8)
        found = reads(wanted, have)
        assert missing(wanted, found) == 0
        for read in found:
            source = data[read.rank][read.source.at :][: read.source.nbytes].view(np.int32).reshape(read.source.sizes)
            part = into.view(np.int32).reshape(wanted.sizes)[inside(read.box, wanted)]
            assert not part.any(), "filled twice"
            part[...] = source[inside(read.box, read.source)]
        assert np.array_equal(into.view(np.int32).reshape(wanted.sizes), array[slices(wanted)])


@given(problems(), st.data())
def test_a_missing_block_is_seen(problem: tuple[tuple[int, ...], Boxes, Boxes], data: st.DataObject) -> None:
    shape, saved, _ = problem
    gone = data.draw(st.integers(0, len(saved) - 1))
    rest, _ = place(block(shape, box) for i, box in enumerate(saved) if i != gone)
    everything = block(shape, ((0,) * len(shape), shape))
    assert missing(everything, reads(everything, index({0: rest}))) == math.prod(saved[gone][1])
    if rest:
        with pytest.raises(CheckpointError, match="cover"):
            check_coverage({0: rest})


@given(problems(), st.integers(1, 40))
def test_touched_sub_blocks_hold_every_byte_and_no_needless_one(
    problem: tuple[tuple[int, ...], Boxes, Boxes], sub_block: int
) -> None:
    """With tiny sub-blocks, so that rows are shorter and longer than one."""
    shape, saved, new = problem
    tables, data = shards(np.zeros(shape, dtype=np.int32), saved, 1)
    for wanted in (block(shape, box) for box in new):
        for read in reads(wanted, index(tables)):
            at = read.source.at + np.arange(read.source.nbytes).reshape(*read.source.sizes, 4)
            bytes_of_box = at[inside(read.box, read.source)].ravel()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(blocks, "SUB_BLOCK", sub_block)
                mask = np.zeros(sub_blocks(len(data[0])), dtype=np.bool_)
                touched(read, mask)
            assert set(np.flatnonzero(mask)) == set(bytes_of_box // sub_block)


@given(st.lists(st.booleans(), max_size=9), st.integers(1, SUB_BLOCK))
def test_spans_join_neighbours_and_end_with_the_shard(marked: list[bool], last: int) -> None:
    nbytes = max(0, len(marked) - 1) * SUB_BLOCK + last
    ranges = spans(np.array(marked, dtype=np.bool_), nbytes)
    inside_ranges = {at for start, stop in ranges for at in range(start // SUB_BLOCK, -(-stop // SUB_BLOCK))}
    assert inside_ranges == {i for i, is_marked in enumerate(marked) if is_marked}
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)) and all(stop <= nbytes for _, stop in ranges)


DIM = st.tuples(st.integers(0, 5), st.integers(1, 3))


@given(st.lists(st.tuples(DIM, DIM, DIM), max_size=8, unique=True))
def test_two_boxes_that_meet_are_found_if_there_are_any(raw: list[tuple[tuple[int, int], ...]]) -> None:
    boxes = [(tuple(o for o, _ in dims), tuple(n for _, n in dims)) for dims in raw]
    pair = overlap(boxes)
    assert (pair is not None) == any(intersect(a, b) for a, b in itertools.combinations(boxes, 2))
    assert pair is None or (intersect(*pair) and pair[0] != pair[1])


def test_copies_are_read_once_and_the_first_rank_is_preferred() -> None:
    table, _ = place([block((4,), ((0,), (4,)))])
    found = reads(table[0], index({3: table, 1: table}))
    assert [read.rank for read in found] == [3]
    check_coverage({0: table, 1: table})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (block((4, 2), ((0, 0), (4, 2)), "float32"), "saved as float32"),
        (block((4, 3), ((0, 0), (4, 3))), r"saved as int32\[4, 3\]"),
    ],
)
def test_another_shape_or_dtype_is_an_error(other: Block, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reads(block((4, 2), ((0, 0), (4, 2))), index({0: (other,)}))


def test_overlap_is_an_error() -> None:
    table, _ = place([block((4, 4), ((0, 0), (3, 4))), block((4, 4), ((2, 0), (2, 4)))])
    with pytest.raises(CheckpointError, match="overlap"):
        check_coverage({0: table})
    with pytest.raises(CheckpointError, match="overlap"):
        reads(block((4, 4), ((0, 0), (4, 4))), index({0: table}))


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense",
        b"{}1",
        b"[[1]]",
        b'[["w","int32",[4],[2],[3],0]]',
        b'[["w","object",[4],[0],[4],0]]',
        b'[["w","int32",[4],[0,0],[4],0]]',
        b'[["w","int32",[4],[0],[4],-1]]',
    ],
)
def test_a_bad_table_is_an_error(raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode_bytes(raw)
    with pytest.raises(CheckpointError):
        decode(None)
