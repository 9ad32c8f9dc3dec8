"""Orders to a live run of real processes: nothing is redone, and every sample is used once whatever is ordered."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic.controller import requests
from elastic.controller.membership import needed_nodes
from elastic.controller.state import Phase
from elastic.telemetry import journal
from elastic.telemetry.lineage import lineage
from tests.process.running import Running, small

pytestmark = pytest.mark.timeout(400)


def order(run: Running, kind: str, **given: object) -> str:
    event = requests.event_of(kind, given, "ann", "for a test", run.driver.state, run.config)
    reason = run.driver.take(event)
    assert reason, kind
    return reason


@pytest.mark.long
def test_resize_and_drain_redo_nothing(tmp_path: Path) -> None:
    config = small(tmp_path, steps=80, checkpoint={"interval_steps": 1000})
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(lambda: run.step(5)() and run.warm(2)())
        order(run, "set", key="checkpoint.interval_steps", value=15)
        run.until(lambda: run.driver.state.durable_step >= 15)
        order(run, "resize", hosts=1)
        run.until(lambda: len(run.driver.state.members) == 1 and run.driver.state.phase is Phase.RUNNING)
        order(run, "resize")
        run.until(lambda: len(run.driver.state.members) == 2 and run.driver.state.phase is Phase.RUNNING)
        node = run.seen.reports[run.driver.state.members[0]].node
        order(run, "drain", node=node)
        run.until(lambda: len(run.driver.state.members) == 1 and node not in needed_nodes(run.driver.state))
        generation = run.driver.state.generation
        run.cluster.kill_node(node)
        step = run.driver.state.step
        run.until(run.step(step + 3))
        assert run.driver.state.generation == generation and run.driver.state.incidents == 0
        run.finish()
    assert [record.step for record in run.seen.records] == list(range(1, 81)), "no step was done twice"
    assert [record["step"] for record in lineage(journal.read_file(run.journal))] == list(range(1, 81))


@pytest.mark.long
def test_a_paused_run_outlives_all_its_hosts(tmp_path: Path) -> None:
    config = small(tmp_path, steps=40, checkpoint={"interval_steps": 1000})
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(run.step(7))
        order(run, "pause")
        run.until(lambda: run.driver.state.phase is Phase.WAITING and run.driver.state.upload is None)
        step = run.driver.state.step
        assert run.driver.state.durable_step == step, "it was made durable without being asked"
        victims = [(report.node, report.pids["host"]) for report in run.seen.reports.values()]
        for node, pid in victims:
            os.kill(pid, signal.SIGKILL)
            run.until(lambda: len(run.driver.state.hosts) < 2)
            run.cluster.spawn(node, 0)
        run.until(lambda: sum(report.ready for report in run.seen.reports.values()) == 2)
        assert run.driver.state.phase is Phase.WAITING
        order(run, "resume")
        run.until(lambda: run.driver.state.phase is Phase.STARTING)
        restore = run.driver.state.assignments[0].restore
        assert restore is not None and restore.key.step == step
        assert {source.tier for source in restore.sources} == {"storage"}
        run.finish()
        assert run.driver.state.incidents == 0
    assert [record["step"] for record in lineage(journal.read_file(run.journal))] == list(range(1, 41))
