"""docs/own_model.md: its code, run as it stands on real host processes, with kills, a resize, a lost cluster."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic.config import Config
from elastic.controller.state import Phase
from elastic.events import StepRecord
from elastic.worker.task_check import check
from tests.process.running import Running, small

pytestmark = pytest.mark.timeout(400)

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"
TASKS = ("my_model.py:MyTask", "my_loop.py:train", "my_state.py:train")
COMPARED = ("loss", "grad_norm", "lr", "digest", "held_out", "metrics")


def write_code(directory: Path) -> None:
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert {name for name, _ in blocks} == {"my_model.py", "my_loop.py", "my_state.py", "job.yaml", "train.py"}
    for name, text in blocks:
        (directory / name).write_text(text)


def prepared(path: Path, task: str, **changes: Any) -> Config:
    path.mkdir()
    write_code(path)
    return check(small(path, task=str(path / task), **changes))


def told(records: list[StepRecord]) -> dict[int, dict[str, Any]]:
    """What each step computed; a step that was done twice was the same twice."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        facts = {name: getattr(record, name) for name in COMPARED}
        assert found.setdefault(record.step, facts) == facts
    return found


def undisturbed(config: Config, path: Path, **changes: Any) -> dict[int, dict[str, Any]]:
    """The same run under another name."""
    config = config.model_copy(update={"run": "undisturbed", **changes})
    with Running(config, path, nodes=2, hosts_per_node=1) as run:
        run.finish()
        assert run.driver.state.incidents == 0
        return told(run.seen.records)


@pytest.mark.parametrize("task", [TASKS[0], *(pytest.param(task, marks=pytest.mark.long) for task in TASKS[1:])])
def test_killed_and_restored_it_computes_the_same(tmp_path: Path, task: str) -> None:
    config = prepared(tmp_path / "killed", task)
    with Running(config, tmp_path / "killed", nodes=2, hosts_per_node=1) as run:
        for generation, rank in ((1, 1), (2, 0)):
            run.until(run.warm(2))
            before = run.driver.state.step
            run.until(run.step(before + 4))
            os.kill(run.pid(rank, "trainer"), signal.SIGKILL)
            run.until(lambda generation=generation: run.driver.state.generation > generation)
            restore = run.driver.state.assignments[0].restore
            assert restore is not None and all(source.tier == "own" for source in restore.sources)
        run.finish()
        assert run.driver.state.incidents == 2
        found = told(run.seen.records)
    assert found == undisturbed(config, tmp_path / "undisturbed")
    assert found[30]["loss"] < found[1]["loss"]


@pytest.mark.long
def test_own_loop_reports_and_registered_state_goes_on(tmp_path: Path) -> None:
    """The whole cluster is lost: state comes back from storage, and counts on where it was."""
    config = prepared(tmp_path / "lost", "my_state.py:train", hosts_min=2)
    with Running(config, tmp_path / "lost", nodes=2, hosts_per_node=1) as run:
        run.until(lambda: run.driver.state.durable_step >= 10)
        victims = [(report.node, report.pids["host"]) for report in run.seen.reports.values()]
        for _, pid in victims:
            os.kill(pid, signal.SIGKILL)
        run.until(lambda: run.driver.state.phase is Phase.WAITING)
        for node, _ in victims:
            run.cluster.spawn(node, 0)
        run.until(lambda: run.driver.state.phase is Phase.STARTING)
        restore = run.driver.state.assignments[0].restore
        assert restore is not None and {source.tier for source in restore.sources} == {"storage"}
        run.finish()
        found = told(run.seen.records)
    assert [facts["metrics"]["seen"] for facts in found.values()] == pytest.approx(list(range(30)))
    assert [facts["lr"] for facts in found.values()] == pytest.approx([0.5] * 10 + [0.35] * 10 + [0.245] * 10)
    best = [facts["metrics"]["best"] for facts in found.values()]
    assert best[1:] == [pytest.approx(min(facts["loss"] for facts in list(found.values())[:n])) for n in range(1, 30)]


@pytest.mark.long
def test_resized_it_computes_the_same_but_for_rounding(tmp_path: Path) -> None:
    task = "my_state.py:train"  # the one with a loop, a scheduler and state of its own
    exact: dict[str, Any] = {"precision": "float64", "steps": 18}
    changes = [{"step": 0, "hosts": 1}, {"step": 6, "hosts": 2}, {"step": 12, "hosts": 1}]
    config = prepared(tmp_path / "resized", task, **exact, schedule=changes)
    with Running(config, tmp_path / "resized", nodes=2, hosts_per_node=1) as run:
        run.finish()
        assert run.driver.state.generation == 3 and run.driver.state.incidents == 0
        found = told(run.seen.records)
    alone = undisturbed(config, tmp_path / "alone", schedule=config.schedule[:1])
    for step, facts in alone.items():
        assert found[step]["digest"] == facts["digest"]
        assert found[step]["loss"] == pytest.approx(facts["loss"], rel=0, abs=1e-10)
        assert found[step]["metrics"] == pytest.approx(facts["metrics"], rel=0, abs=1e-10)


STRANGE = """
from pathlib import Path
import torch
from my_loop import Predictor, loss_sum

def train(ctx):
    model = ctx.parallelize(Predictor(ctx.config.model.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters())
    if Path(__file__).with_name("now").exists():
        ctx.state["late"] = 1
    for step in ctx.steps(model, optimizer):
        batch = ctx.batch()
        step.backward(loss_sum(model(batch.tokens), batch.targets))
"""


@pytest.mark.long
def test_state_that_no_snapshot_has_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "strange"
    path.mkdir()
    write_code(path)
    (path / "strange.py").write_text(STRANGE)
    whole = {"global_samples": 12, "micro_samples": 12}
    config = check(small(path, task=str(path / "strange.py:train"), steps=2000, warm_standby=False, batch=whole))
    with Running(config, path, nodes=2, hosts_per_node=1) as run:
        run.until(run.step(4))
        (path / "now").touch()
        os.kill(run.pid(1, "trainer"), signal.SIGKILL)
        run.until(lambda: run.driver.state.phase is Phase.FAILED)
        assert run.driver.state.failure == "user code"
        assert "does not have state.late" in run.driver.state.detail
        assert run.driver.state.generation == 2, "it must not be tried again"
