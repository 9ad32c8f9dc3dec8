"""Which sample is number g: a pure function of (dataset fingerprint, seed, g), never of the world size.

Each epoch is a permutation of the windows that is computed, not stored: a Feistel network over the next power
of two, walked along its cycle until it falls inside. Memory is O(1) and any position is reached at once, so
the data position of a run is one integer.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WINDOWS_MAX = 2**40
EPOCHS_MAX = 2**24
# 4 rounds already pass the avalanche and chi-square gates at 10**9; more make small domains mix as well.
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
_FACTORS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))


def sample_ids(*, fingerprint: str, seed: int, windows: int, start: int, count: int) -> NDArray[np.uint64]:
    """Ids of the samples number `start` to `start + count`: uint64 [count], id = epoch * 2**40 + window.

    Numbers run on without end: sample g belongs to epoch g // windows, and each epoch holds each window once.
    ValueError: no windows, or more windows or epochs than an id can name.
    """
    if not 0 < windows <= WINDOWS_MAX:
        raise ValueError(f"{windows} windows, wanted 1 to {WINDOWS_MAX}: take more text or a shorter seq_len")
    if start < 0 or count < 0 or (start + count) > windows * EPOCHS_MAX:
        raise ValueError(f"samples {start} to {start + count} lie outside 0 to {windows * EPOCHS_MAX}")
    ids = np.empty(count, dtype=np.uint64)
    done = 0
    while done < count:
        epoch, offset = divmod(start + done, windows)
        size = min(count - done, windows - offset)
        positions = np.arange(offset, offset + size, dtype=np.uint64)
        keys = _round_keys(f"epoch {epoch} of seed {seed} over {fingerprint}")
        ids[done : done + size] = permute(positions, size=windows, keys=keys) + np.uint64(epoch * WINDOWS_MAX)
        done += size
    return ids


def window_of(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The window that each id names."""
    return ids & np.uint64(WINDOWS_MAX - 1)


def digest(ids: NDArray[np.uint64]) -> int:
    """Sum of hash64(id) mod 2**64: it ignores order, and the digests of a step's shares add up to its own."""
    return int(np.sum(hash64(ids), dtype=np.uint64))


def hash64(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 of each id."""
    return _fmix64(ids + _GOLDEN)


def permute(values: NDArray[np.uint64], *, size: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A keyed bijection of [0, size) onto itself, applied to each value."""
    bits = (size - 1).bit_length()
    out = _feistel(values, bits, keys)
    # Cycle walking: the domain is below 2 * size, so a value is outside with probability under 1/2 each time,
    # and its cycle leads back inside at the latest when it returns to the start.
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _feistel(out[outside], bits, keys)
        outside = outside[out[outside] >= size]
    return out


def _feistel(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
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


@lru_cache(maxsize=8)
def _round_keys(purpose: str) -> NDArray[np.uint64]:
    """Independent keys for each purpose: hashed, never derived as seed + epoch, which would repeat orders."""
    words = b"".join(hashlib.sha256(f"round {turn} of {purpose}".encode()).digest()[:8] for turn in range(_ROUNDS))
    return np.frombuffer(words, dtype="<u8").astype(np.uint64)


def _fmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Stafford's variant 13 of murmur3's)."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])
