"""Safe snapshots on the disk of a node: what of a run outlives all its memory, nearer than object storage.

The same objects as of a durable checkpoint's shards, in a directory that all hosts of the node share. They make no
checkpoint: whether a snapshot is whole, and may be used, only the controller knows.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.checkpoint.arena import Arena, Buffer, State
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.read_through import ReadThrough
from elastic.checkpoint.shard import of_object, put_shard, table_object
from elastic.events import Holding, to_json
from elastic.plan import DiskOrder, SnapshotKey, shard_object
from elastic.storage.errors import StorageError
from elastic.storage.store import DirectoryStore

LOOK_S = 30.0  # a disk that does not answer is taken for empty, or as it was
READ_S = 10.0
GIVEN_UP_POLL_S = 0.5

_At = tuple[int, int, int]  # attempt, generation, step


class Disk:
    """A run's directory on the disk of this node. Calls block; CheckpointError: what the disk does not do."""

    def __init__(self, root: Path) -> None:
        self.store = DirectoryStore(root)
        self._root = root
        self._known: dict[str, Holding] = {}

    def holdings(self) -> tuple[Holding, ...]:
        """What lies there whole, as far as tables and sizes tell; the data is not read."""
        sizes = self.store.list("data/")
        known, self._known = self._known, {}
        for name, nbytes in sizes.items():
            at = _at(Path(name).parent.name)
            if at is None or not name.endswith(".bin") or table_object(name) not in sizes:
                continue
            with suppress(StorageError):  # damaged, or deleted meanwhile: as good as not there
                holding = known.get(name) or self._read(name, attempt=at[0])
                if holding.nbytes == nbytes:
                    self._known[name] = holding
        return tuple(self._known.values())

    def delete_before(self, kept: Sequence[_At]) -> None:
        """Deletes what is older than all of `kept`; also what writers that died left of it."""
        for folder in (self._root / "data").glob("*-*-*"):
            at = _at(folder.name)
            if at is not None and kept and at < min(kept):
                shutil.rmtree(folder, ignore_errors=True)  # another host of the node may be at it, too

    def _read(self, name: str, attempt: int) -> Holding:
        shard = of_object(self.store.get(table_object(name)), name=name)
        if name != shard_object(attempt, shard.key, shard.rank):
            raise CheckpointError(f"{name} describes rank {shard.rank} of {shard.key}")
        return Holding(
            key=shard.key,
            rank=shard.rank,
            world=shard.world,
            tier="disk",
            sealed=True,
            nbytes=shard.nbytes,
            attempt=attempt,
        )


def _at(folder: str) -> _At | None:
    """Of "ATTEMPT-GENERATION-STEP"; None: it is no such name."""
    numbers = folder.split("-")
    if len(numbers) != 3 or not all(part.isdecimal() for part in numbers):
        return None
    attempt, generation, step = map(int, numbers)
    return attempt, generation, step


class OnDisk:
    """A mover's part: it writes its own shards as ordered, tells what lies there, and reads it for whoever restores.

    `pinned`: keeps a buffer from being reused. `tell`: a message to the host. One thread does it all, so a slow disk
    never has two jobs at once; what the controller has given up holds no buffer.
    """

    def __init__(
        self,
        arena: Arena,
        pinned: Callable[[Buffer], AbstractContextManager[None]],
        tell: Callable[[dict[str, Any]], None],
        *,
        bytes_max: int,
    ) -> None:
        """`bytes_max`: of what is read, to be kept for others."""
        self._arena, self._pinned, self._tell = arena, pinned, tell
        self._bytes_max = bytes_max
        self._disk: Disk | None = None
        self._order: DiskOrder
        self._ordered = asyncio.Event()
        self._found: tuple[Holding, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self.reads: ReadThrough | None = None

    def obey(self, root: str, order: DiskOrder) -> None:
        if self._disk is None:
            self._disk = Disk(Path(root))
            self.reads = ReadThrough(self._disk.store, bytes_max=self._bytes_max, deadline_s=READ_S)
        self._order = order
        self._ordered.set()

    async def run(self) -> None:
        tried: SnapshotKey | None = None
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            assert self._disk is not None
            if self._order.write is not None and self._order.write != tried:
                tried = self._order.write
                await self._write(self._disk, tried)
            await self._look(self._disk)

    async def _write(self, disk: Disk, key: SnapshotKey) -> None:
        buffer = next((own for own in self._arena.own if own.key == key and own.state == State.SEALED), None)
        if buffer is None:
            self._fail(f"{key} is not in this host's arena any more", key)
            return
        sequence, attempt = buffer.sequence, self._order.attempt
        kept = self._kept()

        def put() -> None:
            disk.delete_before(kept)  # first: so that there is room
            put_shard(disk.store, buffer, key, sequence=sequence, attempt=attempt)

        with self._pinned(buffer):
            writing = asyncio.get_running_loop().run_in_executor(self._thread, put)
            while not writing.done() and self._order.write == key:
                await asyncio.wait((writing,), timeout=GIVEN_UP_POLL_S)
        if not writing.done():  # it will notice when the buffer is reused under it
            writing.add_done_callback(asyncio.Future.exception)
        elif why := _failure(writing):
            self._fail(why, key)

    async def _look(self, disk: Disk) -> None:
        kept = self._kept()

        def look() -> tuple[Holding, ...]:
            disk.delete_before(kept)
            return disk.holdings()

        try:
            async with asyncio.timeout(LOOK_S):
                self._found = await asyncio.get_running_loop().run_in_executor(self._thread, look)
        except TimeoutError:
            self._fail(f"no answer within {LOOK_S:.0f} s", None)
        except (OSError, StorageError) as error:
            self._fail(str(error), None)
        self._tell({"on disk": [to_json(holding) for holding in self._found]})

    def _kept(self) -> list[_At]:
        return [(self._order.attempt, key.generation, key.step) for key in self._order.keep]

    def _fail(self, why: str, key: SnapshotKey | None) -> None:
        self._tell({"failed": "disk", "reason": why, "key": asdict(key) if key else None})


def _failure(writing: asyncio.Future[Any]) -> str:
    error = writing.exception()
    if error is None or isinstance(error, OSError | StorageError):
        return str(error or "")
    raise error
