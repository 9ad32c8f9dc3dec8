"""Losses of several at once, of both copies of a shard, of too many hosts: real processes, real kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic.checkpoint.log import CommitLog
from elastic.controller.state import Phase
from elastic.proof import verify_data
from elastic.storage.store import store_at
from elastic.telemetry import journal
from elastic.telemetry.lineage import lineage
from tests.process.running import Running, small

pytestmark = pytest.mark.timeout(400)


@pytest.mark.long
def test_both_copies_gone_falls_back_to_the_durable_checkpoint(tmp_path: Path) -> None:
    """Rank 0 and its partner die in one moment, below hosts_min: the run waits, then goes on from storage."""
    config = small(tmp_path, steps=60, hosts_min=2, hosts_max=2)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(lambda: run.driver.state.durable_step >= 20)
        victims = [(report.node, report.pids["host"]) for report in run.seen.reports.values()]
        for _, pid in victims:
            os.kill(pid, signal.SIGKILL)
        run.until(lambda: run.driver.state.phase is Phase.WAITING)
        durable = run.driver.state.durable_step
        run.cluster.spawn(victims[0][0], 0)
        run.until(lambda: any(report.ready for report in run.seen.reports.values()))
        assert run.driver.state.phase is Phase.WAITING, "one host is below hosts_min"
        run.cluster.spawn(victims[1][0], 0)
        run.until(lambda: run.driver.state.phase is Phase.STARTING)
        restore = run.driver.state.assignments[0].restore
        assert restore is not None and restore.key.step == durable
        assert {source.tier for source in restore.sources} == {"storage"}
        run.finish()
        assert all(len(found) == 1 for found in run.losses().values()), "redone steps have equal losses"
        records = lineage(journal.read_file(run.journal))
        assert [record["step"] for record in records] == list(range(1, 61))


@pytest.mark.long
def test_a_node_with_two_hosts_dies_and_a_trainer_in_the_recovery(tmp_path: Path) -> None:
    """The second failure comes during the recovery from the first; nothing is read from storage."""
    config = small(tmp_path, steps=60, hosts_min=1, hosts_max=4, checkpoint={"interval_steps": 1000})
    with Running(config, tmp_path, nodes=2, hosts_per_node=2) as run:
        run.until(lambda: run.step(5)() and run.warm(4)() and run.driver.state.safe is not None)
        step = run.driver.state.step
        lost = run.seen.reports[run.driver.state.members[3]].node
        run.cluster.kill_node(lost)
        run.until(lambda: run.driver.state.generation == 2 and run.pid(0, "trainer") != 0)
        assert len(run.driver.state.members) == 2
        os.kill(run.pid(0, "trainer"), signal.SIGKILL)
        run.until(lambda: run.driver.state.generation >= 3 and run.driver.state.phase is Phase.RUNNING)
        restore = run.driver.state.assignments[0].restore
        assert restore is not None and restore.key.step >= step - 2
        assert {source.tier for source in restore.sources} <= {"own", "received"}
        run.finish()
        assert run.driver.state.incidents >= 2


def test_journal_proves_the_samples_and_storage_holds_the_end(tmp_path: Path) -> None:
    config = small(tmp_path, steps=20)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(run.step(5))
        os.kill(run.pid(1, "trainer"), signal.SIGKILL)
        run.finish()
    run_dir = config.run_dir()
    os.rename(run.journal, run_dir / "journal.jsonl")
    (run_dir / "config.yaml").write_text(config.model_dump_json())
    assert "20 steps of the committed lineage, 240 samples" in verify_data(config.place())[0]
    newest = CommitLog(store_at(config.place())).newest()
    assert newest is not None and newest.key.step == 20
