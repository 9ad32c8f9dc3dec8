"""The disk tier's decisions: what is written when, what holds buffers, what may be used, what damage means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic import events
from elastic.controller.actions import KeepSnapshot, StartGeneration, UploadSnapshot, WriteSnapshot
from elastic.controller.disk import KEPT, is_usable, limit_s, order
from elastic.controller.durability import WAIT_S_MAX
from elastic.controller.orders import order_for
from elastic.controller.safety import DiskFold
from elastic.controller.sources import choose
from elastic.controller.state import Phase
from elastic.events import Exit, Holding
from elastic.plan import RestorePlan, ShardSource, SnapshotKey, Stretch
from tests.controller.conftest import Table, config


def at(step: int, generation: int = 1) -> SnapshotKey:
    return SnapshotKey(generation=generation, step=step)


def on_disk(key: SnapshotKey, rank: int, *, world: int = 4, attempt: int = 1) -> Holding:
    return Holding(key=key, rank=rank, world=world, tier="disk", sealed=True, nbytes=1, attempt=attempt)


def made(
    *, line: tuple[Stretch, ...] = (), attempt: int = 1, durable: RestorePlan | None = None, **changes: Any
) -> Table:
    """Four hosts on two nodes, with a disk, before anything runs."""
    asked = {"steps": 100, "checkpoint": {"interval_steps": 50}, **changes}
    table = Table(config(**asked))
    generation = durable.key.generation if durable else 0
    table.take(
        events.RunStarted(run="t", attempt=attempt, generation=generation, durable=durable, disk="t-1", line=line)
    )
    return table


def running(**changes: Any) -> Table:
    table = made(**changes)
    table.join("a/0", "a/1", "b/0", "b/1")
    table.run_all()
    table.step(1)
    assert table.state.phase is Phase.RUNNING
    return table


def safe(table: Table, step: int) -> list[Any]:
    table.step(step)
    decision = table.take(events.StepSafe(key=at(step)))
    return [*decision.actions]


def durable(step: int) -> RestorePlan:
    source = ShardSource(rank=0, tier="storage", host="", endpoint=None, object="data/x")
    return RestorePlan(key=at(step, 7), world=1, sources=(source,))


def test_one_is_written_at_a_time_and_its_buffers_are_held() -> None:
    table = running()
    assert safe(table, 2) == [KeepSnapshot(key=at(2)), WriteSnapshot(key=at(2))]
    assert safe(table, 3) == [], "passed over, and the buffer of step 2 stays"
    assert table.state.keep == at(2)
    table.take(events.DiskWritten(key=at(2)))
    assert (table.state.keep, table.state.disk.writing, table.state.disk.kept) == (at(3), None, (at(2),))
    assert safe(table, 4) == [KeepSnapshot(key=at(4)), WriteSnapshot(key=at(4))]


def test_disk_and_storage_take_the_same_snapshot_or_each_its_own() -> None:
    table = running(checkpoint={"interval_steps": 3})
    safe(table, 2)
    assert safe(table, 3) == [UploadSnapshot(key=at(3))], "an upload does not wait for a slow disk"
    assert table.state.keep == at(2)
    table.take(events.DiskWritten(key=at(2)))
    assert table.state.keep == at(3)
    table.take(events.CheckpointCommitted(key=at(3), number=2, restore=replace(durable(3), key=at(3))))
    assert safe(table, 6) == [KeepSnapshot(key=at(6)), UploadSnapshot(key=at(6)), WriteSnapshot(key=at(6))]
    table.take(events.CommitFailed(key=at(6), reason="away"))
    assert table.state.keep == at(6), "the disk still reads it"
    assert safe(table, 7) == []
    table.take(events.DiskWritten(key=at(6)))
    assert table.state.keep == at(7)


def test_so_many_steps_apart_and_none_without_a_folder() -> None:
    table = running(snapshot={"disk_interval_steps": 5})
    assert WriteSnapshot(key=at(2)) in safe(table, 2)
    table.take(events.DiskWritten(key=at(2)))
    assert [bool(safe(table, step)[1:]) for step in range(3, 8)] == [False, False, False, False, True]
    off = running()
    off.state = replace(off.state, disk=replace(off.state.disk, folder=""))
    assert safe(off, 2) == [KeepSnapshot(key=at(2))]
    assert order_for(off.state, "a/0").disk is None


def test_members_are_told_what_to_write_and_what_to_keep() -> None:
    table = running(hosts_max=3)
    spare = next(host for host in table.state.hosts if host not in table.state.members)
    for step in (2, 3, 4):
        safe(table, step)
        told = order_for(table.state, table.state.members[0]).disk
        assert told is not None and told.write == at(step)
        assert told.keep == ((at(2), at(3)) if step == 4 else ()), "nothing is deleted before two are whole"
        table.take(events.DiskWritten(key=at(step)))
    told = order_for(table.state, spare).disk
    assert told is not None and (told.write, told.keep, told.remove) == (None, (), False)
    assert len(table.state.disk.kept) == KEPT
    removed = order(table.state, is_member=False, is_finished=True)
    assert removed is not None and removed.remove


def test_a_broken_disk_is_said_once_and_tried_ever_more_rarely() -> None:
    table = running()
    safe(table, 2)
    told = table.take(events.DiskWritten(key=at(2), failed="b/0: no space left"))
    assert "step 2 is not on the nodes' disks: b/0: no space left; training goes on" in told.reason
    assert table.state.keep == at(2) and table.state.phase is Phase.RUNNING
    assert WriteSnapshot(key=at(3)) not in safe(table, 3), "not at once"
    table.now_s += WAIT_S_MAX
    assert WriteSnapshot(key=at(4)) in safe(table, 4)
    late = table.take(events.Tick(), after_s=limit_s(table.config) + 1)
    assert table.state.disk.writing is None and late.reason == "", "given up, said before"
    assert table.take(events.DiskWritten(key=at(4))).state.disk.kept == (), "too late"
    table.now_s += WAIT_S_MAX
    safe(table, 5)
    assert "again" in table.take(events.DiskWritten(key=at(5))).reason


def test_it_is_whole_when_every_rank_was_told_of_by_some_host() -> None:
    table, fold = running(), DiskFold(at(2), attempt=1)
    hosts = list(table.state.hosts.values())
    of_node = tuple(on_disk(at(2), rank) for rank in (0, 1))
    other = (on_disk(at(2), 2, attempt=9), on_disk(at(1), 2), on_disk(at(2), 3))
    assert not fold.observe(replace(hosts[0], holdings=of_node), 4)
    assert not fold.observe(replace(hosts[1], holdings=of_node), 4)
    assert not fold.observe(replace(hosts[2], holdings=other), 4)
    assert fold.observe(replace(hosts[3], holdings=(on_disk(at(2), 2),)), 4)


@pytest.mark.parametrize(
    ("attempt", "generation", "step", "usable"),
    [
        (2, 3, 51, True), (2, 3, 57, True), (2, 4, 58, True),
        (2, 3, 58, False), (2, 4, 57, False),  # of a generation whose end was undone; before its own first step
        (1, 3, 55, False), (2, 5, 59, False),  # of an attempt, a generation that the line does not have
        (3, 6, 70, True),  # of this attempt
    ],
)  # fmt: skip
def test_of_earlier_attempts_only_what_is_on_the_line(attempt: int, generation: int, step: int, usable: bool) -> None:
    line = (
        Stretch(attempt=2, generation=3, first=51, last=57),
        Stretch(attempt=2, generation=4, first=58, last=58),
    )
    table = made(line=line, attempt=3, durable=durable(50))
    assert is_usable(table.state, on_disk(at(step, generation), 0, attempt=attempt)) is usable


def test_a_new_attempt_starts_from_the_disks_and_leaves_what_is_damaged() -> None:
    line = (Stretch(attempt=1, generation=8, first=51, last=58),)
    table = made(line=line, attempt=2, durable=durable(50))
    for node in ("a", "b"):
        for slot in (0, 1):
            ranks = (0, 1) if node == "a" else (2, 3)
            steps = (57, 58, 59) if node == "a" else (57, 58)
            held = tuple(on_disk(at(step, 8), rank) for step in steps for rank in ranks)
            table.report(f"{node}/{slot}", holdings=held)
    decision = table.decision
    assert decision is not None and decision.reason.endswith(
        "from step 58 on the nodes' disks; the last durable checkpoint is of step 50"
    )
    started = next(action for action in decision.actions if isinstance(action, StartGeneration))
    assert (started.restore, started.tier) == (at(58, 8), "disk")
    restore = table.state.assignments[0].restore
    assert restore is not None
    assert [source.host for source in restore.sources] == ["a/0", "a/1", "b/0", "b/1"], "each reads its own"
    assert [source.object for source in restore.sources] == [f"data/1-8-58/{rank}.bin" for rank in range(4)]
    for expected in (at(57, 8), at(50, 7)):
        broken = Exit(kind="peer", step=0, code=1, detail="bytes 0 to 9 fail their CRC\nmore", damaged=True)
        for host in table.state.members:
            table.trainer(host, "starting")
        before = table.state.step
        said = table.trainer(table.state.members[1], "exited", broken)
        assert f"step {before} on the nodes' disks is damaged" in said.reason and "fail their CRC" in said.reason
        for host in table.state.members:
            if host != table.state.members[1]:
                ended = broken if host == table.state.members[0] else Exit(kind="stopped", step=0)
                table.trainer(host, "exited", ended)
        restore = table.state.assignments[0].restore
        assert restore is not None and restore.key == expected, "never the same again"
    assert {source.tier for source in restore.sources} == {"storage"}


def test_memory_before_disk_before_storage_of_the_same_step(table: Table) -> None:
    members = list(table.state.hosts.values())

    def found(*tiers: str, step: int = 3, generation: int = 1) -> tuple[RestorePlan | None, str]:
        told = [
            replace(report, holdings=(replace(on_disk(at(step, generation), rank), tier=tier),))
            for rank, (report, tier) in enumerate(zip(members, tiers))
        ]
        more = [replace(members[0], holdings=tuple(on_disk(at(4, 2), rank) for rank in range(3)))]
        return choose([*told, *more], members, durable(3), lambda _: True)

    plan, tier = found("disk", "disk", "own", "received")
    assert plan is not None and (plan.key, tier) == (at(3), "disk"), "step 4 lacks a rank; step 3 is in storage, too"
    assert [source.tier for source in plan.sources] == ["disk", "disk", "own", "received"]
    assert found("own", "own", "own", "received")[1] == "memory"
    both = [
        replace(r, holdings=(on_disk(at(3, 2), n), replace(on_disk(at(3), n), tier="own")))
        for n, r in enumerate(members)
    ]
    assert choose(both, members, None, lambda _: True)[1] == "memory", "though that is of an older generation"
    disks = [replace(r, holdings=(on_disk(at(3), n),)) for n, r in enumerate(members)]
    assert choose(disks, members, durable(4), lambda _: True)[1] == "storage"
    assert choose(disks, members, durable(2))[1] == "storage", "nobody said that they may be used"
