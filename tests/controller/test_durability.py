"""What a storage outage does to a run: nothing but a sentence, tries that grow rarer, and a checkpoint afterwards."""

from __future__ import annotations

from elastic import events
from elastic.controller.actions import CommitCheckpoint, UploadSnapshot
from elastic.controller.durability import WAIT_S_MAX
from elastic.controller.membership import needed_nodes
from elastic.controller.orders import order_for
from elastic.controller.state import ALIVE, Phase
from elastic.events import Exit
from elastic.plan import RestorePlan, SnapshotKey
from tests.controller.conftest import Table, config


def key(step: int) -> SnapshotKey:
    return SnapshotKey(generation=1, step=step)


def training(steps: int = 100_000) -> Table:
    """Two hosts, a checkpoint due at each third step, step 3 under upload."""
    table = Table(config(steps=steps, hosts_min=1, hosts_max=2, checkpoint={"interval_steps": 3}))
    table.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    table.join("a/0", "b/0")
    table.run_all()
    for number in (1, 2, 3):
        table.step(number)
    table.take(events.StepSafe(key=key(3)))
    assert table.state.upload == key(3)
    return table


def failed(table: Table, why: str = "503") -> str:
    assert table.state.upload is not None
    return table.take(events.CommitFailed(key=table.state.upload, reason=why)).reason


def safe(table: Table, step: int, after_s: float) -> bool:
    """Whether an upload of it began."""
    table.step(step)
    decision = table.take(events.StepSafe(key=key(step)), after_s=after_s)
    return UploadSnapshot(key=key(step)) in decision.actions


def test_an_outage_is_said_once_and_what_is_newest_afterwards_is_committed() -> None:
    table = training()
    table.step(4)
    table.take(events.StepSafe(key=key(4)))
    assert table.state.keep == key(3), "under upload"
    told = failed(table, "s3://b: 503")
    assert told.startswith(
        "checkpoint of step 3 is not durable yet: s3://b: 503; it is tried again, training goes on, no "
    )
    assert table.state.keep == key(4) and table.state.upload is None, "the buffers are free at once"
    assert not safe(table, 5, after_s=1.0), "not at once again"
    assert safe(table, 6, after_s=1.0) and failed(table) == "", "said already"
    assert not safe(table, 7, after_s=3.0) and safe(table, 8, after_s=1.0)
    done = events.CheckpointCommitted(key=key(8), number=9, restore=RestorePlan(key=key(8), world=2, sources=()))
    assert "entry 9: storage takes checkpoints again, after 6 s" in table.take(done).reason
    assert table.state.durable_step == 8 and not table.state.not_durable and not table.state.commit_failures
    assert not safe(table, 9, after_s=0.1) and safe(table, 11, after_s=0.1)
    assert "the last durable one is of step 8, 0 s ago" in failed(table), "another outage"


def test_tries_never_stop_however_long_it_takes() -> None:
    table = training()
    for step in range(4, 1200):
        failed(table)
        assert safe(table, step, after_s=WAIT_S_MAX), step
    assert table.state.phase in ALIVE and table.state.generation == 1


def test_an_upload_without_end_is_given_up() -> None:
    table = training()
    assert not table.take(events.Tick(), after_s=table.config.control.upload_timeout_s - 1.0).reason
    assert "it took over 600 s" in table.take(events.Tick(), after_s=2.0).reason
    assert table.state.upload is None


def test_a_failure_of_an_older_generation_is_no_news() -> None:
    table = training()
    table.take(events.CommitFailed(key=SnapshotKey(generation=0, step=3), reason="503"))
    assert table.state.upload == key(3) and not table.state.commit_failures


def test_an_upload_goes_on_when_a_trainer_dies_and_is_committed_in_the_next_generation() -> None:
    table = training()
    first = table.state.members
    table.take(events.CheckpointRequested(who="me", why="lunch"))
    table.trainer(first[0], "exited", Exit(kind="lost", step=3, signal=9), holdings=(table.holding(3, 0),))
    assert table.state.phase is Phase.STOPPING and table.state.upload == key(3)
    stopped = Exit(kind="stopped", step=3, signal=9)
    table.trainer(first[1], "exited", stopped, holdings=(table.holding(3, 1),))
    assert table.state.generation == 2 and table.state.upload == key(3) and table.state.upload_hosts == first
    assert all(order_for(table.state, host).upload == key(3) for host in first)
    assert UploadSnapshot(key=key(4)) not in table.step(4).actions, "one at a time"
    assert table.take(events.UploadCompleted(key=key(3))).actions == (CommitCheckpoint(key=key(3)),)
    done = events.CheckpointCommitted(key=key(3), number=2, restore=RestorePlan(key=key(3), world=2, sources=()))
    table.take(done)
    assert table.state.durable_step == 3 and table.state.upload is None and table.state.checkpoint_wanted


def test_an_upload_ends_with_a_host_that_holds_a_shard_and_is_owed_then() -> None:
    table = training()
    table.take(events.HostGone(host=table.state.members[1], reason="reset"))
    assert table.state.upload is None and table.state.checkpoint_wanted


def test_a_node_that_is_drained_stays_needed_until_its_upload_has_ended() -> None:
    table = training()
    table.take(events.NodeQuarantined(node="b", why="new disk"))
    table.exit_all("paused", 3)
    assert table.state.members == ("a/0",) and table.state.upload == key(3)
    table.run_all()
    table.step(4)
    table.take(events.StepSafe(key=SnapshotKey(generation=2, step=4)))
    assert needed_nodes(table.state) == {"a", "b"} and order_for(table.state, "b/0").upload == key(3)
    done = events.CheckpointCommitted(key=key(3), number=2, restore=RestorePlan(key=key(3), world=2, sources=()))
    table.take(done)
    assert needed_nodes(table.state) == {"a"}


def test_a_checkpoint_that_was_asked_for_is_still_owed_when_it_failed() -> None:
    table = training()
    done = events.CheckpointCommitted(key=key(3), number=2, restore=RestorePlan(key=key(3), world=2, sources=()))
    table.take(done)
    table.take(events.CheckpointRequested(who="me", why="lunch"))
    assert safe(table, 4, after_s=0.1)
    failed(table)
    assert safe(table, 5, after_s=3.0), "though less than an interval has passed"


def test_the_end_of_a_run_waits_for_storage_for_a_limited_time_and_says_what_is_durable() -> None:
    table = training(steps=4)
    done = events.CheckpointCommitted(key=key(3), number=2, restore=RestorePlan(key=key(3), world=2, sources=()))
    table.take(done)
    table.step(4)
    table.exit_all("done", 4)
    assert table.state.phase is Phase.SAVING
    failed(table, "s3://b: 503")
    for _ in range(19):
        table.take(events.Tick(), after_s=WAIT_S_MAX)
        failed(table, "s3://b: 503")
    assert table.state.phase is Phase.SAVING
    table.take(events.Tick(), after_s=WAIT_S_MAX)
    table.take(events.Tick(), after_s=WAIT_S_MAX)
    assert table.state.phase is Phase.FAILED and table.state.failure == "checkpoint"
    assert table.state.detail.startswith("step 4 is not durable: s3://b: 503; the last durable one is of step 3, 630 s")


def test_a_restore_that_storage_does_not_answer_is_tried_for_ever() -> None:
    table = training()
    for _ in range(20):
        for host in ("a/0", "b/0"):
            table.trainer(host, "exited", Exit(kind="storage", step=0, code=1, detail="s3://b: 503"))
        assert table.state.incident is not None and table.state.incident.failure == "storage outage"
        assert table.state.phase is Phase.STARTING
    assert table.state.failures_without_progress <= 1
