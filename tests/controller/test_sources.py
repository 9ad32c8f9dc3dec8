"""Where state comes from: shards in storage are dealt out to the members' movers."""

from __future__ import annotations

from elastic.controller.sources import choose
from elastic.plan import RestorePlan, ShardSource, SnapshotKey
from tests.controller.conftest import Table


def test_each_stored_shard_is_fetched_by_one_member(table: Table) -> None:
    members = [table.state.hosts[host] for host in ("a/0", "b/0", "b/1")]
    sources = tuple(
        ShardSource(rank=rank, tier="storage", host="", endpoint=None, object=f"data/{rank}") for rank in range(5)
    )
    plan = RestorePlan(key=SnapshotKey(generation=9, step=99), world=5, sources=sources)
    found, tier = choose([], members, plan)
    assert found is not None and (found.key, found.world, tier) == (plan.key, 5, "storage")
    assert [source.host for source in found.sources] == ["a/0", "b/0", "b/1", "a/0", "b/0"]
    assert [source.endpoint for source in found.sources] == [members[i % 3].mover for i in range(5)]
    assert [source.object for source in found.sources] == [source.object for source in sources]
    assert choose([], members, None) == (None, "the seed")
