"""A live run on real Ray nodes, ordered about from the command line as a person does it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.report import entries_of, verify_data
from tests.process.running import small

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

DEADLINE_S = 200.0


def elastic(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def until(run_dir: Path, condition: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """The journal's entries once `condition` holds."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        entries = entries_of(run_dir) if (run_dir / "journal.jsonl").exists() else []
        if entries and condition(entries):
            return entries
        assert time.monotonic() < deadline_s, entries[-3:]
        time.sleep(0.1)


def test_status_drain_pause_resume_set_and_stop(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        run="ordered",
        steps=100_000,
        hosts_min=1,
        hosts_max=2,
        local={"nodes": 2, "hosts_per_node": 1},
        checkpoint={"interval_steps": 100_000},
        evaluation={"interval_steps": 100_000, "samples": 2},
    )
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run_dir = str(config.run_dir())
    absent = elastic("status", run_dir)
    assert absent.returncode == 1 and "no run" in absent.stderr
    with subprocess.Popen([sys.executable, "-m", "elastic.cli", "train", str(job)], stdout=subprocess.DEVNULL) as train:
        try:
            until(config.run_dir(), lambda entries: entries[-1]["phase"] == "running" and entries[-1]["step"] > 5)
            told = json.loads(elastic("status", run_dir, "--json").stdout)
            assert told["phase"] == "running" and told["world"] == 2
            node = next(iter(told["hosts"].values()))["node"]

            refused = elastic("drain", run_dir, "nowhere")
            assert refused.returncode == 1 and "no nodes of run ordered are called 'nowhere'" in refused.stderr
            assert elastic("drain", run_dir, node, "--why", "new disk").returncode == 0
            until(
                config.run_dir(), lambda entries: entries[-1]["phase"] == "running" and entries[-1]["generation"] == 2
            )
            assert "may be switched off" in elastic("status", run_dir).stdout

            assert elastic("set", run_dir, "checkpoint.interval_steps=20").returncode == 0
            until(config.run_dir(), lambda entries: any(e["event"]["kind"] == "CheckpointCommitted" for e in entries))
            wrong = elastic("set", run_dir, "seed=3")
            assert wrong.returncode in (1, 2) and "seed can't change while the run goes on" in wrong.stderr

            assert elastic("pause", run_dir).returncode == 0
            until(config.run_dir(), lambda entries: entries[-1]["phase"] == "waiting" and entries[-1]["paused"])
            assert "paused" in elastic("status", run_dir).stdout
            assert elastic("resume", run_dir).returncode == 0
            until(
                config.run_dir(), lambda entries: entries[-1]["phase"] == "running" and entries[-1]["generation"] == 3
            )
            assert elastic("stop", run_dir, "--why", "enough").returncode == 0
            assert train.wait(DEADLINE_S) == 0
        finally:
            train.kill()
    over = elastic("status", run_dir)
    assert over.returncode == 1 and "is not running" in over.stderr
    entries = entries_of(config.run_dir())
    reasons = "\n".join(entry["reason"] for entry in entries)
    assert "new disk" in reasons and "stop requested by" in reasons
    assert not any(entry["incident"] for entry in entries)
    done = [e["event"]["record"]["step"] for e in entries if e["event"]["kind"] == "StepCompleted"]
    assert done == list(range(1, done[-1] + 1)), "nothing was redone"
    assert any("exactly once" in line for line in verify_data(config.run_dir()))
