"""A trainer is killed in each phase of a step, seen in the progress word that it shares with its host."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from elastic.checkpoint.arena import Arena
from elastic.controller.state import Phase as RunPhase
from elastic.worker.context import Phase
from tests.process.running import LIMIT_S, Running, small

pytestmark = pytest.mark.timeout(400)

MOMENTS = (Phase.FORWARD, Phase.BACKWARD, Phase.WORD, Phase.OPTIMIZER, Phase.SNAPSHOT)


def arena_of(host: int) -> Arena:
    """The arena of a running host process, through its open descriptor."""
    for name in os.listdir(f"/proc/{host}/fd"):
        path = f"/proc/{host}/fd/{name}"
        if "memfd:elastic-arena" in os.readlink(path):
            return Arena.attach(os.open(path, os.O_RDWR))
    raise AssertionError(f"host {host} holds no arena")


def kill_in(run: Running, rank: int, moment: Phase) -> None:
    """SIGKILL the trainer of `rank` while its progress word shows `moment`; a thread watches, the driver turns on."""
    board = arena_of(run.pid(rank, "host")).board
    pid, generation = run.pid(rank, "trainer"), run.driver.state.generation
    killed = threading.Event()
    deadline_s = time.monotonic() + LIMIT_S

    def watch() -> None:
        while time.monotonic() < deadline_s:
            progress = board.progress
            if progress.generation == generation and progress.phase == moment:
                os.kill(pid, signal.SIGKILL)
                killed.set()
                return

    threading.Thread(target=watch, daemon=True).start()
    run.until(killed.is_set)


def test_killed_in_every_phase_of_a_step(tmp_path: Path) -> None:
    config = small(tmp_path, steps=5000)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        for index, moment in enumerate(MOMENTS):
            before = run.driver.state.step
            run.until(lambda before=before: run.driver.state.step >= before + 3)
            generation, rank = run.driver.state.generation, index % 2
            kill_in(run, rank, moment)
            run.until(lambda g=generation: run.driver.state.generation > g)
            run.until(lambda: run.driver.state.phase is RunPhase.RUNNING)
            restore = run.driver.state.assignments[0].restore
            assert restore is not None and all(source.tier == "own" for source in restore.sources), moment
            assert restore.key.step >= before, moment
        assert run.driver.state.incidents == len(MOMENTS)
        assert all(len(found) == 1 for found in run.losses().values()), "a redone step had another loss"
