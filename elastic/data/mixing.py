"""Which source sample number g comes from, and which of that source's samples it is: a pure function, nothing stored.

Samples are dealt out in blocks of BLOCK. At the end of each block every source has had its exact share of all samples
so far, rounded to less than one; inside a block the sources are shuffled. A source hands out its samples in sequence,
so what a run has used of each is always its first so many, whatever the weights were and whoever else took part.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from elastic.data.order import Numbers, permute, round_keys

BLOCK = 4096
Which = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From sample number `first` on, sources are taken by these weights: whole numbers, one for each source."""

    first: int
    weights: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """stages: the first one begins at 0, and each later than the one before.

    ValueError: a stage without weight, or a weight below 1/BLOCK of its stage's sum, which would have blocks without it
    and its shares rounded down again.
    """

    seed: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        firsts = [stage.first for stage in self.stages]
        if firsts[:1] != [0] or firsts != sorted(set(firsts)):
            raise ValueError(f"stages begin at samples {firsts}, wanted 0 and then later and later")
        for stage in self.stages:
            total = sum(stage.weights)
            if total <= 0 or any(weight and weight * BLOCK < total for weight in stage.weights):
                raise ValueError(
                    f"weights {stage.weights}: wanted each 0, or at least 1/{BLOCK} of their sum, and not all of them 0"
                )

    def places(self, numbers: Numbers) -> tuple[Which, Numbers]:
        """(source, number within the source) of each of these samples, in any order."""
        at = np.searchsorted(self._firsts, numbers, side="right") - 1
        blocks = (numbers - self._firsts[at]) // np.uint64(BLOCK)
        which, inside = np.empty(len(numbers), dtype=np.int64), np.empty(len(numbers), dtype=np.uint64)
        pairs = np.stack([at.astype(np.uint64), blocks], axis=1)
        for number, block in np.unique(pairs, axis=0).tolist():
            rows = np.flatnonzero((at == number) & (blocks == block))
            stage = self.stages[number]
            first = stage.first + block * BLOCK
            slots = (numbers[rows] - np.uint64(first)).astype(np.int64)
            sources, ranks = _dealt(self.seed, stage, block)
            which[rows] = sources[slots]
            before = np.array(self._before[number], dtype=np.uint64) + np.array(
                _shares(block * BLOCK, stage.weights), dtype=np.uint64
            )
            inside[rows] = before[sources[slots]] + ranks[slots].astype(np.uint64)
        return which, inside

    def used(self, position: int) -> tuple[int, ...]:
        """How many samples of each source are among the first `position`."""
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        return tuple(
            before + here for before, here in zip(self._before[number], _used(self.seed, self.stages[number], position))
        )

    @cached_property
    def _firsts(self) -> Numbers:
        return np.array([stage.first for stage in self.stages], dtype=np.uint64)

    @cached_property
    def _before(self) -> list[tuple[int, ...]]:
        """Samples of each source before each stage."""
        found = [(0,) * len(self.stages[0].weights)]
        for stage, following in zip(self.stages, self.stages[1:]):
            used = _used(self.seed, stage, following.first)
            found.append(tuple(before + here for before, here in zip(found[-1], used)))
        return found


def _used(seed: int, stage: Stage, position: int) -> tuple[int, ...]:
    """Samples of each source from the stage's beginning up to `position`."""
    block, slots = divmod(position - stage.first, BLOCK)
    sources, _ = _dealt(seed, stage, block)
    here = np.bincount(sources[:slots], minlength=len(stage.weights)).tolist()
    return tuple(whole + part for whole, part in zip(_shares(block * BLOCK, stage.weights), here))


@lru_cache(maxsize=16)
def _dealt(seed: int, stage: Stage, block: int) -> tuple[Which, Which]:
    """Of each slot of a block: its source, and how many slots before it have the same."""
    begin, end = (_shares(number * BLOCK, stage.weights) for number in (block, block + 1))
    sources = np.repeat(np.arange(len(begin)), np.subtract(end, begin))
    keys = round_keys(f"mixing block {block} from sample {stage.first} of seed {seed}")
    sources = sources[permute(np.arange(BLOCK, dtype=np.uint64), size=BLOCK, keys=keys).astype(np.int64)]
    ranks = np.empty(BLOCK, dtype=np.int64)
    for source in range(len(begin)):
        its = np.flatnonzero(sources == source)
        ranks[its] = np.arange(len(its))
    return sources, ranks


def _shares(slots: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """`slots` parted by weight: each share is off by less than one, the largest remainders are rounded up.

    (Hamilton's method.) From one block to the next no share falls: a weight brings at least one slot a block.
    """
    total = sum(weights)
    shares = [slots * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda at: (-(slots * weights[at] % total), at))
    for at in by_remainder[: slots - sum(shares)]:
        shares[at] += 1
    return tuple(shares)


def whole_numbers(weights: list[float]) -> tuple[int, ...]:
    """The same ratios, of the decimal numbers as they are written: 0.7 and 0.3 are 7 to 3."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return tuple(int(weight * scale) for weight in exact)
