"""The order is a permutation per epoch, a function of the sample's number, and well mixed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.order import digest, hash64, permute, sample_ids, window_of

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 20_000))
SEEDS = st.integers(0, 2**63)


def ids(windows: int, start: int, count: int, *, seed: int = 0, fingerprint: str = "f") -> np.ndarray:
    return sample_ids(fingerprint=fingerprint, seed=seed, windows=windows, start=start, count=count)


@settings(deadline=None)
@given(windows=SIZES, seed=SEEDS, epoch=st.integers(0, 2**20))
def test_each_epoch_holds_each_window_once(windows: int, seed: int, epoch: int) -> None:
    got = ids(windows, epoch * windows, windows, seed=seed)
    assert got.dtype == np.uint64
    assert (got >> np.uint64(40) == epoch).all()
    assert np.array_equal(np.sort(window_of(got)), np.arange(windows, dtype=np.uint64))


@settings(deadline=None)
@given(windows=st.integers(1, 500), data=st.data())
def test_any_division_into_shares_gives_the_same_samples(windows: int, data: st.DataObject) -> None:
    """Read in one piece, or cut anywhere (also across epochs): the same ids in the same order, digests add up."""
    start = data.draw(st.integers(0, windows * 2**20))
    count = data.draw(st.integers(0, windows * 5))
    whole = ids(windows, start, count)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=8))), count]
    shares = [ids(windows, start + a, b - a) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate(shares), whole)
    assert sum(digest(share) for share in shares) % 2**64 == digest(whole)
    assert len(np.unique(whole)) == count, "no id twice, in whatever epoch"


def test_epochs_seeds_and_corpora_have_orders_of_their_own() -> None:
    orders = [
        window_of(ids(5000, 0, 5000)),
        window_of(ids(5000, 5000, 5000)),
        window_of(ids(5000, 0, 5000, seed=1)),
        window_of(ids(5000, 0, 5000, fingerprint="g")),
        np.arange(5000, dtype=np.uint64),
    ]
    for number, order in enumerate(orders):
        for other in orders[:number]:
            assert (order == other).sum() < 10, "about one fixed point is expected by chance"


def test_a_later_epoch_is_not_a_later_seed() -> None:
    assert not np.array_equal(window_of(ids(100, 100, 100, seed=0)), window_of(ids(100, 0, 100, seed=1)))


@pytest.mark.parametrize("windows", [2**30, 10**9 + 7, 115_530])
def test_neighbours_are_mixed(windows: int) -> None:
    """Chi-square of the low nibble (15 degrees of freedom), and parity of the step between neighbours."""
    got = window_of(ids(windows, 0, min(windows, 100_000)))
    counts = np.bincount((got & np.uint64(15)).astype(np.int64), minlength=16)
    expected = len(got) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 45, "p < 1e-4"
    parity = ((got[1:] ^ got[:-1]) & np.uint64(1)).mean()
    assert abs(parity - 0.5) < 0.01
    gaps = got[1:].astype(np.int64) - got[:-1].astype(np.int64)
    assert abs(np.abs(gaps).mean() / windows - 1 / 3) < 0.01, "uniform pairs lie a third of the range apart"


def test_avalanche() -> None:
    """Each input bit flips each output bit half the time: a permutation of 2**40, 4000 inputs, 40 x 40 bits."""
    keys = np.arange(1, 9, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    inputs = np.arange(4000, dtype=np.uint64) * np.uint64(274_177)
    plain = permute(inputs, size=2**40, keys=keys)
    for bit in range(40):
        flipped = plain ^ permute(inputs ^ np.uint64(1 << bit), size=2**40, keys=keys)
        rates = [((flipped >> np.uint64(out)) & np.uint64(1)).mean() for out in range(40)]
        assert abs(np.mean(rates) - 0.5) < 0.01 and np.abs(np.array(rates) - 0.5).max() < 0.05


def test_digest_tells_a_lost_and_a_repeated_sample() -> None:
    whole = ids(100, 0, 50)
    assert digest(whole[::-1]) == digest(whole)
    assert digest(whole[:-1]) != digest(whole)
    assert digest(np.append(whole[:-1], whole[0])) != digest(whole)
    assert digest(whole[:0]) == 0
    assert len(np.unique(hash64(np.arange(10_000, dtype=np.uint64)))) == 10_000


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run needs the order that it began with: these values are part of the format."""
    assert window_of(ids(1000, 0, 5)).tolist() == [255, 735, 575, 606, 568]
    assert f"{digest(ids(1000, 995, 10)):016x}" == "54d86c16ca2434f5"


@pytest.mark.parametrize(("windows", "start"), [(0, 0), (2**40 + 1, 0), (10, -1), (1, 2**24)])
def test_what_an_id_cannot_name_is_refused(windows: int, start: int) -> None:
    with pytest.raises(ValueError, match=r"wanted 1 to|lie outside"):
        ids(windows, start, 1)
