"""The shards of a corpus behind a URL in one process: which pieces are here, and how one is brought."""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from elastic.data.cache import (
    STREAM_BYTES,
    UNUSED_S,
    Cache,
    Held,
    Stream,
    code_of,
    index_of,
    number_of,
    pieces_of,
    span_of,
)
from elastic.data.fetch import Counts, Pool, Task, Wanted
from elastic.data.shards import DataError, Shard
from elastic.storage.errors import ObjectMissing, StorageError, StorageUnavailable
from elastic.storage.store import Store

TRIES = 3  # of a piece whose bytes are wrong
LOCK_WAIT_S = 30.0  # for another process that fetches a piece; it may have been stopped
TEND_EVERY_S = 10.0
HELD_MAX = 512  # shards that are mapped: each takes a descriptor, and a process often has 1,024

Numbers = NDArray[np.int64]

log = logging.getLogger(__name__)


class ManyForStream(Exception):
    """So many pieces are not to be in memory at once."""


class Pieces:
    """What one process holds of them, and its threads. Pieces go by their codes."""

    def __init__(self, place: str, store: Store, cache: Cache, shards: Sequence[Shard]) -> None:
        """place: of the store, for what is said."""
        self.counts = Counts()
        self.streams = False
        self._place = place
        self._shards = shards
        self._store = store
        self._cache = cache
        self._pinned: Counter[int] = Counter()
        self._stream = Stream(self._pinned, STREAM_BYTES)
        self._held: dict[int, Held] = {}
        self._crcs: dict[int, NDArray[np.uint32]] = {}
        self._sidecar_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.RLock()
        self._tended_s = time.monotonic()
        self.pool = Pool(self._attempt, f"the corpus at {place}")

    def expect(self, codes: Numbers) -> Wanted:
        """These pieces are read soon. Does not wait."""
        _, missing = self._look(codes)
        return self.pool.want(missing, urgent=False) if missing else Wanted()

    @contextmanager
    def present(self, codes: Numbers, streamed_max: int) -> Iterator[Mapping[int, Held]]:
        """Shards by number; these pieces of them may be read inside. Waits for as long as storage is down. DataError: a
        piece can't be had, or is not what was written. ManyForStream: more than `streamed_max`, and no cache."""
        keys = codes.tolist()
        with self._lock:
            self._pinned.update(keys)
        try:
            while True:
                held, missing = self._look(codes)
                if not missing:
                    break
                if self.streams and len(keys) > streamed_max:
                    raise ManyForStream
                self.pool.wait(self.pool.want(missing, urgent=True))
            yield held
        finally:
            with self._lock:
                self._pinned.subtract(keys)
                for key in keys:
                    if not self._pinned[key]:
                        del self._pinned[key]
                self._stream.trim()

    def _look(self, codes: Numbers) -> tuple[dict[int, Held], list[tuple[int, int]]]:
        """The shards, and which of the pieces are not there: code and bytes."""
        held, missing = {}, []
        numbers, which = codes & 0xFFFFFFFF, codes >> 32
        with self._lock:
            self._tend()
            for index in np.unique(which).tolist():
                one = held[index] = self._hold(index)
                its = numbers[which == index]
                if not one.present[its].all():
                    one = held[index] = self._refreshed(index, one)
                for number in its[~one.present[its]].tolist():
                    start, stop = span_of(one.shard, number)
                    missing.append((code_of(index, number), stop - start))
        return held, missing

    def _hold(self, index: int) -> Held:
        with self._lock:
            if (held := self._held.get(index)) is None:
                if not self.streams:
                    try:
                        held = self._cache.hold(self._shards[index])
                    except OSError as error:
                        self._give_up_the_cache(error)
                if held is None:
                    held = self._stream.hold(self._shards[index])
                self._held[index] = held
                if len(self._held) > HELD_MAX:
                    oldest = sorted(self._held, key=lambda at: self._held[at].used_s)
                    for at in oldest[: HELD_MAX // 4]:
                        self._let_go(at)
            held.used_s = time.monotonic()
            return held

    def _let_go(self, index: int) -> None:
        """Who reads it now keeps it for as long as that takes. In a stream it is the only copy, and takes no file."""
        if not self.streams:
            del self._held[index]

    def _refreshed(self, index: int, held: Held) -> Held:
        """With what other processes of the node brought."""
        if self.streams:
            return held
        try:
            return held if self._cache.refresh(held) else self._anew(index, held)
        except OSError as error:
            self._give_up_the_cache(error)
            return self._hold(index)

    def _tend(self) -> None:
        """Now and then: say what is in use, let go of what is not, or was deleted, and of the pages that were read."""
        now_s = time.monotonic()
        if self.streams or now_s - self._tended_s < TEND_EVERY_S:
            return
        since_s, self._tended_s = self._tended_s, now_s
        for index, held in list(self._held.items()):
            is_used = held.used_s >= since_s
            with suppress(OSError, ValueError):  # advice only
                held.memory.madvise(mmap.MADV_DONTNEED)
            if (not is_used and now_s - held.used_s > UNUSED_S) or (is_used and not self._touched(held)):
                del self._held[index]

    def _touched(self, held: Held) -> bool:
        try:
            return self._cache.touch(held)
        except OSError:
            return True  # what is mapped can be read

    def _give_up_the_cache(self, error: OSError) -> None:
        with self._lock:
            if self.streams:
                return
            self.streams = True
            self._held.clear()
            log.warning(
                "can't write into data.cache %s: %s; the corpus at %s is read through %d MiB of memory instead, which"
                " is slow: make room or give another directory, the next trainer tries again",
                *(self._cache.directory, error.strerror or error, self._place, STREAM_BYTES >> 20),
            )

    # ---------------------------------------------------------------- in the pool's threads

    def _attempt(self, task: Task, is_second: bool, sent: Callable[[], None]) -> bool:
        index, number = index_of(task.code), number_of(task.code)
        with self._lock:
            held, streams = self._hold(index), self.streams
        if held.present[number]:
            return True
        crc = self._crc(index, number)
        if streams:
            data = self._cache.stored(held.shard, number, crc) or self._get(index, number, crc, is_second, sent)
            with self._lock:
                if not held.present[number]:
                    self._stream.write(held, task.code, data)
            return True
        try:
            return self._through_cache(task, held, crc, is_second, sent)
        except OSError as error:
            if not (error.errno in (errno.ENOSPC, errno.EDQUOT) and self._make_room(is_full=True)):
                self._give_up_the_cache(error)
            return False

    def _through_cache(self, task: Task, held: Held, crc: int, is_second: bool, sent: Callable[[], None]) -> bool:
        index, number = index_of(task.code), number_of(task.code)
        with self._cache.locked(held, number) as is_mine:
            # Two may well write it: the lock saves requests, no more.
            if not (is_mine or is_second or task.waited_s > LOCK_WAIT_S):
                return self._cache.refresh(held) and bool(held.present[number])
            if not self._cache.refresh(held):
                held = self._anew(index, held)
                self._cache.refresh(held)
            if held.present[number] or self._cache.is_whole(held, number, crc):
                return True
            data = self._get(index, number, crc, is_second, sent)
            if not held.present[number] and not self._cache.write(held, number, data):
                self._cache.write(self._anew(index, held), number, data)
        self._make_room()
        return True

    def _anew(self, index: int, old: Held) -> Held:
        """Of a shard whose files were deleted."""
        with self._lock:
            if self._held.get(index) is old:
                del self._held[index]
            return self._hold(index)

    def _make_room(self, *, is_full: bool = False) -> bool:
        with self._lock:
            in_use = {self._shards[index_of(code)].sha256 for code in self._pinned}
        deleted = set(self._cache.make_room(in_use, is_full=is_full))
        with self._lock:
            for index in [index for index, held in self._held.items() if held.shard.sha256 in deleted]:
                del self._held[index]
        return bool(deleted)

    def _get(self, index: int, number: int, crc: int, is_second: bool, sent: Callable[[], None]) -> bytes:
        shard = self._shards[index]
        start, stop = span_of(shard, number)
        for _ in range(TRIES):
            sent()
            self.counts.requests += 1
            self.counts.second_requests += is_second
            data = self._from_store(shard.file, start, stop)
            if len(data) == stop - start and zlib.crc32(data) == crc:
                return data
            self.counts.wrong += 1
        raise self._wrong(shard, number, data, crc)

    def _from_store(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            data = self._store.get(key, start, stop)
        except StorageUnavailable:
            raise
        except ObjectMissing as error:
            raise DataError(
                f"{self._place}/{key} is missing, which the manifest names: the corpus there was changed or "
                "deleted; upload it again"
            ) from error
        except StorageError as error:
            raise DataError(f"data.prepared: {error}") from error
        self.counts.nbytes += len(data)
        return data

    def _wrong(self, shard: Shard, number: int, data: bytes, crc: int) -> DataError:
        start, stop = span_of(shard, number)
        place = f"{self._place}/{shard.file}"
        nbytes = self._store.list(shard.file).get(shard.file, 0)
        if nbytes != shard.nbytes:
            return DataError(
                f"{place} has {nbytes} bytes, the manifest says {shard.nbytes}: it was changed; upload the corpus again"
            )
        return DataError(
            f"{place}: bytes {start} to {stop} (piece {number}) are damaged: {len(data)} bytes of CRC "
            f"{zlib.crc32(data):08x}, wanted {stop - start} of {crc:08x}, {TRIES} times; upload the corpus again"
        )

    def _crc(self, index: int, number: int) -> int:
        if (crcs := self._crcs.get(index)) is None:
            with self._lock:
                lock = self._sidecar_locks[index]
            with lock:
                if (crcs := self._crcs.get(index)) is None:
                    crcs = self._crcs[index] = self._read_crcs(self._shards[index])
        return int(crcs[number])

    def _read_crcs(self, shard: Shard) -> NDArray[np.uint32]:
        content = self._cache.sidecar(shard)
        if hashlib.sha256(content).hexdigest() != shard.pieces_sha256:
            content = self._from_store(shard.sidecar)
            if hashlib.sha256(content).hexdigest() != shard.pieces_sha256 or len(content) != 4 * pieces_of(shard):
                raise DataError(
                    f"{self._place}/{shard.sidecar} is not the one that the manifest names; upload it again"
                )
            if not self.streams:
                with suppress(OSError):  # the pieces will be refused too, and that is said
                    self._cache.keep_sidecar(shard, content)
        return np.frombuffer(content, "<u4")
