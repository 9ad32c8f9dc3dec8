"""A node's check of the run's storage, on real directories."""

from __future__ import annotations

import time
from pathlib import Path

from elastic.cluster.storage_check import StorageCheck
from elastic.config import Config, Place
from elastic.resume import save_config
from elastic.storage.store import store_at

LIMIT_S = 60.0


def found(check: StorageCheck) -> dict[str, str]:
    deadline_s = time.monotonic() + LIMIT_S
    while (facts := check.take()) is None:
        assert time.monotonic() < deadline_s
    return facts


def test_a_directory_of_this_node_alone_is_told_until_it_is_shared(tmp_path: Path) -> None:
    place = Place.of_directory(tmp_path / "run")
    save_config(Config(), store_at(place), attempt=1)
    check = StorageCheck(place, 2, again_s=0.01)
    assert "is it a directory of this node alone?" in found(check)["storage_wrong"]
    save_config(Config(), store_at(place), attempt=2)
    while found(check)["storage_wrong"]:
        pass


def test_what_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = StorageCheck(Place.of_directory(tmp_path / "file" / "run"), 1, again_s=LIMIT_S)
    facts = found(check)
    check.close()
    assert "can't write" in facts["storage_wrong"] and not facts["storage_down"]
