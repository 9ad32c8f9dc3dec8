"""A prepared corpus behind a URL: its manifest, and arrays over its shards, whose bytes are brought to this node first.

Nothing is connected, and no thread runs, before the first byte is wanted, and never across a fork: trainers are forked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from elastic.config_sections import Data, StorageOptions
from elastic.data.cache import STREAM_BYTES, Cache, Held
from elastic.data.fetch import Wanted
from elastic.data.pieces import ManyForStream, Numbers, Pieces
from elastic.data.shards import MANIFEST, PIECE_BYTES, ByShard, DataError, Shard, TokenDtype, Values
from elastic.storage.errors import ObjectMissing, StorageError, StorageUnavailable
from elastic.storage.files import replace_file
from elastic.storage.store import Store, open_store

TRY_S = 5.0  # of one request, before it counts as an outage: it is tried again in any case
STREAM_PIECES = STREAM_BYTES // PIECE_BYTES // 2  # that are read at once out of a stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Where a corpus lies behind a URL (`file://` too: a directory that is slow to read), and how it is read: as `Data`
    says."""

    url: str
    options: StorageOptions
    cache: str
    cache_bytes_max: int
    ahead_s: float
    ahead_bytes_max: int

    def __str__(self) -> str:
        return self.url

    def store(self, deadline_s: float) -> Store:
        """Its requests are tried again for so long at most."""
        limit_s = min(deadline_s, self.options.deadline_s)
        return open_store(self.url, self.options.model_copy(update={"deadline_s": limit_s}))

    def values_of(self, shards: Sequence[Shard]) -> partial[Fetched]:
        """What makes, of dtype and offsets, arrays over these shards."""
        return partial(Fetched, Remote(self, shards))

    def manifest_bytes(self) -> bytes:
        """As they lie in storage; while storage is down as this node read them last. FileNotFoundError: there are none.
        DataError: storage refuses. StorageUnavailable: it is down, and this node never read them."""
        copy = Path(self.cache, f"manifest-{hashlib.sha256(self.url.encode()).hexdigest()}.json")
        try:
            content = self.store(self.options.deadline_s).get(MANIFEST)
        except ObjectMissing:
            raise FileNotFoundError from None
        except StorageUnavailable as error:
            with suppress(OSError):
                content = copy.read_bytes()
                log.warning("the manifest is taken from %s, as it was read last: %s", self.cache, error)
                return content
            raise
        except StorageError as error:
            raise DataError(f"data.prepared: {error}") from error
        with suppress(OSError):  # where pieces are refused too it is said
            if not copy.exists() or copy.read_bytes() != content:
                copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(copy, content)
        return content


def prepared_at(data: Data, place: str = "") -> Path | Prepared:
    """What `data.prepared` says, or `place` in its stead: a directory, or what lies behind a URL."""
    place = place or data.prepared
    if "://" not in place:
        return Path(place)
    return Prepared(
        url=place.rstrip("/"),
        options=data.prepared_options,
        cache=data.cache or f"/tmp/elastic-data-cache-{os.getuid()}",
        cache_bytes_max=data.cache_bytes_max,
        ahead_s=data.ahead_s,
        ahead_bytes_max=data.ahead_bytes_max,
    )


class Remote:
    """The shards of one split; for any number of threads, and for each process that a fork makes of this one anew."""

    def __init__(self, prepared: Prepared, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self._prepared = prepared
        self._found: tuple[int, Pieces] | None = None
        self._lock = threading.Lock()

    @property
    def pieces(self) -> Pieces:
        with self._lock:
            if self._found is None or self._found[0] != os.getpid():
                of = self._prepared
                cache = Cache(of.cache, of.cache_bytes_max)
                self._found = (os.getpid(), Pieces(of.url, of.store(TRY_S), cache, self.shards))
            return self._found[1]

    @property
    def horizon(self) -> tuple[float, int]:
        """So many seconds, and so many bytes, are fetched ahead."""
        nbytes = self._prepared.ahead_bytes_max
        return self._prepared.ahead_s, min(nbytes, STREAM_BYTES // 2) if self.pieces.streams else nbytes


# Windows, seq_len, the values of each shard -> their copies.
Read = Callable[[NDArray[np.uint64], int, Sequence[Values]], Values]


class Fetched(ByShard):
    """Values of each shard, as `Mapped`: offsets says where they begin in each file, counts how many there are."""

    def __init__(
        self,
        remote: Remote,
        dtype: TokenDtype | Literal["uint8", "uint64"],
        offsets: Sequence[int | None],
        counts: Sequence[int] | None = None,
    ) -> None:
        self.remote = remote
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        self._offsets = offsets
        self._counts = [shard.tokens for shard in remote.shards] if counts is None else counts
        self._starts = np.array([-1 if offset is None else offset for offset in offsets], np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def of_shard(self, index: int) -> Values:
        """All of a shard's, fetched where they are not here."""
        whole = np.array([index]), np.array([0]), np.array([self._counts[index]])
        with self.present(*whole, streamed_max=1 << 30) as values:
            return values[index].copy() if self.remote.pieces.streams else values[index]

    def expect_windows(self, ends: Numbers, indices: NDArray[np.uint64], seq_len: int) -> Wanted:
        """They are read soon. Does not wait. ends: of the shards, in the stream of all values."""
        return self.remote.pieces.expect(self._codes(*_places(ends, indices, seq_len)))

    def read_windows(self, ends: Numbers, indices: NDArray[np.uint64], seq_len: int, read: Read) -> Values:
        """What `read` makes of them, once they are here."""
        try:
            with self.present(*_places(ends, indices, seq_len), streamed_max=STREAM_PIECES) as values:
                return read(indices, seq_len, values)
        except ManyForStream:
            half = len(indices) // 2
            if not half:
                raise
            parts = [self.read_windows(ends, some, seq_len, read) for some in (indices[:half], indices[half:])]
            return np.concatenate(parts)

    @contextmanager
    def present(
        self, shards: Numbers, starts: Numbers, stops: Numbers, streamed_max: int
    ) -> Iterator[Sequence[Values]]:
        """The shards' values, of which these may be read inside. ManyForStream: see `Pieces.present`."""
        with self.remote.pieces.present(self._codes(shards, starts, stops), streamed_max) as held:
            yield _Inside(self, held)

    def _codes(self, shards: Numbers, starts: Numbers, stops: Numbers) -> Numbers:
        shards, starts, stops = (array[self._starts[shards] >= 0] for array in (shards, starts, stops))
        first = (self._starts[shards] + starts * self.dtype.itemsize) // PIECE_BYTES
        last = (self._starts[shards] + stops * self.dtype.itemsize - 1) // PIECE_BYTES
        more = int((last - first).max(initial=0)) + 1
        return np.unique(np.concatenate([(shards << 32 | first + k)[first + k <= last] for k in range(more)]))

    def of(self, index: int, held: Mapping[int, Held]) -> Values:
        offset, count = self._offsets[index], self._counts[index]
        if offset is None:
            return np.broadcast_to(np.ones((), self.dtype), (count,))
        values: Values = held[index].whole[offset : offset + count * self.dtype.itemsize].view(self.dtype)
        return values


class _Inside(ByShard):
    def __init__(self, fetched: Fetched, held: Mapping[int, Held]) -> None:
        self._fetched, self._held = fetched, held

    def __len__(self) -> int:
        return len(self._fetched)

    def of_shard(self, index: int) -> Values:
        return self._fetched.of(index, self._held)


def _places(ends: Numbers, indices: NDArray[np.uint64], seq_len: int) -> tuple[Numbers, Numbers, Numbers]:
    """Shards, and in each [start, stop) of its values, where these windows lie; one that crosses shards in each."""
    starts = indices.astype(np.int64) * seq_len
    stops = starts + seq_len + 1
    first, last = np.searchsorted(ends, starts, side="right"), np.searchsorted(ends, stops, side="left")
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    found = []
    for more in range(int((last - first).max(initial=0)) + 1):
        its = first + more <= last
        shards = first[its] + more
        begin = begins[shards]
        found.append((shards, np.maximum(starts[its], begin) - begin, np.minimum(stops[its], ends[shards]) - begin))
    shards, starts, stops = (np.concatenate(column) for column in zip(*found))
    return shards, starts, stops
