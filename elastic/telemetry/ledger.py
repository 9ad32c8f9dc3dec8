"""Where the time went: a pure fold of the journal into categories whose integer microseconds sum to wall time.

The interval before an entry belongs to what the run was doing in it: to the step that the entry completes, or
else to the phase that the entry before left the run in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

CATEGORIES = (
    "waiting",  # not enough hosts
    "starting",  # the first generation of an attempt, up to its first step
    "productive",  # a step that had never been completed before
    "rework",  # a step completed before and undone by a failure
    "rescale",  # a planned change of membership
    "recovery",  # from a failure to the next generation's first step
    "paused",  # by a person
    "checkpoint",  # committing the last snapshot at the end
    "unknown",  # no coordinator was there to see
    "other",
)


@dataclass(slots=True)
class Ledger:
    """`microseconds` by category; they sum to `wall_us`, from the first entry to the last."""

    microseconds: Counter[str] = field(default_factory=Counter)
    wall_us: int = 0
    _at_us: int | None = None
    _doing: str = "starting"
    _highest_step: int = 0

    def add(self, entry: dict[str, Any]) -> None:
        at_us = round(entry["t"] * 1_000_000)
        if self._at_us is None:
            self._at_us = at_us
        # A clock that a restart set back gives an empty interval, never a negative one.
        passed_us = max(0, at_us - self._at_us)
        self._at_us = max(self._at_us, at_us)
        self.microseconds[self._category(entry)] += passed_us
        self.wall_us += passed_us
        self._doing = _doing(entry)

    def _category(self, entry: dict[str, Any]) -> str:
        event = entry["event"]
        if event["kind"] in ("CoordinatorRestarted", "RunStarted"):
            return "unknown"
        if event["kind"] == "StepCompleted" and self._doing == "productive":
            step = event["record"]["step"]
            new = step > self._highest_step
            self._highest_step = max(step, self._highest_step)
            return "productive" if new else "rework"
        if event["kind"] == "StepCompleted":
            self._highest_step = max(event["record"]["step"], self._highest_step)
        return self._doing

    def seconds(self) -> dict[str, float]:
        return {name: self.microseconds[name] / 1e6 for name in CATEGORIES if self.microseconds[name]}


def _doing(entry: dict[str, Any]) -> str:
    phase = entry["phase"]
    if phase == "running":
        return "productive"
    if phase in ("stopping", "saving"):
        return {"stopping": "recovery", "saving": "checkpoint"}[phase]
    if phase not in ("waiting", "starting"):
        return "other"
    if phase == "waiting" and entry.get("paused"):
        return "paused"
    if entry["short"]:
        return "waiting"
    if entry["incident"]:
        return "recovery"
    return "starting" if entry["fresh"] else "rescale"


def fold(entries: Iterable[dict[str, Any]]) -> Ledger:
    ledger = Ledger()
    for entry in entries:
        ledger.add(entry)
    assert sum(ledger.microseconds.values()) == ledger.wall_us, (ledger.microseconds, ledger.wall_us)
    return ledger
