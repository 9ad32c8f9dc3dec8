"""A sharded model's local parts as plain tensors: memory for them, their gradients, and their names as state.

DTensor works out placements anew for each operation and shape in each process, 2 to 4 ms of one core at a time;
between a trainer's start and its first step that is what there is to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic.checkpoint import save


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, detached, sharing memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def allocate(model: nn.Module, device: torch.device) -> None:
    """`model.to_empty(device=device)`, without DTensor's dispatch."""

    def empty(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device=device)
        return _with_local(tensor, torch.empty_like(tensor.to_local(), device=device))

    with torch.no_grad():
        model._apply(empty)


def local_gradients(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """This rank's shards of the gradients; without those that are empty or that no backward pass reached."""
    found = {}
    for parameter in parameters:
        if parameter.grad is not None and (local := local_part(parameter.grad)).numel():
            found[parameter] = local
    return found


def sharded_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer, shards: Mapping[nn.Parameter, nn.Parameter]
) -> list[save.Entry]:
    """All state by name, as `save.entries`; `shards` maps parameters to what `optimizer` has in their place."""
    if not shards:
        return save.entries(model, optimizer)
    save.materialise(optimizer)
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter, shard in shards.items():
        values = optimizer.state.get(shard, {})
        state[parameter] = {
            key: _with_local(parameter, value) if torch.is_tensor(value) and value.shape == shard.shape else value
            for key, value in values.items()
        }
    as_if_whole = SimpleNamespace(state=state, param_groups=[])
    return save.entries(model, cast(torch.optim.Optimizer, as_if_whole))


def _with_local(like: Tensor, local: Tensor) -> Tensor:
    """A DTensor placed as `like`, whose part here is `local`; shares its memory."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
