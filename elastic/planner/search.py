"""(config, world) -> plan. Pure. For now one layout: FSDP over all hosts; the global batch never changes."""

from __future__ import annotations

from elastic.config import Config
from elastic.plan import Plan


def equal_shares(samples: int, world: int) -> tuple[int, ...]:
    """`samples` cut into `world` parts that differ by at most one."""
    low, rest = divmod(samples, world)
    return tuple(low + (rank < rest) for rank in range(world))


def choose(config: Config, world: int) -> Plan:
    """The plan for `world` hosts. Every rank runs equally many micro-batches, as ZeRO-3 needs."""
    assert 1 <= world <= config.batch.global_samples, (world, config.batch.global_samples)
    shares = equal_shares(config.batch.global_samples, world)
    micro_batches = min(-(-shares[0] // config.batch.micro_samples), shares[-1])
    return Plan(world=world, shares=shares, micro_batches=micro_batches)
