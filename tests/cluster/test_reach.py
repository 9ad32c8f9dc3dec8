"""An address at which no Ray cluster answers is told at once, not after Ray's minutes of silent tries."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from ray._private import services

from elastic.cluster import control, reach, session
from elastic.cluster.coordinator import MEMORY, RunError
from elastic.config import Config
from tests.runs import Told, config_in


@pytest.fixture
def dead() -> str:
    """HOST:PORT at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_only_what_does_not_answer_is_refused(dead: str) -> None:
    port = dead.split(":")[1]
    assert reach.unreachable(dead).endswith(f":{port} does not answer (Connection refused)")
    with socket.create_server(("0.0.0.0", 0)) as server:  # as a head listens: Ray goes to the node's own address
        assert reach.unreachable(f"127.0.0.1:{server.getsockname()[1]}") == ""
    assert "does not answer" in reach.unreachable("127.0.0.1:99999")
    assert reach.unreachable("ray://127.0.0.1:1") == "" == reach.unreachable("local")


def test_auto_is_looked_up_as_ray_does(dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", set)  # without a note Ray takes any cluster that runs here
    with pytest.raises(RunError, match=r"can't start: .* find any running Ray instance.*; start one, give --address"):
        session.run(Config(), address="auto", observers=[], say=lambda _: None)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(dead)
    with pytest.raises(RunError, match=rf"can't start: the Ray cluster at \S+:{dead.split(':')[1]} does not answer"):
        session.run(Config(), address="auto", observers=[], say=lambda _: None)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:99999")
    with pytest.raises(RunError, match=r"can't start: the Ray cluster at \S+:99999 does not answer"):
        session.run(Config(), address="auto", observers=[], say=lambda _: None)
    with pytest.raises(RunError, match=r"can't be asked: the Ray cluster at \S+:99999 does not answer"):
        control.status("quickstart", "auto")


def test_train_and_orders_say_so(dead: str) -> None:
    with pytest.raises(RunError, match=rf"can't start: the Ray cluster at \S+:{dead.split(':')[1]} does not answer"):
        session.run(Config(), address=dead, observers=[], say=lambda _: None)
    with pytest.raises(RunError, match=rf"can't be asked: the Ray cluster at \S+:{dead.split(':')[1]} does not answer"):
        control.status("quickstart", dead)


def test_the_status_of_a_run_that_ended_says_how(tmp_path: Path, dead: str) -> None:
    config = config_in(tmp_path)
    told = Told(config)
    told.attempt()
    told.generation(1, 3)
    (config.run_dir() / MEMORY).write_text(json.dumps({"ray_address": dead}))
    with pytest.raises(RunError, match=r"is not running: its driver ended without a word at step 3; the same"):
        control.status(str(config.run_dir()), None)
    shutil.rmtree(config.run_dir())
    config.run_dir().mkdir(parents=True)
    (config.run_dir() / MEMORY).write_text(json.dumps({"ray_address": dead}))
    with pytest.raises(RunError, match="is not running: nothing has happened in it yet"):
        control.status(str(config.run_dir()), None)
