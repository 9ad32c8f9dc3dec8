"""Which state the next generation starts from: the newest snapshot that every shard has somewhere. Pure.

Arenas and partner copies first, then the disks of the nodes, then the last committed checkpoint, then the initialised
model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from elastic.events import Holding, Report
from elastic.plan import RestorePlan, ShardSource, SnapshotKey, shard_object

_NEAR = ("own", "received", "disk")


def choose(
    hosts: Iterable[Report],
    members: Sequence[Report],
    durable: RestorePlan | None,
    is_usable: Callable[[Holding], bool] = lambda _: False,
) -> tuple[RestorePlan | None, str]:
    """(state to restore, its tier with the reason). None: start from the seed.

    An own shard that is only written (not yet checksummed) serves its own host's trainer in the same layout;
    everybody else reads sealed shards only. is_usable: whether what lies on a disk may be taken.
    """
    shards: dict[tuple[SnapshotKey, int], dict[int, ShardSource]] = defaultdict(dict)
    for report in hosts:
        for holding in report.holdings:
            may = holding.sealed or _is_own_restore(report, holding, members)
            if may and (holding.tier != "disk" or is_usable(holding)):
                _offer(shards[holding.key, holding.world], report, holding, members)
    whole = [(key, world) for (key, world), found in shards.items() if len(found) == world]
    best = max(whole, key=lambda at: (at[0].step, not _on_disk(shards[at]), at[0].generation), default=None)
    if best is None or (durable is not None and durable.key.step > best[0].step):
        return (through(durable, members), "storage") if durable else (None, "the seed")
    key, world = best
    sources = tuple(shards[best][rank] for rank in range(world))
    return RestorePlan(key=key, world=world, sources=sources), "disk" if _on_disk(shards[best]) else "memory"


def through(plan: RestorePlan, members: Sequence[Report]) -> RestorePlan:
    """`plan`, from storage, with the member whose mover fetches each shard for all that want some of it: in turn."""
    sources = tuple(
        replace(source, host=reader.host, endpoint=reader.mover)
        for source, reader in zip(plan.sources, itertools.cycle(members))
    )
    return replace(plan, sources=sources)


def _is_own_restore(report: Report, holding: Holding, members: Sequence[Report]) -> bool:
    if holding.tier != "own" or holding.world != len(members) or holding.rank >= len(members):
        return False
    return members[holding.rank].host == report.host


def _on_disk(found: dict[int, ShardSource]) -> bool:
    return any(source.tier == "disk" for source in found.values())


def _offer(found: dict[int, ShardSource], report: Report, holding: Holding, members: Sequence[Report]) -> None:
    """Own copies before partner copies: the survivor that held the rank most likely still has it. Both before disks;
    of the hosts that see the same one the member of that rank, so that not one of them reads for all."""

    def distance(source: ShardSource) -> tuple[int, bool]:
        away = source.rank >= len(members) or members[source.rank].host != source.host
        return _NEAR.index(source.tier), away

    name = shard_object(holding.attempt, holding.key, holding.rank) if holding.tier == "disk" else ""
    offered = ShardSource(rank=holding.rank, tier=holding.tier, host=report.host, endpoint=report.mover, object=name)
    known = found.get(holding.rank)
    if known is None or distance(offered) < distance(known):
        found[holding.rank] = offered
