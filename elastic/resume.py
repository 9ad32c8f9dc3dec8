"""From what a run goes on, and whether its configuration may: decided before anything starts, and told.

The same decision is made by the command line, for its sentences, and by the coordinator, which claims it in the commit
log. `bring` begins a run with another run's checkpoint.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from elastic import segments
from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.manifest import About, Manifest, build
from elastic.checkpoint.shard import of_object, table_object
from elastic.checkpoint.upkeep import manifest_of, of_step
from elastic.config import BUILT_IN_TASK, Config, ConfigError, Place
from elastic.config_sections import Model
from elastic.data.skips import Skips
from elastic.events import Uploaded
from elastic.model.shape import tensor_sizes
from elastic.plan import Stretch
from elastic.storage.errors import ObjectMissing
from elastic.storage.store import Store, open_store, store_at
from elastic.telemetry.lineage import lineage

FIRST_ENTRY = "log/00000001.json"  # never deleted, and no two are the same

# What may differ between the attempts of a run. The rest is what is computed; a new key is that until it stands here.
SAFE = (
    "run",
    "storage",
    "storage_options",
    "directory",
    "hosts_min",
    "hosts_max",
    "use_gpu",
    "task_path",  # directories of this machine
    "sizes",  # they follow from the task, or are room
    "warm_standby",
    "max_failures",
    "schedule",
    "batch.micro_samples",
    "data.corpus_options",
    "data.prepared_options",
    "data.cache",
    "data.cache_bytes_max",
    "data.ahead_s",
    "data.ahead_bytes_max",
    "data.prepared",  # a place; what lies there is known by its fingerprint
    "evaluation",
    "snapshot",
    "checkpoint",
    "control",
    "policies",
    "admission",
    "local",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What was asked. point: auto, never, a step, or another run (name, directory, URL). allowed: keys that may have
    changed though they are not SAFE; a section's name allows all its keys, "all" every one."""

    point: str = "auto"
    allowed: tuple[str, ...] = ()

    def allows(self, key: str) -> bool:
        return any(given == "all" or key == given or key.startswith(f"{given}.") for given in self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the attempt begins. `origin`: "from ...", and why from nothing newer. `step`: 0 from the seed. `base`: the
    log entry to go back to, None: the newest. `other`: the run whose checkpoint is to be brought here first."""

    origin: str
    step: int = 0
    base: int | None = None
    other: str = ""
    changes: tuple[str, ...] = ()


def choose(config: Config, asked: Resume) -> Start:
    """ConfigError: the run, the step or the other run does not fit what was asked, or a change is not allowed."""
    place = config.place()
    if asked.point == "auto" or asked.point.isdecimal():
        return _go_on(config, asked)
    if exists(place):
        wanted = "only a new run can begin" if asked.point == "never" else f"it can't begin from {asked.point}"
        raise ConfigError(
            f"--resume {asked.point}: {place.url} holds a run already, so {wanted}; "
            f"give this one another name (--set run=NAME), or go on with it (--resume auto)"
        )
    if asked.point == "never":
        return Start(origin="from the seed")
    return _begin_from(config, asked)


def exists(place: Place) -> bool:
    """Has a run of this name begun? Prepared objects without a log entry are no run."""
    return segments.exist(place) or bool(store_at(place).list("log/"))


# ---------------------------------------------------------------- this run


def _go_on(config: Config, asked: Resume) -> Start:
    store, damaged = store_at(config.place()), list[str]()
    log = CommitLog(store, damaged.append)
    entry = log.newest_entry() if asked.point == "auto" else _of_step(config, log, int(asked.point))
    if entry is None:
        why = ["no earlier attempt committed a checkpoint"] if exists(config.place()) else []
        return Start(origin="; ".join(["from the seed", *damaged, *why]))
    manifest = manifest_of(entry)
    changes = _check(config, manifest, saved_config(store), asked)
    other = f" of run {manifest.about.run}" if manifest.about.run != config.run else ""
    told = f"from the checkpoint of step {manifest.key.step}{other} (log entry {entry.number}, attempt {entry.attempt})"
    newer = _newer(config, log, entry) if asked.point == "auto" else _given_up(log, entry)
    base = None if asked.point == "auto" else entry.number
    return Start(origin="; ".join([told, *damaged, *newer]), step=manifest.key.step, base=base, changes=changes)


def _of_step(config: Config, log: CommitLog, step: int) -> Entry:
    try:
        return of_step(log, step)
    except ConfigError as error:
        raise ConfigError(
            f"--resume {step}: run {config.run}: {error} (checkpoint.keep is {config.checkpoint.keep})"
        ) from error


def _newer(config: Config, log: CommitLog, entry: Entry) -> Iterator[str]:
    """What there is, or was, that is newer."""
    line = {other.number for other in log.line()}
    if left := [other for other in log.checkpoints() if other.number > entry.number and other.number not in line]:
        yield f"the run went back from its checkpoints of steps {_steps(left)}"
    if stretches := disk_line(config, log):
        yield f"or from a newer one, up to step {stretches[-1].last}, if the nodes' disks have it whole"
        return
    records = lineage(segments.entries(config.place()))
    if records and records[-1]["attempt"] >= log.branch() and records[-1]["step"] > manifest_of(entry).key.step:
        last = records[-1]["step"]
        yield f"step {last} was the last completed, its state was only in the memory of hosts that are gone"


def disk_line(config: Config, log: CommitLog) -> tuple[Stretch, ...]:
    """Which snapshots that earlier attempts wrote to the nodes' disks the run may go on from, in the order of steps.

    Only what its present state descends from, beyond the newest checkpoint and without a gap in the journal: so that
    each sample that was used has its record. Nothing where the run went back, also from a checkpoint that is damaged.
    Without any checkpoint nothing, too: there is none to hold configuration and data against.
    """
    if not config.snapshot.disk:
        return ()
    entry, found = log.newest_entry(), list[Stretch]()
    if entry is None or entry != log.line()[0]:
        return ()
    skipped = saved_config(store_at(config.place())).get("data", {}).get("skip", [])
    if skipped != [one.model_dump() for one in config.data.skip]:
        return ()  # what is added now was held against the checkpoint's position, not against theirs
    step, branch = manifest_of(entry).key.step, log.branch()
    for record in lineage(segments.entries(config.place())):
        if record["step"] <= step:
            continue
        if record["step"] != step + 1 or record["attempt"] < branch or record["step"] > config.steps:
            break
        step, attempt, generation = record["step"], record["attempt"], record["generation"]
        if found and (found[-1].attempt, found[-1].generation) == (attempt, generation):
            found[-1] = replace(found[-1], last=step)
        else:
            found.append(Stretch(attempt=attempt, generation=generation, first=step, last=step))
    return tuple(found)


def disk_folder(config: Config, store: Store) -> str:
    """Of the run, on the nodes' disks: its name, and what tells it from an earlier run of that name. "": none."""
    if not config.snapshot.disk:
        return ""
    try:
        return f"{config.run}-{hashlib.sha256(store.get(FIRST_ENTRY)).hexdigest()[:12]}"
    except ObjectMissing:
        return ""  # somebody deleted it: then it is as safe as it can be, without


def _given_up(log: CommitLog, entry: Entry) -> Iterator[str]:
    if left := [other for other in reversed(log.line()) if other.number > entry.number]:
        yield f"its checkpoints of steps {_steps(left)} are given up, and deleted with the next one"


def _steps(entries: Sequence[Entry]) -> str:
    return ", ".join(str(manifest_of(entry).key.step) for entry in entries) or "none"


# ---------------------------------------------------------------- another run


def _begin_from(config: Config, asked: Resume) -> Start:
    where = _locate(config, asked.point)
    store = _store_of_other(config, where)
    entry = CommitLog(store).newest_entry()
    if entry is None:
        raise ConfigError(f"--resume {asked.point}: {where} has no checkpoint; give a run that has one")
    manifest = manifest_of(entry)
    return Start(
        origin=f"from step {manifest.key.step} of run {manifest.about.run} ({where}, log entry {entry.number})",
        step=manifest.key.step,
        other=where,
        changes=_check(config, manifest, saved_config(store), asked),
    )


def _locate(config: Config, point: str) -> str:
    """The other run's storage: a URL, a directory, or a run's name beside this one."""
    if "://" in point:
        return point
    for directory in (Path(point), Path(config.storage) / point):
        if (directory / "log").is_dir():
            return str(directory)
    beside = config.model_copy(update={"run": point}).place()
    if "://" in beside.url and exists(beside):
        return beside.url
    there = [path.parent.name for path in Path(config.storage).glob("*/log")]
    close = difflib.get_close_matches(point, there, n=1)
    hint = f"did you mean {close[0]}?" if close else f"runs in {config.storage}: {', '.join(sorted(there)) or 'none'}"
    raise ConfigError(f"--resume {point!r}: wanted auto, never, a step, or a run's name, directory or URL; {hint}")


def _store_of_other(config: Config, where: str) -> Store:
    return open_store(where, config.storage_options)


def settle(config: Config, asked: Resume, start: Start) -> Resume:
    """Brings the other run's checkpoint here, where that was chosen. Returns what is left to ask the coordinator."""
    if not start.other:
        return asked
    bring(config, start)
    return replace(asked, point="auto")


def bring(config: Config, start: Start) -> None:
    """Copy the other run's newest checkpoint, verified, and make it the first entry of this run's log, its
    configuration what this one is compared with. Killed at any moment and called again it does the same: without that
    entry this run does not exist."""
    source, target = _store_of_other(config, start.other), store_at(config.place())
    manifest = CommitLog(source).newest()
    assert manifest is not None, start
    folder = f"data/1-{manifest.key.generation}-{manifest.key.step}"
    uploads = []
    for record in manifest.shards:
        name = f"{folder}/{record.rank}.bin"
        table, data = source.get(table_object(record.object)), source.get(record.object)
        shard = of_object(table, name=table_object(record.object))
        shard.verify(np.frombuffer(data, dtype=np.uint8), [(0, shard.nbytes)], where=record.object)
        target.put(name, data)
        target.put(table_object(name), table)
        uploads.append(Uploaded(key=manifest.key, rank=record.rank, object=name, nbytes=record.nbytes))
    brought = build(
        target,
        uploads,
        about=manifest.about,
        attempt=1,
        key=manifest.key,
        samples=manifest.samples,
        metrics=manifest.metrics,
    )
    if saved := saved_config(source):
        target.put(_config_object(None), yaml.safe_dump(saved, sort_keys=False).encode())
    CommitLog(target).commit(1, brought)


# ---------------------------------------------------------------- its configuration


def save_config(config: Config, store: Store, *, attempt: int | None = None) -> None:
    """What `attempt` computes, for the proof of its samples; None: what the next attempt is compared with."""
    store.put(_config_object(attempt), yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode())


def saved_config(store: Store, *, attempt: int | None = None) -> dict[str, Any]:
    """The inverse, as plain values; empty where it is not known (an older elastic did not save it by attempt)."""
    try:
        return dict(yaml.safe_load(store.get(_config_object(attempt))))
    except ObjectMissing:
        return {}


def _config_object(attempt: int | None) -> str:
    return "config.yaml" if attempt is None else f"config/{attempt:08d}.yaml"


def about(config: Config, fingerprint: str) -> About:
    """What the checkpoints of an attempt with `config` over the dataset of `fingerprint` say of themselves."""
    safe = Resume(allowed=SAFE)
    computed = {key: value for key, value in flat(config.model_dump(mode="json")).items() if not safe.allows(key)}
    return About(
        run=config.run,
        fingerprint=fingerprint,
        seed=config.seed,
        config_sha256=hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest(),
        code_sha256=_code_sha256(config),
        elastic=version("elastic"),
    )


def _code_sha256(config: Config) -> str:
    """Of the source of elastic and, where the task is a file or lies in one of `task_path`, of that."""
    package, module = Path(__file__).parent, config.task.partition(":")[0]
    own = Path(module) if module.endswith(".py") else Path(*module.split(".")).with_suffix(".py")
    found = sum([[Path(folder, own)] for folder in ("", *config.task_path)], sorted(package.rglob("*.py")))
    digest = hashlib.sha256()
    for path in found:
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _check(config: Config, manifest: Manifest, saved: Mapping[str, Any], asked: Resume) -> tuple[str, ...]:
    """The changes that were made and allowed. ConfigError: one line for each that is not, or can't be."""
    problems, allowed = [], []
    step = manifest.key.step
    skipped = flat(saved).get("data.skip", [])
    position = Skips(ranges=tuple((one["first"], one["stop"]) for one in skipped)).number(manifest.samples)
    later = f" (at its end a range can be added that begins at {position} or later)"
    if step > config.steps:
        problems.append(f"steps {config.steps} is below {step}, where the run goes on; raise it, or --resume a STEP")
    for key, (before, now) in _changes(saved, config).items():
        if key == "data.skip" and _only_later(before, now, position):
            allowed.append(f"{key}: {len(now) - len(before)} ranges were added")
        elif asked.allows(key):
            allowed.append(f"{key} {before} -> {now}")
        else:
            problems.append(
                f"{key} is {now}, the checkpoint of step {step} was trained with {before}: that changes what is "
                f"computed; keep it{later if key == 'data.skip' else ''}, name a new run (--set run=NAME), or give "
                f"--allow-change {key}"
            )
    sizes, wanted = _sizes(saved), _sizes(config.model_dump())
    if saved and sizes and wanted and sizes != wanted:
        unlike = ", ".join(f"{name} {size} -> {wanted[name]}" for name, size in sizes.items() if size != wanted[name])
        problems = [f"the checkpoint of step {step} can't be read into another model ({unlike}); name a new run"]
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(allowed)


def _only_later(before: Sequence[Any], now: Sequence[Any], position: int) -> bool:
    """Whether ranges were only added to the skipped samples, and begin at `position` or later."""
    return [*now[: len(before)]] == [*before] and all(one["first"] >= position for one in now[len(before) :])


def _changes(saved: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """(before, now) by key, of all that is not SAFE. What a saved file of another version lacks had the default."""
    if not saved:
        return {}
    before = _without_places({**flat(Config().model_dump(mode="json")), **flat(saved)})
    now = _without_places(flat(config.model_dump(mode="json")))
    safe = Resume(allowed=SAFE)
    return {key: (before[key], now[key]) for key in now if before[key] != now[key] and not safe.allows(key)}


def _without_places(values: dict[str, Any]) -> dict[str, Any]:
    """Where a source was prepared does not matter, as with `data.prepared`."""
    sources = [{**source, "prepared": ""} for source in values["data.sources"]]
    return {**values, "data.sources": sources}


def flat(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """A configuration by dotted key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{section}{name}.") if isinstance(value, Mapping) else {section + name: value}
    return found


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of the built-in model must agree on; empty for other tasks and files not understood."""
    if raw.get("task") != BUILT_IN_TASK:
        return {}
    try:
        model = Model.model_validate(raw["model"])
    except (ValidationError, KeyError):
        return {}
    return {**tensor_sizes(model), "bits": 64 if raw.get("precision") == "float64" else 32}
