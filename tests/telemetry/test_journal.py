"""The journal survives a torn write at any byte and refuses damage in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.telemetry import journal

ENTRIES: list[dict[str, Any]] = [{"t": 1.5, "event": {"kind": "Tick"}, "reason": "é"}, {"t": 2.0}, {"t": 3.5, "x": [1]}]
DATA = b"".join(journal.encode(entry) for entry in ENTRIES)


@given(st.integers(0, len(DATA)))
def test_truncated_anywhere_gives_a_clean_prefix(length: int) -> None:
    found = list(journal.read(DATA[:length]))
    assert found == ENTRIES[: len(found)]
    whole = sum(len(journal.encode(entry)) for entry in found)
    assert length - whole < len(journal.encode(ENTRIES[min(len(found), 2)]))


# Every byte up to the newline before the last entry: with that one damaged, the last two lines are one bad tail.
BEFORE_THE_LAST = len(DATA) - len(journal.encode(ENTRIES[-1]))


@given(st.integers(0, BEFORE_THE_LAST - 2), st.integers(1, 255))
def test_damage_before_good_lines_is_an_error(at: int, flip: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= flip
    with pytest.raises(journal.JournalError, match="damaged"):
        list(journal.read(bytes(damaged)))


@given(st.integers(BEFORE_THE_LAST - 1, len(DATA) - 1), st.integers(1, 255))
def test_damage_of_the_tail_is_a_shorter_prefix(at: int, flip: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= flip
    found = list(journal.read(bytes(damaged)))
    assert found == ENTRIES[: len(found)]
    assert len(found) < len(ENTRIES)


@pytest.mark.parametrize(
    ("schema", "next_"), [(journal.SCHEMA + 1, "upgrade elastic"), (0, "use the elastic that wrote it")]
)
def test_another_schema_is_refused_with_a_sentence(schema: int, next_: str) -> None:
    data = DATA + journal.encode({"schema": schema, "t": 4.0})
    with pytest.raises(journal.JournalError, match=f"line 4 has schema {schema}, this elastic reads 1.*{next_}"):
        list(journal.read(data))


def test_a_tail_leaves_out_what_was_before_its_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = journal.Follower(path, since_s=2.0)
    path.write_bytes(DATA)
    assert tail.read() == ENTRIES[1:] and tail.read() == []


def test_append_cuts_the_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(DATA + b"0000")
    with journal.open_for_append(path) as file:
        file.write(journal.encode({"t": 4.0}))
    assert journal.read_file(path) == [*ENTRIES, {"t": 4.0}]
