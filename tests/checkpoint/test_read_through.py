"""Restore from storage through the movers: real movers, a real server that counts; each byte is fetched once."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic.checkpoint import read_through
from elastic.checkpoint.errors import Damaged
from elastic.checkpoint.read_through import PART_BYTES, ReadThrough, in_parts, stored_shard
from elastic.checkpoint.restore import Restored, restore
from elastic.checkpoint.save import Entry, local
from elastic.checkpoint.shard import of_object, to_object
from elastic.checkpoint.wire import frame, frame_length, parse
from elastic.plan import Endpoint, RestorePlan
from elastic.storage.errors import StorageUnavailable
from elastic.storage.object_store import ObjectStore
from elastic.storage.store import DirectoryStore, MemoryStore
from tests.checkpoint.hosts import LIMIT_S, TOKEN, Host, hosts, key
from tests.checkpoint.layouts import Layout, Tensors, ddp, fsdp, hsdp, nowhere, of_rank, right, save
from tests.checkpoint.web import Web, web

MB = 1 << 20


def state() -> dict[str, torch.Tensor]:
    """20 MB; rows that no world divides, fewer rows than ranks, a replicated scalar."""
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(1003, 4096, generator=generator),
        "b": torch.randn(3, 350_000, generator=generator),
        "c": torch.randn(17, 1000, generator=generator),
        "d": torch.tensor(3.0),
    }


def through(plan: RestorePlan, movers: Sequence[Endpoint]) -> RestorePlan:
    """As the controller deals them out."""
    sources = (
        replace(source, host=f"host{i % len(movers)}", endpoint=movers[i % len(movers)])
        for i, source in enumerate(plan.sources)
    )
    return replace(plan, sources=tuple(sources))


class Trainers:
    """The new layout's ranks, as threads: each with its tensors and an arena that holds nothing."""

    def __init__(self, tensors: Tensors, layout: Layout, url: str) -> None:
        self.tensors, self.layout, self.url = tensors, layout, url
        self.entries = [of_rank(tensors, layout, rank, empty=True) for rank in range(layout.world)]

    def begin(self, plan: RestorePlan, pool: ThreadPoolExecutor) -> list[Future[Restored]]:
        return [pool.submit(self._restore, rank, entries, plan) for rank, entries in enumerate(self.entries)]

    def restore(self, plan: RestorePlan) -> list[Restored]:
        with ThreadPoolExecutor(self.layout.world) as pool:
            return self.right([future.result(LIMIT_S) for future in self.begin(plan, pool)])

    def right(self, found: list[Restored]) -> list[Restored]:
        for rank, entries in enumerate(self.entries):
            assert right(entries, self.tensors, self.layout, rank), rank
        return found

    def _restore(self, rank: int, entries: list[Entry], plan: RestorePlan) -> Restored:
        arena = nowhere()
        try:
            return restore(
                entries, plan, rank=rank, world=self.layout.world, arena=arena, store=ObjectStore(self.url), token=TOKEN
            )
        finally:
            os.close(arena.fd)


@contextmanager
def movers(root: Path, count: int) -> Iterator[tuple[Web, list[Host], list[Endpoint]]]:
    with web(root) as server, hosts(server.url, count) as found:  # type: ignore[arg-type]
        yield server, found, [host.endpoint for host in found]


@pytest.mark.parametrize(
    ("old", "new", "most"),
    [
        (fsdp(4), fsdp(3), 1.01),
        pytest.param(fsdp(4), fsdp(2), 1.01, marks=pytest.mark.long),
        pytest.param(fsdp(2), fsdp(4), 1.01, marks=pytest.mark.long),
        pytest.param(fsdp(3), fsdp(4), 1.01, marks=pytest.mark.long),
        (fsdp(4), fsdp(4), 1.01),
        (hsdp(2, 2), hsdp(2, 2), 0.51),
        pytest.param(fsdp(3), ddp(3), 0.34, marks=pytest.mark.long),
        pytest.param(ddp(3), ddp(3), 0.34, marks=pytest.mark.long),
        (ddp(1), ddp(4), 0.26),
    ],
)
def test_storage_is_read_once_whatever_the_layouts(tmp_path: Path, old: Layout, new: Layout, most: float) -> None:
    """Bytes fetched, tables included, over the bytes that the ranks need. Where k ranks have copies, 1 / k."""
    tensors = state()
    plan = save(DirectoryStore(tmp_path), tensors, old)
    trainers = Trainers(tensors, new, "")
    needed = sum(local(tensor).nbytes for entries in trainers.entries for _, tensor in entries)
    with movers(tmp_path, new.world) as (server, _, endpoints):
        trainers.url = server.url
        found = trainers.restore(through(plan, endpoints))
    ratio = server.nbytes() / needed
    assert ratio <= most
    places = {place for restored in found for place in restored.nbytes}
    if (old, new) == (fsdp(4), fsdp(4)):
        assert places == {"storage"}, "each its own, directly"
    else:
        assert "relayed" in places
    assert not any(restored.detours for restored in found)


def test_a_mover_that_cannot_be_reached_is_gone_around(tmp_path: Path) -> None:
    tensors = state()
    plan = save(DirectoryStore(tmp_path), tensors, fsdp(3))
    with movers(tmp_path, 2) as (server, found, endpoints):
        found[1].listen.close()
        found[1].kill_mover()
        restored = Trainers(tensors, fsdp(2), server.url).restore(through(plan, endpoints))
    assert any("storage" in each.nbytes for each in restored) and all("relayed" in each.nbytes for each in restored)
    (told,) = {note for each in restored for note in each.detours}
    assert "data/1-1-3/1.bin is read directly: host1 should relay it, but mover at" in told


def test_a_mover_that_dies_while_storage_answers_is_gone_around(tmp_path: Path) -> None:
    tensors = state()
    plan = save(DirectoryStore(tmp_path), tensors, fsdp(1))
    with movers(tmp_path, 1) as (server, (host,), endpoints), ThreadPoolExecutor(2) as pool:
        server.gate.clear()
        trainers = Trainers(tensors, fsdp(2), server.url)
        running = trainers.begin(through(plan, endpoints), pool)
        assert server.waiting.acquire(timeout=LIMIT_S)
        host.kill_mover()
        server.gate.set()
        restored = trainers.right([future.result(LIMIT_S) for future in running])
    assert all(set(each.nbytes) == {"storage"} and len(each.detours) == 1 for each in restored)


def test_while_storage_is_slow_the_mover_says_that_it_is_alive(tmp_path: Path) -> None:
    plan = save(DirectoryStore(tmp_path), {"a": torch.randn(5, 100)}, fsdp(1))
    with movers(tmp_path, 1) as (server, _, (endpoint,)):
        server.gate.clear()
        with socket.create_connection((endpoint.address, endpoint.port), LIMIT_S) as sock:
            sock.sendall(frame({"hello": TOKEN}))
            sock.sendall(frame({"read": [1, 3], "rank": 0, "spans": [[0, 2000]], "object": plan.sources[0].object}))
            with sock.makefile("rb") as stream:
                assert parse(stream.read(frame_length(stream.read(4)))) == {"wait": True}
                server.gate.set()
                while "wait" in (answer := parse(stream.read(frame_length(stream.read(4))))):
                    pass
                assert answer == {"nbytes": 2000} and len(stream.read(2000)) == 2000


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda data: flip(data / "1.bin"), r"storage \(data/1-1-3/1\.bin\): bytes \d+ to \d+ of rank 1's .* CRC \(a"),
    (lambda data: os.truncate(data / "1.bin", 9 * MB), r"1\.bin is cut short: bytes \d+ to \d+ of \d+ are \d+ only"),
    (lambda data: (data / "1.bin").unlink(), r"can't read data/1-1-3/1\.bin: it does not exist"),
    (lambda data: (data / "1.json").unlink(), r"can't read data/1-1-3/1\.json: it does not exist"),
    (lambda data: flip(data / "1.json"), r"data/1-1-3/1\.json"),
    (lambda data: shutil.copy(data / "0.json", data / "1.json"), r"1\.json describes rank 0 of .*, wanted rank 1 of"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_the_stores_and_no_hosts(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """Told by a mover it is looked at once more, directly, as in the same layout: that rank says what is wrong."""
    tensors = state()
    plan = save(DirectoryStore(tmp_path), tensors, fsdp(2))
    damage(tmp_path / "data/1-1-3")
    with movers(tmp_path, 1) as (server, _, endpoints), ThreadPoolExecutor(2) as pool:
        (running,) = Trainers(tensors, fsdp(1), server.url).begin(through(plan, endpoints), pool)
        with pytest.raises(Damaged, match=message):
            running.result(LIMIT_S)
        running = Trainers(tensors, fsdp(2), server.url).begin(through(plan, endpoints), pool)[1]
        with pytest.raises(Damaged, match=message):
            running.result(LIMIT_S)


# ---------------------------------------------------------------- the cache by itself


class Counting(MemoryStore):
    """What is read, and when it may be: `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.gets.append((key, start))
        assert self.gate.wait(LIMIT_S)
        return super().get(key, start, stop)


def one_shard(nbytes: int) -> tuple[Counting, str]:
    store = Counting()
    plan = save(store, {"a": torch.from_numpy(np.arange(nbytes, dtype=np.uint8))}, fsdp(1))
    return store, plan.sources[0].object


def test_those_who_ask_together_share_one_fetch() -> None:
    store, name = one_shard(20 * MB)

    async def ask() -> None:
        stored = ReadThrough(store, bytes_max=100 * MB, deadline_s=LIMIT_S)
        store.gate.clear()
        tables = [stored.shard(name, key(1, 3), 0) for _ in range(9)]
        store.gate.set()
        (shard,) = {id(found): found for found in await asyncio.gather(*tables)}.values()
        parts = await asyncio.gather(*(stored.part(name, shard, i % 3) for i in range(9)))
        assert b"".join(parts[:3]) == store.get(name)

    asyncio.run(ask())
    assert sorted(store.gets[:-1]) == [(name, 0), (name, 8 * MB), (name, 16 * MB), (name.replace("bin", "json"), 0)]


def test_no_more_is_kept_than_allowed_and_nothing_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    store, name = one_shard(40 * MB)

    async def ask() -> None:
        stored = ReadThrough(store, bytes_max=2 * PART_BYTES, deadline_s=LIMIT_S)
        shard = await stored.shard(name, key(1, 3), 0)
        for number in (0, 1, 2, 1, 2, 0):
            await stored.part(name, shard, number)
        assert [start // PART_BYTES for got, start in store.gets if got == name] == [0, 1, 2, 0]
        monkeypatch.setattr(read_through, "IDLE_S", 0.0)
        stored.drop_if_idle()
        await stored.part(name, shard, 0)
        assert [start // PART_BYTES for got, start in store.gets if got == name] == [0, 1, 2, 0, 0]

    asyncio.run(ask())


def test_what_failed_is_tried_again_and_no_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    store, name = one_shard(9 * MB)
    good = store.get(name)

    async def ask() -> None:
        stored = ReadThrough(store, bytes_max=100 * MB, deadline_s=LIMIT_S)
        shard = await stored.shard(name, key(1, 3), 0)
        store.put(name, bytes(len(good)))
        with pytest.raises(Damaged, match=r"storage \(data/1-1-3/0\.bin\): bytes 0 to 1048576 .* CRC \(a\["):
            await stored.part(name, shard, 0)
        store.put(name, good)
        assert await stored.part(name, shard, 0) == good[:PART_BYTES]
        monkeypatch.setattr(read_through, "SLACK_S", 0.0)
        silent = ReadThrough(store, bytes_max=100 * MB, deadline_s=0.01)
        store.gate.clear()
        with pytest.raises(StorageUnavailable, match="no answer within"):
            await silent.part(name, shard, 0)
        store.gate.set()

    asyncio.run(ask())


def test_parts_are_cut_at_their_edges() -> None:
    assert in_parts([(0, 3), (PART_BYTES - 1, 2 * PART_BYTES + 1)]) == [
        (0, 0, 3),
        (0, PART_BYTES - 1, PART_BYTES),
        (1, PART_BYTES, 2 * PART_BYTES),
        (2, 2 * PART_BYTES, 2 * PART_BYTES + 1),
    ]


def test_a_table_of_another_shard_is_refused() -> None:
    store, name = one_shard(100)
    with pytest.raises(Damaged, match=r"describes rank 0 of step 3 of generation 1, wanted rank 0 of step 4"):
        stored_shard(store, name, key(1, 4), 0)
    raw = to_object(replace(of_object(store.get(name.replace("bin", "json")), name=name), rank=5))
    store.put(name.replace("bin", "json"), raw)
    with pytest.raises(Damaged, match=r"describes rank 5 of .*, wanted rank 0"):
        stored_shard(store, name, key(1, 3), 0)
