"""`elastic train` as a process of its own: watched through its journal, its descendants known by pid and start time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from elastic.chaos.inject import family
from elastic.config import Config
from elastic.telemetry.journal import Follower

DEADLINE_S = 240.0
GONE_S, AGENTS_GONE_S = 20.0, 90.0
ROOT = Path(__file__).parent.parent.parent


class Driving:
    """Use as a context manager: what is left of it is killed at its end.

    `processes`: (pid, start time) of every descendant seen by `look`; `agents`: those of them that are Ray's agents,
    which try for a minute to tell a dead GCS that their raylet died; `memory`: arenas, by device and inode.
    """

    def __init__(self, config: Config, directory: Path, name: str, address: str = "") -> None:
        job = directory / "job.yaml"
        job.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        self._output = directory / f"{name}.out"
        self._journal = Follower(config.run_dir() / "journal.jsonl")
        self._journal.read()
        self.entries: list[dict[str, Any]] = []
        self.processes: set[tuple[int, str]] = set()
        self.agents: set[tuple[int, str]] = set()
        self.memory: set[tuple[int, int]] = set()
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic.cli", "train", str(job), *(["--address", address] if address else [])],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                start_new_session=True,
            )

    def __enter__(self) -> Driving:
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        for pid, start in self.processes:
            if started(pid) == start:
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10.0)

    @property
    def said(self) -> str:
        return self._output.read_text()

    @property
    def step(self) -> int:
        return max((entry["step"] for entry in self.entries), default=0)

    @property
    def commits(self) -> list[int]:
        """Steps of the checkpoints that this attempt committed."""
        events = [entry["event"] for entry in self.entries]
        return [event["key"]["step"] for event in events if event["kind"] == "CheckpointCommitted"]

    def look(self) -> None:
        """At all of its processes: not often, that costs a core more than a few steps do."""
        for pid in family(self.process.pid):
            if start := started(pid):
                self.processes.add((pid, start))
                if command(pid).startswith("ray::") and "Agent" in command(pid):
                    self.agents.add((pid, start))
                self.memory |= arenas(pid)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < deadline_s, f"{what}: not within {DEADLINE_S} s:\n{self.said}"
            time.sleep(0.05)
            self.entries += self._journal.read()

    def named(self, name: str) -> int:
        """Pid of the living descendant whose command line holds `name`; 0: there is none."""
        for pid in family(self.process.pid):
            if name in command(pid):
                return pid
        return 0

    def send(self, number: signal.Signals, pid: int = 0) -> None:
        """To the driver itself, or to one of its descendants."""
        self.look()
        os.kill(pid or self.process.pid, number)

    def ended(self, *, agents_too: bool = True) -> int:
        """Its exit code, once nothing of it is left: no process, no memory."""
        code = self.process.wait(DEADLINE_S)
        self.entries += self._journal.read()
        self._wait_for_end(self.processes if agents_too else self.processes - self.agents, GONE_S)
        return code

    def agents_ended(self) -> None:
        self._wait_for_end(self.agents, AGENTS_GONE_S)

    def _wait_for_end(self, processes: set[tuple[int, str]], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while left := [pid for pid, start in processes if started(pid) == start] or holders(self.memory):
            told = ", ".join(f"{pid} {command(pid)[:80]}" for pid in left)
            assert time.monotonic() < deadline_s, f"{told} outlived the driver by {limit_s} s:\n{self.said}"
            time.sleep(0.05)

    def sessions(self) -> list[Path]:
        """Directories of Ray sessions that this driver started and nobody removed."""
        return list(Path("/tmp/ray").glob(f"session_2*_{self.process.pid}"))


def started(pid: int) -> str:
    """When a living process began, in ticks of the kernel; "" once it has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def arenas(pid: int) -> set[tuple[int, int]]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if "memfd:elastic" in os.readlink(entry):
                status = entry.stat()
                found.add((status.st_dev, status.st_ino))
        except OSError:
            continue
    return found


def holders(memory: set[tuple[int, int]]) -> list[int]:
    """Pids of all processes of the machine that hold any of `memory`."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if memory & arenas(pid)]


def command(pid: int) -> str:
    """Its command line; "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
