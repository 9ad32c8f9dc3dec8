"""Documents that are told apart, in windows or in bins: a run with a kill and other worlds computes the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic.config import Config
from elastic.data.feed import open_corpora
from elastic.data.prepare import prepare_for
from elastic.proof import verify_data
from elastic.telemetry import journal
from elastic.telemetry.lineage import lineage
from tests.process.running import Running, small

pytestmark = pytest.mark.timeout(400)


def build(path: Path, changes: dict[str, Any]) -> Config:
    path.mkdir()
    config = small(path, steps=12, precision="float64", evaluation={"interval_steps": 4, "samples": 8})
    raw = config.model_dump(mode="json")
    raw["model"] |= {"seq_len": 128, "dropout": 0.0}
    raw["data"] |= changes
    config = Config.model_validate(raw)
    prepare_for(config, progress=lambda line: None)
    return config


def records_of(run: Running) -> list[dict[str, Any]]:
    return lineage(journal.read_file(run.journal))


MODES = [
    pytest.param({"documents": "apart"}, id="apart", marks=pytest.mark.long),
    pytest.param({"documents": "apart", "packing": "best_fit"}, id="best_fit", marks=pytest.mark.long),
]


@pytest.mark.parametrize("changes", MODES)
def test_a_kill_and_another_world_change_nothing(tmp_path: Path, changes: dict[str, str]) -> None:
    """One host from the start to the end, and two with a kill: equal but for rounding."""
    one = build(tmp_path / "one", changes).model_copy(update={"hosts_max": 1})
    with Running(one, tmp_path / "one", nodes=1, hosts_per_node=1) as run:
        run.finish()
        expected = records_of(run)
    two = build(tmp_path / "two", changes)
    with Running(two, tmp_path / "two", nodes=2, hosts_per_node=1) as run:
        run.until(run.step(5))
        os.kill(run.pid(1, "trainer"), signal.SIGKILL)
        run.finish()
        assert run.driver.state.incidents == 1
        found = records_of(run)
        (two.run_dir() / "journal.jsonl").write_bytes(run.journal.read_bytes())  # where `verify-data` looks
    assert [record["step"] for record in found] == list(range(1, 13))
    for record, wanted in zip(found, expected, strict=True):
        assert record["digest"] == wanted["digest"] and record["tokens"] == wanted["tokens"]
        assert record["loss"] == pytest.approx(wanted["loss"], rel=0, abs=1e-10)
        assert (record["held_out"] is None) == (record["step"] % 4 > 0)
        assert (record["held_out"] or 0.0) == pytest.approx(wanted["held_out"] or 0.0, rel=0, abs=1e-10)
    windows = open_corpora(two.data, "train")[""].windows(128)
    assert min(record["tokens"] for record in found) < 12 * 128, "documents' firsts and padding are no targets"
    assert verify_data(two.place())[0].startswith(
        f"12 steps of the committed lineage, 144 samples ({144 / windows:.3f}"
    )
