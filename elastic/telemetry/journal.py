"""The append-only record of a run: one checksummed JSON line per decision that changed something.

A line is written before it is acted on. A torn tail (the writer was killed in a write) is cut off on read;
a bad line with good ones after it is damage and an error.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from elastic.config import ElasticError
from elastic.schema import refusal

SCHEMA = 1


class JournalError(ElasticError):
    """The journal is damaged before its end, or of a newer elastic; the message names file and line."""


def encode(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode(line: bytes) -> dict[str, Any] | None:
    """The entry, or None if the line is torn or damaged."""
    if not line.endswith(b"\n") or line[8:9] != b" ":
        return None
    if line[:8] != b"%08x" % zlib.crc32(line[9:-1]):
        return None
    entry: dict[str, Any] = json.loads(line[9:])
    return entry


def read(data: bytes, name: str = "journal") -> Iterator[dict[str, Any]]:
    """Entries in order, up to a torn tail."""
    lines = io.BytesIO(data).readlines()
    for index, line in enumerate(lines):
        entry = decode(line)
        if entry is None:
            if any(decode(later) is not None for later in lines[index + 1 :]):
                raise JournalError(f"{name}: line {index + 1} is damaged and good lines follow; restore the file")
            return
        if why := refusal(f"{name}: line {index + 1}", entry.get("schema", SCHEMA), SCHEMA):
            raise JournalError(why)
        yield entry


def read_file(path: Path) -> list[dict[str, Any]]:
    return list(read(path.read_bytes(), str(path))) if path.exists() else []


def open_for_append(path: Path) -> IO[bytes]:
    """Cut a torn tail off, then append after it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = sum(len(encode(entry)) for entry in read_file(path))
    file = path.open("ab")
    file.truncate(whole)
    file.seek(0, 2)
    return file


class Follower:
    """Follows a journal that another process writes; `read` gives the entries that are new and whole.

    since_s: what happened before is not news, also where the file is written anew with what storage remembers.
    """

    def __init__(self, path: Path, *, since_s: float = 0.0) -> None:
        self._path, self._since_s = path, since_s
        self._at = 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [entry for entry in read(whole, str(self._path)) if entry["t"] >= self._since_s]
