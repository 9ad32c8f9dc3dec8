"""journal -> what a person wants to know: recoveries by phase, a run summary. Pure but reading.

Everything here is derived from the journal of a run, live or after its end. The proof of its samples: proof.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic import segments
from elastic.checkpoint.log import CommitLog
from elastic.config import Config, ElasticError, Place, parse
from elastic.config_sections import StorageOptions
from elastic.resume import saved_config
from elastic.storage.errors import StorageUnavailable
from elastic.storage.store import store_at
from elastic.telemetry import ledger
from elastic.telemetry.lineage import lineage

ADMISSION_LINES_MAX = 20
ELSEWHERE = "storage.json"  # in the directory of a run whose storage is not there
PHASES = ("detect", "stop", "decide", "fork", "rendezvous", "build", "restore", "first step")
# The trainers' marks, in the order in which they pass.
MARKS = {"start": "fork", "group": "rendezvous", "build": "build", "restore": "restore", "first_step": "first step"}


class ReportError(ElasticError):
    """The run directory does not hold what is asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One incident, from what broke to the first completed step of every rank of the generation that followed.

    phases: seconds by name; they sum to first_step_s. detect: from the fault (where its time is known) to the
    decision to stop; stop: until all trainers are reaped; then the slowest rank's fork (or standby), rendezvous,
    build, restore, first step; decide: what is left, deciding, telling the hosts and hearing from them.
    first_step_s: from the fault or the decision to the last rank's first step. new_step_s: to the first step that had
    not been completed before. redone: steps done again.
    """

    number: int
    failure: str
    hosts: tuple[str, ...]
    generation: int
    world: int
    tier: str
    phases: dict[str, float]
    first_step_s: float
    new_step_s: float | None
    redone: int


def place_of(text: str) -> Place:
    """The run that `text` names: its directory, its name where that lies in runs/, or its storage's URL. How a URL is
    reached (its endpoint) stands in the run's directory, where one is here; else its client's own configuration says it
    (AWS_ENDPOINT_URL)."""
    if "://" in text:
        url = text.rstrip("/")
        directory = Path("runs", url.rpartition("/")[2])
        known = place_of(str(directory))
        return known if known.url == url else Place(directory=directory, url=url)
    directory = next((path for path in (Path(text), Path("runs", text)) if path.exists()), Path(text))
    if (directory / ELSEWHERE).exists():
        told = json.loads((directory / ELSEWHERE).read_text())
        return Place(directory=directory, url=told["url"], options=StorageOptions.model_validate(told["options"]))
    return Place.of_directory(directory)


def point_to(place: Place) -> None:
    """Let the run's directory say where its storage is, so that it is enough to name the directory."""
    if place.url != str(place.directory):
        place.directory.mkdir(parents=True, exist_ok=True)
        told = {"url": place.url, "options": place.options.model_dump()}
        (place.directory / ELSEWHERE).write_text(json.dumps(told))


def entries_of(place: Place) -> list[dict[str, Any]]:
    if not segments.exist(place):
        raise ReportError(
            f"{place.url} holds no journal; give the directory of a run, such as runs/quickstart, or a URL"
        )
    return segments.entries(place)


def config_of(place: Place, attempt: int | None = None) -> Config:
    """What `attempt` was asked for, the newest one by default or where that is not known."""
    store = store_at(place)
    saved = (saved_config(store, attempt=attempt) if attempt is not None else {}) or saved_config(store)
    if not saved:
        raise ReportError(f"{place.url} holds no config.yaml; give the directory or URL of a run")
    return parse(saved, source=f"{place.url}/config.yaml")


# ---------------------------------------------------------------- recoveries


def recoveries(entries: Sequence[dict[str, Any]], faults_at_s: Sequence[float] = ()) -> list[Recovery]:
    """Each incident that a later generation of its attempt ended, in order. `faults_at_s`: of injected ones."""
    found = []
    index = 0
    while index < len(entries):
        opened = entries[index]["incident"]
        if opened is None or (index and entries[index - 1]["incident"] is not None):
            index += 1
            continue
        last = index
        while last < len(entries) and entries[last]["incident"] is not None:
            last += 1
        if last < len(entries) and entries[last]["event"]["kind"] != "RunStarted":
            found.append(_recovery(entries, index, last, faults_at_s))
        index = last
    return found


def _recovery(entries: Sequence[dict[str, Any]], first: int, last: int, faults_at_s: Sequence[float]) -> Recovery:
    """entries[first] opened the incident, entries[last] is the first without it."""
    broken_s = entries[first]["t"]
    fault_s = max((at_s for at_s in faults_at_s if broken_s - 60 < at_s <= broken_s), default=broken_s)
    started = max(i for i in range(first, last + 1) if _started(entries[i]) is not None)
    start = _started(entries[started])
    assert start is not None
    marks, all_ran_s = _marks(entries[started:], start["generation"])
    first_step_s = max(all_ran_s, entries[last]["t"]) - fault_s
    marks = {"detect": broken_s - fault_s, "stop": entries[started]["t"] - broken_s, **marks}
    highest = max((_step(entry) for entry in entries[:first]), default=0)
    new_s = next((e["t"] for e in entries[last:] if _step(e) > highest), None)
    return Recovery(
        number=entries[last - 1]["incident"]["number"],
        failure=entries[last - 1]["incident"]["failure"],
        hosts=tuple(entries[last - 1]["incident"]["hosts"]),
        generation=start["generation"],
        world=len(start["hosts"]),
        tier=start["tier"],
        phases={**marks, "decide": max(0.0, first_step_s - sum(marks.values()))},
        first_step_s=first_step_s,
        new_step_s=None if new_s is None else new_s - fault_s,
        redone=max(0, highest - start["step"]),
    )


def _started(entry: dict[str, Any]) -> Any:
    """The entry's StartGeneration, or None."""
    return next((action for action in entry["actions"] if action["kind"] == "StartGeneration"), None)


def _step(entry: dict[str, Any]) -> int:
    return int(entry["event"]["record"]["step"]) if entry["event"]["kind"] == "StepCompleted" else 0


def _marks(entries: Sequence[dict[str, Any]], generation: int) -> tuple[dict[str, float], float]:
    """(seconds that each phase added, slowest rank each time; when the last rank had its first step)."""
    first: dict[str, tuple[float, dict[str, float]]] = {}
    for entry in entries:
        event = entry["event"]
        if event["kind"] != "HostReported":
            continue
        trainer = event["report"]["trainer"]
        if trainer["generation"] == generation and trainer["phase"] == "running":
            first.setdefault(event["report"]["host"], (entry["t"], trainer["marks"]))
    told = list(first.values())
    phases: dict[str, float] = {}
    before_s = 0.0
    for mark, name in MARKS.items():
        until_s = max((marks.get(mark, 0.0) for _, marks in told), default=0.0)
        phases[name] = max(0.0, until_s - before_s)
        before_s = max(before_s, until_s)
    return phases, max((at_s for at_s, _ in told), default=0.0)


def recovery_lines(found: Sequence[Recovery]) -> list[str]:
    lines = []
    for r in found:
        phases = ", ".join(f"{name} {1000 * r.phases[name]:.0f}" for name in PHASES)
        lines.append(
            f"incident {r.number}: {r.failure} -> generation {r.generation} on {r.world} hosts from {r.tier}, "
            f"first step of every rank after {r.first_step_s:.2f} s, {r.redone} steps redone ({phases} ms)"
        )
    return lines


# ---------------------------------------------------------------- summary


def summary_lines(place: Place) -> list[str]:
    """The short account at the end of a run."""
    entries = entries_of(place)
    if not entries:
        return [f"{place.url}: nothing happened yet"]
    records = lineage(entries)
    held_out = [record for record in records if record["held_out"] is not None]
    last = entries[-1]
    starts = [start for entry in entries if (start := _started(entry))]
    spent = ledger.fold(entries)
    wall_s = spent.wall_us / 1e6
    told = recoveries(entries)
    return [
        f"phase       {last['phase']}",
        f"held-out    {_held_out_line(held_out[-1]) if held_out else 'none'}",
        f"steps       {last['step']}{_asked_steps(place)}, {sum(r['samples'] for r in records)} samples",
        f"durable     {durability_line(entries)}",
        f"generations {len(starts)}, worlds {' '.join(str(len(start['hosts'])) for start in starts)}",
        f"incidents   {len(told)}",
        *(f"  {line}" for line in recovery_lines(told)),
        *(f"node        {line}" for line in admission_lines(entries)),
        f"time        {wall_s:.1f} s: "
        + ", ".join(f"{name} {s:.1f} s ({100 * s / wall_s:.0f} %)" for name, s in spent.seconds().items()),
        f"files       {place.url} (journal.jsonl, config.yaml, log/, data/); output: elastic logs {place.directory}",
    ]


def _held_out_line(record: dict[str, Any]) -> str:
    sets = ", ".join(f"{name} {loss:.4f}" for name, loss in record.get("held_out_sets", {}).items())
    return f"{record['held_out']:.4f} nats per token at step {record['step']}" + (f" ({sets})" if sets else "")


def ending(place: Place) -> str:
    """How far a run came that nobody drives any more."""
    try:
        entries = entries_of(place)
    except ElasticError:
        entries = []
    if not entries:
        return "nothing has happened in it yet"
    last = entries[-1]
    ended = last["phase"] in ("finished", "stopped", "failed")
    told = f"it {last['phase']}" if last["phase"] != "stopped" else "it was stopped"
    how = told if ended else "its driver ended without a word"
    on = "" if last["phase"] == "finished" else "; the same `elastic train` goes on from its newest state"
    return f"{how} at step {last['step']}{on}"


def _asked_steps(place: Place) -> str:
    try:
        return f" of {config_of(place).steps}"
    except StorageUnavailable:
        return ""  # told by whoever read the journal


def durability_line(entries: Sequence[dict[str, Any]]) -> str:
    """The newest checkpoint, and for how long storage took none although one was due."""
    newest, failing_s, outages_s = "no checkpoint", None, list[float]()
    for entry in entries:
        kind, now_s = entry["event"]["kind"], entry["t"]
        if kind == "CommitFailed" and failing_s is None and not entry["event"]["fenced_by"]:
            failing_s = now_s
        elif kind in ("CheckpointCommitted", "RunStarted") and failing_s is not None:
            outages_s.append(now_s - failing_s)
            failing_s = None
        if kind == "CheckpointCommitted":
            newest = f"step {entry['event']['key']['step']}, {entries[-1]['t'] - now_s:.0f} s before the end"
    if failing_s is not None:
        outages_s.append(entries[-1]["t"] - failing_s)
    took = f"; storage took none for {sum(outages_s):.0f} s in all, {len(outages_s)} times" if outages_s else ""
    return newest + took


def admission_lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Hosts that were refused or marked, nodes that rested; each once, the newest last."""
    lines: dict[str, None] = {}
    for action in (action for entry in entries for action in entry["actions"]):
        if action["kind"] in ("RefuseHost", "MarkHost"):
            lines[f"{action['host']} {'refused' if action['kind'] == 'RefuseHost' else 'marked'}: {action['why']}"] = (
                None
            )
        elif action["kind"] == "RestNode":
            lines[f"{action['node']} rested: it was lost {action['losses']} times"] = None
    return [*lines][-ADMISSION_LINES_MAX:]


# ---------------------------------------------------------------- how it ended


def finished(config: Config) -> bool:
    """Has the run of this name reached its last step already, and not gone back since?"""
    entries = segments.entries(config.place())
    line = CommitLog(store_at(config.place())).line()
    newest = line[0].manifest if line else None
    ended = bool(entries) and entries[-1]["phase"] == "finished" and entries[-1]["step"] >= config.steps
    return ended and (newest is None or newest.key.step >= config.steps)


def failure_of(place: Place) -> tuple[str, str]:
    """(failure, detail) of the newest attempt, empty if it did not fail."""
    failed = [
        action for entry in segments.entries(place)[-20:] for action in entry["actions"] if action["kind"] == "FailRun"
    ]
    return (failed[-1]["failure"], failed[-1]["detail"]) if failed else ("", "")
