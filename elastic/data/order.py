"""Which sample is number g: a pure function of (dataset fingerprint, seed, g), never of the world size.

An epoch is a permutation of the corpus' windows that is computed, not stored: memory is O(1) and any position is
reached at once, so the data position of a run is one integer. A small corpus is permuted as a whole. A larger one is
cut into blocks of neighbouring windows, so that what a rank reads in one piece is used as a whole: as many blocks as a
batch has samples are open at a time, one for each lane, and sample g takes the next window of lane g mod lanes. Both
the order of the blocks and that of the windows in each are permuted, anew in each epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

# An id is epoch, source and window, from the highest bits to the lowest.
WINDOWS_MAX = 2**36
SOURCES_MAX = 2**8 - 1  # the last one is padding's
EPOCHS_MAX = 2**20
WHOLE_BYTES = 1 << 30  # a corpus of so many bytes is shuffled whole: any node's cache holds it
BLOCK_BYTES = 8 << 20
ROWS_MIN = 8  # a lane has at least so many blocks in an epoch
# Block counts that are tried, to leave as few windows over as possible: those are read apart from their blocks.
_COUNTS_TRIED = 16
# 4 rounds already pass the avalanche and chi-square gates at 10**9; more make small domains mix as well.
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
_FACTORS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of one corpus.

    lanes: blocks that are open at a time. block: windows of a block, at least; 1: an epoch is one permutation.
    name, source: of the corpus among those that are mixed, and its number there; the order does not know the number.
    ValueError: no windows, or more than an id can name.
    """

    fingerprint: str
    seed: int
    windows: int
    lanes: int = 1
    block: int = 1
    name: str = ""
    source: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.windows <= WINDOWS_MAX:
            raise ValueError(f"{self.windows} windows, wanted 1 to {WINDOWS_MAX}: take more text or a shorter seq_len")
        if self.lanes < 1 or self.block < 1:
            raise ValueError(f"{self.lanes} lanes of blocks of {self.block} windows, wanted 1 or more of each")

    def ids(self, numbers: Numbers) -> Numbers:
        """Ids of the samples with these numbers, in any order: id = (epoch * 2**8 + source) * 2**36 + window.

        Sample g belongs to epoch g // windows, and each epoch holds each window once. ValueError: an epoch that an id
        can't name.
        """
        epochs, offsets = np.divmod(numbers, np.uint64(self.windows))
        ids = np.empty(len(numbers), dtype=np.uint64)
        for epoch in np.unique(epochs).tolist():
            if epoch >= EPOCHS_MAX:
                raise ValueError(f"epoch {epoch} lies outside 0 to {EPOCHS_MAX - 1}")
            its = epochs == epoch
            ids[its] = self._windows(offsets[its], epoch) + np.uint64(
                (epoch * (SOURCES_MAX + 1) + self.source) * WINDOWS_MAX
            )
        return ids

    def run(self, start: int, count: int) -> Numbers:
        """Ids of `count` samples from number `start` on. ValueError: as `ids`, or a negative number."""
        if start < 0 or count < 0 or start + count > self.windows * EPOCHS_MAX:
            raise ValueError(f"samples {start} to {start + count} lie outside 0 to {self.windows * EPOCHS_MAX}")
        return self.ids(np.arange(start, start + count, dtype=np.uint64))

    def _windows(self, offsets: Numbers, epoch: int) -> Numbers:
        of = f"epoch {epoch} of seed {self.seed} over {self.fingerprint}" + (f" as {self.name}" if self.name else "")
        blocks = self._blocks()
        if blocks == self.windows:
            return permute(offsets, size=self.windows, keys=round_keys(of))
        # The first `over` blocks have a window more than the others; those come at the end, one of each.
        size, over = divmod(self.windows, blocks)
        row, rest = np.divmod(offsets, np.uint64(self.lanes * size))
        at, lane = np.divmod(rest, np.uint64(self.lanes))
        ends = offsets >= blocks * size
        block = np.empty(len(offsets), dtype=np.uint64)
        whole = ~ends
        in_turn = row[whole] * np.uint64(self.lanes) + lane[whole]
        block[whole] = permute(in_turn, size=blocks, keys=round_keys(f"blocks of {of}"))
        block[ends] = permute(offsets[ends] - np.uint64(blocks * size), size=over, keys=round_keys(f"ends of {of}"))
        at[ends] = size
        sizes = np.uint64(size) + (block < over)
        keys = round_keys(f"windows of {of}")[:, None] ^ _fmix64(block + _GOLDEN)
        inside = _walk(at, sizes, size.bit_length(), keys)  # bits for size + 1 values
        return block * np.uint64(size) + np.minimum(block, np.uint64(over)) + inside

    def _blocks(self) -> int:
        """A multiple of the lanes, so that each row of blocks is full."""
        if self.block == 1 or self.windows < self.lanes * self.block:
            return self.windows
        rows = self.windows // (self.lanes * self.block)
        tried = range(rows, max(0, rows - _COUNTS_TRIED), -1)
        return self.lanes * min(tried, key=lambda count: self.windows % (self.lanes * count))


def order_of(
    *, fingerprint: str, seed: int, windows: int, window_bytes: int, lanes: int, name: str = "", source: int = 0
) -> Order:
    """The order in which a run reads a corpus: its blocks are as large as pays, by the corpus' size and the batch's
    alone. lanes: the samples of a batch. ValueError: no windows, or too many."""
    block = 1
    if windows * window_bytes > WHOLE_BYTES:
        block = max(1, min(BLOCK_BYTES // window_bytes, windows // (ROWS_MIN * lanes)))
    return Order(
        fingerprint=fingerprint, seed=seed, windows=windows, lanes=lanes, block=block, name=name, source=source
    )


def epoch_of(ids: Numbers) -> Numbers:
    """The epoch that each id names."""
    return ids // np.uint64(WINDOWS_MAX * (SOURCES_MAX + 1))


def source_of(ids: Numbers) -> Numbers:
    """The number of the source that each id names."""
    return ids // np.uint64(WINDOWS_MAX) & np.uint64(SOURCES_MAX)


def window_of(ids: Numbers) -> Numbers:
    """The window that each id names."""
    return ids & np.uint64(WINDOWS_MAX - 1)


def digest(ids: Numbers) -> int:
    """Sum of hash64(id) mod 2**64: it ignores order, and the digests of a step's shares add up to its own."""
    return int(np.sum(hash64(ids), dtype=np.uint64))


def hash64(ids: Numbers) -> Numbers:
    """splitmix64 of each id."""
    return _fmix64(ids + _GOLDEN)


def permute(values: Numbers, *, size: int, keys: Numbers) -> Numbers:
    """A keyed bijection of [0, size) onto itself, applied to each value. keys: uint64 [rounds]."""
    return _walk(values, np.full(len(values), size, dtype=np.uint64), (size - 1).bit_length(), keys[:, None])


def _walk(values: Numbers, sizes: Numbers, bits: int, keys: Numbers) -> Numbers:
    """The same of [0, sizes[i]) for each value i, all of them at most 2**bits. keys: [rounds, 1 or values]."""
    out = _feistel(values, bits, keys)
    # Cycle walking: a value that falls outside goes on, and its cycle leads back inside at the latest when it returns
    # to the start. Half of the domain or more is inside, so it takes few turns.
    outside = np.flatnonzero(out >= sizes)
    while outside.size:
        out[outside] = _feistel(out[outside], bits, keys if keys.shape[1] == 1 else keys[:, outside])
        outside = outside[out[outside] >= sizes[outside]]
    return out


def _feistel(values: Numbers, bits: int, keys: Numbers) -> Numbers:
    """A keyed bijection of [0, 2**bits): the halves take turns, each XORed with a hash of the other."""
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits // 2)) - np.uint64(1)
    high, low = values >> low_bits, values & low_mask
    for turn, key in enumerate(keys):
        if turn % 2:
            high = high ^ (_fmix64(low ^ key) & high_mask)
        else:
            low = low ^ (_fmix64(high ^ key) & low_mask)
    return (high << low_bits) | low


@lru_cache(maxsize=16)
def round_keys(purpose: str) -> Numbers:
    """Independent keys for each purpose: hashed, never derived as seed + epoch, which would repeat orders."""
    words = b"".join(hashlib.sha256(f"round {turn} of {purpose}".encode()).digest()[:8] for turn in range(_ROUNDS))
    return np.frombuffer(words, dtype="<u8").astype(np.uint64)


def _fmix64(x: Numbers) -> Numbers:
    """The finaliser of splitmix64 (Stafford's variant 13 of murmur3's)."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])
