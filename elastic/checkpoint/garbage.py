"""Objects under data/ that no checkpoint names and that none can name any more: which, and how they are deleted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import REQUESTS_AT_ONCE
from elastic.plan import SnapshotKey
from elastic.storage.store import Store

INDEX = "/index.json"


def garbage(names: Iterable[str], log: CommitLog, *, attempt: int, committed: SnapshotKey | None) -> list[str]:
    """Of `names` what can go: of checkpoints that do not count any more, and uploads that nobody will commit.

    attempt, committed: one that has claimed the log, and its newest checkpoint. What attempts before it left behind is
    fenced; what it uploaded before `committed` is too old to be committed still. Anything newer, and whatever else lies
    there, stays. Nothing that stopped counting ever counts again, so it does not matter what is committed meanwhile.
    """
    last, entries = log.last(), log.checkpoints()
    if unread := {*last.line, *last.aside} - {entry.number for entry in entries}:
        numbers = ", ".join(map(str, sorted(unread)))
        log.complain(f"no checkpoint data is deleted: log entries {numbers} count and can't be read")
        return []
    named = {name for entry in entries if entry.manifest for name in entry.manifest.objects()}
    until = (attempt, committed.generation, committed.step) if committed else (attempt, 0, 0)
    return [name for name in names if name not in named and (at := _upload_of(name)) is not None and at < until]


def _upload_of(name: str) -> tuple[int, int, int] | None:
    """(attempt, generation, step) of data/ATTEMPT-GENERATION-STEP/...; None: not ours, and never touched."""
    top, _, rest = name.partition("/")
    parts = rest.partition("/")[0].split("-")
    if top != "data" or len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return None
    attempt, generation, step = map(int, parts)
    return attempt, generation, step


def delete(store: Store, names: Sequence[str]) -> None:
    """First what makes the rest readable: indices, then tables, then data; each kind before the next."""
    kinds: tuple[list[str], ...] = ([], [], [])
    for name in names:
        kinds[0 if name.endswith(INDEX) else 1 if name.endswith(".json") else 2].append(name)
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for kind in kinds:
            for _ in pool.map(store.delete, kind):
                pass
