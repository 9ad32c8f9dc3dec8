"""Each rule of the controller by itself: whole values, no clock, no mocks. `check` runs inside every decision."""

from __future__ import annotations

from dataclasses import replace

from elastic import events
from elastic.controller.actions import (
    CommitCheckpoint,
    DrainGeneration,
    EvictHost,
    FailRun,
    FinishRun,
    KeepSnapshot,
    StartGeneration,
    StopGeneration,
    UploadSnapshot,
)
from elastic.controller.orders import order_for
from elastic.controller.state import Decision, Phase
from elastic.events import Exit, TrainerReport
from elastic.plan import RestorePlan, ShardSource, SnapshotKey
from tests.controller.conftest import Table, config, record

LOST = Exit(kind="lost", step=3, signal=9)


def stored(step: int, generation: int = 1) -> RestorePlan:
    source = ShardSource(rank=0, tier="storage", host="", endpoint=None, object="data/x")
    return RestorePlan(key=SnapshotKey(generation=generation, step=step), world=1, sources=(source,))


def starts_from(table: Table) -> RestorePlan:
    """A checkpoint, whoever reads it for the others (test_sources.py)."""
    plan = table.state.assignments[0].restore
    assert plan is not None and all(source.endpoint is not None for source in plan.sources)
    return replace(plan, sources=tuple(replace(source, host="", endpoint=None) for source in plan.sources))


def stop_others(table: Table, *ended: str) -> None:
    for rank, host in enumerate(table.state.members):
        if host not in ended:
            held = (table.holding(3, rank), table.holding(3, (rank + 2) % 4, "received"))
            table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=held)


def test_first_generation_waits_for_all_hosts_then_starts_with_enough() -> None:
    table = Table(config())
    table.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    table.join("a/0", "a/1", "b/0")
    assert table.state.phase is Phase.WAITING
    decision = table.take(events.Tick(), after_s=5.1)
    assert table.state.phase is Phase.STARTING and table.state.members == ("a/0", "a/1", "b/0")
    assert [type(a) for a in decision.actions] == [StartGeneration]


def test_fewer_than_hosts_min_waits_and_says_for_what(table: Table) -> None:
    for host in ("a/0", "a/1", "b/0"):
        table.take(events.HostGone(host=host, reason="EOF"))
    table.trainer("b/1", "exited", Exit(kind="stopped", step=3))
    assert table.state.phase is Phase.WAITING
    from elastic.controller.membership import form

    assert form(table.state, table.config, table.now_s) == (None, "waiting: 1 hosts ready, need 2")
    table.take(events.Tick(), after_s=table.config.control.hosts_wait_s + 1)
    assert table.state.phase is Phase.FAILED and table.state.failure == "not enough hosts"


def test_killed_trainer_stops_the_generation_and_the_same_hosts_go_on(table: Table) -> None:
    decision = table.trainer("b/0", "exited", LOST, holdings=(table.holding(3, 2, sealed=False),))
    assert decision.actions == (StopGeneration(generation=1),)
    assert decision.reason == "incident 1, lost process: rank 2 on b/0 ended (lost, signal 9) after step 3"
    stop_others(table, "b/0")
    assert table.state.phase is Phase.STARTING and table.state.generation == 2
    assert table.state.members == ("a/0", "a/1", "b/0", "b/1"), "survivors keep their ranks"
    assert table.state.step == 3, "an own shard that is only written serves its own rank"
    decision = table.step(4)
    assert table.state.phase is Phase.RUNNING and "incident 1 is over" in decision.reason


def test_lost_node_goes_on_from_partner_copies(table: Table) -> None:
    table.take(events.HostGone(host="b/0", reason="EOF"))
    assert table.state.phase is Phase.STOPPING
    decision = table.take(events.HostGone(host="b/1", reason="EOF"))
    assert EvictHost(host="b/1") in decision.actions
    for rank, host in enumerate(("a/0", "a/1")):
        held = (table.holding(3, rank), table.holding(2, rank + 2, "received"), table.holding(2, rank))
        table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=held)
    assert table.state.incident is not None and table.state.incident.failure == "lost node"
    restore = table.state.assignments[0].restore
    assert restore is not None and restore.key == SnapshotKey(generation=1, step=2), "step 3 lacks two shards"
    assert [s.tier for s in restore.sources] == ["own", "own", "received", "received"]
    assert table.state.members == ("a/0", "a/1")


def test_both_copies_gone_falls_back_to_the_durable_checkpoint(table: Table) -> None:
    table.take(events.CheckpointCommitted(key=SnapshotKey(generation=1, step=2), number=1, restore=stored(2)))
    for host in ("a/0", "b/0"):
        table.take(events.HostGone(host=host, reason="EOF"))
    for rank, host in ((1, "a/1"), (3, "b/1")):
        table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=(table.holding(3, rank),))
    assert starts_from(table) == stored(2)
    assert table.state.step == 2


def lose_all_memory(table: Table) -> None:
    """What is left: hosts without a snapshot, and the checkpoints."""
    for host in ("a/0", "a/1", "b/0", "b/1"):
        table.take(events.HostGone(host=host, reason="EOF"))
    table.join("c/0", "c/1", "d/0", "d/1")


def finds_damage(table: Table, host: str) -> Decision:
    ended = Exit(kind="peer", step=0, damaged=True, detail="data/1-1-3/0.bin is cut short\nTraceback ...")
    return table.trainer(host, "exited", ended)


def test_a_damaged_checkpoint_is_left_for_the_older_one_with_a_loud_line(table: Table) -> None:
    for step in (2, 3):
        table.take(
            events.CheckpointCommitted(key=SnapshotKey(generation=1, step=step), number=step, restore=stored(step))
        )
    lose_all_memory(table)
    assert starts_from(table) == stored(3)
    generation = table.state.generation
    said = finds_damage(table, "c/0").reason
    assert said.startswith(
        "the checkpoint of step 3 is damaged, going back to that of step 2: data/1-1-3/0.bin is cut short;"
    )
    for host in table.state.members:
        table.report(host, trainer=TrainerReport(phase="running", generation=generation))
    late = TrainerReport(
        phase="exited", generation=generation, exit=Exit(kind="peer", step=0, damaged=True, detail="x")
    )
    assert not table.report("c/1", trainer=late).reason, "told once: it is of an older generation"
    assert (
        table.state.phase is Phase.STARTING
        and table.state.generation == generation + 1
        and starts_from(table) == stored(2)
    )
    assert table.state.step == 2
    upload = SnapshotKey(generation=generation + 1, step=4)
    table.state = replace(table.state, upload=upload)
    (commit,) = table.take(events.UploadCompleted(key=upload)).actions
    assert commit == CommitCheckpoint(key=upload, without=(stored(3).sources[0].object,)), "it goes off the line"


def test_without_an_older_checkpoint_the_run_ends_and_does_not_start_anew(table: Table) -> None:
    table.take(events.CheckpointCommitted(key=SnapshotKey(generation=1, step=3), number=1, restore=stored(3)))
    lose_all_memory(table)
    finds_damage(table, "c/0")
    assert table.state.phase is Phase.FAILED and table.state.failure == "no checkpoint"
    assert "step 3 is damaged, and there is no older one" in table.state.detail


def test_a_restore_from_storage_may_take_longer_than_a_start(table: Table) -> None:
    table.take(events.CheckpointCommitted(key=SnapshotKey(generation=1, step=3), number=1, restore=stored(3)))
    lose_all_memory(table)
    generation, control = table.state.generation, table.config.control
    table.take(events.Tick(), after_s=control.start_timeout_s + control.restore_timeout_s - 1.0)
    assert table.state.phase is Phase.STARTING and table.state.generation == generation
    assert "no step within 1860 s" in table.take(events.Tick(), after_s=2.0).reason


def test_silence_alone_is_no_verdict(table: Table) -> None:
    assert not table.take(events.HostSilent(host="b/0", silent_s=9.0, stalled_s=0.1)).actions
    assert table.state.phase is Phase.RUNNING
    decision = table.take(events.HostSilent(host="b/0", silent_s=9.0, stalled_s=9.0))
    assert table.state.phase is Phase.STOPPING and decision.actions == (StopGeneration(generation=1),)
    assert "b/0" in table.state.hosts, "its memory is not given up"


def test_silent_host_is_not_waited_for_and_takes_part_again(table: Table) -> None:
    table.take(events.HostSilent(host="b/0", silent_s=9.0, stalled_s=9.0))
    for rank, host in ((0, "a/0"), (1, "a/1"), (3, "b/1")):
        held = (table.holding(3, rank), table.holding(3, 2, "received"))
        table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=held)
    assert table.state.members == ("a/0", "a/1", "b/1") and table.state.generation == 2
    assert not order_for(table.state, "b/0").running, "the thawed host is told to kill its old trainer"
    table.run_all()
    table.step(4)
    table.report("b/0", trainer=table.state.hosts["b/0"].trainer)
    assert not table.state.draining, "its trainer of generation 1 still runs"


def test_ready_host_is_taken_in_at_a_step_boundary_with_no_step_lost(table: Table) -> None:
    table.take(events.HostGone(host="b/1", reason="EOF"))
    for rank, host in enumerate(("a/0", "a/1", "b/0")):
        held = (table.holding(3, rank), table.holding(3, 3, "received"))
        table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=held)
    table.run_all()
    table.step(4)
    decision = table.report("b/2")
    assert decision.actions == (DrainGeneration(generation=2),)
    assert order_for(table.state, "a/0").drain
    table.exit_all("paused", 5)
    assert table.state.generation == 3 and table.state.step == 5 and len(table.state.members) == 4


def test_user_error_ends_the_run_with_its_traceback_even_when_a_peer_told_first(table: Table) -> None:
    table.trainer("a/0", "exited", Exit(kind="peer", step=3, code=1, detail="closed"))
    table.trainer("b/0", "exited", Exit(kind="user", step=3, code=1, detail="ValueError: mine"))
    stop_others(table, "a/0", "b/0")
    assert table.state.phase is Phase.FAILED and table.state.failure == "user code"
    assert table.state.detail.endswith("ValueError: mine")


def test_budget_bounds_failures_without_progress(table: Table) -> None:
    """R53, R16: the budget counts what makes no progress and starts anew after real progress."""
    limit = table.config.control.failures_without_progress_max
    for _ in range(limit + 1):
        assert table.state.phase in (Phase.RUNNING, Phase.STARTING)
        table.run_all()
        table.trainer("b/0", "exited", LOST, holdings=(table.holding(3, 2),))
        stop_others(table, "b/0")
    assert table.state.phase is Phase.FAILED and table.state.failure == "restart budget spent"


def test_progress_renews_the_budget(table: Table) -> None:
    for number in range(4, 10):
        for _ in range(table.config.control.failures_without_progress_max - 1):
            table.run_all()
            table.trainer("b/0", "exited", LOST, holdings=(table.holding(number - 1, 2),))
            for rank, host in enumerate(table.state.members):
                if host != "b/0":
                    held = (table.holding(number - 1, rank),)
                    table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=held)
        table.step(number)
    assert table.state.phase is Phase.RUNNING


def test_host_that_can_not_stop_its_trainer_loses_its_place(table: Table) -> None:
    table.trainer("b/0", "exited", LOST)
    for host in ("a/0", "a/1"):
        table.trainer(host, "exited", Exit(kind="stopped", step=3))
    decision = table.take(events.Tick(), after_s=table.config.control.stop_timeout_s + 0.1)
    assert EvictHost(host="b/1") in decision.actions and order_for(table.state, "b/1").evicted
    late = table.trainer("b/1", "exited", Exit(kind="stopped", step=3))
    assert "evicted" in late.reason and "b/1" not in table.state.hosts


def test_safe_step_is_kept_and_uploaded_when_due() -> None:
    table = Table(config(checkpoint={"interval_steps": 2}))
    table.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    table.join("a/0", "a/1", "b/0", "b/1")
    table.run_all()
    for number in (1, 2, 3):
        table.step(number)
    one, two, three = (SnapshotKey(generation=1, step=s) for s in (1, 2, 3))
    assert table.take(events.StepSafe(key=one)).actions == (KeepSnapshot(key=one),)
    assert table.take(events.StepSafe(key=two)).actions == (KeepSnapshot(key=two), UploadSnapshot(key=two))
    table.take(events.StepSafe(key=three))
    assert table.state.keep == two, "what is being uploaded stays"
    assert table.take(events.UploadCompleted(key=two)).actions == (CommitCheckpoint(key=two),)
    table.take(events.CheckpointCommitted(key=two, number=1, restore=stored(2)))
    assert table.state.keep == three and table.state.durable_step == 2 and table.state.upload is None


def test_last_step_is_committed_before_the_run_finishes(table: Table) -> None:
    for number in range(4, 11):
        table.step(number)
    table.exit_all("done", 10)
    assert table.state.phase is Phase.SAVING and table.state.upload == SnapshotKey(generation=1, step=10)
    table.take(events.UploadCompleted(key=SnapshotKey(generation=1, step=10)))
    decision = table.take(
        events.CheckpointCommitted(key=SnapshotKey(generation=1, step=10), number=1, restore=stored(10))
    )
    assert table.state.phase is Phase.FINISHED and decision.actions == (FinishRun(step=10),)
    assert order_for(table.state, "a/0").finish


def test_fenced_attempt_ends_itself(table: Table) -> None:
    failed = events.CommitFailed(key=SnapshotKey(generation=1, step=3), reason="claimed", fenced_by=2)
    decision = table.take(failed)
    assert table.state.phase is Phase.FAILED and table.state.failure == "fenced"
    assert any(isinstance(action, FailRun) for action in decision.actions)


def test_stop_pauses_commits_and_ends(table: Table) -> None:
    assert table.take(events.StopRequested(who="me", why="lunch")).actions == (DrainGeneration(generation=1),)
    table.exit_all("paused", 4)
    assert table.state.phase is Phase.SAVING
    table.take(events.CheckpointCommitted(key=SnapshotKey(generation=1, step=4), number=1, restore=stored(4)))
    assert table.state.phase is Phase.STOPPED


def test_schedule_makes_planned_changes_at_exact_steps() -> None:
    table = Table(config(schedule=[{"step": 4, "hosts": 2}, {"step": 7, "hosts": 3}]))
    table.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    table.join("a/0", "a/1", "b/0", "b/1")
    assert table.state.assignments[0].until_step == 4
    table.run_all()
    table.exit_all("paused", 4)
    assert len(table.state.members) == 2 and table.state.step == 4 and table.state.assignments[0].until_step == 7
    table.run_all()
    table.exit_all("paused", 7)
    assert len(table.state.members) == 3 and table.state.assignments[0].until_step == 10


def test_quarantined_node_is_left_out(table: Table) -> None:
    decision = table.take(events.NodeQuarantined(node="b", why="slow"))
    assert DrainGeneration(generation=1) in decision.actions
    table.exit_all("paused", 4)
    assert table.state.members == ("a/0", "a/1")


def test_stale_record_changes_only_what_is_known(table: Table) -> None:
    table.trainer("b/0", "exited", LOST, holdings=(table.holding(3, 2),))
    stop_others(table, "b/0")
    before = table.state.step
    table.take(events.StepCompleted(record=record(1, 4)))
    assert table.state.step == before and table.state.highest_step == 4
    assert table.take(events.StepCompleted(record=record(1, 4))).state == table.state, "told twice changes nothing"


def test_two_failures_at_once_make_one_recovery(table: Table) -> None:
    """R95: the losses of one moment are one incident and one new generation."""
    table.trainer("b/0", "exited", LOST, holdings=(table.holding(3, 2),))
    table.take(events.HostGone(host="a/1", reason="EOF"))
    for rank, host in ((0, "a/0"), (3, "b/1")):
        held = (table.holding(3, rank), table.holding(3, 1, "received"))
        table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=held)
    assert table.state.incidents == 1 and table.state.generation == 2
    assert table.state.members == ("a/0", "b/0", "b/1")


def test_failure_during_recovery_starts_over(table: Table) -> None:
    table.trainer("b/0", "exited", LOST, holdings=(table.holding(3, 2),))
    stop_others(table, "b/0")
    assert table.state.generation == 2 and table.state.phase is Phase.STARTING
    for host in table.state.members:
        table.trainer(host, "starting")
    table.trainer("a/0", "exited", Exit(kind="lost", step=0, signal=9))
    assert table.state.phase is Phase.STOPPING and table.state.incidents == 2
    for host in ("a/1", "b/0", "b/1"):
        table.trainer(host, "exited", Exit(kind="stopped", step=0))
    assert table.state.generation == 3 and table.state.step == 3


def test_unreadable_source_is_left_out_of_the_next_choice(table: Table) -> None:
    table.trainer("b/0", "exited", LOST, holdings=(table.holding(3, 2),))
    stop_others(table, "b/0")
    table.trainer("a/0", "exited", Exit(kind="peer", step=0, code=1, detail="no answer", blame="b/1"))
    assert table.state.silent == {"b/1"}
