"""The run's line in the commit log: which checkpoints an attempt descends from, after going back and forth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.shard import sign
from elastic.checkpoint.store import Store
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import commits, manifest


def steps(log: CommitLog) -> list[int]:
    return [entry.manifest.key.step for entry in log.line() if entry.manifest]


def test_going_back_is_durable_before_anything_is_committed(store: Store) -> None:
    assert CommitLog(store).claim("a") == 1
    commits(store, 10, 20, 30)
    assert CommitLog(store).claim("back", base=2) == 2
    assert steps(CommitLog(store)) == [10]
    assert CommitLog(store).claim("again, after a crash") == 3, "the newest is where the run went back to"
    assert steps(CommitLog(store)) == [10]
    commits(store, 15, attempt=3)
    assert steps(CommitLog(store)) == [15, 10]
    assert [entry.number for entry in CommitLog(store).checkpoints()] == [2, 3, 4, 7], "still there to go to"


def test_back_and_forth_and_to_the_seed(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    CommitLog(store).claim("back", base=2)
    commits(store, 12, attempt=2)
    CommitLog(store).claim("forth", base=3)
    assert steps(CommitLog(store)) == [20, 10]
    store.put("log/00000007.json", sign({"kind": "claim", "schema": 1, "attempt": 4, "who": "new", "base": 0}))
    assert steps(CommitLog(store)) == [] and CommitLog(store).newest() is None


def test_a_claim_without_base_starts_from_the_newest_as_in_older_logs(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    store.put("log/00000004.json", sign({"kind": "claim", "attempt": 2, "who": "older elastic"}))
    assert steps(CommitLog(store)) == [20, 10] and CommitLog(store).claim("b") == 3


def test_a_claim_says_where_it_starts_even_past_damage(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    store.delete("data/1-1-20/1.bin")
    CommitLog(store, lambda _: None).claim("b")
    assert CommitLog(store).entries()[-1].base == 2 and steps(CommitLog(store)) == [10]


def test_only_what_still_exists_can_be_gone_back_to(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10)
    CommitLog(store).commit(1, replace(manifest(store, key(1, 20)), retired=(2,)))
    with pytest.raises(CheckpointError, match="log entry 2 is no checkpoint that still exists; entries that are: 3"):
        CommitLog(store).claim("b", base=2)
    with pytest.raises(CheckpointError, match="log entry 1 is no checkpoint"):
        CommitLog(store).claim("b", base=1)
    store.delete("data/1-1-20/0.bin")
    with pytest.raises(CheckpointError, match="has no bytes"):
        CommitLog(store).claim("b", base=3)
