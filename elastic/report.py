"""journal -> what a person wants to know: recoveries by phase, a run summary, proof of the samples. Pure but reading.

Everything here is derived from the journal of a run (and, for the proof, its corpus), live or after its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elastic.config import Config, ElasticError, parse
from elastic.data.order import digest, sample_ids
from elastic.data.shards import Corpus
from elastic.telemetry import journal, ledger
from elastic.telemetry.lineage import lineage

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


def entries_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "journal.jsonl"
    if not path.exists():
        raise ReportError(f"{run_dir} holds no journal.jsonl; give the directory of a run, such as runs/quickstart")
    return journal.read_file(path)


def config_of(run_dir: Path) -> Config:
    path = run_dir / "config.yaml"
    if not path.exists():
        raise ReportError(f"{run_dir} holds no config.yaml; give the directory of a run, such as runs/quickstart")
    return parse(yaml.safe_load(path.read_text()), source=str(path))


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


def summary_lines(run_dir: Path) -> list[str]:
    """The short account at the end of a run."""
    entries = entries_of(run_dir)
    if not entries:
        return [f"{run_dir}: nothing happened yet"]
    records = lineage(entries)
    held_out = [record for record in records if record["held_out"] is not None]
    last = entries[-1]
    starts = [start for entry in entries if (start := _started(entry))]
    spent = ledger.fold(entries)
    wall_s = spent.wall_us / 1e6
    loss = f"{held_out[-1]['held_out']:.4f} nats per token at step {held_out[-1]['step']}" if held_out else "none"
    told = recoveries(entries)
    return [
        f"phase       {last['phase']}",
        f"held-out    {loss}",
        f"steps       {last['step']} of {config_of(run_dir).steps}, {sum(r['samples'] for r in records)} samples",
        f"generations {len(starts)}, worlds {' '.join(str(len(start['hosts'])) for start in starts)}",
        f"incidents   {len(told)}",
        *(f"  {line}" for line in recovery_lines(told)),
        f"time        {wall_s:.1f} s: "
        + ", ".join(f"{name} {s:.1f} s ({100 * s / wall_s:.0f} %)" for name, s in spent.seconds().items()),
        f"files       {run_dir} (journal.jsonl, config.yaml, log/, data/); output: elastic logs {run_dir}",
    ]


# ---------------------------------------------------------------- proof of the samples


def verify_data(run_dir: Path) -> list[str]:
    """Prove from the journal that each sample of the committed lineage was used exactly once, in order.

    Each step's record carries the count and the digest of the sample ids that the ranks really read; both are
    computed anew here from (corpus fingerprint, seed, step). Returns the proof's lines; ReportError: it fails.
    """
    entries, config = entries_of(run_dir), config_of(run_dir)
    corpus = Corpus.open(Path(config.data.prepared), "train")
    windows = corpus.windows(config.model.seq_len)
    records = lineage(entries)
    samples = config.batch.global_samples
    for expected, record in enumerate(records, start=1):
        step = record["step"]
        if step != expected:
            raise ReportError(f"step {expected} is missing from the lineage (step {step} follows step {expected - 1})")
        ids = sample_ids(
            fingerprint=corpus.fingerprint,
            seed=config.seed,
            windows=windows,
            start=(step - 1) * samples,
            count=samples,
        )
        if record["samples"] != samples or record["digest"] != f"{digest(ids):016x}":
            raise ReportError(
                f"step {step} of generation {record['generation']} used {record['samples']} samples with digest "
                f"{record['digest']}, wanted {samples} with {digest(ids):016x}"
            )
    undone = sum(entry["event"]["kind"] == "StepCompleted" for entry in entries) - len(records)
    return [
        f"{len(records)} steps of the committed lineage, {len(records) * samples} samples "
        f"({len(records) * samples / windows:.3f} epochs of {windows}): each used exactly once, in the order of "
        f"seed {config.seed}",
        f"{undone} further steps were undone by failures and are not part of it",
    ]


def finished(config: Config) -> bool:
    """Has the run of this name reached its last step already?"""
    entries = journal.read_file(config.run_dir() / "journal.jsonl")
    return bool(entries) and entries[-1]["phase"] == "finished" and entries[-1]["step"] >= config.steps


def failure_of(run_dir: Path) -> tuple[str, str]:
    """(failure, detail) of the newest attempt, empty if it did not fail."""
    path = run_dir / "journal.jsonl"
    failed = [
        action for entry in journal.read_file(path)[-20:] for action in entry["actions"] if action["kind"] == "FailRun"
    ]
    return (failed[-1]["failure"], failed[-1]["detail"]) if failed else ("", "")
