"""journal, manifests -> proof that each sample of the lineage was used exactly once, in order. Reads no tokens.

Each step's record carries the count and the digest of the sample ids that the ranks really read. Both are computed anew
here from (fingerprints, seed, weights, skipped samples, step), as the step's attempt was configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.config import Config, Place
from elastic.data.feed import Feed, feed_of, open_corpora
from elastic.data.order import digest
from elastic.report import ReportError, config_of, entries_of
from elastic.telemetry.lineage import lineage


def verify_data(place: Place) -> list[str]:
    """The proof's lines; ReportError: it fails."""
    entries = entries_of(place)
    records = lineage(entries)
    brought = _brought_step(entries)
    for expected, record in enumerate(records, start=brought + 1):
        if record["step"] != expected:
            raise ReportError(
                f"step {expected} is missing from the lineage, step {record['step']} follows the one before"
            )
    attempts = sorted({record["attempt"] for record in records})
    for attempt in attempts:
        _verify_attempt(config_of(place, attempt), [r for r in records if r["attempt"] == attempt])
    samples = sum(record["samples"] for record in records)
    undone = sum(entry["event"]["kind"] == "StepCompleted" for entry in entries) - len(records)
    config = config_of(place, attempts[-1] if attempts else None)
    feed = feed_of(config, open_corpora(config.data, "train"))
    windows = sum(order.windows for order in feed.orders)
    return [
        f"{len(records)} steps of the committed lineage, {samples} samples "
        f"({samples / windows:.3f} epochs of {windows}): each used exactly once, in the order of "
        f"seed {config.seed}",
        *_source_lines(config, feed, (brought + len(records)) * config.batch.global_samples),
        *_skip_lines(config),
        f"{undone} further steps were undone, by failures or by going back, and are not part of it",
        *([f"the {brought} steps before came with another run's checkpoint; their proof is there"] if brought else []),
        *_changes(entries, attempts),
    ]


def verify_same(place: Place, other: Place) -> list[str]:
    """Proof that both runs used the same samples in the same steps, as far as both came. ReportError: they did not."""
    ours, theirs = (lineage(entries_of(one)) for one in (place, other))
    pairs = {record["step"]: record for record in theirs}
    shared = [(record, pairs[record["step"]]) for record in ours if record["step"] in pairs]
    if not shared:
        raise ReportError(f"{place.url} and {other.url} have no completed step in common")
    for mine, its in shared:
        if (mine["samples"], mine["digest"]) != (its["samples"], its["digest"]):
            raise ReportError(
                f"step {mine['step']} used {mine['samples']} samples with digest {mine['digest']}, in {other.url} "
                f"{its['samples']} with {its['digest']}"
            )
    first, last = shared[0][0]["step"], shared[-1][0]["step"]
    return [f"steps {first} to {last} used the same samples as those of {other.url}: {len(shared)} steps, one order"]


def _verify_attempt(config: Config, records: Sequence[dict[str, Any]]) -> None:
    feed = feed_of(config, open_corpora(config.data, "train"))
    samples = config.batch.global_samples
    for record in records:
        step = record["step"]
        ids = feed.run((step - 1) * samples, samples)
        if record["samples"] != samples or record["digest"] != f"{digest(ids):016x}":
            raise ReportError(
                f"step {step} of generation {record['generation']} used {record['samples']} samples with digest "
                f"{record['digest']}, wanted {samples} with {digest(ids):016x}"
            )


def _source_lines(config: Config, feed: Feed, position: int) -> list[str]:
    if feed.mixture is None:
        return []
    told = [
        f"{name} {used} samples ({used / order.windows:.3f} epochs)"
        for name, order, used in zip(config.data.parts(), feed.orders, feed.used(position))
    ]
    return [f"by source: {', '.join(told)}"]


def _skip_lines(config: Config) -> list[str]:
    return [
        f"samples {one.first} to {one.stop - 1} of the order were never used: {one.why or 'skipped by configuration'}"
        for one in config.data.skip
    ]


def _starts(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry["event"] for entry in entries if entry["event"]["kind"] == "RunStarted"]


def _brought_step(entries: Sequence[dict[str, Any]]) -> int:
    """The step of the checkpoint that the run's first attempt began from: another run's. 0: from the seed."""
    durable = next((event["durable"] for event in _starts(entries)), None)
    return int(durable["key"]["step"]) if durable else 0


def _changes(entries: Sequence[dict[str, Any]], attempts: Sequence[int]) -> list[str]:
    """What the lineage's attempts changed: after another batch, seed or corpus a sample may be used once more."""
    return [
        f"attempt {event['attempt']} changed {', '.join(event['changes'])}"
        for event in _starts(entries)
        if event.get("changes") and event["attempt"] in attempts
    ]
