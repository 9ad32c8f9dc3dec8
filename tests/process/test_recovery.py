"""Real processes, real kills: training goes on, redone steps have equal losses, planned changes redo nothing."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from elastic.controller.state import Phase
from tests.process.running import Running, small

pytestmark = pytest.mark.timeout(400)


def _only(losses: dict[int, set[float]]) -> dict[int, float]:
    assert all(len(found) == 1 for found in losses.values()), losses
    return {step: found.pop() for step, found in losses.items()}


def _clean(path: Path, **changes: object) -> dict[int, float]:
    """Losses of the same run without faults."""
    path.mkdir()
    config = small(path, **changes)
    with Running(config, path, nodes=2, hosts_per_node=1) as run:
        run.finish()
        assert run.driver.state.generation == 1
        assert run.driver.state.incidents == 0
        return _only(run.losses())


def test_a_killed_trainer_costs_at_most_a_step_and_changes_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    path.mkdir()
    config = small(path)
    with Running(config, path, nodes=2, hosts_per_node=1) as run:
        for generation, rank in ((1, 1), (2, 0)):
            run.until(run.warm(2))
            before = run.driver.state.step
            run.until(run.step(before + 4))
            os.kill(run.pid(rank, "trainer"), signal.SIGKILL)
            killed_at = run.driver.state.highest_step
            run.until(lambda generation=generation: run.driver.state.generation > generation)
            restore = run.driver.state.assignments[0].restore
            assert restore is not None
            assert restore.key.step >= killed_at - 1
            assert all(source.tier == "own" for source in restore.sources)
        run.finish()
        assert run.driver.state.incidents == 2
        assert _only(run.losses()) == _clean(tmp_path / "clean")


@pytest.mark.long
def test_template_mover_and_host_may_die(tmp_path: Path) -> None:
    config = small(tmp_path, steps=60)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(run.warm(2))
        os.kill(run.pid(1, "template"), signal.SIGKILL)
        run.until(lambda: run.driver.state.generation == 2 and run.driver.state.phase is Phase.RUNNING)

        mover = run.pid(0, "mover")
        step = run.driver.state.step
        os.kill(mover, signal.SIGKILL)
        run.until(lambda: run.pid(0, "mover") not in (0, mover))
        run.until(lambda: run.driver.state.safe is not None and run.driver.state.safe.step > step + 2)
        assert run.driver.state.generation == 2

        node = run.seen.reports[run.driver.state.members[0]].node
        os.kill(run.pid(0, "host"), signal.SIGKILL)
        run.until(lambda: run.driver.state.generation == 3 and run.driver.state.phase is Phase.RUNNING)
        assert len(run.driver.state.members) == 1
        run.cluster.spawn(node, 0)
        run.finish()
        assert sorted(run.losses()) == list(range(1, 61))


def test_planned_changes_redo_nothing_and_change_nothing_but_rounding(tmp_path: Path) -> None:
    exact = {"precision": "float64", "steps": 18, "hosts_max": 4}
    exact["model"] = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "seq_len": 32}
    path = tmp_path / "changed"
    path.mkdir()
    config = small(path, **exact, schedule=[{"step": 6, "hosts": 2}, {"step": 12, "hosts": 3}])
    with Running(config, path, nodes=2, hosts_per_node=2) as run:
        run.finish()
        assert run.driver.state.generation == 3
        assert run.driver.state.incidents == 0
        assert [(r.generation, r.step) for r in run.seen.records if r.step in (6, 7, 12, 13)] == [
            (1, 6),
            (2, 7),
            (2, 12),
            (3, 13),
        ]
        changed = _only(run.losses())
        digests = {record.step: record.digest for record in run.seen.records}
        assert len(run.seen.records) == 18
    path = tmp_path / "alone"
    path.mkdir()
    with Running(small(path, **{**exact, "hosts_max": 1}), path, nodes=1, hosts_per_node=1) as run:
        run.finish()
        assert _only(run.losses()) == pytest.approx(changed, rel=0, abs=1e-10)
        assert digests == {record.step: record.digest for record in run.seen.records}


def test_a_frozen_node_is_left_behind_and_taken_in_again(tmp_path: Path) -> None:
    control = {"silence_s": 1.0, "lease_s": 3.0, "collective_timeout_s": 60.0, "grow_wait_s": 0.0}
    config = small(tmp_path, steps=2000, control=control)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(run.warm(2))
        node = run.seen.reports[run.driver.state.members[1]].node
        run.cluster.freeze_node(node)
        run.until(lambda: run.driver.state.generation == 2 and run.driver.state.phase is Phase.RUNNING)
        assert len(run.driver.state.members) == 1
        run.cluster.thaw_node(node)
        run.until(lambda: len(run.driver.state.members) == 2 and run.driver.state.phase is Phase.RUNNING)
        assert run.driver.state.incidents == 1


def test_an_error_in_the_task_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    config = small(tmp_path, task="tests.process.broken:Broken")
    with Running(config, tmp_path, nodes=1, hosts_per_node=2) as run:
        run.until(lambda: run.driver.state.phase is Phase.FAILED)
        assert run.driver.state.failure == "user code"
        assert "the fifth step is broken" in run.driver.state.detail


def test_a_host_that_hears_nothing_for_a_lease_stops_its_trainer(tmp_path: Path) -> None:
    config = small(tmp_path, steps=2000, control={"lease_s": 2.0, "collective_timeout_s": 60.0})
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(run.warm(2))
        trainer = os.pidfd_open(run.pid(0, "trainer"))
        ended, _, _ = select.select([trainer], [], [], 60.0)  # the driver does not turn meanwhile
        assert ended, "the trainer outlived its lease"
        os.close(trainer)
        run.until(lambda: run.driver.state.generation == 2 and run.driver.state.phase is Phase.RUNNING)


@pytest.mark.long
def test_a_module_that_starts_a_thread_is_left_to_the_trainers(tmp_path: Path) -> None:
    config = small(tmp_path, steps=4, hosts_max=1, task="tests.process.threaded:Threaded")
    with Running(config, tmp_path, nodes=1, hosts_per_node=1) as run:
        run.finish()
        log = (tmp_path / "logs" / "n0-0" / "host-n0-0.log").read_text()
        assert "importing tests.process.threaded started 1 thread(s): left to the trainers" in log
