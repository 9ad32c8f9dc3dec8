"""A tiny language for states: hosts by name, reports, and a decide that keeps the state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from elastic import events
from elastic.config import Config
from elastic.controller.decide import decide
from elastic.controller.state import Decision, RunState
from elastic.events import Exit, Holding, Report, StepRecord, TrainerReport
from elastic.plan import Endpoint, SnapshotKey


@dataclass
class Table:
    """One run on the table: feed it events, read its state."""

    config: Config
    state: RunState = field(default_factory=RunState)
    now_s: float = 1000.0
    seq: int = 0
    decision: Decision | None = None

    def take(self, event: Any, after_s: float = 0.0) -> Decision:
        self.now_s += after_s
        self.decision = decide(self.state, event, self.now_s, self.config)
        self.state = self.decision.state
        return self.decision

    def report(self, host: str, **changes: Any) -> Decision:
        self.seq += 1
        node, slot = host.split("/")
        base = self.state.hosts.get(host) or Report(
            host=host, seq=0, node=node, domain=node, slot=int(slot), ready=True, warm=True,
            mover=Endpoint(address=host, port=1), store=Endpoint(address=host, port=2),
        )  # fmt: skip
        return self.take(events.HostReported(report=replace(base, seq=self.seq, **changes)))

    def join(self, *hosts: str) -> None:
        for host in hosts:
            self.report(host)

    def trainer(self, host: str, phase: str = "running", ended: Exit | None = None, **changes: Any) -> Decision:
        told = TrainerReport(phase=phase, generation=self.state.generation, exit=ended)  # type: ignore[arg-type]
        return self.report(host, trainer=told, **changes)

    def run_all(self) -> None:
        for host in self.state.members:
            self.trainer(host)

    def exit_all(self, kind: str, step: int, **changes: Any) -> None:
        for rank, host in enumerate(self.state.members):
            held = (self.holding(step, rank),)
            ended = Exit(kind=kind, step=step)  # type: ignore[arg-type]
            self.trainer(host, "exited", ended, holdings=held, **changes)

    def holding(self, step: int, rank: int, tier: str = "own", sealed: bool = True) -> Holding:
        key = SnapshotKey(generation=self.state.generation, step=step)
        world = len(self.state.members)
        return Holding(key=key, rank=rank, world=world, tier=tier, sealed=sealed, nbytes=1)  # type: ignore[arg-type]

    def step(self, number: int) -> Decision:
        return self.take(events.StepCompleted(record=record(self.state.generation, number)), after_s=0.1)


def record(generation: int, step: int) -> StepRecord:
    return StepRecord(
        generation=generation, step=step, loss=1.0, tokens=1, samples=1, digest="0", grad_norm=1.0, lr=0.1, seconds=0.1
    )


def config(**changes: Any) -> Config:
    base = {"run": "t", "steps": 10, "hosts_min": 2, "hosts_max": 4, "control": {"start_wait_s": 5.0}}
    return Config.model_validate({**base, **changes})


@pytest.fixture
def table() -> Table:
    """Four hosts on two nodes, generation 1 running at step 3."""
    made = Table(config())
    made.take(events.RunStarted(run="t", attempt=1, generation=0, durable=None))
    made.join("a/0", "a/1", "b/0", "b/1")
    made.run_all()
    for number in (1, 2, 3):
        made.step(number)
    return made
