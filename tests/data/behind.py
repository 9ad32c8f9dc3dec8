"""A corpus of several shards in a directory, and the same behind a `file://` URL, whose store can be made to fail."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.config_sections import Data
from elastic.data.importing import import_tokens
from elastic.data.remote import Prepared, prepared_at
from elastic.storage.store import DirectoryStore

VOCAB_SIZE = 50_000
SEQ_LEN = 512


def corpus_in(directory: Path, tokens: int = 4_000_000, shard_bytes: int = 3 << 20) -> Path:
    """Of random tokens; a piece holds about 1,000 windows. Documents are short enough for several shards."""
    source = directory / "source"
    source.mkdir(parents=True)
    values = np.random.default_rng(7).integers(1, VOCAB_SIZE, size=tokens, dtype=np.uint16)
    values[999::1000] = 0
    np.save(source / "train.npy", values)
    np.save(source / "held_out.npy", values[: 20 * SEQ_LEN])
    out = directory / "prepared"
    import_tokens(
        str(source), out, format="numpy", vocab_size=VOCAB_SIZE, end_of_document=0, shard_bytes=shard_bytes,
        progress=lambda line: None,
    )  # fmt: skip
    return out


def behind(url: str | Path, cache: Path, **changes: Any) -> Prepared:
    place = url if isinstance(url, str) else f"file://{url}"
    prepared = prepared_at(Data(prepared=place, cache=str(cache), **changes))
    assert isinstance(prepared, Prepared)
    return prepared


def copied(prepared: Path, to: Path) -> Path:
    shutil.copytree(prepared, to)
    return to


class Gets:
    """What is read of directories, in this process; `rule` may raise, wait, or change the answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[tuple[str, int]] = []
        self.rule: Callable[[str, int, bytes], bytes] = lambda key, start, data: data
        self._lock = threading.Lock()
        real = DirectoryStore.get

        def get(store: DirectoryStore, key: str, start: int = 0, stop: int | None = None) -> bytes:
            data = real(store, key, start, stop)
            if key.endswith(".arrow"):
                with self._lock:
                    self.pieces.append((key, start))
                data = self.rule(key, start, data)
            return data

        monkeypatch.setattr(DirectoryStore, "get", get)
