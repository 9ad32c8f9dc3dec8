"""A whole run through `ElasticTrainer` on real Ray nodes; its coordinator is killed in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from elastic.checkpoint.log import CommitLog
from elastic.cluster import coordinator
from elastic.cluster.ray_nodes import LocalNodes
from elastic.cluster.ray_train import ElasticTrainer
from elastic.storage.store import open_store
from elastic.telemetry import journal
from tests.process.running import small

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

DEADLINE_S = 240.0
STEPS = 60


def test_a_run_survives_its_coordinator_and_ends_with_a_result(tmp_path: Path) -> None:
    config = small(tmp_path, run="survivor", steps=STEPS, hosts_min=1, hosts_max=2)
    ended: dict[str, Any] = {}

    def fit() -> None:
        try:
            ended["result"] = ElasticTrainer(config=config).fit()
        except BaseException as error:
            ended["error"] = error

    with LocalNodes(nodes=1, hosts_per_node=2):
        thread = threading.Thread(target=fit, daemon=True)
        thread.start()
        before = wait_for_step(thread, ended, step=10)
        with pytest.raises(coordinator.RunError, match="survivor is already running"):
            coordinator.start(config, name_free_s=0.0)

        os.kill(before["pid"], signal.SIGKILL)
        after = wait_for_step(thread, ended, step=before["step"] + 5)
        assert after["pid"] != before["pid"]
        assert after["generation"] == before["generation"], "the trainers must not have noticed"
        assert set(after["hosts"]) == set(before["hosts"])

        thread.join(DEADLINE_S)
        assert not thread.is_alive() and "error" not in ended, ended
        assert [row for row in placement_group_table().values() if row["state"] != "REMOVED"] == []
        with pytest.raises(coordinator.RunError, match="no run survivor is running"):
            coordinator.find("survivor")

    result = ended["result"]
    assert result.metrics["phase"] == "finished" and result.metrics["step"] == STEPS
    assert result.metrics["incidents"] == 0
    newest = CommitLog(open_store(result.checkpoint.path)).newest()
    assert newest is not None and newest.key.step == STEPS
    happened = [entry["event"] for entry in journal.read_file(config.run_dir() / "journal.jsonl")]
    steps = [event["record"]["step"] for event in happened if event["kind"] == "StepCompleted"]
    assert steps == list(range(1, STEPS + 1)), "each step once: none redone, none untold"
    kinds = [event["kind"] for event in happened]
    assert kinds.count("RunStarted") == 1 and kinds.count("CoordinatorRestarted") == 1


def wait_for_step(thread: threading.Thread, ended: dict[str, Any], *, step: int) -> dict[str, Any]:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        assert thread.is_alive(), ended
        assert time.monotonic() < deadline_s, f"step {step} not within {DEADLINE_S} s"
        try:
            status = ray.get(coordinator.find("survivor").status.remote(), timeout=30)
        except coordinator.RunError:
            status = {}
        if status.get("step", 0) >= step:
            return dict(status)
        time.sleep(0.05)
