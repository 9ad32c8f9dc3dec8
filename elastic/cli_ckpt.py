"""`elastic ckpt`: what a person does with a run's checkpoints. Arguments, and what is printed; `cli` is the entry.

Each command imports its room when it runs. Another module's commands join the group through `add`.
"""

from __future__ import annotations

import argparse
import getpass
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elastic.config import ConfigError, ElasticError

if TYPE_CHECKING:
    from elastic.checkpoint.log import CommitLog, Entry
    from elastic.storage.store import Store

DONE, FAILED = 0, 1  # exit codes, see cli
UNFINISHED_AFTER_S = 86_400.0  # no upload takes a day
NAMES_SHOWN = 20


class NoCheckpoints(ElasticError):
    """There is no commit log where the run should be."""


def add(commands: Any, *, further: Sequence[Callable[[Any], None]] = ()) -> None:
    """`further`: each adds its command to the group, as those here do (see `add_command`)."""
    text = "list, verify, pin, remove and compare a run's checkpoints"
    group = commands.add_parser("ckpt", help=text, description=text)
    inner = group.add_subparsers(required=True, metavar="COMMAND")
    for plug in (*COMMANDS, *further):
        plug(inner)


def add_command(inner: Any, name: str, command: Callable[..., int], text: str) -> argparse.ArgumentParser:
    """One command of the group on one RUN, which `command` gets with the parsed arguments."""
    sub: argparse.ArgumentParser = inner.add_parser(name, help=text, description=text)
    sub.add_argument("run", metavar="RUN", help="the run's name, its directory, or its storage's URL")
    sub.set_defaults(command=lambda parsed: command(parsed, *opened(parsed.run)))
    return sub


def opened(run: str) -> tuple[Store, CommitLog, list[str]]:
    """The run's storage and log, and what the log complains of. NoCheckpoints: nothing of a run is there."""
    from elastic.checkpoint.log import CommitLog
    from elastic.report import place_of
    from elastic.storage.store import store_at

    place = place_of(run)
    store, complaints = store_at(place), list[str]()
    if not store.list("log/"):
        raise NoCheckpoints(f"{place.url} holds no commit log; give a run's name, its directory or its storage's URL")
    return store, CommitLog(store, complaints.append), complaints


def _person() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _add_json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="for programs")


# ---------------------------------------------------------------- ls


def _add_ls(inner: Any) -> None:
    _add_json(add_command(inner, "ls", _ls, "the checkpoints that count, newest last"))


def _ls(parsed: argparse.Namespace, store: Store, log: CommitLog, complaints: list[str]) -> int:
    rows = _rows(store, log, now_s=time.time())
    if parsed.json:
        print(json.dumps({"checkpoints": rows, "complaints": complaints}, indent=1))
    else:
        print("\n".join([*_table(rows), *(f"damaged     {line}" for line in complaints)]))
    return DONE


def _rows(store: Store, log: CommitLog, *, now_s: float) -> list[dict[str, Any]]:
    from elastic.checkpoint import pins
    from elastic.checkpoint.upkeep import damage_at_a_glance, manifest_of

    entries, line, pinned = log.checkpoints(), log.last().line, pins.pinned(store)
    rows = []
    for entry in entries:
        manifest = manifest_of(entry)
        pin = pins.read(store, entry.number) if entry.number in pinned else None
        rows.append(
            {
                "number": entry.number,
                "step": manifest.key.step,
                "attempt": entry.attempt,
                "generation": manifest.key.generation,
                "world": manifest.world,
                "mesh": dict(manifest.mesh),
                "nbytes": sum(record.nbytes for record in manifest.shards),
                "age_s": round(now_s - entry.written_s, 1) if entry.written_s else None,
                "metrics": dict(manifest.metrics),
                "line": entry.number in line,
                "pin": asdict(pin) if pin else None,
                "damage": damage_at_a_glance(store, entry),
            }
        )
    return [row for row, entry in zip(rows, entries) if not row["damage"] or _counts(log, entry)]


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no checkpoint"]
    lines = [("step", "entry", "attempt.generation", "mesh", "size", "age", "held-out", "")]
    for row in rows:
        loss = row["metrics"].get("held_out")
        flags = ["line" if row["line"] else "aside: the run went back from it"]
        flags += [f"pinned by {row['pin']['who']}: {row['pin']['why']}"] if row["pin"] else []
        flags += [f"DAMAGED: {row['damage']}"] if row["damage"] else []
        lines.append(
            (
                str(row["step"]),
                str(row["number"]),
                f"{row['attempt']}.{row['generation']}",
                " ".join(f"{axis} {size}" for axis, size in row["mesh"].items()),
                size(row["nbytes"]),
                age(row["age_s"]),
                "" if loss is None else f"{loss:.4f}",
                "; ".join(flags),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]


def size(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def age(age_s: float | None) -> str:
    if age_s is None:
        return ""
    for unit, factor in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if age_s >= 2 * factor:
            return f"{age_s / factor:.0f} {unit}"
    return f"{age_s:.0f} s"


# ---------------------------------------------------------------- verify


def _add_verify(inner: Any) -> None:
    sub = add_command(
        inner, "verify", _verify, "hold every byte against its checksum; exit 1 where one is damaged or there is none"
    )
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="default: the newest")
    which.add_argument("--all", action="store_true", help="every checkpoint that counts")
    _add_json(sub)


def _verify(parsed: argparse.Namespace, store: Store, log: CommitLog, complaints: list[str]) -> int:
    from elastic.checkpoint.upkeep import of_step

    entries = log.checkpoints() if parsed.all else log.line()[:1]
    if parsed.step is not None:
        entries = [of_step(log, parsed.step)]
    results = [_verified(store, log, entry) for entry in entries]
    damaged = bool(complaints) or any(result["damages"] for result in results)
    if parsed.json:
        print(json.dumps({"checkpoints": results, "complaints": complaints}, indent=1))
        return DONE if entries and not damaged else FAILED
    for result in results:
        told = f"{result['nbytes']:,} bytes of {result['tensors']} tensors verified"
        told = "damaged" if result["damages"] else "retired meanwhile" if result["retired"] else told
        print(f"step {result['step']} (log entry {result['number']}): {told}")
        print("".join(f"  {line}\n" for line in result["damages"]), end="")
    print("".join(f"log: {line}\n" for line in complaints), end="")
    if not entries:
        print("no checkpoint")
    return DONE if entries and not damaged else FAILED


def _verified(store: Store, log: CommitLog, entry: Entry) -> dict[str, Any]:
    from elastic.checkpoint.reader import Reader
    from elastic.checkpoint.upkeep import manifest_of
    from elastic.checkpoint.verify import damages
    from elastic.storage.errors import ObjectMissing

    manifest = manifest_of(entry)
    nbytes = sum(record.nbytes for record in manifest.shards)
    found = list(damages(store, manifest, _progress(f"step {manifest.key.step}", nbytes)))
    try:
        tensors = 0 if found else len(Reader(store, manifest).tensors)
    except ObjectMissing as error:
        found, tensors = [str(error)], 0
    retired = bool(found) and not _counts(log, entry)  # a live run deletes what it retires
    return {
        "number": entry.number,
        "step": manifest.key.step,
        "nbytes": nbytes,
        "tensors": tensors,
        "damages": [] if retired else found,
        "retired": retired,
    }


def _counts(log: CommitLog, entry: Entry) -> bool:
    last = log.last()
    return entry.number in (*last.line, *last.aside)


def _progress(what: str, nbytes: int) -> Callable[[int], None]:
    """One line that is redrawn, where a person looks."""
    done = 0

    def show(more: int) -> None:
        nonlocal done
        done += more
        if sys.stderr.isatty():
            end = "\r" if done < nbytes else "\r\033[K"
            print(f"{what}: {size(done)} of {size(nbytes)}", end=end, file=sys.stderr, flush=True)

    return show


# ---------------------------------------------------------------- rm, pin, unpin, gc


def _add_rm(inner: Any) -> None:
    sub = add_command(inner, "rm", _rm, "remove checkpoints; never the newest whole one nor a pinned one")
    sub.add_argument("which", metavar="STEP", nargs="+", help="or entry:NUMBER, where a step has two")


def _rm(parsed: argparse.Namespace, store: Store, log: CommitLog, _: list[str]) -> int:
    from elastic.checkpoint.upkeep import chosen, manifest_of, remove

    entries = [chosen(log, which) for which in dict.fromkeys(parsed.which)]
    remove(store, log, entries, _person(), _progress)
    for entry in entries:
        manifest = manifest_of(entry)
        nbytes = sum(record.nbytes for record in manifest.shards)
        print(f"removed the checkpoint of step {manifest.key.step} (log entry {entry.number}), {size(nbytes)}")
    return DONE


def _add_pin(inner: Any) -> None:
    sub = add_command(inner, "pin", _pin, "keep a checkpoint whatever retention says, until it is unpinned")
    sub.add_argument("step", metavar="STEP", type=int)
    sub.add_argument("--why", default="by hand", help="the reason, for whoever finds the pin")


def _pin(parsed: argparse.Namespace, store: Store, log: CommitLog, _: list[str]) -> int:
    from elastic.checkpoint import pins
    from elastic.checkpoint.upkeep import of_step

    entry = of_step(log, parsed.step)
    new = pins.pin(store, log, entry.number, pins.Pin(who=_person(), why=parsed.why, when_s=round(time.time(), 3)))
    print(f"step {parsed.step} (log entry {entry.number}) {'is pinned' if new else 'was pinned already'}")
    return DONE


def _add_unpin(inner: Any) -> None:
    sub = add_command(inner, "unpin", _unpin, "take a pin away; retention decides again at the next checkpoint")
    sub.add_argument("step", metavar="STEP", type=int)


def _unpin(parsed: argparse.Namespace, store: Store, log: CommitLog, _: list[str]) -> int:
    from elastic.checkpoint import pins
    from elastic.checkpoint.upkeep import manifest_of

    pinned = [entry for entry in log.checkpoints() if entry.number in pins.pinned(store)]
    chosen = [entry for entry in pinned if manifest_of(entry).key.step == parsed.step]
    if not chosen:
        steps = ", ".join(str(manifest_of(entry).key.step) for entry in pinned) or "none"
        raise ConfigError(f"no checkpoint of step {parsed.step} is pinned; those that are: {steps}")
    for entry in chosen:
        pins.unpin(store, entry.number)
        print(f"step {parsed.step} (log entry {entry.number}) is not pinned any more")
    return DONE


def _add_gc(inner: Any) -> None:
    sub = add_command(
        inner, "gc", _gc, "delete what no checkpoint needs: leftovers of uploads that were never committed"
    )
    sub.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    _add_json(sub)


def _gc(parsed: argparse.Namespace, store: Store, log: CommitLog, complaints: list[str]) -> int:
    from elastic.checkpoint.upkeep import collect

    before_s = time.time() - UNFINISHED_AFTER_S
    found = collect(store, log, unfinished_before_s=before_s, dry_run=parsed.dry_run)
    if parsed.json:
        print(json.dumps({**asdict(found), "dry_run": parsed.dry_run, "complaints": complaints}, indent=1))
        return DONE
    names = [*found.objects, *(f"{name} (unfinished)" for name in found.unfinished)]
    done = "would delete" if parsed.dry_run else "deleted"
    more = [f"  and {len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    nbytes = size(sum(found.objects.values()))
    told = f"{done} {len(found.objects)} objects, {nbytes}, and {len(found.unfinished)} unfinished uploads"
    print("\n".join([told, *(f"  {name}" for name in names[:NAMES_SHOWN]), *more]))
    print("".join(f"log: {line}\n" for line in complaints), end="")
    return DONE


# ---------------------------------------------------------------- diff


def _add_diff(inner: Any) -> None:
    text = "what two checkpoints differ in: RUN STEP STEP, or RUN@STEP RUN@STEP"
    sub = inner.add_parser("diff", help=text, description=text)
    sub.add_argument("which", metavar="RUN STEP STEP | RUN@STEP RUN@STEP", nargs="+")
    sub.add_argument("--values", action="store_true", help="compare the tensors' values too, which reads all of them")
    _add_json(sub)
    sub.set_defaults(command=_diff)


def _diff(parsed: argparse.Namespace) -> int:
    from elastic.checkpoint import diff
    from elastic.checkpoint.reader import Reader
    from elastic.checkpoint.upkeep import manifest_of
    from elastic.resume import flat, saved_config

    sides = [_side(run, step) for run, step in _sides(parsed.which)]
    manifests = [manifest_of(entry) for _, entry in sides]
    facts = diff.differences(*map(diff.facts, manifests))
    configs = [flat(saved_config(store, attempt=entry.attempt)) for store, entry in sides]
    a, b = (Reader(store, manifest) for (store, _), manifest in zip(sides, manifests))
    found = {
        "facts": facts,
        "config": diff.differences(*configs) if all(configs) else {},
        "tensors": list(diff.tensors_differ(a, b)),
        "values": [asdict(tensor) for tensor in diff.values_differ(a, b)] if parsed.values else None,
    }
    print(json.dumps(found, indent=1) if parsed.json else "\n".join(_diff_lines(found)))
    return DONE


def _sides(which: Sequence[str]) -> list[tuple[str, int]]:
    if len(which) == 3 and which[1].isdecimal() and which[2].isdecimal():
        return [(which[0], int(which[1])), (which[0], int(which[2]))]
    split = [text.rpartition("@") for text in which]
    if len(which) == 2 and all(run and step.isdecimal() for run, _, step in split):
        return [(run, int(step)) for run, _, step in split]
    raise ConfigError(f"diff {' '.join(which)}: wanted RUN STEP STEP, or RUN@STEP RUN@STEP")


def _side(run: str, step: int) -> tuple[Store, Entry]:
    from elastic.checkpoint.upkeep import of_step

    store, log, _ = opened(run)
    return store, of_step(log, step)


def _diff_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{name:<11} {a} -> {b}" for name, (a, b) in found["facts"].items()]
    lines += [f"config      {key} {a} -> {b}" for key, (a, b) in found["config"].items()]
    lines += [f"tensor      {name} {a or 'not there'} -> {b or 'not there'}" for name, a, b in found["tensors"]]
    if not found["tensors"]:
        lines.append("tensors     the same names, shapes and dtypes")
    for value in found["values"] or ():
        lines.append(
            f"values      {value['name']}: {value['differing']:,} of {value['elements']:,} elements differ, by at most "
            f"{value['max_abs']:.6g}"
        )
    if found["values"] == []:
        lines.append("values      every bit is the same")
    return lines


COMMANDS: tuple[Callable[[Any], None], ...] = (
    _add_ls,
    _add_verify,
    _add_pin,
    _add_unpin,
    _add_rm,
    _add_gc,
    _add_diff,
)
