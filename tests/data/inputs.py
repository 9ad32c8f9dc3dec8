"""Corpora of each kind for tests, and what was prepared of them, read back."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic.config_sections import Data
from elastic.data.prepare import prepare
from elastic.data.shards import Split, read_manifest

Rows = Sequence[Mapping[str, Any]]


def quiet(line: str) -> None:
    pass


def texts(count: int, start: int = 0) -> list[str]:
    """Of several lengths, with letters beyond ASCII."""
    return [f"text {number} äöü 漢字 {'word ' * (number * 7 % 40)}\n" for number in range(start, start + count)]


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": number, "text": text} for number, text in enumerate(texts(count, start), start)]


def write_jsonl(path: Path, content: Rows) -> None:
    path.write_bytes(as_jsonl(content))


def write_jsonl_gz(path: Path, content: Rows) -> None:
    path.write_bytes(gzip.compress(as_jsonl(content), mtime=0))


def write_jsonl_zst(path: Path, content: Rows) -> None:
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(as_jsonl(content))


def write_parquet(path: Path, content: Rows) -> None:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in content]), path, row_group_size=10)


def as_jsonl(content: Rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in content)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".jsonl": write_jsonl,
    ".jsonl.gz": write_jsonl_gz,
    ".jsonl.zst": write_jsonl_zst,
    ".parquet": write_parquet,
}


def data_of(corpus: Path | str, prepared: Path, **changes: Any) -> Data:
    fields = {"corpus": str(corpus), "prepared": str(prepared), "held_out_every": 4, "shard_bytes": 4096}
    return Data(**{**fields, **changes})


def prepared_of(corpus: Path | str, prepared: Path, **changes: Any) -> Path:
    return prepare(data_of(corpus, prepared, **changes), progress=quiet).parent


def documents(prepared: Path, split: Split, column: str = "tokens") -> list[np.ndarray]:
    """Read by Arrow alone."""
    found = []
    for shard in read_manifest(prepared).splits[split]:
        batch = pa.ipc.open_file(pa.memory_map(str(prepared / shard.file))).get_batch(0)
        found += [np.array(row.values) for row in batch.column(column)]
    return found


def as_texts(prepared: Path, split: Split) -> list[str]:
    """Of tokens that are bytes, each document without its end."""
    found = documents(prepared, split)
    assert all(document[-1] == 256 for document in found)
    return [document[:-1].astype(np.uint8).tobytes().decode() for document in found]


def contents(directory: Path) -> dict[str, bytes]:
    """What is the same wherever it was made: all but records with times."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".arrow", ".crc")} | {
        "manifest.json": (directory / "manifest.json").read_bytes()
    }
