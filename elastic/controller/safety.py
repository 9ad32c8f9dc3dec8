"""Folds over reports that would be too chatty for the journal: which snapshot is safe, which is uploaded. Pure data.

Both only grow within a generation, so duplicated, late and reordered reports do no harm; a restarted coordinator
learns them again from the next reports. What `decide` sees, and the journal holds, is their conclusion.
"""

from __future__ import annotations

from collections import defaultdict

from elastic.events import Report, Uploaded
from elastic.plan import Assignment, SnapshotKey


class SafetyFold:
    """A snapshot is safe when each shard is sealed on its own host and lies at its partner (where it has one)."""

    def __init__(self, assignments: tuple[Assignment, ...]) -> None:
        self._generation = assignments[0].generation if assignments else 0
        self._hosts = {m.host: rank for rank, m in enumerate(assignments[0].members)} if assignments else {}
        self._missing_at_first = {("own", a.rank) for a in assignments}
        self._missing_at_first |= {("received", a.rank) for a in assignments if a.partner is not None}
        self._missing: dict[SnapshotKey, set[tuple[str, int]]] = {}
        self._newest: SnapshotKey | None = None

    def observe(self, report: Report) -> SnapshotKey | None:
        """The key that this report makes safe, if it is newer than all before."""
        if report.host not in self._hosts:
            return None
        found = None
        for holding in report.holdings:
            key = holding.key
            if not holding.sealed or key.generation != self._generation or (self._newest and key <= self._newest):
                continue
            missing = self._missing.setdefault(key, set(self._missing_at_first))
            missing.discard((holding.tier, holding.rank))
            if not missing and (found is None or key > found):
                found = key
        if found is not None:
            self._newest = found
            self._missing = {key: left for key, left in self._missing.items() if key > found}
        return found


class DiskFold:
    """Which ranks' shards of one snapshot lie on the disk of a node."""

    def __init__(self, key: SnapshotKey, attempt: int) -> None:
        self.key = key
        self._attempt = attempt
        self._ranks: set[int] = set()

    def observe(self, report: Report, world: int) -> bool:
        """Whether all of them do."""
        for held in report.holdings:
            if held.tier == "disk" and (held.key, held.attempt) == (self.key, self._attempt):
                self._ranks.add(held.rank)
        return len(self._ranks) == world


class UploadFold:
    """Shards in storage, by snapshot."""

    def __init__(self) -> None:
        self._found: dict[SnapshotKey, dict[int, Uploaded]] = defaultdict(dict)

    def observe(self, report: Report) -> None:
        for upload in report.uploads:
            self._found[upload.key][upload.rank] = upload

    def complete(self, key: SnapshotKey, world: int) -> tuple[Uploaded, ...] | None:
        found = self._found.get(key, {})
        return tuple(found[rank] for rank in range(world)) if len(found) == world else None

    def forget_before(self, key: SnapshotKey) -> None:
        self._found = defaultdict(dict, {k: v for k, v in self._found.items() if k >= key})
