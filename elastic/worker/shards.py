"""A model's local parts as plain tensors: what may be sharded, memory for it, gradients, and names as state.

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
from torch.nn.modules.batchnorm import _BatchNorm

from elastic.checkpoint import save
from elastic.config import TaskError


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, detached, sharing memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def is_empty(model: nn.Module) -> bool:
    """Whether `model` lies on the meta device. TaskError: a part of it does."""
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if real and on_meta:
        raise TaskError(f"{on_meta[0]} was built on the meta device and {real[0]} was not; build all in one way")
    return bool(on_meta)


def check_buffers(model: nn.Module) -> None:
    """TaskError: buffers whose values would be lost, or would follow from how the samples are divided."""
    for path, module in model.named_modules():
        where = path or "the model"
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name in module._non_persistent_buffers_set:
                raise TaskError(
                    f"buffer {name} of {where} was built on the meta device and is not saved (persistent=False): "
                    "nothing would fill it; build the model as usual, or compute it in forward"
                )
        if isinstance(module, _BatchNorm) and module.track_running_stats and not isinstance(module, nn.SyncBatchNorm):
            raise TaskError(
                f"{where} is {type(module).__name__}: its running statistics would differ from rank to rank; take "
                "GroupNorm, LayerNorm or SyncBatchNorm, or track_running_stats=False"
            )


def allocate(model: nn.Module, device: torch.device) -> None:
    """Memory for what `model` has on the meta device, without DTensor's dispatch; the rest keeps its values."""

    def empty(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device=device)
        return _with_local(tensor, torch.empty_like(tensor.to_local(), device=device))

    with torch.no_grad():
        model._apply(empty)


def local_gradients(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """This rank's shards of the gradients; without those that are empty or that no backward pass reached."""
    found = {}
    with torch.no_grad():  # else `to_local` records an autograd function for each
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
