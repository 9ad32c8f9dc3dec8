"""The journal's copies in storage: nothing twice, nothing missing, whatever dies in between."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from elastic import segments
from elastic.checkpoint.errors import CheckpointError
from elastic.config import Place
from elastic.segments import Sealer, recover
from elastic.storage.store import DirectoryStore, MemoryStore, Store
from elastic.telemetry import journal

NEVER_S = 3600.0
LIMIT_S = 30.0


def started(attempt: int) -> dict[str, Any]:
    return {"event": {"kind": "RunStarted", "attempt": attempt}, "reason": 'with "kind":"RunStarted" in its text'}


def tick(number: int) -> dict[str, Any]:
    return {"event": {"kind": "Tick"}, "number": number}


def append(path: Path, *entries: dict[str, Any]) -> None:
    with journal.open_for_append(path) as file:
        for entry in entries:
            file.write(journal.encode(entry))


def sealed(store: Store) -> list[dict[str, Any]]:
    return [entry for name in store.list("journal/") for entry in journal.read(store.get(name))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / segments.FILE


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return DirectoryStore(tmp_path / "run")


def test_new_lines_are_sealed_once_and_only_whole_ones(path: Path, store: Store) -> None:
    append(path, started(1), tick(1))
    sealer = Sealer(path, store, attempt=1, every_s=NEVER_S)
    sealer.seal()
    sealer.seal()
    append(path, tick(2))
    with path.open("ab") as file:
        file.write(b"half a li")
    sealer.close()
    assert sealed(store) == [started(1), tick(1), tick(2)]
    assert list(store.list("journal/")) == ["journal/00001-00000001.jsonl", "journal/00001-00000002.jsonl"]


def test_the_thread_seals_by_itself(path: Path, store: Store) -> None:
    arrived = threading.Event()

    class Told(MemoryStore):
        def put_if_absent(self, key: str, data: bytes) -> bool:
            done = super().put_if_absent(key, data)
            arrived.set()
            return done

    append(path, started(1))
    sealer = Sealer(path, Told(), attempt=1, every_s=0.01)
    assert arrived.wait(LIMIT_S)
    sealer.close()


def test_long_journals_are_cut_into_segments_at_lines(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES_MAX", 200)
    entries = [started(1), *(tick(number) for number in range(20)), {**tick(99), "long": "x" * 1000}, tick(100)]
    append(path, *entries)
    Sealer(path, store, attempt=1, every_s=NEVER_S).seal()
    assert sealed(store) == entries
    assert len(store.list("journal/")) > 5 and all(0 < n < 1300 for n in store.list("journal/").values())


def test_a_coordinator_that_comes_back_goes_on_where_the_last_one_stopped(path: Path, store: Store) -> None:
    append(path, started(1), tick(1))
    Sealer(path, store, attempt=1, every_s=NEVER_S).seal()
    append(path, tick(2))
    assert not recover(path, store)
    Sealer(path, store, attempt=1, every_s=NEVER_S).seal()
    assert sealed(store) == [started(1), tick(1), tick(2)]


def test_a_new_attempt_first_seals_what_the_one_before_could_not(path: Path, store: Store) -> None:
    append(path, started(1), tick(1))
    Sealer(path, store, attempt=1, every_s=NEVER_S).seal()
    append(path, tick(2))
    sealer = Sealer(path, store, attempt=2, every_s=NEVER_S)
    append(path, started(2), tick(3))
    sealer.seal()
    assert sealed(store) == [started(1), tick(1), tick(2), started(2), tick(3)]
    assert [name[8:13] for name in store.list("journal/")] == ["00001", "00001", "00002"]


def test_a_lost_file_comes_back_from_storage(path: Path, store: Store) -> None:
    append(path, started(1), tick(1))
    sealer = Sealer(path, store, attempt=1, every_s=NEVER_S)
    sealer.seal()
    append(path, tick(2))  # never sealed: lost with the file
    path.unlink()
    assert segments.entries(Place.of_directory(path.parent)) == [started(1), tick(1)]
    assert recover(path, store) and not recover(path, store)
    assert journal.read_file(path) == [started(1), tick(1)]


def test_a_stale_file_and_storage_give_each_attempts_longer_half(path: Path, store: Store) -> None:
    """Attempt 1 ran here and died with an unsealed line, attempt 2 ran elsewhere, attempt 3 is here again."""
    append(path, started(1), tick(1))
    Sealer(path, store, attempt=1, every_s=NEVER_S).seal()
    append(path, tick(2))
    elsewhere = path.with_name("elsewhere.jsonl")
    assert recover(elsewhere, store)
    sealer = Sealer(elsewhere, store, attempt=2, every_s=NEVER_S)
    append(elsewhere, started(2), tick(3))
    sealer.seal()
    whole = [started(1), tick(1), tick(2), started(2), tick(3)]
    assert segments.entries(Place.of_directory(path.parent)) == whole
    assert recover(path, store) and journal.read_file(path) == whole
    Sealer(path, store, attempt=3, every_s=NEVER_S).seal()
    assert sealed(store) == whole


class Refusing(MemoryStore):
    """`refuse`: nothing arrives; `forget`: it arrives, but the writer hears of a failure."""

    refuse = forget = False

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self.refuse:
            raise CheckpointError("storage is down")
        done = super().put_if_absent(key, data)
        if self.forget:
            raise CheckpointError("no answer came")
        return done


def test_what_storage_refused_is_sealed_later_and_what_arrived_unheard_is_not_sealed_twice(path: Path) -> None:
    store = Refusing()
    append(path, started(1))
    sealer = Sealer(path, store, attempt=1, every_s=NEVER_S)
    store.refuse = True
    with pytest.raises(CheckpointError, match="storage is down"):
        sealer.seal()
    store.refuse, store.forget = False, True
    with pytest.raises(CheckpointError, match="no answer"):
        sealer.seal()
    store.forget = False
    append(path, tick(1))
    sealer.seal()
    assert sealed(store) == [started(1), tick(1)]


def test_two_writers_of_one_attempt_are_told_apart(path: Path, tmp_path: Path, store: Store) -> None:
    append(path, started(1), tick(1))
    other = tmp_path / "other.jsonl"
    append(other, started(1), tick(2))
    one, two = (Sealer(file, store, attempt=1, every_s=NEVER_S) for file in (path, other))
    one.seal()
    two.seal()  # it takes what is there for its own
    for file, number in ((path, 3), (other, 4)):
        append(file, tick(number))
    one.seal()
    with pytest.raises(CheckpointError, match=r"journal/00001-00000002.jsonl holds other lines than .*other.jsonl"):
        two.seal()


def sealed_in_many(path: Path, store: Store, lines: int, *, attempt: int = 1) -> list[dict[str, Any]]:
    sealer = Sealer(path, store, attempt=attempt, every_s=NEVER_S)
    entries = [started(attempt), *map(tick, range(lines - 1))]
    for entry in entries:
        append(path, entry)
        sealer.seal()
    sealer.close()
    return entries


def test_segments_become_few_and_their_lines_stay(
    path: Path, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MERGED", 4)
    entries = sealed_in_many(path, store, 10)
    names = [name.removeprefix("journal/00001-000000").removesuffix(".jsonl") for name in store.list("journal/")]
    assert names == ["01-00000004", "05-00000008", "09", "10"]
    assert sealed(store) == entries
    kept = path.read_bytes()
    path.unlink()
    assert recover(path, store) and path.read_bytes() == kept
    entries += sealed_in_many(path, store, 5, attempt=2)
    path.unlink()
    assert segments.entries(Place.of_directory(tmp_path / "run")) == entries


class Dies(Exception):
    pass


class Dying(MemoryStore):
    """Its caller dies at the change that is number `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.changes = -1, 0

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self._change()
        return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._change()
        super().delete(key)

    def _change(self) -> None:
        self.changes += 1
        if self.changes == self.at:
            raise Dies


def test_killed_at_any_change_of_a_merge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MERGED", 4)
    for at in range(1, 6):
        store = Dying()
        path.unlink(missing_ok=True)
        sealer = Sealer(path, store, attempt=1, every_s=NEVER_S)
        entries = [started(1), *map(tick, range(3))]
        for entry in entries:
            append(path, entry)
            sealer.seal()
        store.changes, store.at = 0, at
        with pytest.raises(Dies):
            sealer._try()
        lines = path.read_bytes()
        path.unlink()
        assert recover(path, store) and path.read_bytes() == lines
        store.at = -1
        Sealer(path, store, attempt=1, every_s=NEVER_S).close()
        append(path, tick(9))
        Sealer(path, store, attempt=1, every_s=NEVER_S).close()
        path.unlink()
        assert recover(path, store) and [*journal.read(path.read_bytes())] == [*entries, tick(9)]


def test_a_segment_that_is_merged_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MERGED", 4)

    class Merging(MemoryStore):
        def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            if key.endswith("1-00000001.jsonl") and not merged:
                merged.append(True)
                segments._merge(self, 1, 4)
            return super().get(key, start, stop)

    merged: list[bool] = []
    store = Merging()
    sealer = Sealer(path, store, attempt=1, every_s=NEVER_S)
    for entry in [started(1), *map(tick, range(3))]:
        append(path, entry)
        sealer.seal()
    lines = path.read_bytes()
    path.unlink()
    assert recover(path, store) and path.read_bytes() == lines and merged
    sealer.close()
