"""Tails of logs: cut, read on, and several ranks read as one."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.telemetry.logs import PREFIX, Reading, Tail, first_failure, merged, ranks_text, trainer_log


class Objects:
    """A store's reading half over a dict, which tests write to."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.data[key][start:stop]

    def list(self, prefix: str) -> dict[str, int]:
        return {key: len(data) for key, data in self.data.items() if key.startswith(prefix)}

    def ship(self, generation: int, rank: int, whole: bytes, tail_bytes: int = 1_000) -> None:
        tail = Tail(node="n", path="/disk/log", from_byte=max(0, len(whole) - tail_bytes), data=whole[-tail_bytes:])
        self.data[PREFIX + trainer_log(generation, rank)] = tail.to_object()


def test_ranks_are_merged_in_the_order_of_their_times() -> None:
    first = "2026-01-01 10:00:01,000 INFO a: hello\nno time\n2026-01-01 10:00:05,000 INFO a: mine\n"
    second = "2026-01-01 10:00:02,500 INFO a: hello\n[2026-01-01T10:00:03.000] INFO a: yours\n"
    assert merged({0: first, 1: second}) == [
        "[ranks 0-1] 2026-01-01 10:00:01,000 INFO a: hello",
        "[rank 0] no time",
        "[rank 1] [2026-01-01T10:00:03.000] INFO a: yours",
        "[rank 0] 2026-01-01 10:00:05,000 INFO a: mine",
    ]


def test_without_times_ranks_follow_each_other_and_repeats_stay_repeats() -> None:
    assert merged({2: "x\nx\ny\n", 0: "x\nx\n", 1: "x\nz\n"}) == [
        "[ranks 0-2] x",
        "[ranks 0,2] x",
        "[rank 1] z",
        "[rank 2] y",
    ]


def test_names_of_ranks() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 1], [0, 2, 3, 4, 9])] == ["rank 3", "ranks 0-1", "ranks 0,2-4,9"]


def test_reading_goes_on_where_it_stopped_and_says_what_it_missed() -> None:
    objects = Objects()
    reading = Reading(objects)
    assert reading.texts() == {}
    objects.ship(1, 0, b"one\ntw")
    assert reading.texts(whole_lines=True) == {0: "one\n"}
    objects.ship(1, 0, b"one\ntwo\n")
    assert reading.texts(whole_lines=True) == {0: "two\n"}
    assert reading.texts(whole_lines=True) == {}
    objects.ship(1, 0, b"one\ntwo\nthree\nfour\nfive\n", tail_bytes=7)
    assert reading.texts() == {0: "... 11 bytes are only in /disk/log on node n\nfive\n"}
    objects.ship(2, 0, b"next\n")
    assert reading.texts() == {0: "next\n"} and reading.generation == 2


def test_a_generation_and_a_rank_may_be_named() -> None:
    objects = Objects()
    for generation, rank in ((1, 0), (1, 1), (2, 0)):
        objects.ship(generation, rank, f"{generation} {rank}\n".encode())
    assert Reading(objects).known() == {1: [0, 1], 2: [0]}
    assert Reading(objects, generation=1).texts() == {0: "1 0\n", 1: "1 1\n"}
    assert Reading(objects, generation=1, rank=1).texts() == {1: "1 1\n"}
    assert Reading(objects, rank=1).texts() == {}


def entry(generation: int, number: int | None = None, rank: int | None = None, kind: str = "Tick") -> dict[str, Any]:
    incident = None if number is None else {"number": number, "failure": "lost process", "rank": rank, "hosts": ["h"]}
    return {"event": {"kind": kind}, "generation": generation, "incident": incident}


@pytest.mark.parametrize(("generation", "rank"), [(1, 2), (2, None), (3, None), (5, 0)])
def test_first_failure_is_the_one_that_ended_the_generation(generation: int, rank: int | None) -> None:
    entries = [
        entry(0, kind="RunStarted"),
        entry(1),
        entry(1, 1, rank=1),
        entry(1, 1, rank=2),  # refined
        entry(2, 1, rank=2),  # still open while the next one starts
        entry(2),
        entry(3, kind="RunStarted"),
        entry(5, 1, rank=0),  # numbers begin anew with an attempt
    ]
    found = first_failure(entries, generation)
    assert (found and found["rank"]) == rank
