"""What fault tolerance costs while nothing fails: the built-in task under elastic, and the same loop without it.

`python -m bench.overhead [--rounds N] [--steps N]`. One run of elastic on 4 hosts of 2 local nodes; in turns it is
paused and 4 plain torch.distributed ranks take as many steps of the same model (paired differences on a machine whose
speed drifts). Prints both, the seconds from `elastic train` to the first step, and one JSON line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import yaml

from bench.overhead_plain import PlainRanks
from bench.result import show
from elastic.cluster import coordinator, session
from elastic.cluster.ray_nodes import LocalNodes
from elastic.config import Config, load
from elastic.data.prepare import prepare
from elastic.report import entries_of

JOB = Path(__file__).parents[1] / "jobs" / "quickstart.yaml"
RUN = "overhead-bench"
SETTLE_STEPS = 6  # after a pause: the first steps adapt the interval, and standbys warm up
GOALS = {"overhead_pct": 2.0, "first_step_s": 45.0}
TIMEOUT_S = 300.0


def job(storage: Path) -> Config:
    """The quickstart with the default snapshot interval, without end, checkpoints and evaluation."""
    raw = load(JOB).model_dump(mode="json")
    raw |= {"run": RUN, "steps": 1_000_000, "storage": str(storage), "snapshot": {}}
    raw |= {"checkpoint": {"interval_steps": 1_000_000}, "evaluation": {"interval_steps": 1_000_000}}
    return Config.model_validate(raw)


class Rounds:
    """Watches the run; pauses it after each block of steps, lets the plain ranks take theirs, resumes it."""

    def __init__(self, config: Config, rounds: int, steps: int) -> None:
        self._config = config
        self._rounds, self._steps = rounds, steps
        self._plain: PlainRanks | None = None
        self._block: list[dict[str, Any]] = []
        self._pausing = False
        self.ours: list[list[dict[str, Any]]] = []
        self.plain: list[list[float]] = []

    def __call__(self, entries: list[dict[str, Any]], nodes: LocalNodes | None) -> None:
        for entry in entries:
            if entry["event"]["kind"] == "StepCompleted":
                self._block.append(entry["event"]["record"])
            if self._pausing and entry["phase"] == "waiting":
                self._pausing = False
                self._take_plain()
        if not self._pausing and len(self._block) == SETTLE_STEPS and not self._warm():
            self._block.pop()  # a standby that warms up takes cores
        if not self._pausing and len(self._block) >= SETTLE_STEPS + self._steps:
            self.ours.append(self._block[SETTLE_STEPS:])
            self._pausing = True
            self._order("pause")

    def _warm(self) -> bool:
        status = ray.get(coordinator.find(RUN).status.remote(), timeout=TIMEOUT_S)
        return all(host["warm"] for host in status["hosts"].values())

    def _take_plain(self) -> None:
        self._plain = self._plain or PlainRanks(self._config, world=self._config.hosts_max)
        self.plain.append(self._plain.step(SETTLE_STEPS + self._steps)[SETTLE_STEPS:])
        print(
            f"  round {len(self.plain)}: {_ms(_seconds(self.ours[-1]))} ms, plain {_ms(self.plain[-1])} ms", flush=True
        )
        self._block = []
        if len(self.plain) < self._rounds:
            self._order("resume")
        else:
            self._plain.close()
            self._order("stop")

    def _order(self, kind: str) -> None:
        ray.get(coordinator.find(RUN).request.remote(kind, "the benchmark", "turns"), timeout=TIMEOUT_S)


def _seconds(records: list[dict[str, Any]]) -> list[float]:
    return [record["seconds"] for record in records]


def _ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f}"


def measure_rounds(storage: Path, rounds: int, steps: int) -> dict[str, float]:
    config = job(storage)
    watch = Rounds(config, rounds, steps)
    ended = session.run(config, address=None, observers=[watch], say=lambda text: print(f"  {text}"))
    assert ended.error is None, ended.error
    records = [record for block in watch.ours for record in block]
    ratios = [
        statistics.median(_seconds(ours)) / statistics.median(plain) for ours, plain in zip(watch.ours, watch.plain)
    ]
    print(f"  paired ratios: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return {
        "overhead_pct": 100 * sum(r["upkeep_s"] for r in records) / sum(_seconds(records)),
        "step_ms": 1000 * statistics.median(_seconds(records)),
        "plain_step_ms": 1000 * statistics.median(s for block in watch.plain for s in block),
        "plain_ratio": statistics.median(ratios),
    }


def measure_first_step(storage: Path) -> dict[str, float]:
    """Seconds from the command to the first completed step, corpus prepared; and until hosts were ready."""
    config = Config.model_validate({**job(storage).model_dump(), "run": "first-step", "steps": 2})
    path = storage / "job.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    began_s = time.time()
    command = [sys.executable, "-m", "elastic.cli", "train", str(path)]
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
    entries = entries_of(config.place())
    at: dict[str, float] = {}
    for entry in entries:
        at.setdefault(entry["event"]["kind"], entry["t"] - began_s)
        if any(action["kind"] == "StartGeneration" for action in entry["actions"]):
            at.setdefault("StartGeneration", entry["t"] - began_s)
    ready_s = at["StartGeneration"]
    print(
        f"  to the first step {at['StepCompleted']:.1f} s: Ray nodes and coordinator {at['RunStarted']:.1f}, "
        f"hosts and templates {ready_s - at['RunStarted']:.1f}, the generation {at['StepCompleted'] - ready_s:.1f}"
    )
    return {"first_step_s": at["StepCompleted"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15, help="of each side in each round")
    parser.add_argument("--starts", type=int, default=3, help="how often the start is measured")
    given = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    storage = Path(tempfile.mkdtemp(prefix="elastic-overhead-"))
    prepare(job(storage).data, progress=lambda text: None)
    starts = []
    for _ in range(given.starts):
        starts.append(measure_first_step(storage)["first_step_s"])
        shutil.rmtree(storage / "first-step")
    values = {"first_step_s": statistics.median(starts), **measure_rounds(storage, given.rounds, given.steps)}
    shutil.rmtree(storage)
    show("overhead", values, GOALS)


if __name__ == "__main__":
    main()
