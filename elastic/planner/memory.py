"""Bytes per host: what a rank's shard weighs and how much memory its arena takes. Pure arithmetic."""

from __future__ import annotations

from elastic.config import Config

# A snapshot holds each parameter and AdamW's two moments.
STATE_COPIES = 3
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 4, "float64": 8}


def state_bytes(config: Config, parameters: int) -> int:
    """Bytes of the whole model's snapshot; masters stay float32 under bfloat16."""
    return parameters * STATE_COPIES * BYTES_PER_VALUE[config.precision]


def host_bytes(config: Config, *, shard_bytes: int, received_buffers: int) -> int:
    """Host memory that one host takes: two own and the received snapshot buffers and, on a CPU, the trainer's state
    with its gradients. Without activations, which depend on the batch."""
    arena = (2 + received_buffers) * shard_bytes
    return arena if config.use_gpu else arena + shard_bytes * (STATE_COPIES + 1) // STATE_COPIES


def shard_bytes_max(config: Config, parameters: int, tensors: int) -> int:
    """Bytes of the largest shard: the smallest allowed world, each tensor rounded up to a whole row.

    FSDP2 cuts along the first dimension in equal chunks, so one rank holds at most ceil(rows / world) rows.
    The slack of one page per tensor covers padding, alignment and replicated scalars.
    """
    return -(-state_bytes(config, parameters) // config.hosts_min) + 4096 * (tensors * STATE_COPIES + 16)
