"""The run's line in the commit log: which checkpoints an attempt descends from, after going back and forth."""

from __future__ import annotations

import pytest

from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import SEED, CommitLog
from elastic.storage.store import MemoryStore, Store
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
    for number in (2, 3, 5):
        CommitLog(store).take_back([number], who="a test")
    assert steps(CommitLog(store)) == [] and CommitLog(store).newest() is None
    CommitLog(store).claim("from the seed")
    assert CommitLog(store).entries()[-1].base == SEED


def test_a_claim_says_where_it_starts_even_past_damage(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    store.delete("data/1-1-20/1.bin")
    CommitLog(store, lambda _: None).claim("b")
    assert CommitLog(store).entries()[-1].base == 2 and steps(CommitLog(store)) == [10]


def test_only_what_still_exists_can_be_gone_back_to(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10)
    CommitLog(store).commit(1, manifest(store, key(1, 20)), keep=lambda line, aside: [])
    with pytest.raises(CheckpointError, match="log entry 2 is no checkpoint that still exists; entries that are: 3"):
        CommitLog(store).claim("b", base=2)
    with pytest.raises(CheckpointError, match="log entry 1 is no checkpoint"):
        CommitLog(store).claim("b", base=1)
    store.delete("data/1-1-20/0.bin")
    with pytest.raises(CheckpointError, match="has no bytes"):
        CommitLog(store).claim("b", base=3)


class Counted(MemoryStore):
    reads = 0

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.reads += key.startswith("log/")
        return super().get(key, start, stop)


def test_a_long_log_costs_as_many_reads_as_there_are_checkpoints_that_count() -> None:
    """A run of weeks has thousands of entries: a resume must not read them all."""
    store = Counted()
    log = CommitLog(store)
    log.claim("a")
    for step in range(10, 210, 10):
        log.commit(1, manifest(store, key(1, step)), keep=lambda line, aside: [entry.number for entry in line[:2]])
    store.reads = 0
    assert steps(CommitLog(store)) == [200, 190, 180]
    assert store.reads == 3


def test_what_is_taken_back_does_not_count_and_fences_nobody(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20, 30)
    driver = CommitLog(store)
    assert steps(driver) == [30, 20, 10]
    CommitLog(store).take_back([3], who="somebody")
    assert driver.commit(1, manifest(store, key(1, 40))) == 6
    assert steps(CommitLog(store)) == [40, 30, 10]


def test_branch_names_the_attempt_that_went_back_last(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    assert CommitLog(store).branch() == 0, "none has gone back"
    CommitLog(store).claim("goes on")
    assert CommitLog(store).branch() == 0
    CommitLog(store).claim("back", base=2)
    CommitLog(store).claim("goes on from there")
    commits(store, 15, attempt=4)
    assert CommitLog(store).branch() == 3


def test_a_damaged_newest_entry_may_have_been_a_claim_so_its_attempt_is_not_used_again(store: Store) -> None:
    CommitLog(store).claim("a")
    CommitLog(store).claim("b")
    store.put("log/00000002.json", b"{")
    assert CommitLog(store, lambda _: None).claim("c") == 3
