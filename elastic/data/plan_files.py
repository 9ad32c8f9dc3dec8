"""Packing plans beside their shards: made when a corpus is prepared for a run, looked at, verified.

One file for each shard and seq_len, and a table of them for each split, written last. What is there already is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from elastic.data.packed import AGAIN, DOCUMENTS_MAX, PlanFile, Table, read_table, table_name
from elastic.data.packing import Plan, plan_of
from elastic.data.shards import SPLITS, Corpus, DataError, Manifest, Shard, Split, read_manifest
from elastic.data.writer import unwritable
from elastic.storage.files import replace_file, sync_directory

SUFFIX = ".pack"
_SAY_EVERY_S = 1.0


def make_plans(prepared: Path, split: Split, seq_len: int, *, progress: Callable[[str], None]) -> None:
    """The plan of each shard of `split` for windows of `seq_len`, in `prepared`; nothing where it is there.

    DataError: the corpus can't be read, or the directory can't be written and the corpus is too large to be packed
    anew by each process; for a smaller one that is said.
    """
    manifest = read_manifest(prepared)
    try:
        table = read_table(prepared, split, seq_len, manifest.fingerprint)
    except DataError:
        table = None  # it is written anew
    if table is not None and {file.file for file in table.files} <= {path.name for path in prepared.iterdir()}:
        return
    try:
        table = _make(prepared, split, seq_len, manifest, progress)
    except OSError as error:
        documents = sum(shard.documents for shard in manifest.splits.get(split, ()))
        if documents > DOCUMENTS_MAX:
            raise unwritable(prepared, error) from error
        why = error.strerror or error
        progress(f"can't write the packing plan into {prepared} ({why}): each process packs {split} for itself")
        return
    progress(f"packed {split} of {prepared} for seq_len {seq_len}: {_told(table)}")


def _make(prepared: Path, split: Split, seq_len: int, manifest: Manifest, progress: Callable[[str], None]) -> Table:
    """OSError: the directory can't be written."""
    corpus, shards = Corpus.open(prepared, split), manifest.splits[split]
    assert corpus.boundaries is not None
    said_s, files = time.monotonic(), list[PlanFile]()
    for number, shard in enumerate(shards):
        name = f"{shard.file.removesuffix('.arrow')}-{seq_len}{SUFFIX}"
        plan = _existing(prepared / name, shard, seq_len)
        if plan is None:
            plan = plan_of(corpus.boundaries.of_shard(number), seq_len)
            replace_file(prepared / name, plan.to_bytes(seq_len=seq_len, tokens=shard.tokens))
        tokens = int(plan.lengths.sum())
        files.append(PlanFile(file=name, shard_tokens=shard.tokens, bins=plan.bins, tokens=tokens))
        if time.monotonic() - said_s >= _SAY_EVERY_S and len(files) < len(shards):
            said_s = time.monotonic()
            progress(f"packed {len(files)} of {len(shards)} shards of {split}")
    sync_directory(prepared)
    table = Table(seq_len=seq_len, files=tuple(files))
    replace_file(prepared / table_name(split, seq_len), table.to_json(manifest.fingerprint).encode())
    sync_directory(prepared)
    return table


def _existing(path: Path, shard: Shard, seq_len: int) -> Plan | None:
    """Of an earlier, interrupted try, or of a corpus that has this shard too."""
    try:
        values = np.fromfile(path, dtype="<i8")
        return Plan.of_values(values, seq_len=seq_len, tokens=shard.tokens)
    except (OSError, ValueError):
        return None


def shard_of(name: str) -> str:
    """The shard that the plan file of this name belongs to."""
    return f"{name.removesuffix(SUFFIX).rpartition('-')[0]}.arrow"


def described(prepared: Path, manifest: Manifest) -> Iterator[str]:
    """A line for each table of this corpus."""
    for split, table in _tables(prepared, manifest):
        if isinstance(table, Table):
            yield f"packed      {split} for seq_len {table.seq_len}: {_told(table)}"


def damages(prepared: Path, manifest: Manifest) -> Iterator[str]:
    """One sentence for each plan that can't be read."""
    for split, table in _tables(prepared, manifest):
        if isinstance(table, DataError):
            yield str(table)
            continue
        if len(table.files) != len(manifest.splits[split]):
            yield f"{prepared / table_name(split, table.seq_len)} does not name a plan for each shard; {AGAIN}"
        for file in table.files:
            try:
                file.read(prepared, table.seq_len)
            except DataError as error:
                yield str(error)


def _tables(prepared: Path, manifest: Manifest) -> Iterator[tuple[Split, Table | DataError]]:
    """Each, or why it can't be read; without those of a corpus that was here before."""
    for split in SPLITS:
        lengths = [path.stem.rpartition("-")[2] for path in prepared.glob(f"packing-{split}-*.json")]
        for seq_len in sorted(int(length) for length in lengths if length.isdecimal()):
            try:
                table = read_table(prepared, split, seq_len, manifest.fingerprint)
            except DataError as error:
                yield split, error
                continue
            if table is not None:
                yield split, table


def _told(table: Table) -> str:
    return f"{table.bins:,} rows, {100 * table.filled:.1f} % filled"
