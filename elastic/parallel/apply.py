"""A plain model and a plan -> a sharded model: one function, whose order is the documentation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elastic.parallel.fsdp import Precision, shard_parameters
from elastic.plan import Plan


def parallelize(
    model: nn.Module, *, plan: Plan, mesh: DeviceMesh, units: Iterable[nn.Module], precision: Precision
) -> nn.Module:
    """Turn `model` in place into the sharded model of `plan`; each rank keeps its part of the values.

    `units`: the modules that are gathered as one, in the order of their use (for a transformer its blocks).
    Built on the meta device it is still empty: `model.to_empty(device=...)`, then fill it.
    """
    assert mesh.size() == plan.world, (mesh, plan)
    # 1. The precision in which parameters and optimizer state are kept.
    model.to(torch.float64 if precision == "float64" else torch.float32)
    # 2. Sharding over the data-parallel ranks: last, since it must see the parameters as they finally are.
    shard_parameters(model, units, mesh, precision)
    return model
