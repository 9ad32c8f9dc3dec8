"""Break real processes at the steps that a schedule names. Fed with the journal's entries; reads no clock.

Everything is addressed by the pids that hosts report, so only processes of this run, on this machine, are hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elastic.chaos.faults import Fault


class Nodes(Protocol):
    """The hands for whole nodes: local Ray nodes, or made-up nodes of local processes."""

    def kill_node(self, node: str) -> None: ...

    def freeze_node(self, node: str) -> None: ...

    def thaw_node(self, node: str) -> None: ...

    def add_node(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    fault: Fault
    at_s: float
    what: str


@dataclass(slots=True)
class Injector:
    """`observe` new journal entries; due faults are injected there and then. `done` says what was done when.

    reports: the newest of each host; members: hosts by rank; settled: the newest entry is a step of a running
    generation, so that nothing else is being recovered from.
    """

    faults: list[Fault]
    nodes: Nodes
    now_s: Callable[[], float]
    done: list[Injected] = field(default_factory=list)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    settled: bool = False
    _step: int = 0
    _thaws: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def observe(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            self._note(entry)
        self._thaw_due()
        due = [fault for fault in self.faults if fault.step <= self._step]
        if due and self.settled:
            self.faults.remove(due[0])
            self.inject(due[0])

    def inject(self, fault: Fault) -> None:
        """Break it now."""
        self.settled = False  # the next one waits until steps go on
        at_s = self.now_s()
        self.done.append(Injected(fault=fault, at_s=at_s, what=self._break(fault)))

    def _note(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        if event["kind"] == "HostReported":
            self.reports[event["report"]["host"]] = event["report"]
        elif event["kind"] == "HostGone":
            self.reports.pop(event["host"], None)
        elif event["kind"] == "StepCompleted":
            self._step = event["record"]["step"]
        self.settled = entry["phase"] == "running" and event["kind"] == "StepCompleted"
        for action in entry["actions"]:
            if action["kind"] == "StartGeneration":
                self.members = list(action["hosts"])

    def _break(self, fault: Fault) -> str:
        if fault.kind == "add-node":
            self.nodes.add_node()
            return "a node was added"
        rank = len(self.members) - 1 if fault.rank is None else fault.rank
        if not 0 <= rank < len(self.members):
            return f"nothing done: there is no rank {rank} in a world of {len(self.members)}"
        report = self.reports[self.members[rank]]
        if fault.kind.endswith("-node"):
            return self._break_node(fault, report["node"])
        name = fault.kind.partition("-")[2]
        pid = report["pids"][name]
        if fault.kind == "freeze-host":
            pids = family(pid)
            send_signal(pids, signal.SIGSTOP)
            self._thaws.append((self.now_s() + fault.seconds, lambda: send_signal(pids, signal.SIGCONT)))
        else:
            send_signal([pid], signal.SIGKILL)
        return f"{name} of rank {rank} ({report['host']}, pid {pid})"

    def _break_node(self, fault: Fault, node: str) -> str:
        if fault.kind == "kill-node":
            self.nodes.kill_node(node)
        else:
            self.nodes.freeze_node(node)
            self._thaws.append((self.now_s() + fault.seconds, lambda: self.nodes.thaw_node(node)))
        ranks = [rank for rank, host in enumerate(self.members) if host.partition("/")[0] == node]
        return f"node {node} with ranks {', '.join(map(str, ranks))}"

    def _thaw_due(self) -> None:
        due = [thaw for at_s, thaw in self._thaws if at_s <= self.now_s()]
        self._thaws = [(at_s, thaw) for at_s, thaw in self._thaws if at_s > self.now_s()]
        for thaw in due:
            thaw()


def family(pid: int) -> list[int]:
    """`pid` and its living descendants, parents first."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            for child in task.read_text().split():
                found += family(int(child))
    return found


def send_signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
