"""Both stores, for every test that takes `store`."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.storage.store import DirectoryStore, MemoryStore, Store


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return DirectoryStore(tmp_path / "run") if request.param == "directory" else MemoryStore()
