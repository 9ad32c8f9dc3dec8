"""The device mesh of a generation: its axes have names, and everything sharded refers to them."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic.plan import Plan

# The axis along which FSDP shards parameters, gradients and optimizer state. Later axes stand beside it.
SHARD_AXIS = "dp_shard"


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """One axis "dp_shard" over all ranks of `plan`; needs the default process group, and each rank to call."""
    return init_device_mesh(device_type, (plan.world,), mesh_dim_names=(SHARD_AXIS,))
