"""What each rank of the checkpoint benchmark does: ours and torch's own (DCP) in turn, on the same live state.

A rank is host and trainer in one: it has an arena, a real mover as its child, and the tensors. Both sides talk to
storage through the same slow proxy. Times are taken between barriers, so they are those of the slowest rank.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import checkpoint_dcp as dcp
from bench.slow_proxy import counts
from elastic.checkpoint import save
from elastic.checkpoint.blocks import Block, encode_bytes, index, place, reads, spans, sub_blocks, touched
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import About, build, restore_plan
from elastic.checkpoint.mover import uploaded_of
from elastic.checkpoint.restore import restore
from elastic.checkpoint.save import Entry, Snapshotter, entries, local, shard_bytes_max, wanted
from elastic.checkpoint.shard import of_object, table_object
from elastic.config_sections import Model, StorageOptions
from elastic.model.transformer import Transformer
from elastic.parallel.fsdp import shard_parameters
from elastic.plan import RestorePlan, ShardSource, SnapshotKey
from elastic.storage.store import open_store
from tests.checkpoint.hosts import TOKEN, Host

SHAPE = Model(vocab_size=8192, dim=512, layers=8, heads=8, kv_heads=8, ffn_dim=1408, seq_len=256)
BUCKET = "bench-checkpoints"
ABOUT = About(run="bench", fingerprint="")
Times = dict[str, list[float]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """endpoint: the slow proxy's. server: process of the S3 service behind it. directory: on a local disk."""

    endpoint: str
    server: int
    directory: str
    repeats: int

    @property
    def options(self) -> StorageOptions:
        return StorageOptions(endpoint=self.endpoint, region="us-east-1")


class Rank:
    """The state of one rank and its host. `close` ends the mover."""

    def __init__(self, setting: Setting, rank: int, world: int, url: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.setting, self.rank, self.world, self.url = setting, rank, world, url
        self.model = Transformer(SHAPE)
        shard_parameters(self.model, self.model.layers, init_device_mesh("cpu", (world,)), "float32")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.entries: list[Entry] = entries(self.model, self.optimizer)
        with torch.no_grad():
            for name, tensor in self.entries:
                if not name.endswith(".step"):
                    local(tensor).normal_()
        nbytes = shard_bytes_max(self.entries, world)
        self.host = Host(url, nbytes=nbytes, received_buffers=1, options=setting.options.model_dump())
        self.host.order(partner=None)
        self.host.arena.map_own()
        self.store = open_store(url, setting.options)
        self.snapshotter = Snapshotter(
            self.host.arena, rank=rank, world=world, entries=self.entries, wake=self.host.wake
        )
        self.log = CommitLog(self.store) if rank == 0 else None
        self.attempt = self.log.claim("bench") if self.log else 0
        self._step = 0

    def close(self) -> None:
        self.host.close()

    def snapshot(self) -> tuple[SnapshotKey, float]:
        """Its key and how long the trainer stood still."""
        self._step += 1
        key = SnapshotKey(generation=1, step=self._step)
        began_s = time.perf_counter()
        assert self.snapshotter.write(key)
        stall_s = time.perf_counter() - began_s
        self.host.arena.board.order(generation=1, keep=key)  # the other buffer is free again
        return key, stall_s

    def sealed(self) -> None:
        self.host.tell(seal=True)
        self.host.hear("sealed")

    def save(self) -> None:
        """From the trainer's tensors to a committed checkpoint."""
        key, _ = self.snapshot()
        self.host.tell(upload={"generation": key.generation, "step": key.step})
        uploaded = uploaded_of(self.host.hear("uploaded")["uploaded"])
        found: list[Any] = [None] * self.world
        dist.gather_object(uploaded, found if self.rank == 0 else None)
        if self.log is not None:
            manifest = build(self.store, found, about=ABOUT, attempt=self.attempt, key=key, samples=0)
            self.log.commit(self.attempt, manifest)

    def newest(self) -> RestorePlan:
        found: list[Any] = [None]
        if self.rank == 0:
            manifest = CommitLog(self.store).newest()
            assert manifest is not None
            found = [restore_plan(manifest)]
        dist.broadcast_object_list(found)
        movers: list[Any] = [None] * self.world
        dist.all_gather_object(movers, self.host.endpoint)
        # As the controller does it: in another layout each shard is fetched by one host's mover, in turn.
        sources = [
            replace(source, host=f"host{source.rank % self.world}", endpoint=movers[source.rank % self.world])
            for source in found[0].sources
        ]
        return replace(found[0], sources=tuple(sources))

    def load(self, plan: RestorePlan) -> None:
        arena, store = self.host.arena, self.store
        restored = restore(self.entries, plan, rank=self.rank, world=self.world, arena=arena, store=store, token=TOKEN)
        assert not restored.detours, restored.detours

    def new_mover(self, directory: str | None = None) -> None:
        """One that has fetched nothing yet; `directory`: its new storage."""
        self.host.kill_mover()
        if directory is not None:
            self.host.storage = {"url": directory, "options": {}}
        self.host.start_mover()
        self.host.order(partner=None, keep=self.host.arena.board.keep)

    def wanted(self) -> list[Block]:
        return [block for name, tensor in self.entries if (block := wanted(name, tensor))]

    def mover_cpu_s(self) -> float:
        return cpu_s(self.host.mover.pid)

    def digest(self) -> float:
        """Of this rank's tensors: tells a wrong restore from a right one, on the same layout."""
        return sum(float(local(tensor).double().abs().sum()) for _, tensor in self.entries)

    def wipe(self) -> None:
        with torch.no_grad():
            for _, tensor in self.entries:
                local(tensor).zero_()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def together_s(work: Callable[[], Any]) -> float:
    """Seconds until every rank is done."""
    dist.barrier()
    began_s = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began_s


def fastest(works: Mapping[T, Callable[[], Any]]) -> T:
    """Its name, the same on all ranks; each is done once."""
    seconds = {name: together_s(work) for name, work in works.items()}
    found = [min(seconds, key=lambda name: seconds[name])]
    dist.broadcast_object_list(found)
    if dist.get_rank() == 0:
        print("  DCP:", ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()), "->", found[0], flush=True)
    return found[0]


def in_turn(work: Callable[[], float]) -> float:
    """Each rank alone: four of them on two cores would mostly measure each other."""
    value = 0.0
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            value = work()
    dist.barrier()
    return value


# ---------------------------------------------------------------- programs, one for each start of ranks


def saving(rank: int, world: int, setting: Setting) -> dict[str, Any]:
    """On four ranks: stalls, saves, the restore of the same layout from arenas and from storage."""
    mine = Rank(setting, rank, world, f"s3://{BUCKET}/ours")
    try:
        found: dict[str, Any] = {"nbytes": mine.snapshotter.nbytes, "blocks": len(mine.snapshotter.table)}
        found |= stalls(mine)
        found |= saves(mine)
        found |= loads(mine)
        found["arena_restore_s"] = arena_restores(mine)
        found |= local_saves(mine)
        return found
    finally:
        mine.close()


def resharding(rank: int, world: int, setting: Setting) -> dict[str, Any]:
    """On three ranks, what four saved."""
    mine = Rank(setting, rank, world, f"s3://{BUCKET}/ours", seed=1)
    try:
        return {**loads(mine), **plans(mine)}
    finally:
        mine.close()


def stalls(mine: Rank) -> Times:
    flat = torch.ones(mine.snapshotter.nbytes, dtype=torch.uint8).numpy()  # of the allocator that the state is of
    into = mine.host.arena.own[0].room[: len(flat)]
    peer = dcp.AsyncSaves(mine.entries, Path(mine.setting.directory, "stall"))

    def copy() -> float:
        began_s = time.perf_counter()
        np.copyto(into, flat)
        return time.perf_counter() - began_s

    def ours() -> float:
        stall_s = mine.snapshot()[1]
        mine.sealed()  # else its mover would take a core from the rank that comes next
        return stall_s

    found: Times = {"memcpy_s": [], "stall_s": [], "dcp_stall_s": []}
    for repeat in range(-1, mine.setting.repeats):
        values = in_turn(copy), in_turn(ours), in_turn(peer.start)
        peer.wait()
        if repeat >= 0:
            for times, value in zip(found.values(), values):
                times.append(value)
    peer.close()
    return found


def saves(mine: Rank) -> dict[str, Any]:
    def peer(settings: tuple[int, int], number: int) -> None:
        dcp.save_s3(mine.entries, f"s3://{BUCKET}/dcp-{number}", mine.setting.endpoint, settings)

    together_s(lambda: peer(dcp.S3_SAVES[0], 0))  # the first one makes the plan
    best = fastest({settings: partial(peer, settings, 0) for settings in dcp.S3_SAVES})
    together_s(mine.save)
    found: dict[str, Any] = {"save_s": [], "dcp_save_s": [], "mover_cpu_s": [], "server_cpu_s": []}
    for repeat in range(mine.setting.repeats):
        before_s = mine.mover_cpu_s(), cpu_s(mine.setting.server)
        found["save_s"].append(together_s(mine.save))
        found["mover_cpu_s"].append(mine.mover_cpu_s() - before_s[0])
        found["server_cpu_s"].append(cpu_s(mine.setting.server) - before_s[1])
        found["dcp_save_s"].append(together_s(partial(peer, best, 1 + repeat)))
    return found


def loads(mine: Rank) -> dict[str, Any]:
    """Seconds, and bytes that came through the proxy."""
    plan = mine.newest()
    found: dict[str, Any] = {"load_s": [], "dcp_load_s": [], "load_bytes": [], "dcp_load_bytes": []}

    def peer(settings: tuple[int, str]) -> None:
        dcp.load_s3(mine.entries, f"s3://{BUCKET}/dcp-1", mine.setting.endpoint, settings)

    def measure(name: str, work: Callable[[], Any]) -> float:
        """Of what it restored."""
        mine.wipe()
        mine.new_mover()
        if mine.rank == 0:
            counts(mine.setting.endpoint)
        found[f"{name}_s"].append(together_s(work))
        if mine.rank == 0:
            found[f"{name}_bytes"].append(counts(mine.setting.endpoint)["GET in"])
        return mine.digest()

    best = fastest({settings: partial(peer, settings) for settings in dcp.S3_LOADS})
    together_s(partial(mine.load, plan))
    for _ in range(mine.setting.repeats):
        digests = measure("load", partial(mine.load, plan)), measure("dcp_load", partial(peer, best))
        assert digests[0] == digests[1] > 0, f"they restored different things: {digests}"
    return found


def _own(rank: int) -> ShardSource:
    return ShardSource(rank=rank, tier="own", host=f"host{rank}", endpoint=None, object="")


def arena_restores(mine: Rank) -> list[float]:
    key, _ = mine.snapshot()
    mine.sealed()
    sources = tuple(_own(rank) for rank in range(mine.world))
    plan = RestorePlan(key=key, world=mine.world, sources=sources)
    return [together_s(lambda: mine.load(plan)) for _ in range(1 + mine.setting.repeats)][1:]


def local_saves(mine: Rank) -> Times:
    """The same on the local file system, for the record."""
    found: Times = {"file_save_s": [], "dcp_file_save_s": []}
    directory = Path(mine.setting.directory)
    mine.new_mover(str(directory / "ours"))
    mine.store = open_store(str(directory / "ours"))
    if mine.log is not None:
        mine.log = CommitLog(mine.store)
        mine.attempt = mine.log.claim("bench")
    for repeat in range(-1, min(3, mine.setting.repeats)):
        ours_s = together_s(mine.save)
        folder = directory / f"dcp-{repeat}"
        peer_s = together_s(partial(dcp.save_files, mine.entries, folder))
        if mine.rank == 0:
            shutil.rmtree(folder)
        if repeat >= 0:
            found["file_save_s"].append(ours_s)
            found["dcp_file_save_s"].append(peer_s)
    return found


def plans(mine: Rank) -> Times:
    """Seconds per block: this rank's table for a snapshot, and the plan of a resharded read; no collective in them."""
    plan = mine.newest()
    tables = {source.rank: mine.store.get(table_object(source.object)) for source in plan.sources}
    shards = {rank: of_object(raw, name=str(rank)) for rank, raw in tables.items()}

    def table() -> float:
        save._local_box.cache_clear()
        began_s = time.perf_counter()
        blocks = mine.wanted()
        encode_bytes(place(blocks)[0])
        return (time.perf_counter() - began_s) / len(blocks)

    def read_plan() -> float:
        blocks = mine.wanted()
        began_s = time.perf_counter()
        have = index({rank: shard.blocks() for rank, shard in shards.items()})
        parts = [(block, read) for block in blocks for read in reads(block, have)]
        masks = {rank: np.zeros(sub_blocks(shard.nbytes), dtype=np.bool_) for rank, shard in shards.items()}
        for _, read in parts:
            touched(read, masks[read.rank])
        for rank, mask in masks.items():
            spans(mask, shards[rank].nbytes)
        known = sum(len(shard) for shard in have.values())
        return (time.perf_counter() - began_s) / known

    found: Times = {"table_s": [], "read_plan_s": []}
    for _ in range(1 + mine.setting.repeats):
        found["table_s"].append(in_turn(table))
        found["read_plan_s"].append(in_turn(read_plan))
    return {name: times[1:] for name, times in found.items()}


def uploading(rank: int, world: int, setting: Setting) -> Times:
    """Steps of one rank that has a core to itself, without and with an upload by its mover, which has the others."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:])  # the mover inherits it
    mine = Rank(setting, rank, world, f"s3://{BUCKET}/slowdown")
    os.sched_setaffinity(0, cores[:1])
    tokens = torch.randint(0, SHAPE.vocab_size, (1, 16))

    def step_s() -> float:
        began_s = time.perf_counter()
        mine.model(tokens).float().logsumexp(-1).mean().backward()
        mine.optimizer.step()
        mine.optimizer.zero_grad()
        return time.perf_counter() - began_s

    def quiet(count: int) -> float:
        return statistics.median(step_s() for _ in range(count))

    def busy() -> float:
        key, _ = mine.snapshot()
        mine.sealed()
        mine.host.tell(upload={"generation": key.generation, "step": key.step})
        with ThreadPoolExecutor(1) as waiting:
            uploaded = waiting.submit(mine.host.hear, "uploaded")
            times = []
            while not uploaded.done():
                times.append(step_s())
        uploaded.result()
        assert len(times) > 1, f"the upload took {len(times)} steps only"
        return statistics.median(times[:-1])  # the last one may have gone on after it

    try:
        quiet(5)
        found: Times = {"slowdown": [], "step_s": []}
        for _ in range(2 * mine.setting.repeats):  # a few per cent are to be told from noise
            before_s, with_s, after_s = quiet(8), busy(), quiet(8)
            alone_s = (before_s + after_s) / 2
            found["slowdown"].append(with_s / alone_s - 1)
            found["step_s"].append(alone_s)
        return found
    finally:
        mine.close()
