"""Snapshot and restore of real FSDP2 state on Gloo processes, to the same and to another layout, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic.checkpoint.arena import Arena, State
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import build, restore_plan
from elastic.checkpoint.mover import uploaded_of
from elastic.checkpoint.restore import Restored, restore
from elastic.checkpoint.save import REPLICATED_BYTES_MAX, Entry, Snapshotter, entries, local, materialise
from elastic.plan import RestorePlan, ShardSource
from elastic.storage.store import DirectoryStore, MemoryStore
from tests.checkpoint.hosts import TOKEN, Host, hosts, key
from tests.checkpoint.stored import ABOUT
from tests.parallel.ranks import run

State_ = dict[str, np.ndarray]


class Half(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.float().sum()


class Net(torch.nn.Module):
    """Sizes that no world divides evenly, some smaller than the world; a buffer to keep and one not to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(13, 13) for _ in range(2))
        self.head = torch.nn.Linear(13, 2)
        self.last = Half()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(self.head(x))


def build_model(world: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model, mesh = Net(), init_device_mesh("cpu", (world,))
    for block in (*model.blocks, model.last):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(step))
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.seen += 1


def full(found: list[Entry]) -> State_:
    state = {}
    for name, tensor in found:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        state[name] = whole.contiguous().view(-1).view(torch.uint8).numpy().copy()
    return state


def attach(path: str) -> Arena:
    return Arena.attach(os.open(path, os.O_RDWR))


def save_rank(rank: int, world: int, paths: list[str]) -> State_:
    model, optimizer = build_model(world, seed=1)
    found = entries(model, optimizer)
    snapshotter = Snapshotter(attach(paths[rank]), rank=rank, world=world, entries=found, wake=os.eventfd(0))
    for step in range(1, 4):
        train_step(model, optimizer, step)
    assert snapshotter.can_write() and snapshotter.write(key(1, 3))
    return full(found)


def restore_rank(
    rank: int, world: int, jobs: list[tuple[list[str], RestorePlan]], storage: str
) -> list[tuple[State_, Restored]]:
    """One job after the other into the same live tensors: paths of the arenas by rank, and the plan."""
    model, optimizer = build_model(world, seed=100 + rank)
    found = entries(model, optimizer)
    results = []
    for places, plan in jobs:
        restored = restore(
            found,
            plan,
            rank=rank,
            world=world,
            arena=attach(places[rank]),
            store=DirectoryStore(Path(storage)),
            token=TOKEN,
        )
        results.append((full(found), restored))
        train_step(model, optimizer, 4)  # the optimizer goes on with what was restored
        assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}
    return results


def same(got: State_, want: State_) -> bool:
    return got.keys() == want.keys() and all(np.array_equal(got[name], want[name]) for name in want)


def paths(found: list[Host]) -> list[str]:
    return [f"/proc/{os.getpid()}/fd/{host.arena.fd}" for host in found]


def plan_of(found: list[Host], tier: Any = "own", places: dict[int, int] | None = None) -> RestorePlan:
    """Rank r's shard lies on host r, or where `places` says."""
    sources = []
    for rank in range(len(found)):
        place = (places or {}).get(rank, rank)
        sources.append(
            ShardSource(
                rank=rank,
                tier="received" if place != rank else tier,
                host=f"host{place}",
                endpoint=found[place].endpoint,
                object="",
            )
        )
    return RestorePlan(key=key(1, 3), world=len(found), sources=tuple(sources))


def checkpoint(found: list[Host], storage: Path) -> RestorePlan:
    """Uploads every host's shard and commits; what a new attempt would start from."""
    uploads = []
    for host in found:
        host.tell(upload={"generation": 1, "step": 3})
        uploads.append(uploaded_of(host.hear("uploaded")["uploaded"]))
    store = DirectoryStore(storage)
    log = CommitLog(store)
    attempt = log.claim("test")
    log.commit(
        attempt,
        build(store, tuple(uploads), about=ABOUT, attempt=attempt, key=key(1, 3), samples=72),
    )
    newest = CommitLog(store).newest()
    assert newest is not None
    return restore_plan(newest)


@pytest.mark.timeout(300)
def test_another_layout_from_arenas_partners_and_storage(tmp_path: Path) -> None:
    """3 ranks to 2 through every tier, and back to 3 from storage."""
    with hosts(tmp_path, 3) as found:
        for i, host in enumerate(found):
            host.order(partner=found[(i + 1) % 3])
        want = run(3, save_rank, paths(found))[0]
        assert len(want) == 7 + 1 + 3 * 7 and "model.scratch" not in want
        for i in range(3):
            found[i].tell(seal=True)
            found[i].hear("sealed")
            found[(i + 1) % 3].until(lambda i=i: found[(i + 1) % 3].holds(key(1, 3), "received"), "a copy")
        stored = checkpoint(found, tmp_path)

        swapped = [paths(found)[1], paths(found)[0]]  # the new rank 1 is on host 0, which got rank 2's copy
        jobs = [
            (paths(found), plan_of(found)),
            (swapped, plan_of(found, places={2: 0})),
            (paths(found), stored),
        ]
        by_rank = run(2, restore_rank, jobs, str(tmp_path))
        assert all(same(state, want) for results in by_rank for state, _ in results)
        assert [[set(restored.nbytes) for _, restored in results] for results in by_rank] == [
            [{"own", "peer"}, {"own", "received"}, {"storage"}],
            [{"own", "peer"}, {"own", "received", "peer"}, {"storage"}],
        ]
        back = run(3, restore_rank, [(paths(found), stored)], str(tmp_path))
        assert all(same(state, want) for results in back for state, _ in results)


@pytest.mark.timeout(300)
def test_the_same_layout_needs_nothing_but_its_own_arena(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as found:
        for host in found:
            host.kill_mover()
        want = run(2, save_rank, paths(found))[0]
        assert all(host.arena.find(key(1, 3), r).state == State.WRITTEN for r, host in enumerate(found))  # type: ignore[union-attr]
        back = run(2, restore_rank, [(paths(found), plan_of(found))], str(tmp_path))
        assert all(same(state, want) for results in back for state, _ in results)
        assert all(set(restored.nbytes) == {"own"} for results in back for _, restored in results)


# ---------------------------------------------------------------- one process, plain tensors


def tensors(seed: int, scale: int = 1) -> list[Entry]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("model.w", torch.randn(scale * 300, 700, generator=generator)),
        ("model.b", torch.randn(11, generator=generator).to(torch.bfloat16)),
        ("optimizer.w.step", torch.tensor(float(seed))),
    ]


def snapshot(host: Host, found: list[Entry], at: Any = None) -> Snapshotter:
    snapshotter = Snapshotter(host.arena, rank=0, world=1, entries=found, wake=host.wake)
    assert snapshotter.write(at or key(1, 3))
    return snapshotter


def equal(a: list[Entry], b: list[Entry]) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(a, b))


def test_a_snapshot_is_skipped_and_counted_where_no_buffer_is_free(tmp_path: Path) -> None:
    found = tensors(1)
    with hosts(tmp_path, 1) as (host,):
        snapshotter = snapshot(host, found, key(1, 1))
        assert snapshotter.write(key(1, 2)) and not snapshotter.can_write()
        assert not snapshotter.write(key(1, 3)) and host.arena.board.skipped == 1
        host.arena.board.order(generation=1, keep=key(1, 2))
        assert snapshotter.can_write() and snapshotter.write(key(1, 3))
        assert {holding.key.step for holding in host.arena.holdings()} == {2, 3}
        host.arena.board.order(generation=2, keep=key(1, 3))
        with pytest.raises(CheckpointError, match="generation 2"):
            snapshotter.write(key(1, 4))


def test_a_snapshot_is_the_state_at_the_call(tmp_path: Path) -> None:
    found, want = tensors(1), tensors(1)
    with hosts(tmp_path, 1) as (host,):
        snapshot(host, found)
        for _, tensor in found:
            tensor.zero_()
        restore(found, plan_of([host]), rank=0, world=1, arena=host.arena, store=MemoryStore(), token=TOKEN)
        assert equal(found, want)


def flip_file(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: flip_file(data / "0.bin"), r"fail their CRC \(one of model\.w"),
        (lambda data: (data / "0.bin").write_bytes((data / "0.bin").read_bytes()[:-1]), "cut short"),
        (lambda data: (data / "0.bin").unlink(), "does not exist"),
        (lambda data: flip_file(data / "0.json"), "0.json"),
        (lambda data: (data / "0.json").unlink(), "does not exist"),
    ],
)
def test_damage_in_storage_is_found_before_training_goes_on(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    with hosts(tmp_path, 1) as (host,):
        host.order(partner=None)
        snapshot(host, tensors(1))
        host.tell(upload={"generation": 1, "step": 3})
        told = uploaded_of(host.hear("uploaded")["uploaded"])
        source = ShardSource(rank=0, tier="storage", host="", endpoint=None, object=told.object)
        plan = RestorePlan(key=key(1, 3), world=1, sources=(source,))
        arguments: dict[str, Any] = {
            "rank": 0,
            "world": 1,
            "arena": host.arena,
            "store": DirectoryStore(tmp_path),
            "token": TOKEN,
        }
        found = tensors(2)
        restore(found, plan, **arguments)
        assert equal(found, tensors(1))
        damage((tmp_path / told.object).parent)
        with pytest.raises(CheckpointError, match=message):
            restore(tensors(2), plan, **arguments)


def test_damage_in_a_peer_and_in_a_received_copy_is_found(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as (a, b):
        a.order(partner=b)
        snapshot(a, tensors(1))
        b.until(lambda: b.holds(key(1, 3), "received"), "the copy")
        elsewhere = Arena.create(own_bytes=64, received_bytes=64, received_buffers=0)
        for arena, place in ((elsewhere, a), (b.arena, b)):
            arguments: dict[str, Any] = {"rank": 0, "world": 1, "arena": arena, "store": MemoryStore(), "token": TOKEN}
            plan = RestorePlan(key=key(1, 3), world=1, sources=(replace(plan_of([place]).sources[0], tier="received"),))
            found = tensors(2)
            restore(found, plan, **arguments)
            assert equal(found, tensors(1))
            buffer = place.arena.find(key(1, 3), 0)
            assert buffer is not None
            buffer.data[buffer.nbytes // 2] ^= 1
            with pytest.raises(CheckpointError, match=r"fail their CRC \(one of model\.w"):
                restore(found, plan, **arguments)
        os.close(elsewhere.fd)


def test_another_model_and_a_lost_peer_are_said(tmp_path: Path) -> None:
    with hosts(tmp_path, 1) as (host,):
        snapshot(host, tensors(1))
        arguments: dict[str, Any] = {"rank": 0, "world": 1, "arena": host.arena, "store": MemoryStore(), "token": TOKEN}
        with pytest.raises(CheckpointError, match=r"step 3 does not have model\.new: it is of another model"):
            restore([*tensors(1), ("model.new", torch.zeros(5))], plan_of([host]), **arguments)
        with pytest.raises(CheckpointError, match=r"saved as float32\[300, 700\]"):
            restore(tensors(1, scale=2), plan_of([host]), **arguments)
        plan = replace(plan_of([host]), world=2)
        with pytest.raises(CheckpointError, match="one of 1, the plan says 2"):
            restore(tensors(1), plan, **arguments)
        gone = replace(plan_of([host]), key=key(1, 9))
        with pytest.raises(CheckpointError, match="not here"):
            restore(tensors(1), gone, **arguments)
        host.listen.close()
        host.kill_mover()
        with pytest.raises(CheckpointError, match="can't be reached"):
            restore(tensors(1), gone, **arguments)


def test_large_replicated_tensors_have_one_owner_each(tmp_path: Path) -> None:
    small = torch.zeros(4)
    found = [("small", small)] + [(f"large{i}", torch.zeros(REPLICATED_BYTES_MAX)) for i in range(8)]
    with hosts(tmp_path, 1) as (host,):
        tables = [Snapshotter(host.arena, rank=rank, world=3, entries=found, wake=host.wake).table for rank in range(3)]
    names = [block.name for table in tables for block in table]
    assert names.count("small") == 3 and all(names.count(f"large{i}") == 1 for i in range(8))
    assert all(len(table) > 1 for table in tables)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
)
def test_making_optimizer_state_changes_nothing(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def steps(early: bool) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.arange(5.0))
        optimizer = make([parameter])
        if early:
            materialise(optimizer)
            assert torch.equal(parameter, torch.arange(5.0)) and parameter.grad is None
            assert all(not value.any() for value in optimizer.state[parameter].values())
        for _ in range(3):
            optimizer.zero_grad()
            parameter.pow(2).sum().backward()
            optimizer.step()
        return local(parameter).clone()

    assert torch.equal(steps(True), steps(False))
