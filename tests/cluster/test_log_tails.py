"""The thread that ships the tails of a host's logs to storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.checkpoint.errors import CheckpointError
from elastic.cluster import log_tails
from elastic.cluster.log_tails import LogTails
from elastic.storage.store import MemoryStore
from elastic.telemetry.logs import PREFIX, TAIL_BYTES, Tail


class Failing(MemoryStore):
    """Fails for the first object that is put, as a store that is away for a moment."""

    failed = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        if not self.failed:
            self.failed = True
            raise CheckpointError("the store is away")
        super().put(key, data)


def test_the_newest_bytes_are_shipped_with_where_the_rest_is(tmp_path: Path) -> None:
    store = MemoryStore()
    tails = LogTails(tmp_path, store, "node-a")
    whole = b"0123456789\n" * 10_000
    (tmp_path / "g1-r0.log").write_bytes(whole)
    (tmp_path / "g1-r1.log").touch()
    tails.close()
    assert list(store.list(PREFIX)) == ["logs/g1-r0.log"], "what is empty is not shipped"
    tail = Tail.from_object(store.get("logs/g1-r0.log"))
    assert (tail.node, tail.path) == ("node-a", str(tmp_path / "g1-r0.log"))
    assert tail.data == whole[-TAIL_BYTES:] and tail.from_byte == len(whole) - TAIL_BYTES


def test_old_logs_are_removed_here_and_in_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tails, "TRAINER_LOGS_MAX", 2)
    store = MemoryStore()
    (tmp_path / "host-n-0.log").write_text("stays")
    for generation in (8, 9, 10):
        (tmp_path / f"g{generation}-r0.log").write_text("text")
        os.utime(tmp_path / f"g{generation}-r0.log", (generation, generation))
    LogTails(tmp_path, store, "n").close()
    left = {"g10-r0.log", "g9-r0.log", "host-n-0.log"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert set(store.list(PREFIX)) == {PREFIX + name for name in left}


def test_a_store_that_fails_costs_a_round(tmp_path: Path) -> None:
    store = Failing()
    tails = LogTails(tmp_path, store, "n")
    (tmp_path / "g1-r0.log").write_text("text")
    tails.hurry()
    while not store.failed:  # the test's own limit ends a thread that never tries
        pass
    tails.close()
    assert Tail.from_object(store.get("logs/g1-r0.log")).data == b"text"
