"""Trainer side of a snapshot: which tensors are state, which boxes of them are this rank's, the copy itself.

Nothing here is a collective. Who stores a replicated tensor follows from its name and place alone.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from elastic.checkpoint.arena import Arena, Buffer, State
from elastic.checkpoint.blocks import ALIGN, ITEM_BYTES, Block, encode_bytes, place
from elastic.checkpoint.errors import CheckpointError, StateError
from elastic.plan import SnapshotKey

Entry = tuple[str, torch.Tensor]

REPLICATED_BYTES_MAX = 64 << 10  # smaller copies are stored by every rank: no rank asks another for a scalar
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def entries(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Entry]:
    """All state by name: "model.<fqn>" (parameters, persistent buffers), "optimizer.<fqn>.<state key>".

    Optimizer state that is still lazy is made first, as zeros, so that a fresh trainer can restore into it.
    The tensors are the live ones: call it again only when the model or optimizer is another.
    StateError: the optimizer keeps state that is no tensor.
    """
    materialise(optimizer)
    found: list[Entry] = []
    names = {parameter: _clean(name) for name, parameter in model.named_parameters()}
    found += [(f"model.{name}", parameter.detach()) for parameter, name in names.items()]
    found += [(f"model.{_clean(name)}", buffer) for name, buffer in _persistent_buffers(model)]
    for parameter, name in names.items():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if not isinstance(value, torch.Tensor):
                raise StateError(
                    f"optimizer state {key} of {name} is {type(value).__name__}, only tensors are saved; "
                    "keep it as a tensor"
                )
            found.append((f"optimizer.{name}.{key}", value.detach()))
    return found


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Makes lazy optimizer state by a step with zero gradients and rate, then zeroes what that made."""
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if all(parameter in optimizer.state for parameter in parameters):
        return
    before = {id(v) for state in optimizer.state.values() for v in state.values()}
    gradients, rates = [p.grad for p in parameters], [group.get("lr") for group in groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter not in optimizer.state else None
    for group, rate in zip(groups, rates):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    for group, rate in zip(groups, rates):
        group["lr"] = rate
    with torch.no_grad():
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and id(value) not in before:
                    value.zero_()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with `tensor`."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def wanted(name: str, tensor: torch.Tensor) -> Block | None:
    """The box of `tensor` that lies on this rank; None where that is empty."""
    shape = tensor.shape  # asked of a DTensor once: it takes its time
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        at = mesh.get_coordinate()
        sizes, offsets = _local_box(shape, mesh, tensor.placements, tuple(at) if at else None)
    else:
        sizes, offsets = tuple(shape), (0,) * len(shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise StateError(f"{name} has dtype {dtype}, the format knows {', '.join(ITEM_BYTES)}")
    if math.prod(sizes) == 0:
        return None
    return Block(name=name, dtype=dtype, global_shape=tuple(shape), offsets=offsets, sizes=sizes)


@functools.lru_cache(maxsize=4096)
def _local_box(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], at: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and global offsets at the mesh coordinate `at`, this rank's own: meshes of two ranks are equal. A parameter
    and its moments have the same, and so do equal layers: worked out once."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(sizes), tuple(offsets)


def shard_bytes_max(entries: Sequence[Entry], world: int) -> int:
    """Upper limit of any rank's shard in a world of at least `world`: of a DTensor at most ceil(rows / world) rows,
    since FSDP cuts the first dimension in equal chunks; what is not sharded may all fall to one rank."""
    total = 0
    for _, tensor in entries:
        nbytes = tensor.numel() * tensor.element_size()
        if isinstance(tensor, DTensor) and nbytes:
            nbytes = -(-tensor.shape[0] // world) * (nbytes // tensor.shape[0])
        total += -(-nbytes // ALIGN) * ALIGN
    return total


def owned(block: Block, tensor: torch.Tensor, rank: int, world: int) -> bool:
    """Does this rank store `block`? Of its copies one does, chosen by hash so that the load is even; all if small."""
    if block.nbytes <= REPLICATED_BYTES_MAX:
        return True
    index, copies = replica(tensor, rank, world)
    return zlib.crc32(f"{block.name}{block.offsets}".encode()) % copies == index


class Snapshotter:
    """Copies this rank's state into its host's arena. Layout and views are made once, a snapshot is copies only.

    entries: from `entries`, live for the whole generation. wake: the mover's eventfd.
    """

    def __init__(self, arena: Arena, *, rank: int, world: int, entries: Sequence[Entry], wake: int) -> None:
        self._arena = arena
        self._rank, self._world, self._wake = rank, world, wake
        mine = [(wanted(name, tensor), tensor) for name, tensor in entries]
        kept = [(block, tensor) for block, tensor in mine if block and owned(block, tensor, rank, world)]
        self.table, self.nbytes = place(block for block, _ in kept)
        self._table = encode_bytes(self.table)
        self._sources = [local(tensor) for _, tensor in kept]
        for buffer in arena.own:
            buffer.check_fits(self.nbytes, len(self._table))
        self._targets = {
            buffer.offset: [
                view(arena.memory, block, at=buffer.offset + block.at).view(block.sizes) for block in self.table
            ]
            for buffer in arena.own
        }

    def can_write(self) -> bool:
        """Is a buffer free? It stays free until this trainer's next `write`."""
        return self._free() is not None

    def write(self, key: SnapshotKey) -> bool:
        """Copies the state of `key.step` completed steps. False: no free buffer, skipped and counted."""
        generation = self._arena.board.generation
        if key.generation != generation:
            raise CheckpointError(f"{key} can't be written: this host is at generation {generation}")
        buffer = self._free()
        if buffer is None:
            self._arena.board.count_skipped()
            return False
        buffer.begin(key, rank=self._rank, world=self._world, nbytes=self.nbytes, table=self._table)
        with torch.no_grad():
            if self._sources:  # a rank may have no rows of anything
                torch._foreach_copy_(self._targets[buffer.offset], self._sources)
        buffer.finish()
        os.eventfd_write(self._wake, 1)
        return True

    def _free(self) -> Buffer | None:
        free = [buffer for buffer in self._arena.own if buffer.reusable()]
        return min(free, key=lambda buffer: (buffer.state != State.FREE, buffer.key), default=None)


def view(memory: object, block: Block, *, at: int) -> torch.Tensor:
    """`block`'s bytes at `at` of a buffer object as a flat tensor of its dtype, sharing memory."""
    dtype = getattr(torch, block.dtype)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(block.sizes), offset=at)


def replica(tensor: torch.Tensor, rank: int, world: int) -> tuple[int, int]:
    """Which of how many copies of its local box this rank has, counted over the mesh dims that replicate."""
    if not isinstance(tensor, DTensor):
        return rank, world
    coordinate, index, copies = tensor.device_mesh.get_coordinate(), 0, 1
    assert coordinate is not None
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            index, copies = (
                index * tensor.device_mesh.size(dim) + coordinate[dim],
                copies * tensor.device_mesh.size(dim),
            )
    return index, copies


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
