"""Mixed sources, skipped samples and several held-out sets in real processes: a kill changes nothing."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic.events import StepRecord
from elastic.proof import verify_data, verify_same
from tests.process.kill_campaign import campaign
from tests.process.mixing import keep, mixed
from tests.process.running import Running

pytestmark = pytest.mark.timeout(400)


def evaluated(records: list[StepRecord]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in records:
        if record.held_out is not None:
            told = {"": record.held_out, **record.held_out_sets}
            assert found.setdefault(record.step, told) == pytest.approx(told, abs=1e-10)
    return found


def test_a_host_that_dies_in_an_evaluation_changes_no_sample_and_no_sum(tmp_path: Path) -> None:
    """The world shrinks with it; in float64 both runs agree but for rounding."""
    code = tmp_path / "dies_evaluating.py"
    shutil.copy(Path(__file__).with_name("dies_evaluating.py"), code)
    exact: dict[str, Any] = {"precision": "float64", "steps": 20, "task": f"{code}:Dying"}
    sizes = {"sizes": {"shard_bytes": 4 << 20}}
    config = mixed(tmp_path / "killed", **exact, **sizes)
    with Running(config, tmp_path / "killed", nodes=2, hosts_per_node=1) as run:
        run.until(run.step(6))
        (tmp_path / "once").write_text(str(run.pid(1, "host")))
        run.until(lambda: run.driver.state.generation == 2)
        assert not (tmp_path / "once").exists() and len(run.driver.state.members) == 1
        run.finish()
        found, losses = evaluated(run.seen.records), run.losses()
        keep(run)
    alone = config.model_copy(update={"run": "alone", "hosts_max": 1})
    with Running(alone, tmp_path / "alone", nodes=1, hosts_per_node=1) as run:
        run.finish()
        keep(run)
        assert evaluated(run.seen.records).keys() == found.keys() == {5, 10, 15, 20}
        for step, told in evaluated(run.seen.records).items():
            assert set(told) == {"", "web", "code", "books"}
            assert told[""] == pytest.approx((told["web"] + told["code"]) / 2, abs=1e-12), "books don't count"
            assert found[step] == pytest.approx(told, abs=1e-10)
        for step, told in run.losses().items():
            assert all(one == pytest.approx(other, abs=1e-10) for one in told for other in losses[step])
    lines = verify_data(config.place())
    assert lines[0].startswith("20 steps of the committed lineage, 240 samples")
    assert any(line.startswith("by source: code ") and "web" in line for line in lines)
    assert "samples 60 to 95 of the order were never used: a loss spike" in lines
    assert "steps 1 to 20 used the same samples" in verify_same(config.place(), alone.place())[0]


@pytest.mark.long
def test_trainers_killed_again_and_again_use_each_mixed_sample_once(tmp_path: Path) -> None:
    config = mixed(tmp_path / "killed", steps=40)
    with Running(config, tmp_path / "killed", nodes=2, hosts_per_node=1) as run:
        for number in range(6):
            run.until(run.warm(2))
            before, generation = run.driver.state.step, run.driver.state.generation
            run.until(run.step(before + 3))
            os.kill(run.pid(number % 2, "trainer"), signal.SIGKILL)
            run.until(lambda generation=generation: run.driver.state.generation > generation)
        run.finish()
        assert all(len(found) == 1 for found in run.losses().values())
        keep(run)
    assert verify_data(config.place())[0].startswith("40 steps of the committed lineage, 480 samples")


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 3])
def test_kills_at_random_moments(tmp_path: Path, world: int) -> None:
    """A little of the campaign."""
    assert "each used exactly once" in campaign(world, kills=5, seed=1, path=tmp_path)
