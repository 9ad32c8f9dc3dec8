"""Which document each token of a window belongs to, from the shards' offsets: no loop over tokens, nothing stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Begins = NDArray[np.uint8]
Integers = NDArray[np.int64]
Numbering = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


class Boundaries:
    """Where the documents of a split's stream begin. `offsets`: of each shard, 64-bit, from 0 to its tokens, as they
    lie in its file; looked at only where a window is read. `ends`: int64, of each shard in the stream.

    No document goes on from one shard to the next: the writer never cuts one.
    """

    def __init__(self, offsets: Sequence[NDArray[Any]], ends: Integers) -> None:
        self._offsets = offsets
        self._ends = ends

    def of_shard(self, shard: int) -> Integers:
        """int64 [documents + 1], counted from the shard's first token."""
        return self._offsets[shard].view("<i8")

    def begins(self, starts: Integers, length: int) -> Begins:
        """For windows of `length` tokens from these places of the stream on: uint8 [len(starts), length], 1 at the
        first token of each document but the one that the window begins with."""
        begins = np.zeros((len(starts), length), dtype=np.uint8)
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._ends, starts + (length - 1), side="right")
        flat, places = begins.reshape(-1), starts - np.arange(len(starts)) * length
        counts = last - first + 1
        reached, rows = ranges(first, counts), np.repeat(np.arange(len(starts)), counts)
        for shard, its in groups(reached):
            offsets = self.of_shard(shard)
            begin = int(self._ends[shard - 1]) if shard else 0
            inside = starts[rows[its]] - begin  # below 0 where the window began in an earlier shard
            low = np.searchsorted(offsets, inside, side="right")
            counts = np.searchsorted(offsets, inside + length, side="left") - low
            flat[offsets[ranges(low, counts)] + np.repeat(begin - places[rows[its]], counts)] = 1
        return begins


def groups(shards: NDArray[np.integer[Any]]) -> Iterator[tuple[int, Integers]]:
    """Each shard that is named, and where: shards in their order."""
    order = np.argsort(shards, kind="stable")
    found, firsts = np.unique(shards[order], return_index=True)
    edges = [*firsts.tolist(), len(shards)]
    for shard, (start, stop) in zip(found.tolist(), pairwise(edges)):
        yield shard, order[start:stop]


def ranges(firsts: NDArray[np.integer[Any]], counts: NDArray[np.integer[Any]]) -> Integers:
    """first, first + 1, ..., so many of each, one after another: int64 [counts.sum()]."""
    stops = np.cumsum(counts, dtype=np.int64)
    total = int(stops[-1]) if len(stops) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(firsts - stops + counts, counts)


def numbering(length: int) -> type[np.uint16] | type[np.uint32]:
    """For the documents of a window of `length` tokens."""
    return np.uint16 if length <= 2**16 else np.uint32


def apart(begins: Begins, learned: Begins | None) -> tuple[Numbering, Begins]:
    """(documents, learned) of windows: 0, 1, 2, ... along each row, and 0 also at each document's first token, which
    can't be predicted from another document. learned: uint8 as in `Rows`, None: all are."""
    documents: Numbering = np.cumsum(begins, axis=1, dtype=numbering(begins.shape[1]))
    own: Begins = begins ^ np.uint8(1)
    return documents, own if learned is None else learned & own
