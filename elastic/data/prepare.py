"""Text files -> token shards: bytes as tokens, one Arrow file per shard, the manifest last.

The result is a function of the input alone: files in the order of their relative paths, split by a hash of
the path, shards named by their content. The files of an older manifest stay until the new one is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from elastic.config import ConfigError
from elastic.config_sections import Data
from elastic.data.shards import (
    MANIFEST,
    SCHEMA,
    SPLITS,
    DataError,
    Manifest,
    Shard,
    Split,
    check_sizes,
    read_manifest,
)

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
# Beside the manifest: what it was made from, with times. A hint for a quick second run, no part of the data.
_INPUT = "input.json"
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})
_LOCK_WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """`name` is the path relative to the corpus directory, with forward slashes on each system."""

    name: str
    path: Path
    nbytes: int
    changed_ns: int


@dataclass(slots=True, kw_only=True)
class _Output:
    """One split on its way to disk: documents that wait for their shard, and the shards written."""

    split: Split
    documents: list[NDArray[np.uint16]] = field(default_factory=list)
    tokens: int = 0
    shards: list[Shard] = field(default_factory=list)


def prepare(data: Data, *, progress: Callable[[str], None]) -> Path:
    """Tokenise the corpus of `data` into `data.prepared` and return the path of its manifest.

    Does nothing when the same settings and files (names, sizes, times) were prepared there before; safe to
    call from several processes at once. ConfigError: the corpus is missing, empty, or too small to be split.
    """
    directory = Path(data.prepared)
    files = list_files(data)
    wanted = _describe_input(data, files)
    if _is_prepared(directory, wanted):
        return directory / MANIFEST
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory, progress):
        if not _is_prepared(directory, wanted):
            manifest = _write_shards(data, files, directory, progress)
            _replace(directory / MANIFEST, manifest.to_json().encode())
            _replace(directory / _INPUT, json.dumps(wanted).encode())
            _delete_leftovers(directory, manifest)
    return directory / MANIFEST


def list_files(data: Data) -> list[SourceFile]:
    """The non-empty text files of the corpus, sorted by name. ConfigError: no directory, or no such file."""
    root = Path(sysconfig.get_path("stdlib") if data.corpus == "stdlib" else data.corpus)
    if not root.is_dir():
        raise ConfigError(f"data.corpus {data.corpus!r}: {root} is no directory; give one, or 'stdlib'")
    files = []
    for parent, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in _NOT_SOURCE]
        for path in (Path(parent, name) for name in names if name.endswith(data.suffixes)):
            if path.is_file() and (status := path.stat()).st_size:
                name = path.relative_to(root).as_posix()
                files.append(SourceFile(name=name, path=path, nbytes=status.st_size, changed_ns=status.st_mtime_ns))
    if not files:
        raise ConfigError(f"no non-empty file ending in {' '.join(data.suffixes)} under {root}; see data.suffixes")
    return sorted(files, key=lambda file: file.name)


def split_of(name: str, held_out_every: int) -> Split:
    """About one file in `held_out_every` is held out; by name, so that a file never changes sides."""
    number = int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8])
    return "held_out" if number % held_out_every == 0 else "train"


def _write_shards(data: Data, files: list[SourceFile], directory: Path, progress: Callable[[str], None]) -> Manifest:
    outputs: dict[Split, _Output] = {split: _Output(split=split) for split in SPLITS}
    source = hashlib.sha256()
    for number, file in enumerate(files, start=1):
        text = file.path.read_bytes()
        source.update(f"{file.name!r} {len(text)} {hashlib.sha256(text).hexdigest()}\n".encode())
        output = outputs[split_of(file.name, data.held_out_every)]
        if output.documents and output.tokens + len(text) + 1 > data.shard_tokens:
            _flush(output, directory)
            progress(f"prepared {number} of {len(files)} files")
        output.documents.append(encode(text))
        output.tokens += len(text) + 1
    for output in outputs.values():
        if output.documents:
            _flush(output, directory)
        if not output.shards:
            raise ConfigError(
                f"no file of {data.corpus} fell into the {output.split} split: {len(files)} files with "
                f"data.held_out_every {data.held_out_every}; give more files or a smaller number"
            )
    tokens = sum(shard.tokens for output in outputs.values() for shard in output.shards)
    progress(f"prepared {len(files)} files, {tokens:,} tokens, in {directory}")
    splits: dict[str, tuple[Shard, ...]] = {split: tuple(outputs[split].shards) for split in SPLITS}
    return Manifest(tokenizer="bytes", vocab_size=VOCAB_SIZE, source=source.hexdigest(), splits=splits)


def encode(text: bytes) -> NDArray[np.uint16]:
    """Bytes as tokens 0 to 255, then the end-of-document token: uint16 [len(text) + 1]."""
    tokens = np.empty(len(text) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(text, dtype=np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return tokens


def _flush(output: _Output, directory: Path) -> None:
    """Write the waiting documents as one shard: one record batch, one row per document."""
    offsets = np.cumsum([0, *(len(document) for document in output.documents)], dtype=np.int64)
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(output.documents)))
    batch = pa.record_batch([column], names=["tokens"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    shard = Shard(
        file=f"{output.split}-{len(output.shards):05d}-{sha256[:12]}.arrow",
        nbytes=content.size,
        tokens=output.tokens,
        documents=len(output.documents),
        sha256=sha256,
        values_offset=_values_offset(content),
    )
    _replace(directory / shard.file, content)
    output.shards.append(shard)
    output.documents, output.tokens = [], 0


def _values_offset(content: pa.Buffer) -> int:
    column = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0).column("tokens")
    values = column.values
    assert values.offset == 0, "a freshly written column starts at its buffer"
    return values.buffers()[1].address - content.address


def _describe_input(data: Data, files: list[SourceFile]) -> dict[str, object]:
    listing = "".join(f"{file.name!r} {file.nbytes} {file.changed_ns}\n" for file in files)
    return {
        "schema": SCHEMA,
        "settings": data.model_dump(mode="json", exclude={"prepared"}),
        "files": hashlib.sha256(listing.encode()).hexdigest(),
    }


def _is_prepared(directory: Path, wanted: dict[str, object]) -> bool:
    """Whether `directory` holds what `wanted` describes, judged by names, sizes and times only."""
    try:
        if json.loads((directory / _INPUT).read_bytes()) != wanted:
            return False
        for shards in read_manifest(directory).splits.values():
            check_sizes(directory, shards)
    except (OSError, ValueError, DataError):
        return False  # nothing there, or damaged: both mean that it is to be prepared
    return True


def _replace(path: Path, content: bytes | pa.Buffer) -> None:
    """Write aside, make it durable, then put it in place in one move."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_leftovers(directory: Path, manifest: Manifest) -> None:
    """Remove shards that the manifest does not name, and what an interrupted run left aside."""
    named = {shard.file for shards in manifest.splits.values() for shard in shards}
    for path in [*directory.glob("*-*.arrow"), *directory.glob("*.tmp")]:
        if path.name not in named:
            path.unlink()


@contextmanager
def _lock(directory: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """One process prepares, others wait for it; the kernel drops the lock of one that dies."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    with (directory / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"another process has been preparing {directory} for {_LOCK_WAIT_S:.0f} s; "
                        "end it, or set data.prepared to another directory"
                    ) from None
                progress(f"waiting for another process that prepares {directory}")
                time.sleep(1.0)
        yield
