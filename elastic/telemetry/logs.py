"""Output of trainers and hosts: how its tails lie in the run's storage; ranks read as one. Pure but reading.

The whole output lies on the disk of the node that made it. The object `logs/NAME` holds its newest bytes, after one
line of JSON that says where the rest is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

PREFIX = "logs/"
TAIL_BYTES = 65_536
LAST_LINES = 30

_TRAINER = re.compile(r"g(\d+)-r(\d+)\.log")
_STAMP = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d+)?)\]?\s*")


def trainer_log(generation: int, rank: int) -> str:
    return f"g{generation}-r{rank}.log"


def host_log(node: str, slot: int) -> str:
    return f"host-{node}-{slot}.log"


# ---------------------------------------------------------------- tails


class Objects(Protocol):
    """The reading half of a checkpoint store; this room can't import it."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes: ...

    def list(self, prefix: str) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The newest bytes of the file `path` on `node`, of which `from_byte` come before them."""

    node: str
    path: str
    from_byte: int
    data: bytes

    def to_object(self) -> bytes:
        head = {"node": self.node, "path": self.path, "from_byte": self.from_byte}
        return json.dumps(head).encode() + b"\n" + self.data

    @classmethod
    def from_object(cls, raw: bytes) -> Tail:
        head, _, data = raw.partition(b"\n")
        return cls(**json.loads(head), data=data)

    def after(self, at_byte: int, *, whole_lines: bool) -> tuple[str, int]:
        """(text from `at_byte` of the file on, where it ends). What was cut off is said in a line of its own.

        whole_lines: a last line without its end is left for the next time.
        """
        begins = max(at_byte, self.from_byte)
        if begins > at_byte:
            begins += self.data.find(b"\n") + 1  # the first line began before the tail
        ends = self.from_byte + (self.data.rfind(b"\n") + 1 if whole_lines else len(self.data))
        text = self.data[begins - self.from_byte : max(0, ends - self.from_byte)].decode(errors="replace")
        if begins > at_byte:
            text = f"... {begins - at_byte} bytes are only in {self.path} on node {self.node}\n{text}"
        return text, max(begins, ends)


class Reading:
    """Reads the tails of one run, and after that what is new in them."""

    def __init__(self, objects: Objects, *, generation: int | None = None, rank: int | None = None) -> None:
        """generation None: the newest that has output, at each reading; rank None: all."""
        self._objects = objects
        self._wanted = generation
        self._rank = rank
        self._seen: dict[tuple[int, int], int] = {}
        self.generation = generation

    def known(self) -> dict[int, list[int]]:
        """The ranks whose output lies in storage, by generation."""
        found: dict[int, list[int]] = {}
        for key in self._objects.list(PREFIX):
            if match := _TRAINER.fullmatch(key.removeprefix(PREFIX)):
                found.setdefault(int(match[1]), []).append(int(match[2]))
        return {generation: sorted(ranks) for generation, ranks in sorted(found.items())}

    def texts(self, *, whole_lines: bool = False) -> dict[int, str]:
        """Text by rank that was not returned before; empty where there is none."""
        known = self.known()
        if self._wanted is None:
            self.generation = max(known, default=None)
        found = {}
        for rank in known.get(self.generation or 0, []):
            if self._rank is not None and rank != self._rank:
                continue
            log = (self.generation or 0, rank)
            tail = Tail.from_object(self._objects.get(PREFIX + trainer_log(*log)))
            text, self._seen[log] = tail.after(self._seen.get(log, 0), whole_lines=whole_lines)
            if text:
                found[rank] = text
        return found


# ---------------------------------------------------------------- ranks as one


@dataclass(slots=True)
class _Line:
    at: str
    rank: int
    number: int
    text: str
    ranks: list[int]


def merged(texts: Mapping[int, str]) -> list[str]:
    """Lines of several ranks: in the order of the times that they begin with, where they have any, else by rank.

    Lines that differ only in their times are one, with their ranks before it: the first of one rank with the
    first of the others, the second with the second. A line without a time belongs to the one above it.
    """
    lines: dict[tuple[str, int], _Line] = {}
    for rank, text in sorted(texts.items()):
        at, seen = "", Counter[str]()
        for number, line in enumerate(text.splitlines()):
            stamp = _STAMP.match(line)
            said = line[stamp.end() :] if stamp else line
            at = max(at, f"{stamp[1]} {stamp[2].replace(',', '.')}" if stamp else "")
            seen[said] += 1
            lines.setdefault((said, seen[said]), _Line(at, rank, number, line, [])).ranks.append(rank)
    ordered = sorted(lines.values(), key=lambda line: (line.at, line.rank, line.number))
    return [f"[{ranks_text(line.ranks)}] {line.text}" for line in ordered]


def ranks_text(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "ranks 0-2,5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"


# ---------------------------------------------------------------- what broke


def first_failure(entries: Iterable[dict[str, Any]], generation: int) -> dict[str, Any] | None:
    """The incident that ended `generation` as the journal tells it (failure, rank, hosts); None: nothing broke."""
    opened: dict[int, int] = {}
    found = None
    for entry in entries:
        if entry["event"]["kind"] == "RunStarted":
            opened.clear()
        incident = entry["incident"]
        if incident is None:
            continue
        opened.setdefault(incident["number"], entry["generation"])
        # A refinement may name another rank; the next generation starts with the incident still open.
        if opened[incident["number"]] == entry["generation"] == generation:
            found = incident
    return found


def last_lines(text: str) -> list[str]:
    return text.splitlines()[-LAST_LINES:]
