"""The order is a permutation per epoch, a function of the sample's number, and well mixed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.order import WHOLE_BYTES, Order, digest, epoch_of, hash64, order_of, permute, source_of, window_of

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 20_000))
SEEDS = st.integers(0, 2**63)


def ids(windows: int, start: int, count: int, *, seed: int = 0, fingerprint: str = "f") -> np.ndarray:
    return Order(fingerprint=fingerprint, seed=seed, windows=windows).run(start, count)


@settings(deadline=None)
@given(windows=SIZES, seed=SEEDS, epoch=st.integers(0, 2**20 - 1))
def test_each_epoch_holds_each_window_once(windows: int, seed: int, epoch: int) -> None:
    got = ids(windows, epoch * windows, windows, seed=seed)
    assert got.dtype == np.uint64
    assert (epoch_of(got) == epoch).all() and not source_of(got).any()
    assert np.array_equal(np.sort(window_of(got)), np.arange(windows, dtype=np.uint64))


@settings(deadline=None)
@given(windows=SIZES, lanes=st.integers(1, 40), block=st.integers(1, 300), epoch=st.integers(0, 5))
def test_so_does_an_epoch_over_blocks(windows: int, lanes: int, block: int, epoch: int) -> None:
    order = Order(fingerprint="f", seed=3, windows=windows, lanes=lanes, block=block)
    got = order.run(epoch * windows, windows)
    assert np.array_equal(np.sort(window_of(got)), np.arange(windows, dtype=np.uint64))
    some = np.random.default_rng(windows).permutation(windows)[:50].astype(np.uint64) + np.uint64(epoch * windows)
    assert np.array_equal(order.ids(some), got[some - np.uint64(epoch * windows)]), "each number by itself"


def test_a_batch_draws_from_a_block_of_its_own_for_each_lane() -> None:
    """And a lane stays in its block until that is used up: what is read in one piece is used as a whole."""
    order = Order(fingerprint="f", seed=0, windows=64_000, lanes=32, block=100)
    size = 64_000 // 640
    blocks = window_of(order.run(0, 32 * size)).reshape(size, 32) // np.uint64(size)
    assert (blocks == blocks[0]).all() and len(np.unique(blocks[0])) == 32
    slots = window_of(order.run(0, 32 * size)).reshape(size, 32) % np.uint64(size)
    assert all(len(np.unique(lane)) == size for lane in slots.T)
    assert len({lane.tobytes() for lane in slots.T}) == 32, "each block has an order of its own"
    later = window_of(order.run(32 * size, 32 * size)).reshape(size, 32) // np.uint64(size)
    assert not set(later[0].tolist()) & set(blocks[0].tolist())


def test_blocks_are_for_corpora_that_no_cache_holds() -> None:
    small, large = WHOLE_BYTES // 2048, 64 * WHOLE_BYTES // 2048
    made = [
        order_of(fingerprint="f", seed=0, windows=windows, window_bytes=2048, lanes=512) for windows in (small, large)
    ]
    assert [order.block for order in made] == [1, 4096]
    many = order_of(fingerprint="f", seed=0, windows=large, window_bytes=2048, lanes=1 << 16)
    assert many.block == large // (8 << 16), "every lane has some blocks, or an epoch would be little shuffled"
    left = large % (made[1].lanes * (large // (made[1].lanes * 4096)))
    assert left < large / 1000, "few windows are read apart from their block"


@settings(deadline=None)
@given(windows=st.integers(1, 500), data=st.data())
def test_any_division_into_shares_gives_the_same_samples(windows: int, data: st.DataObject) -> None:
    """Read in one piece, or cut anywhere (also across epochs): the same ids in the same order, digests add up."""
    start = data.draw(st.integers(0, windows * 2**19))
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


@pytest.mark.parametrize(
    ("windows", "lanes", "block"),
    [(2**30, 1, 1), (10**9 + 7, 1, 1), (115_530, 1, 1), (10**9 + 7, 256, 4096), (10**6, 24, 64)],
)
def test_neighbours_are_mixed(windows: int, lanes: int, block: int) -> None:
    """Chi-square of the low nibble (15 degrees of freedom), and parity of the step between neighbours."""
    order = Order(fingerprint="f", seed=0, windows=windows, lanes=lanes, block=block)
    got = window_of(order.run(0, min(windows, 100_000)))
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
    assert f"{digest(ids(1000, 995, 10)):016x}" == "d4e3290e766a268a"


@pytest.mark.parametrize(("windows", "start"), [(0, 0), (2**36 + 1, 0), (10, -1), (1, 2**20)])
def test_what_an_id_cannot_name_is_refused(windows: int, start: int) -> None:
    with pytest.raises(ValueError, match=r"wanted 1 to|lie outside"):
        ids(windows, start, 1)
