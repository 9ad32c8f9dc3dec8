"""Shards in storage: read and verified directly, or fetched once by one host's mover for all trainers that want them.

In another layout each shard is wanted by many ranks, a bit by each or the same by all. So a mover fetches whole
parts and keeps them while they are asked for: storage sees every byte once, in few large requests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from elastic.checkpoint.blocks import SUB_BLOCK
from elastic.checkpoint.errors import Damaged, TooNew
from elastic.checkpoint.shard import Shard, of_object, table_object
from elastic.plan import SnapshotKey
from elastic.storage.errors import ObjectMissing, StorageError, StorageUnavailable
from elastic.storage.store import Store

PART_BYTES = 8 * SUB_BLOCK
PARTS_AT_ONCE = 8
SLACK_S = 60.0  # a store's deadline ends its tries; the last of them, begun before it, takes its own time
IDLE_S = 15.0  # what nobody asked for so long is dropped: the restore is over

_Key = tuple[str, int]  # data object, number of the part; _TABLE for its table
_TABLE = -1


def stored_shard(store: Store, name: str, key: SnapshotKey, rank: int) -> Shard:
    """The table beside the data object `name`. Damaged: missing, other bytes, or not that shard's."""
    table = table_object(name)
    raw = _get(store, table)
    try:
        shard = of_object(raw, name=table)
    except TooNew:
        raise
    except StorageError as error:
        raise Damaged(str(error)) from error
    if (shard.key, shard.rank) != (key, rank):
        raise Damaged(
            f"{table} describes rank {shard.rank} of {shard.key}, wanted rank {rank} of {key}; use an older checkpoint"
        )
    return shard


def stored_bytes(store: Store, name: str, shard: Shard, start: int, stop: int) -> bytes:
    """Bytes `[start, stop)` of the data object `name`, verified; `start` is on a sub-block, `stop` too or the end.

    Damaged: missing, cut short, or other bytes.
    """
    found = _get(store, name, start, stop)
    if len(found) != stop - start:
        raise Damaged(
            f"{name} is cut short: bytes {start} to {stop} of {shard.nbytes} are {len(found)} only; "
            "use an older checkpoint"
        )
    try:
        shard.verify(np.frombuffer(found, dtype=np.uint8), [(start, stop)], where=f"storage ({name})", at=start)
    except StorageError as error:
        raise Damaged(str(error)) from error
    return found


def _get(store: Store, name: str, start: int = 0, stop: int | None = None) -> bytes:
    try:
        return store.get(name, start, stop)
    except ObjectMissing as error:
        raise Damaged(f"{error}; use an older checkpoint") from error


def in_parts(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The spans cut at the edges of parts: (number of the part, start, stop)."""
    return [
        (number, max(start, number * PART_BYTES), min(stop, (number + 1) * PART_BYTES))
        for start, stop in spans
        for number in range(start // PART_BYTES, -(-stop // PART_BYTES))
    ]


class ReadThrough:
    """One mover's: what it fetched from storage, each part once for all who ask while it is kept.

    At most `bytes_max` are kept: beyond that the part goes that was not asked for for longest, and is fetched again
    if it is asked for again. PARTS_AT_ONCE parts that are being fetched, and one for each connection that is being
    sent, may come on top. All is dropped after IDLE_S without a request. `deadline_s`: of the store's requests.
    """

    def __init__(self, store: Store, *, bytes_max: int, deadline_s: float) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._limit_s = deadline_s + SLACK_S
        self._kept: OrderedDict[_Key, asyncio.Task[Any]] = OrderedDict()
        self._slots = asyncio.Semaphore(PARTS_AT_ONCE)
        self._threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="storage")
        self._asked_s = 0.0
        self._idle: asyncio.TimerHandle | None = None

    def shard(self, name: str, key: SnapshotKey, rank: int) -> asyncio.Task[Shard]:
        """The table of the data object `name`. Await it without cancelling it: others may wait for the same.

        As `stored_shard`; StorageUnavailable: no answer within the limit.
        """
        return self._once((name, _TABLE), lambda: stored_shard(self._store, name, key, rank))

    def part(self, name: str, shard: Shard, number: int) -> asyncio.Task[bytes]:
        """Part `number` of the data object `name`, verified. As `stored_bytes` and `shard`."""
        start = number * PART_BYTES
        stop = min(start + PART_BYTES, shard.nbytes)
        return self._once((name, number), lambda: stored_bytes(self._store, name, shard, start, stop))

    def _once(self, key: _Key, work: Callable[[], Any]) -> asyncio.Task[Any]:
        loop = asyncio.get_running_loop()
        self._asked_s = loop.time()
        if self._idle is None:
            self._idle = loop.call_later(IDLE_S, self.drop_if_idle)
        if key not in self._kept:
            self._kept[key] = task = asyncio.create_task(self._fetch(key[0], work))
            task.add_done_callback(lambda task: self._fetched(key, task))
        self._kept.move_to_end(key)
        return self._kept[key]

    async def _fetch(self, name: str, work: Callable[[], Any]) -> Any:
        async with self._slots:
            try:
                async with asyncio.timeout(self._limit_s):
                    return await asyncio.get_running_loop().run_in_executor(self._threads, work)
            except TimeoutError as error:
                raise StorageUnavailable(f"{name}: storage gave no answer within {self._limit_s:.0f} s") from error

    def _fetched(self, key: _Key, task: asyncio.Task[Any]) -> None:
        """A failure is for those who wait now; who asks later has it tried again."""
        if task.cancelled() or task.exception() is not None:
            del self._kept[key]
            return
        done = [other for other, task in self._kept.items() if other[1] != _TABLE and task.done()]
        total = sum(len(self._kept[other].result()) for other in done)
        for oldest in done:
            if total <= self._bytes_max:
                return
            total -= len(self._kept.pop(oldest).result())

    def drop_if_idle(self) -> None:
        """Drops all unless it was asked for within IDLE_S; calls itself again."""
        loop = asyncio.get_running_loop()
        left_s = self._asked_s + IDLE_S - loop.time()
        if left_s <= 0 and all(task.done() for task in self._kept.values()):
            self._idle = None
            self._kept.clear()
        else:
            self._idle = loop.call_later(max(left_s, 1.0), self.drop_if_idle)
