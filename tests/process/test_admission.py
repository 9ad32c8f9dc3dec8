"""Real hosts are checked before they take part: figures in the status, refusals with a sentence, rests of a flapper."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elastic.controller.state import Phase
from elastic.events import StopRequested
from elastic.telemetry import journal
from tests.process.running import LIMIT_S, Running, small

pytestmark = pytest.mark.timeout(400)


def test_good_hosts_pass_and_their_figures_are_in_the_status(tmp_path: Path) -> None:
    config = small(tmp_path, steps=8, hosts_min=2)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(run.step(1))
        hosts = run.driver.status()["hosts"]
        checks = {host: told["check"] for host, told in hosts.items()}
        for host, check in checks.items():
            assert check["gemm_gflops"] > 0 and check["copy_gbs"] > 0 and check["gemm_wrong"] == 0
            assert check["memory_free_bytes"] > check["memory_wanted_bytes"] > 0 and check["disk_free_bytes"] > 0
            assert check["link_to"] in checks.keys() - {host} and check["link_mbs"] > 0
            assert abs(check["clock_ahead_s"]) < 1.0
        run.finish()
        assert run.driver.status()["refused"] == {}


def test_a_node_without_the_memory_is_refused_and_the_run_waits_for_one_that_has_it(tmp_path: Path) -> None:
    config = small(tmp_path, admission={"memory_spare_bytes": 1 << 50})
    with Running(config, tmp_path, nodes=1, hosts_per_node=1) as run:
        run.until(lambda: bool(run.driver.state.refused))
        assert run.driver.state.phase is Phase.WAITING
        waiting_for, refused = run.driver.status()["waiting_for"], run.driver.status()["refused"]
        assert waiting_for.startswith("waiting: 0 hosts ready, 1 refused, need 1; n0/0")
        assert "GB of memory are free, wanted 1125899.9 GB" in waiting_for
        (host,) = run.seen.reports.values()
        assert host.host in refused and host.pids.keys() == {"host"}, "nothing else was started on it"
        run.driver.take(StopRequested(who="test", why="seen enough"))
        assert run.driver.turn(0.02), "nothing is there to save"
        assert run.driver.state.phase is Phase.STOPPED
        assert set(run.cluster.wait(LIMIT_S).values()) == {0}


@pytest.mark.long
def test_a_node_that_flaps_rests(tmp_path: Path) -> None:
    config = small(tmp_path, steps=5000, admission={"rest_s": 1.0})
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        for _ in range(2):
            run.until(lambda: len(run.driver.state.members) == 2 and run.driver.state.phase is Phase.RUNNING)
            node = run.seen.reports[run.driver.state.members[1]].node
            os.kill(run.pid(1, "host"), signal.SIGKILL)
            run.until(lambda: len(run.driver.state.members) == 1 and run.driver.state.phase is Phase.RUNNING)
            run.cluster.spawn(node, 0)
        run.until(lambda: len(run.driver.state.members) == 2)
        rest_s = started_s = 0.0
        for entry in journal.read_file(run.journal):
            for action in entry["actions"]:
                if action["kind"] == "RestNode":
                    assert action["losses"] == 2 and not rest_s
                    rest_s = action["until_s"]
                if action["kind"] == "StartGeneration" and len(action["hosts"]) == 2:
                    started_s = entry["t"]
        assert 0.0 < rest_s <= started_s
