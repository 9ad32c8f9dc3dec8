"""The committed lineage: which records of which generations the run's present state descends from. Pure.

A generation starts from a snapshot of an earlier one, so its history is that generation's up to the snapshot's
step, and so on back to the seed. Everything else was undone and counts as rework.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Generation:
    attempt: int
    world: int
    start_step: int
    base: int | None  # generation of the snapshot it started from; None: the seed
    records: dict[int, dict[str, Any]] = field(default_factory=dict)


def lineage(entries: Iterable[dict[str, Any]], generation: int | None = None) -> list[dict[str, Any]]:
    """StepRecords (as JSON, each with "world" and "attempt" added) that `generation` descends from, in order.

    generation: the newest by default. Where a record is missing the list has a gap.
    """
    generations: dict[int, _Generation] = {}
    attempt = 0
    for entry in entries:
        event = entry["event"]
        if event["kind"] == "RunStarted":
            attempt = event["attempt"]
        for action in entry["actions"]:
            if action["kind"] == "StartGeneration":
                restore = action["restore"]
                base = restore["generation"] if restore else None
                world, step = len(action["hosts"]), action["step"]
                generations[action["generation"]] = _Generation(attempt, world, step, base)
        if event["kind"] == "StepCompleted" and event["record"]["generation"] in generations:
            record = event["record"]
            generations[record["generation"]].records[record["step"]] = record
    at = max(generations, default=None) if generation is None else generation
    found: list[dict[str, Any]] = []
    until = max(generations[at].records, default=generations[at].start_step) if at is not None else 0
    while at is not None and at in generations:
        here = generations[at]
        steps = sorted(step for step in here.records if step <= until)
        found[:0] = [{**here.records[step], "world": here.world, "attempt": here.attempt} for step in steps]
        until, at = min(until, here.start_step), here.base
    return found


def schedule(entries: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(step, world) wherever the lineage's world size changes, the first at step 0: what makes the twin."""
    changes: list[tuple[int, int]] = []
    for record in lineage(entries):
        if not changes or changes[-1][1] != record["world"]:
            changes.append((record["step"] - 1, record["world"]))
    return changes
