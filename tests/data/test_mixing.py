"""Mixed sources: exact shares, each source's own sequence, no state; deletions that renumber nothing before them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.mixing import BLOCK, Mixture, Stage, whole_numbers
from elastic.data.skips import Skips

WEIGHTS = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any).map(tuple)


def mixture(*weights: tuple[int, ...], first: int = 3 * BLOCK + 77, seed: int = 5) -> Mixture:
    stages = tuple(Stage(first=number * first, weights=each) for number, each in enumerate(weights))
    return Mixture(seed=seed, stages=stages)


def places(mixed: Mixture, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    return mixed.places(np.arange(start, start + count, dtype=np.uint64))


@settings(deadline=None, max_examples=50)
@given(weights=WEIGHTS, later=WEIGHTS, seed=st.integers(0, 2**32))
def test_each_source_hands_out_its_samples_in_sequence(
    weights: tuple[int, ...], later: tuple[int, ...], seed: int
) -> None:
    """Also over a change of weights in the middle of a block: no sample of a source is left out or given twice."""
    size = max(len(weights), len(later))
    weights, later = (each + (0,) * (size - len(each)) for each in (weights, later))
    mixed = mixture(weights, later, seed=seed)
    total = 6 * BLOCK
    which, inside = places(mixed, 0, total)
    for source in range(size):
        its = inside[which == source]
        assert np.array_equal(its, np.arange(len(its))), "in the order of the samples' numbers"
    for position in (0, 1, BLOCK, 3 * BLOCK + 76, 3 * BLOCK + 77, 3 * BLOCK + 78, total):
        counts = np.bincount(which[:position], minlength=size)
        assert mixed.used(position) == tuple(counts.tolist())


@settings(deadline=None, max_examples=50)
@given(weights=WEIGHTS, blocks=st.integers(1, 10**9))
def test_shares_are_exact_to_less_than_one_sample_at_any_distance(weights: tuple[int, ...], blocks: int) -> None:
    used = mixture(weights).used(blocks * BLOCK)
    assert sum(used) == blocks * BLOCK
    for got, weight in zip(used, weights):
        assert abs(got - Fraction(blocks * BLOCK * weight, sum(weights))) < 1


@settings(deadline=None, max_examples=30)
@given(start=st.integers(0, 10**12), seed=st.integers(0, 2**32))
def test_any_number_by_itself(start: int, seed: int) -> None:
    mixed = mixture((7, 3), (1, 1), seed=seed)
    which, inside = places(mixed, start, 300)
    some = np.random.default_rng(seed).permutation(300)[:40]
    got = mixed.places(some.astype(np.uint64) + np.uint64(start))
    assert np.array_equal(got[0], which[some]) and np.array_equal(got[1], inside[some])


def test_sources_are_shuffled_inside_a_block_and_each_block_anew() -> None:
    which, _ = places(mixture((1, 1)), 0, 2 * BLOCK)
    first, second = which[:BLOCK], which[BLOCK:]
    assert (first == second).mean() == pytest.approx(0.5, abs=0.05)
    assert (first[1:] == first[:-1]).mean() == pytest.approx(0.5, abs=0.05)
    assert not np.array_equal(first, places(mixture((1, 1), seed=6), 0, BLOCK)[0])


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1/4096"):
        mixture((1, 4096))
    with pytest.raises(ValueError, match="not all of them 0"):
        mixture((0, 0))
    with pytest.raises(ValueError, match="wanted 0 and then later"):
        Mixture(seed=0, stages=(Stage(first=4, weights=(1,)),))


def test_the_mixture_never_changes_between_versions() -> None:
    which, inside = places(mixture((7, 3)), BLOCK, 12)
    assert which.tolist() == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1]
    assert inside.tolist() == [2867, 1229, 1230, 2868, 2869, 1231, 1232, 2870, 2871, 1233, 2872, 1234]


def test_weights_are_the_decimal_numbers_that_were_written() -> None:
    assert whole_numbers([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert whole_numbers([1, 0.25]) == (4, 1)


RANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), max_size=6).map(
    lambda pairs: tuple((first, first + length) for first, length in pairs)
)


@settings(deadline=None)
@given(ranges=RANGES)
def test_what_is_left_is_the_order_without_the_skipped(ranges: tuple[tuple[int, int], ...]) -> None:
    skipped = {number for first, stop in ranges for number in range(first, stop)}
    left = [number for number in range(1000) if number not in skipped]
    got = Skips(ranges=ranges).numbers(np.arange(len(left), dtype=np.uint64))
    assert got.tolist() == left


@settings(deadline=None)
@given(ranges=RANGES, place=st.integers(0, 900), length=st.integers(1, 50))
def test_a_range_after_what_was_used_changes_nothing_before(
    ranges: tuple[tuple[int, int], ...], place: int, length: int
) -> None:
    before = Skips(ranges=ranges)
    first = before.number(place)
    after = Skips(ranges=(*ranges, (first, first + length)))
    used = np.arange(place, dtype=np.uint64)
    assert np.array_equal(before.numbers(used), after.numbers(used))
    assert after.number(place) >= first + length


@pytest.mark.parametrize("bad", [(5, 5), (-1, 3), (7, 2)])
def test_an_impossible_range_is_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="wanted 0 <= first < stop"):
        Skips(ranges=(bad,))
