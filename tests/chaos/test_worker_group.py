"""The long-lived worker group on real Ray nodes: hosts and nodes are killed, nodes are added, the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.v2._internal.state.state_actor import get_state_actor
from ray.util.placement_group import placement_group_table

from elastic.cluster.host_slots import HostLimits
from elastic.cluster.ray_nodes import LocalNodes
from elastic.cluster.ray_private import in_place_trainer

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with LocalNodes(nodes=1, hosts_per_node=2) as local:
        yield local


class Fit:
    """One trainer whose hosts write down that they are up, and idle until told to stop."""

    def __init__(self, directory: Path, *, hosts: tuple[int, int], max_failures: int = 0, below_min_s: float = 60.0):
        self.directory = directory
        self.groups: list[str] = []
        self.result: Result | None = None
        self.error: BaseException | None = None
        announced = str(directory / "groups")

        def announce(group: str) -> None:
            with open(announced, "a") as file:
                file.write(group + "\n")

        self._trainer = in_place_trainer(
            idle_host(),
            host_config={"directory": str(directory)},
            scaling_config=ScalingConfig(num_workers=hosts),
            run_config=RunConfig(
                name="run",
                storage_path=str(directory / "storage"),
                failure_config=FailureConfig(max_failures=max_failures),
            ),
            limits=HostLimits(poll_s=0.1, below_min_s=below_min_s),
            announce=announce,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._trainer.fit()
        except BaseException as error:
            self.error = error

    def up(self) -> dict[int, dict[str, Any]]:
        """All hosts that ever came up, by pid."""
        return {int(path.stem): json.loads(path.read_text()) for path in self.directory.glob("*.up")}

    def alive(self) -> set[int]:
        return {pid for pid in self.up() if is_alive(pid)}

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self._thread.is_alive(), f"fit ended before {what}: {self.error!r}"
            assert time.monotonic() < deadline_s, f"{what}: not within {DEADLINE_S} s; hosts {self.up()}"
            time.sleep(0.02)

    def tell(self, word: str) -> None:
        aside = self.directory / "word.tmp"
        aside.write_text(word)
        aside.rename(self.directory / "word")

    def end(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "fit() did not return"

    def shown(self) -> set[int]:
        """Pids of the hosts that Ray Train's state shows as living."""
        attempts = ray.get(get_state_actor().get_train_run_attempts.remote(), timeout=10)
        runs = ray.get(get_state_actor().get_train_runs.remote(), timeout=10)
        ours = {
            run.id for run in runs.values() if run.run_settings.run_config.storage_path.startswith(str(self.directory))
        }
        return {
            worker.pid
            for run, by_id in attempts.items()
            if run in ours
            for attempt in by_id.values()
            for worker in attempt.workers
            if worker.status == "ALIVE"
        }


def idle_host() -> Callable[[dict[str, Any]], str]:
    def host(given: dict[str, Any]) -> str:  # a local function travels by value: workers can't import tests
        import json
        import os
        import sys
        import time
        from pathlib import Path

        import ray

        directory = Path(given["directory"])
        facts = {"node": ray.get_runtime_context().get_node_id(), "torch": "torch" in sys.modules}
        (directory / f"{os.getpid()}.tmp").write_text(json.dumps(facts))
        (directory / f"{os.getpid()}.tmp").rename(directory / f"{os.getpid()}.up")
        word = directory / "word"
        while not word.exists():
            time.sleep(0.02)
        if word.read_text() == "raise":
            raise ValueError("broken on purpose")
        return word.read_text()

    return host


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def placements() -> list[str]:
    return [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]


def test_hosts_come_and_go_inside_one_group(nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    fit = Fit(tmp_path, hosts=(2, 4))

    fit.wait("the start with the two slots that there are", lambda: len(fit.up()) == 2)
    first = fit.alive()
    assert not any(facts["torch"] for facts in fit.up().values()), "a host's process must not import torch"

    added = nodes.add_node()
    fit.wait("growth onto the new node", lambda: len(fit.up()) == 4)
    assert {fit.up()[pid]["node"] for pid in fit.alive() - first} == {added}

    victim = min(first)
    os.kill(victim, signal.SIGKILL)
    fit.wait("the replacement of a killed host", lambda: len(fit.up()) == 5 and len(fit.alive()) == 4)
    fit.wait("Ray Train's state of four hosts", lambda: fit.shown() == fit.alive())
    untouched = first - {victim}
    assert untouched < fit.alive()

    on_added = {pid for pid in fit.alive() if fit.up()[pid]["node"] == added}
    nodes.kill_node(added)
    assert not on_added & fit.alive()
    fit.wait("Ray Train's state without the killed node", lambda: fit.shown() == fit.alive())
    assert len(fit.alive()) == 2 and untouched < fit.alive()
    fit.wait("new requests for the lost slots", lambda: len(placements()) == 4)

    fit.tell("stop")
    fit.end()
    assert fit.error is None
    assert fit.result is not None and fit.result.return_value == "stop" and fit.result.error is None
    assert (tmp_path / "groups").read_text().count("\n") == 1, "the group must have been started once"
    assert placements() == []
    assert not fit.shown()


def test_an_exception_in_a_host_goes_ray_trains_own_way(nodes: LocalNodes, tmp_path: Path) -> None:
    fit = Fit(tmp_path, hosts=(1, 2), max_failures=1)
    fit.wait("the first group", lambda: len(fit.up()) >= 1)
    fit.tell("raise")
    fit.end()
    assert isinstance(fit.error, ray.train.WorkerGroupError)
    assert "broken on purpose" in str(fit.error)
    assert (tmp_path / "groups").read_text().count("\n") == 2, "max_failures=1 allows one more group"
    assert placements() == []


def test_too_few_hosts_for_too_long_fail_the_group(nodes: LocalNodes, tmp_path: Path) -> None:
    added = nodes.add_node()
    fit = Fit(tmp_path, hosts=(4, 4), below_min_s=1.0)
    fit.wait("the start", lambda: len(fit.up()) == 4)
    nodes.kill_node(added)
    fit.end()
    assert isinstance(fit.error, ray.train.WorkerGroupError)
    assert "wanted at least 4" in str(fit.error)
    assert placements() == []
