"""A real run over mixed sources that is resized three times and loses five processes: each sample is used once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from elastic.proof import verify_data
from elastic.report import entries_of
from tests.chaos.driving import Driving
from tests.chaos.test_orders import elastic
from tests.process.mixing import mixed

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(600)]


def test_three_resizes_and_five_kills(tmp_path: Path) -> None:
    config = mixed(
        tmp_path,
        run="samples",
        steps=100_000,
        hosts_min=1,
        hosts_max=4,
        local={"nodes": 2, "hosts_per_node": 2},
        checkpoint={"interval_steps": 200},
    )
    run_dir = str(config.run_dir())
    with Driving(config, tmp_path, "samples") as train:

        def newest(key: str) -> int:
            return int(train.entries[-1][key]) if train.entries else 0

        def advanced(generation: int, steps: int = 20) -> None:
            """A newer generation than that has come, and some steps in it."""
            train.until("a new generation", lambda: newest("generation") > generation)
            before = train.step
            train.until("its steps", lambda: train.step >= before + steps)

        def kill(rank: int, process: str) -> None:
            generation = newest("generation")
            hosts = json.loads(elastic("status", run_dir, "--json").stdout)["hosts"]
            pids = [host["pids"] for host in hosts.values() if host["pids"].get("trainer")]
            os.kill(pids[rank % len(pids)][process], signal.SIGKILL)
            advanced(generation)

        def resize(hosts: int) -> None:
            generation = newest("generation")
            assert elastic("resize", run_dir, "--hosts", str(hosts)).returncode == 0
            advanced(generation)

        advanced(0)
        kill(0, "trainer")
        resize(3)
        kill(1, "host")
        resize(2)
        kill(0, "template")
        kill(1, "trainer")
        resize(4)
        kill(2, "trainer")
        train.look()
        assert elastic("stop", run_dir, "--why", "enough").returncode == 0
        assert train.ended() == 0, train.said
    lines = verify_data(config.place())
    steps = entries_of(config.place())[-1]["step"]
    assert lines[0].startswith(f"{steps} steps of the committed lineage, {12 * steps} samples")
    assert any(line.startswith("by source: code ") for line in lines)
    assert elastic("verify-data", run_dir).returncode == 0
