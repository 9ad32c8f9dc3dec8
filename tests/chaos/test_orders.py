"""A live run on real Ray nodes, ordered about from the command line as a person does it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.core.generated import autoscaler_pb2

from elastic.cluster.coordinator import MEMORY
from elastic.proof import verify_data
from elastic.report import entries_of
from tests.chaos.driving import Driving
from tests.process.running import small

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

DEADLINE_S = 200.0


def elastic(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastic.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def take_away(address: str, node: str) -> None:
    """As an autoscaler on a spot notice, and `ray start --block` on SIGTERM. node: the first digits of its id."""
    client = ray._raylet.GcsClient(address=address)
    ids = [id_.hex() for id_ in client.get_all_node_info()]
    (whole,) = [id_ for id_ in ids if id_.startswith(node)]
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    end_ms = (time.time_ns() // 1_000_000) + 300_000
    assert client.drain_node(whole, reason, "a test", end_ms) == (True, "")


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
    run_dir = str(config.run_dir())
    absent = elastic("status", run_dir)
    assert absent.returncode == 1 and "no run" in absent.stderr
    with Driving(config, tmp_path, "ordered") as train:

        def runs(generation: int) -> bool:
            newest = train.entries[-1] if train.entries else {"phase": "", "generation": 0}
            return (newest["phase"], newest["generation"]) == ("running", generation)

        train.until("step 6", lambda: runs(1) and train.step > 5)
        told = json.loads(elastic("status", run_dir, "--json").stdout)
        assert told["phase"] == "running" and told["world"] == 2
        node = next(iter(told["hosts"].values()))["node"]

        refused = elastic("drain", run_dir, "nowhere")
        assert refused.returncode == 1 and "no nodes of run ordered are called 'nowhere'" in refused.stderr
        assert elastic("drain", run_dir, node, "--why", "new disk").returncode == 0
        train.until("the drain", lambda: runs(2))
        assert "may be switched off" in elastic("status", run_dir).stdout

        assert elastic("release", run_dir, node).returncode == 0
        train.until("its return", lambda: runs(3))
        take_away(json.loads((config.run_dir() / MEMORY).read_text())["ray_address"], node)
        train.until("the notice taken", lambda: runs(4) and bool(train.commits))
        left = json.loads(elastic("status", run_dir, "--json").stdout)
        assert left["world"] == 1 and "drained by Ray: its end is announced for" in left["quarantined"][node]

        assert elastic("set", run_dir, "checkpoint.interval_steps=20").returncode == 0
        before = len(train.commits)
        train.until("a checkpoint", lambda: len(train.commits) > before)
        wrong = elastic("set", run_dir, "seed=3")
        assert wrong.returncode in (1, 2) and "seed can't change while the run goes on" in wrong.stderr

        assert elastic("pause", run_dir).returncode == 0
        train.until("the pause", lambda: train.entries[-1]["phase"] == "waiting" and train.entries[-1]["paused"])
        assert "paused" in elastic("status", run_dir).stdout
        assert elastic("resume", run_dir).returncode == 0
        train.until("the resumption", lambda: runs(5))
        train.look()
        assert elastic("stop", run_dir, "--why", "enough").returncode == 0
        assert train.ended() == 0, train.said
    over = elastic("status", run_dir)
    assert over.returncode == 1 and "is not running" in over.stderr
    entries = entries_of(config.place())
    reasons = "\n".join(entry["reason"] for entry in entries)
    assert "new disk" in reasons and "stop requested by" in reasons
    assert not any(entry["incident"] for entry in entries)
    done = [e["event"]["record"]["step"] for e in entries if e["event"]["kind"] == "StepCompleted"]
    assert done == list(range(1, done[-1] + 1)), "nothing was redone"
    assert any("exactly once" in line for line in verify_data(config.place()))
