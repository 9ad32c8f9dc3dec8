"""Signals to a driver, and the lock that keeps a second driver out."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.cluster.driver_lock import NAME, is_driven, only_driver
from elastic.config import ElasticError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def start(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """A driver, and a pidfd of its child."""
    command = [sys.executable, "-m", "tests.cluster.hanging_driver", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, os.pidfd_open(int(read(process)))


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_asks_the_second_ends_the_third_kills(number: signal.Signals) -> None:
    process, child = start("gentle")
    for answer in ("asked", "ending"):
        process.send_signal(number)
        assert read(process) == answer
    process.send_signal(number)
    assert process.wait(30) == 130
    assert select.select([child], [], [], 30)[0], "its child outlived it"
    os.close(child)


def test_while_nothing_can_be_saved_the_first_ends_and_the_clean_up_is_not_broken_off() -> None:
    process, child = start()
    process.send_signal(signal.SIGINT)
    assert read(process) == "ending"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130, "a second signal raised in the clean-up"
    os.close(child)


def test_a_run_has_one_driver(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    assert not is_driven(run_dir)
    with only_driver(run_dir):
        assert is_driven(run_dir)
        with (
            pytest.raises(ElasticError, match=f"run mine is already running: pid {os.getpid()} on "),
            only_driver(run_dir),
        ):
            pass
    assert not is_driven(run_dir) and (run_dir / NAME).exists()
