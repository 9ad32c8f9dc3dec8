"""Bytes per host: what a rank's shard weighs and how much memory its arena takes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.config import Config
from elastic.model.shape import parameters, row_values, tensors

# A snapshot holds each parameter and AdamW's two moments.
STATE_COPIES = 3
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 4, "float64": 8}
PAGE = 4096
BUFFERS = 2  # of an arena, for the host's own shard and for each one that it keeps for a partner


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """Of one host in a world: its part of parameters, gradients and optimizer, and its arena."""

    parameters: int
    gradients: int
    optimizer: int
    arena: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.arena


def host_bytes(config: Config, *, parameters: int, shard_bytes: int, world: int) -> HostBytes:
    """shard_bytes: room of one arena buffer (`shard_bytes`); it is reserved for the smallest allowed world."""
    each = -(-parameters * BYTES_PER_VALUE[config.precision] // world)
    return HostBytes(
        parameters=each,
        gradients=each,
        optimizer=(STATE_COPIES - 1) * each,
        arena=arena_bytes(config, shard_bytes),
    )


def arena_bytes(config: Config, shard_bytes: int) -> int:
    """An own shard, and a partner's where partners are kept."""
    return BUFFERS * shard_bytes * (2 if config.snapshot.partner else 1)


def arenas_bytes(config: Config, shard_bytes: int, *, hosts: int) -> int:
    """At least what the arenas of all `hosts` fill: each reserves its own shard's room; partners' shards of any world
    weigh together what they do in the smallest."""
    return BUFFERS * shard_bytes * (hosts + (config.hosts_min if config.snapshot.partner else 0))


def state_bytes(config: Config, parameters: int) -> int:
    """Bytes of the whole model's snapshot; masters stay float32 under bfloat16."""
    return parameters * STATE_COPIES * BYTES_PER_VALUE[config.precision]


def received_buffers(config: Config) -> int:
    """Of an arena: for each rank whose second copy may lie there."""
    return BUFFERS * config.snapshot.sources_max if config.snapshot.partner else 0


def reserved_bytes(config: Config) -> int:
    """What a host needs free to start: its own and the received snapshot buffers and, on a CPU, the trainer's state
    with its gradients. Without activations, which depend on the batch."""
    shard = shard_bytes(config)
    arena = (BUFFERS + received_buffers(config)) * shard
    return arena if config.use_gpu else arena + shard * (STATE_COPIES + 1) // STATE_COPIES


def shard_bytes(config: Config) -> int:
    """Room of one arena buffer: the largest shard in the smallest allowed world.

    FSDP2 cuts each tensor along its first dimension, so one rank holds at most ceil(rows / world) rows of it: a row
    more than its part. One page for each tensor covers alignment and replicated scalars.
    """
    if config.sizes.shard_bytes is not None:
        return config.sizes.shard_bytes
    part = -(-state_bytes(config, parameters(config.model)) // config.hosts_min)
    row = row_values(config.model) * BYTES_PER_VALUE[config.precision]
    return part + (tensors(config.model) * STATE_COPIES + 16) * (row + PAGE)
