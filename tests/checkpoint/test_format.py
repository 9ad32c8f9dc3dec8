"""docs/checkpoint-format.md says enough to read a checkpoint: its own reader is run here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import read_index
from elastic.storage.store import DirectoryStore
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import commits

DOCS = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


@pytest.fixture
def reader() -> Any:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["tensor"]


def test_the_reader_in_the_docs_reads_and_notices_damage(tmp_path: Path, reader: Any) -> None:
    store = DirectoryStore(tmp_path)
    CommitLog(store).claim("a")
    commits(store, 10)
    assert np.array_equal(reader(tmp_path, 2, "w"), np.full(16, 10, dtype=np.uint8))
    raw = bytearray(store.get("data/1-1-10/1.bin"))
    raw[3] ^= 1
    store.put("data/1-1-10/1.bin", bytes(raw))
    with pytest.raises(AssertionError, match="damaged"):
        reader(tmp_path, 2, "w")


def test_a_manifest_says_what_it_is_of(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    CommitLog(store).claim("a")
    commits(store, 10)
    manifest = CommitLog(store).newest()
    assert manifest is not None
    assert (manifest.key, manifest.samples, manifest.mesh) == (key(1, 10), 240, {"dp_shard": 2})
    body, tables = read_index(store, manifest)
    assert list(body["tensors"]) == ["w"] and [len(table) for table in tables.values()] == [1, 1]
