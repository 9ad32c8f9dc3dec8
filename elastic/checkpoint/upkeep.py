"""What a person does to a run's checkpoints, while it is alive or after its end: choose, remove, collect garbage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.checkpoint import garbage, pins
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.manifest import Manifest, check_present
from elastic.checkpoint.verify import damages
from elastic.config import ConfigError
from elastic.storage.errors import StorageError, StorageUnavailable
from elastic.storage.object_store import ObjectStore
from elastic.storage.store import DirectoryStore, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """objects: names and sizes in bytes, in the order of their deletion. unfinished: writes that never ended."""

    objects: dict[str, int]
    unfinished: list[str]


def manifest_of(entry: Entry) -> Manifest:
    assert entry.manifest is not None, entry
    return entry.manifest


def of_step(log: CommitLog, step: int) -> Entry:
    """The checkpoint of `step`, rather on the run's line than off it. ConfigError: there is none."""
    alive, line = log.checkpoints(), log.last().line
    found = [entry for entry in alive if manifest_of(entry).key.step == step]
    if not found:
        steps = ", ".join(str(manifest_of(entry).key.step) for entry in alive) or "none"
        raise ConfigError(f"there is no checkpoint of step {step}; those that exist are of steps {steps}")
    return max(found, key=lambda entry: (entry.number in line, entry.number))


def chosen(log: CommitLog, which: str) -> Entry:
    """The checkpoint that a person names: its step, or "entry:NUMBER". ConfigError: there is none, or more than one."""
    kind, _, number = which.rpartition(":")
    if kind not in ("", "entry") or not number.isdecimal():
        raise ConfigError(f"{which!r}: wanted a step, or entry:NUMBER as `elastic ckpt ls` shows it")
    if kind == "":
        of = [entry.number for entry in log.checkpoints() if manifest_of(entry).key.step == int(number)]
        if len(of) > 1:
            raise ConfigError(
                f"step {number} has {len(of)} checkpoints, log entries {', '.join(map(str, of))}: say which, as in "
                f"entry:{of[-1]}"
            )
        return of_step(log, int(number))
    alive = {entry.number: entry for entry in log.checkpoints()}
    if int(number) not in alive:
        there = ", ".join(map(str, alive)) or "none"
        raise ConfigError(f"log entry {number} is no checkpoint that exists; entries that are: {there}")
    return alive[int(number)]


def damage_at_a_glance(store: Store, entry: Entry) -> str:
    """Objects that are not there or have the wrong size, tables that changed: "" where none did. No data is read."""
    try:
        check_present(store, manifest_of(entry))
    except StorageUnavailable:
        raise
    except StorageError as error:
        return str(error)
    return ""


def remove(
    store: Store,
    log: CommitLog,
    entries: Sequence[Entry],
    who: str,
    progress: Callable[[str, int], Callable[[int], None]] = lambda what, nbytes: lambda more: None,
) -> None:
    """Takes the checkpoints back, then deletes their objects. A driver that is alive goes on: it only needs the newest.

    What the run would go on from is read first, every byte: it may be there in full size and damaged all the same.
    progress: of that, from a name and a size to what hears how many bytes more were read.
    CheckpointError: one is pinned, is what the run goes on from, or what stays is damaged; then nothing is removed.
    """
    numbers = {entry.number for entry in entries}
    if (stays := log.newest_entry()) and stays.number not in numbers:
        manifest = manifest_of(stays)
        what = f"step {manifest.key.step}, which stays"
        hears = progress(what, sum(record.nbytes for record in manifest.shards))
        if found := next(damages(store, manifest, hears), None):
            step = manifest.key.step
            raise CheckpointError(
                f"the checkpoint of step {step}, which would stay, is damaged: {found}; nothing removed"
            )

    def check() -> None:
        held = numbers & pins.pinned(store)
        newest = log.newest_entry()
        for entry in entries:
            step = manifest_of(entry).key.step
            if entry.number in held:
                raise CheckpointError(f"the checkpoint of step {step} is pinned; unpin it first, nothing was removed")
            if newest and entry.number == newest.number:
                raise CheckpointError(
                    f"the checkpoint of step {step} is the newest that is whole, from which the run goes on; go back "
                    "first (elastic train --resume STEP), nothing was removed"
                )

    log.take_back(numbers, who, check)
    named = {name for entry in log.checkpoints() for name in manifest_of(entry).objects()}
    garbage.delete(store, [name for e in entries for name in manifest_of(e).objects() if name not in named])


def collect(store: Store, log: CommitLog, *, unfinished_before_s: float, dry_run: bool) -> Collected:
    """Deletes, or with `dry_run` only finds, what lies there for nothing.

    An upload that the newest attempt may still commit is none of it. unfinished_before_s: Unix time; writes that began
    earlier and never ended.
    """
    attempt = log.last().attempt
    own = [manifest_of(entry).key for entry in log.checkpoints() if entry.attempt == attempt]
    sizes = store.list("data/")
    names = garbage.garbage(sizes, log, attempt=attempt, committed=max(own, default=None))
    unfinished: Sequence[str] = ()
    if isinstance(store, DirectoryStore | ObjectStore):
        unfinished = store.unfinished(unfinished_before_s, delete=not dry_run)
    if not dry_run:
        garbage.delete(store, names)
    return Collected(objects={name: sizes[name] for name in names}, unfinished=list(unfinished))
