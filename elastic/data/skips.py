"""Samples that are deleted from the order: rank-select over a few absolute ranges, nothing is renumbered.

A range names samples by their numbers in the order before any deletion. One that is added later and lies wholly after
what was used changes nothing of what was used; so the newest list alone tells the order of a whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastic.data.order import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Skips:
    """ranges: [first, stop) of each, in any order; they may touch and overlap."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for first, stop in self.ranges:
            if not 0 <= first < stop:
                raise ValueError(f"skipped samples [{first}, {stop}): wanted 0 <= first < stop")

    def numbers(self, places: Numbers) -> Numbers:
        """The number before any deletion of the sample that is at each place of the order that is left."""
        if not self.ranges:
            return places
        merged = self.merged()
        lengths = np.array([stop - first for first, stop in merged], dtype=np.uint64)
        skipped = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(lengths)])
        # Where each range is, in the order that is left: at that place, and from there on, it has been passed.
        left = np.array([first for first, _ in merged], dtype=np.uint64) - skipped[:-1]
        return places + skipped[np.searchsorted(left, places, side="right")]

    def number(self, place: int) -> int:
        return int(self.numbers(np.array([place], dtype=np.uint64))[0])

    def merged(self) -> list[tuple[int, int]]:
        """The same samples as ranges that rise and don't touch."""
        found: list[tuple[int, int]] = []
        for first, stop in sorted(self.ranges):
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], max(stop, found[-1][1]))
            else:
                found.append((first, stop))
        return found
