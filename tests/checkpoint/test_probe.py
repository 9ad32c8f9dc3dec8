"""The driver's check of a directory: what is refused, with its sentence, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.probe import check_storage, try_storage
from elastic.config import ConfigError, Place
from elastic.storage.store import DirectoryStore, store_at


def told(place: Place) -> str:
    with pytest.raises(ConfigError) as caught:
        check_storage(place, pytest.fail)
    return str(caught.value)


def test_a_new_directory_and_one_with_a_run_pass_and_nothing_is_left_behind(tmp_path: Path) -> None:
    place = Place.of_directory(tmp_path / "runs" / "a")
    check_storage(place, pytest.fail)
    assert store_at(place).list("") == {}
    for name in ("driver.lock", ".validate_storage_marker", "coordinator.json", "logs/host-n0-0.log"):
        (place.directory / name).parent.mkdir(exist_ok=True)
        (place.directory / name).touch()
    check_storage(place, pytest.fail)
    CommitLog(store_at(place)).claim("here")
    (place.directory / "notes.txt").touch()
    check_storage(place, pytest.fail)


def test_of_a_trial_nothing_stays(tmp_path: Path) -> None:
    try_storage(Place.of_directory(tmp_path / "runs" / "new"), say=print)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    try_storage(Place.of_directory(tmp_path / "runs" / "new"), say=print)
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"], "what was there stays"


def test_a_directory_that_somebody_else_uses_is_refused(tmp_path: Path) -> None:
    for name in ("checkpoint_000001/model.pt", "a.pt", "b.pt", "c.pt"):
        DirectoryStore(tmp_path).put(name, b"x")
    assert told(Place.of_directory(tmp_path)).startswith(
        f"storage: {tmp_path} holds 4 objects that are no run of elastic (a.pt, b.pt, c.pt, ...); give this run another"
    )


def test_a_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    assert "runs/a/probe/" in (sentence := told(Place.of_directory(tmp_path / "runs" / "a")))
    assert "check that the directory is writable" in sentence
