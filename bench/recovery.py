"""How fast training goes on after a failure: ours beside stock Ray Train 2.60 elastic, in one run, same model.

`python -m bench.recovery [--repeats N] [--stock-repeats N] [--no-stock]`. Prints each recovery by phase, then a
table, then one JSON line. A recovery ends with the first completed optimizer step of the new generation on every
rank, redone or not; the first step beyond the highest before is printed too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.recovery_stock import ROWS, SEQ_LEN, Kind, measure_stock
from bench.result import show
from elastic.chaos.faults import Fault
from elastic.chaos.inject import Injector
from elastic.clock import RealClock
from elastic.cluster import session
from elastic.cluster.ray_nodes import LocalNodes
from elastic.config import Config, Place
from elastic.report import Recovery, entries_of, recoveries, recovery_lines

WORLD = 4
STEADY_STEPS = 20  # between a recovery and the next fault, and as many clean ones before it
GOALS = {
    "clean_step_ms": 50,
    "trainer_kill_s": 0.6, "trainer_kill_ratio": 40, "trainer_kill_ratio_tuned": 35, "node_kill_s": 3.0,
    "node_kill_ratio": 20, "node_kill_ratio_tuned": 10, "silent_node_s": 6.0, "steps_redone_trainer": 1,
    "steps_redone_node": 2, "steps_redone_planned": 0,
}  # fmt: skip


class Campaign:
    """Kills, one after the other, each from a full world whose standbys are warm; then ends the run."""

    def __init__(self, faults: list[Fault]) -> None:
        self.injector: Injector | None = None
        self.clean_s: list[float] = []
        self._faults = faults
        self._steps = 0
        self._clean: list[float] | None = None  # seconds of steps beside which nothing else happens
        self._frozen: str | None = None
        self._refill = False
        self._asked_to_stop = False

    def __call__(self, entries: list[dict[str, Any]], nodes: LocalNodes | None) -> None:
        assert nodes is not None
        if self.injector is None:
            self.injector = Injector(faults=[], nodes=nodes, now_s=RealClock().now_s)
        self.injector.observe(entries)
        for entry in entries:
            if entry["event"]["kind"] == "StepCompleted":
                self._steps += 1
                if self._clean is not None:
                    self._clean.append(entry["event"]["record"]["seconds"])
            if entry["incident"] or any(action["kind"] == "StartGeneration" for action in entry["actions"]):
                self._steps, self._clean = 0, None
        if not self.injector.settled or self._steps < STEADY_STEPS:
            return
        self._restore_capacity(nodes)
        if self._clean is None and self._full_and_warm():
            self._clean = []
        elif self._clean is not None and len(self._clean) >= STEADY_STEPS:
            self.clean_s += self._clean
            self._next()

    def _restore_capacity(self, nodes: LocalNodes) -> None:
        if self._refill:
            nodes.add_node()
            self._refill = False
        if self._frozen:  # Ray has given it up meanwhile: another one takes its place
            nodes.kill_node(self._frozen)
            nodes.add_node()
            self._frozen = None

    def _full_and_warm(self) -> bool:
        assert self.injector is not None
        reports = [self.injector.reports.get(host) for host in self.injector.members]
        return len(reports) == WORLD and all(r and r["warm"] for r in reports)

    def _next(self) -> None:
        assert self.injector is not None
        self._steps, self._clean = 0, None
        if not self._faults:
            if not self._asked_to_stop:
                self._asked_to_stop = True
                session.ask_to_stop(RUN, "the campaign is over")
            return
        fault = self._faults.pop(0)
        self._refill = fault.kind == "kill-node"
        if fault.kind == "freeze-node":
            self._frozen = self.injector.reports[self.injector.members[-1]]["node"]
        self.injector.inject(fault)
        print(f"  {fault.kind}: {self.injector.done[-1].what}", flush=True)


RUN = "recovery-bench"


def config(storage: Path) -> Config:
    return Config.model_validate(
        {
            "run": RUN,
            "steps": 1_000_000,
            "storage": str(storage),
            "hosts_min": 2,
            "hosts_max": WORLD,
            "task": "bench.toy:Toy",
            "model": {"seq_len": SEQ_LEN},
            "batch": {"global_samples": ROWS * WORLD, "micro_samples": ROWS * WORLD},
            "data": {"prepared": str(storage / "data")},
            "evaluation": {"interval_steps": 1_000_000},
            "snapshot": {"interval_steps": 1},
            "checkpoint": {"interval_steps": 500},
        }
    )


def measure_ours(repeats: int) -> tuple[dict[str, list[Recovery]], list[dict[str, Any]], float]:
    """Recoveries by kind of fault, the journal, and the median seconds of a clean step: on the full world with all
    standbys warm, fault tolerance and a snapshot every step included."""
    storage = Path(tempfile.mkdtemp(prefix="elastic-recovery-"))
    kinds = ["kill-trainer"] * repeats + ["kill-node"] * repeats + ["freeze-node"] * repeats
    campaign = Campaign([Fault(kind=kind, step=1, seconds=1e9) for kind in kinds])
    ended = session.run(config(storage), address=None, observers=[campaign], say=lambda text: print(f"  {text}"))
    assert ended.error is None and campaign.injector is not None, ended.error
    entries = entries_of(Place.of_directory(storage / RUN))
    done = campaign.injector.done
    found: dict[str, list[Recovery]] = {}
    for recovery in recoveries(entries, [injected.at_s for injected in done]):
        kind = done[sum(len(group) for group in found.values())].fault.kind
        found.setdefault(kind, []).append(recovery)
        print(f"  {kind}: {recovery_lines([recovery])[0]}")
    shutil.rmtree(storage)
    return found, entries, statistics.median(campaign.clean_s)


def redone_by_plan(entries: Sequence[dict[str, Any]]) -> int:
    """Most steps that any planned change of the world did again."""
    most, step = 0, 0
    for before, entry in zip([{"incident": None}, *entries], entries):
        for action in entry["actions"]:
            if action["kind"] == "StartGeneration" and not before["incident"]:
                most = max(most, step - action["step"])
        if entry["event"]["kind"] == "StepCompleted":
            step = entry["event"]["record"]["step"]
    return most


def stock(repeats: int) -> dict[tuple[Kind, bool], float]:
    kinds: tuple[Kind, ...] = ("trainer", "node")
    medians = {}
    for kind in kinds:
        for tuned in (False, True):
            seen = [measure_stock(kind, tuned=tuned) for _ in range(repeats)]
            medians[kind, tuned] = statistics.median(seen)
            print(f"  stock {kind}{' tuned' if tuned else ''}: {', '.join(f'{s:.1f}' for s in seen)} s", flush=True)
    return medians


def metrics(found: dict[str, list[Recovery]], entries: list[dict[str, Any]], clean_step_s: float) -> dict[str, float]:
    def median(kind: str, value: str) -> float:
        return statistics.median(getattr(recovery, value) for recovery in found[kind])

    return {
        "clean_step_ms": 1000 * clean_step_s,
        "trainer_kill_s": median("kill-trainer", "first_step_s"),
        "trainer_new_step_s": median("kill-trainer", "new_step_s"),
        "node_kill_s": median("kill-node", "first_step_s"),
        "node_new_step_s": median("kill-node", "new_step_s"),
        "silent_node_s": median("freeze-node", "first_step_s"),
        "steps_redone_trainer": max(recovery.redone for recovery in found["kill-trainer"]),
        "steps_redone_node": max(r.redone for r in found["kill-node"] + found["freeze-node"]),
        "steps_redone_planned": redone_by_plan(entries),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stock-repeats", type=int, default=3)
    parser.add_argument("--no-stock", action="store_true", help="ours only: quick, without ratios")
    given = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {given.repeats}")
    values = metrics(*measure_ours(given.repeats))
    if not given.no_stock:
        peers = stock(given.stock_repeats)
        for kind, name in (("trainer", "trainer_kill"), ("node", "node_kill")):
            for tuned, suffix in ((False, ""), (True, "_tuned")):
                values[f"stock_{kind}{suffix}_s"] = peers[kind, tuned]  # type: ignore[index]  # both literals
                values[f"{name}_ratio{suffix}"] = peers[kind, tuned] / values[f"{name}_s"]  # type: ignore[index]
    show("recovery", values, GOALS)


if __name__ == "__main__":
    main()
