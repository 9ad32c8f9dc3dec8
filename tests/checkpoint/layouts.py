"""State in any layout without a process group that talks: each rank's tensors, saved ones in a store, restored ones."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.checkpoint import shard as shards
from elastic.checkpoint.arena import Arena
from elastic.checkpoint.save import Entry, Snapshotter, local
from elastic.plan import RestorePlan, ShardSource
from elastic.storage.store import Store
from tests.checkpoint.hosts import key

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`stages` meshes of shape `mesh`, one after the other. A tensor lies on the stage that its place in the alphabet
    says and is placed there as `placements` say, which are cut to its dims; () leaves it plain: whole on each rank."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...] = ()
    stages: int = 1

    @property
    def world(self) -> int:
        return self.stages * math.prod(self.mesh)


def fsdp(world: int) -> Layout:
    return Layout(mesh=(world,), placements=(Shard(0),))


def ddp(world: int) -> Layout:
    return Layout(mesh=(world,))


def hsdp(replicas: int, shards: int) -> Layout:
    return Layout(mesh=(replicas, shards), placements=(Replicate(), Shard(0)))


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[list[DeviceMesh]]:
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
    try:
        ranks = torch.arange(layout.world).view(layout.stages, *layout.mesh)
        yield [DeviceMesh("cpu", stage) for stage in ranks]
    finally:
        dist.destroy_process_group()


def of_rank(tensors: Tensors, layout: Layout, rank: int, *, empty: bool = False) -> list[Entry]:
    """The live tensors of one rank, with their values or (`empty`) with others."""
    with rank_of(layout, rank) as meshes:
        return [
            (name, _placed(tensor, layout, meshes[i % layout.stages], empty))
            for i, (name, tensor) in enumerate(sorted(tensors.items()))
        ]


def _placed(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh, empty: bool) -> torch.Tensor:
    if empty:
        whole = torch.full_like(whole, 77)
    if whole.dim() == 0 or not layout.placements:
        return whole.clone()
    placements = [
        Shard(placement.dim % whole.dim()) if isinstance(placement, Shard) else placement
        for placement in layout.placements
    ]
    part = torch.empty(0, dtype=whole.dtype)
    if mesh.get_coordinate() is not None:
        sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].clone().contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def save(store: Store, tensors: Tensors, layout: Layout) -> RestorePlan:
    """What the movers of all ranks would have uploaded of snapshot (1, 3)."""
    sources = []
    for rank in range(layout.world):
        entries = of_rank(tensors, layout, rank)
        room = sum(local(tensor).nbytes + 64 for _, tensor in entries)
        arena = Arena.create(own_bytes=room, received_bytes=0, received_buffers=0, prefault=False)
        wake = os.eventfd(0)
        arena.board.order(generation=1, keep=None)
        assert Snapshotter(arena, rank=rank, world=layout.world, entries=entries, wake=wake).write(key(1, 3))
        os.close(wake)
        buffer = arena.find(key(1, 3), rank)
        assert buffer is not None
        crcs = [zlib.crc32(buffer.data[at : at + (1 << 20)].data) for at in range(0, buffer.nbytes, 1 << 20)]
        shard = shards.Shard(
            key=key(1, 3),
            rank=rank,
            world=layout.world,
            nbytes=buffer.nbytes,
            table=buffer.table(),
            crcs=np.array(crcs, dtype=np.uint32),
        )
        name = f"data/1-1-3/{rank}.bin"
        store.put(name, buffer.view)
        store.put(shards.table_object(name), shards.to_object(shard))
        os.close(arena.fd)
        sources.append(ShardSource(rank=rank, tier="storage", host="", endpoint=None, object=name))
    return RestorePlan(key=key(1, 3), world=layout.world, sources=tuple(sources))


def right(got: Sequence[Entry], tensors: Tensors, layout: Layout, rank: int) -> bool:
    return all(
        name == other and torch.equal(local(a), local(b))
        for (name, a), (other, b) in zip(got, of_rank(tensors, layout, rank), strict=True)
    )


def nowhere() -> Arena:
    """An arena that holds nothing."""
    return Arena.create(own_bytes=64, received_bytes=64, received_buffers=0, prefault=False)
