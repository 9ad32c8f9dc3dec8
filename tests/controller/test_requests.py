"""What people order: pause, resume, resize, drain, release, checkpoint, set; and policies that only observe."""

from __future__ import annotations

import pytest

from elastic import events
from elastic.config import ConfigError
from elastic.controller import requests
from elastic.controller.actions import DrainGeneration, UploadSnapshot
from elastic.controller.driver import replay
from elastic.controller.membership import needed_nodes
from elastic.controller.orders import order_for
from elastic.controller.requests import RequestError
from elastic.controller.state import Phase
from elastic.events import Exit
from elastic.plan import RestorePlan, SnapshotKey
from tests.controller.conftest import Table, config
from tests.controller.test_decide import stored


def ordered(table: Table, kind: str, **given: object) -> str:
    event = requests.event_of(kind, given, "ann", "for a test", table.state, table.config)
    return table.take(event).reason


def durable(step: int, generation: int = 1) -> events.CheckpointCommitted:
    plan: RestorePlan = stored(step, generation)
    return events.CheckpointCommitted(key=plan.key, number=1, restore=plan)


def test_pause_holds_at_a_boundary_with_a_checkpoint_and_resume_goes_on(table: Table) -> None:
    assert (
        ordered(table, "pause") == "pause requested by ann: for a test; pause at the next step: pause (ann: for a test)"
    )
    assert order_for(table.state, "a/0").drain
    table.exit_all("paused", 4)
    assert table.state.phase is Phase.WAITING and table.state.waiting_for == "paused by ann: for a test"
    assert table.state.upload == SnapshotKey(generation=1, step=4), "hosts may leave while it is paused"
    assert order_for(table.state, "b/1").upload == table.state.upload
    table.take(durable(4))
    table.take(events.Tick(), after_s=10 * table.config.control.hosts_wait_s)
    assert table.state.phase is Phase.WAITING, "a pause has no limit"
    assert ordered(table, "resume").startswith("resumed by ann: for a test; generation 2")
    assert table.state.phase is Phase.STARTING and table.state.step == 4


def test_pause_survives_a_failed_upload_and_tries_again_later(table: Table) -> None:
    ordered(table, "pause")
    table.exit_all("paused", 4)
    key = SnapshotKey(generation=1, step=4)
    table.take(events.CommitFailed(key=key, reason="disk full"))
    assert table.state.upload is None, "not at once again"
    decision = table.take(events.Tick(), after_s=3.0)
    assert UploadSnapshot(key=key) in decision.actions


def test_stop_ends_a_paused_run(table: Table) -> None:
    ordered(table, "pause")
    table.exit_all("paused", 4)
    table.take(durable(4))
    ordered(table, "stop")
    assert table.state.phase is Phase.STOPPED
    with pytest.raises(RequestError, match="run t has ended"):
        ordered(table, "pause")


def test_a_failure_while_pausing_still_pauses(table: Table) -> None:
    ordered(table, "pause")
    table.trainer("b/0", "exited", Exit(kind="lost", step=3, signal=9), holdings=(table.holding(3, 2, sealed=False),))
    for rank, host in ((0, "a/0"), (1, "a/1"), (3, "b/1")):
        table.trainer(host, "exited", Exit(kind="stopped", step=3), holdings=(table.holding(3, rank),))
    assert table.state.phase is Phase.WAITING and table.state.waiting_for.startswith("paused")
    assert table.state.upload is None, "rank 2's shard is not sealed yet"
    table.report("b/0", holdings=(table.holding(3, 2),))
    assert table.state.upload == SnapshotKey(generation=1, step=3)


def test_resize_to_fewer_nodes_and_back(table: Table) -> None:
    ordered(table, "resize", nodes=1, hosts=None)
    assert table.state.draining == "resize to 1 nodes"
    table.exit_all("paused", 4)
    assert table.state.members == ("a/0", "a/1") and table.state.generation == 2
    table.run_all()
    table.step(5)
    table.report("b/0")
    assert not table.state.draining, "a node that is not wanted does not come back by itself"
    ordered(table, "resize", nodes=None, hosts=None)
    assert table.state.draining.endswith("can join")
    table.exit_all("paused", 6)
    assert len(table.state.members) == 4


def test_resize_to_hosts_keeps_within_what_was_configured(table: Table) -> None:
    with pytest.raises(RequestError, match="1 hosts: allowed are hosts_min 2 to hosts_max 4"):
        ordered(table, "resize", nodes=None, hosts=1)
    ordered(table, "resize", nodes=None, hosts=3)
    table.exit_all("paused", 4)
    assert len(table.state.members) == 3


def test_drained_node_leaves_with_no_step_lost_and_is_told_when_it_may_be_switched_off(table: Table) -> None:
    ordered(table, "drain", node="b")
    assert DrainGeneration(generation=1) in (table.decision.actions if table.decision else ())
    table.exit_all("paused", 4)
    assert table.state.members == ("a/0", "a/1") and table.state.step == 4
    assert "b" in needed_nodes(table.state), "the new generation reads from it"
    table.run_all()
    table.step(5)
    table.take(events.StepSafe(key=SnapshotKey(generation=2, step=5)))
    assert needed_nodes(table.state) == {"a"}
    ordered(table, "release", node="b")
    assert table.state.draining.endswith("can join")


def test_draining_below_hosts_min_waits_with_a_checkpoint(table: Table) -> None:
    ordered(table, "drain", node="b")
    ordered(table, "drain", node="a")
    table.exit_all("paused", 4)
    assert table.state.phase is Phase.WAITING
    assert table.state.waiting_for == "waiting: 0 hosts ready, 4 quarantined, need 2"
    assert table.state.upload == SnapshotKey(generation=1, step=4)


def test_unknown_node_is_refused_with_those_that_are_known(table: Table) -> None:
    with pytest.raises(RequestError, match=r"no nodes of run t are called 'c'; its nodes: a \(a/1\), b \(b/1\)"):
        ordered(table, "drain", node="c")
    with pytest.raises(RequestError, match="takes part already; out are: none"):
        ordered(table, "release", node="a")


def test_checkpoint_on_request_takes_the_next_safe_step_once(table: Table) -> None:
    ordered(table, "checkpoint")
    decision = table.take(events.StepSafe(key=SnapshotKey(generation=1, step=3)))
    assert UploadSnapshot(key=SnapshotKey(generation=1, step=3)) in decision.actions
    table.take(durable(3))
    table.step(4)
    assert table.take(events.StepSafe(key=SnapshotKey(generation=1, step=4))).state.upload is None


def test_set_changes_what_decide_uses_and_only_live_keys(table: Table) -> None:
    ordered(table, "set", key="checkpoint.interval_steps", value=2)
    assert table.take(events.StepSafe(key=SnapshotKey(generation=1, step=3))).state.upload is not None
    with pytest.raises(ConfigError, match=r"model\.dim can't change while the run goes on"):
        ordered(table, "set", key="model.dim", value=7)
    with pytest.raises(ConfigError, match=r"did you mean control\.silence_s"):
        ordered(table, "set", key="control.silense_s", value=7)
    with pytest.raises(ConfigError, match="interval_steps"):
        ordered(table, "set", key="checkpoint.interval_steps", value=-1)


def test_evict_observed_says_once_what_it_would_do() -> None:
    table = Table(config(policies={"evict": "observe"}))
    table.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    table.join("a/0", "a/1", "b/0", "b/1")
    table.run_all()
    table.step(1)
    silent = events.HostSilent(host="b/0", silent_s=9.0, stalled_s=9.0)
    assert table.take(silent).reason.startswith("would go on without b/0 (policies.evict)")
    assert table.state.phase is Phase.RUNNING and "b/0" in table.state.observed
    assert table.take(silent).reason == "", "once"
    table.report("b/0")
    assert not table.state.observed
    ordered(table, "set", key="policies.evict", value="act")
    table.take(silent)
    assert table.state.phase is Phase.STOPPING


@pytest.mark.parametrize("policy", ["off", "observe"])
def test_growth_that_is_not_allowed_needs_an_order(policy: str) -> None:
    table = Table(config(policies={"resize": policy}))
    table.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    table.join("a/0", "a/1")
    table.take(events.Tick(), after_s=6.0)
    table.run_all()
    table.step(1)
    table.report("b/0")
    assert table.state.phase is Phase.RUNNING and not table.state.draining
    assert ("resize" in table.state.observed) is (policy == "observe")
    ordered(table, "resize", nodes=None, hosts=3)
    assert table.state.draining, "a person's order is no automatic judgement"


def test_requests_are_in_the_fold() -> None:
    table = Table(config())
    told: list[events.Event] = [
        events.RunStarted(run="t", attempt=1, generation=0, durable=None),
        events.PauseRequested(who="ann", why="x"),
        events.ResizeRequested(nodes=1, hosts=None, who="ann", why="x"),
        events.SettingChanged(key="policies.evict", value="off", who="ann", why="x"),
    ]
    for event in told:
        table.take(event)
    entries = [{"t": table.now_s, "event": events.to_json(event)} for event in told]
    assert replay(entries, table.config) == table.state
    assert table.state.paused_by and table.state.nodes_wanted == 1
