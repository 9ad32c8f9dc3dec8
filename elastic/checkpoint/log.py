"""The commit log: small objects `log/00000042.json`, each an attempt's claim, a manifest, or checkpoints taken back.

To append is to create the next number only if nobody has. That one primitive orders all attempts: whoever is
refused reads what won, and a claim by a higher attempt means that this one is fenced and must end itself.
Each entry says which checkpoints count after it: those on the run's line (what its present state may descend from,
newest first) and those aside (what a claim went back from, until the next commit, or what is pinned). So the newest
entry alone tells the state, however long the log is, and going back to an older checkpoint is as durable as a commit.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.checkpoint.errors import CheckpointError, Fenced, TooNew
from elastic.checkpoint.manifest import Manifest, check_present, of_body, to_body
from elastic.checkpoint.shard import check, check_schema, sign
from elastic.storage.errors import StorageError, StorageUnavailable
from elastic.storage.store import Store

SCHEMA = 2
TRIES_MAX = 100
SEED = 0  # base of an attempt that starts from no checkpoint
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Number `number` of the log, written by `attempt`. line, aside: numbers of the checkpoints that count after it.

    branch: the last attempt that did not start from the newest checkpoint before it; what older ones did after that
    checkpoint is undone. who: of a claim, and of what was done by hand. manifest: None for both of these. written_s:
    Unix time by the writer's clock, for people only.
    """

    number: int
    attempt: int
    branch: int = 0
    line: tuple[int, ...] = ()
    aside: tuple[int, ...] = ()
    who: str = ""
    written_s: float = 0.0
    manifest: Manifest | None = None

    @property
    def base(self) -> int:
        """The checkpoint that a state after this entry starts from."""
        return self.line[0] if self.line else SEED


Retention = Callable[[Sequence[Entry], Sequence[Entry]], Collection[int]]


def keep_all(line: Sequence[Entry], aside: Sequence[Entry]) -> Collection[int]:
    return [entry.number for entry in (*line, *aside)]


class CommitLog:
    """Reads and appends. Entries never change, so each is read once. One thread at a time. TooNew: see errors.

    `loudly` gets a sentence for whatever is damaged and therefore skipped.
    """

    def __init__(self, store: Store, loudly: Callable[[str], None] = _log.warning) -> None:
        self._store = store
        self._loudly = loudly
        self._known: dict[int, Entry | None] = {}  # None: damaged
        self._seen: list[int] = []

    # ---------------------------------------------------------------- reading

    def entries(self) -> list[Entry]:
        """All valid entries by number, as far as the log reaches now."""
        found = [self._entry(number) for number in self._numbers()]
        return [entry for entry in found if entry is not None]

    def newest(self) -> Manifest | None:
        """The newest checkpoint on the run's line whose objects are all there."""
        entry = self.newest_entry()
        return entry.manifest if entry else None

    def newest_entry(self) -> Entry | None:
        """As `newest`; damaged ones are skipped, and said so."""
        for entry in self.line():
            assert entry.manifest is not None
            try:
                check_present(self._store, entry.manifest)
            except StorageUnavailable:
                raise  # an outage is no damage: what is older must not be taken for it
            except StorageError as error:
                self._loudly(f"checkpoint {entry.number} of step {entry.manifest.key.step} is skipped: {error}")
                continue
            return entry
        return None

    def line(self) -> list[Entry]:
        """The checkpoints that the run's present state may descend from, newest first."""
        return self._checkpoints(self.last().line)

    def checkpoints(self) -> list[Entry]:
        """All that count, by number; also those off the run's line."""
        last = self.last()
        return self._checkpoints(sorted({*last.line, *last.aside}))

    def last(self) -> Entry:
        """The newest valid entry: what counts now, also where an entry that it names can't be read."""
        return self._last()[0]

    def branch(self) -> int:
        """See `Entry.branch`."""
        return self.last().branch

    # ---------------------------------------------------------------- appending

    def claim(self, who: str, *, base: int | None = None) -> int:
        """Opens an attempt: its number, higher than any in the log. Older attempts are fenced from here on.

        base: number of the checkpoint to start from, None: the newest. CheckpointError: there is no such one.
        """
        for _ in range(TRIES_MAX):
            last, number = self._last()
            start = self.newest_entry() if base is None else self._checkpoint(base)
            damaged = number - 1 - last.number  # each may have been a claim
            attempt, line = last.attempt + damaged + 1, self._line_from(start, last)
            aside = tuple(sorted({*last.line, *last.aside} - {*line}))
            went_back = last.line[:1] != line[:1]
            entry = replace(last, attempt=attempt, line=line, aside=aside, branch=attempt if went_back else last.branch)
            if self._append(number, entry, {"kind": "claim", "schema": SCHEMA, "who": who, "base": entry.base}):
                return attempt
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times while claiming it; are many attempts starting?")

    def commit(self, attempt: int, manifest: Manifest, keep: Retention = keep_all) -> int:
        """Appends the manifest, which makes it a checkpoint; its number. Fenced: a higher attempt has claimed.

        keep: which of the older checkpoints on the line and aside still count then.
        """
        manifest = replace(manifest, attempt=attempt)
        for refused in range(TRIES_MAX):
            # Where nobody has appended since, what is known is all there is: no need to look.
            last, number = self._last(look=refused > 0)
            if last.attempt > attempt:
                raise Fenced(last.attempt)
            kept = keep(self._checkpoints(last.line), self._checkpoints(last.aside))
            line = (number, *(at for at in last.line if at in kept))
            aside = tuple(at for at in last.aside if at in kept)
            entry = replace(last, attempt=attempt, line=line, aside=aside)
            if self._append(number, entry, {"kind": "manifest", **to_body(manifest)}):
                return number
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times during one commit; who else writes to it?")

    def take_back(self, numbers: Collection[int], who: str, check: Callable[[], None] = lambda: None) -> int:
        """Appends that these checkpoints do not count any more; the entry's number. Their data may be deleted then.

        check: raises what forbids it; asked anew when the log has grown meanwhile, so it is true at that entry.
        """
        for _ in range(TRIES_MAX):
            last, number = self._last()
            check()
            line = tuple(at for at in last.line if at not in numbers)
            aside = tuple(at for at in last.aside if at not in numbers)
            entry = replace(last, line=line, aside=aside)
            body = {"kind": "taken back", "schema": SCHEMA, "who": who, "numbers": sorted(numbers)}
            if self._append(number, entry, body):
                return number
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times meanwhile; who else writes to it?")

    def note_pin(self, checkpoint: int, who: str) -> bool:
        """Appends that it was pinned; False: it does not count any more. Whoever retires something looks at the pins
        after reading the log, so what is appended after this entry has seen the pin."""
        for _ in range(TRIES_MAX):
            last, number = self._last()
            if checkpoint not in (*last.line, *last.aside):
                return False
            body = {"kind": "pinned", "schema": SCHEMA, "who": who, "numbers": [checkpoint]}
            if self._append(number, last, body):
                return True
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times meanwhile; who else writes to it?")

    def complain(self, sentence: str) -> None:
        self._loudly(sentence)

    def _line_from(self, start: Entry | None, last: Entry) -> tuple[int, ...]:
        if start is None:
            return ()
        alive = {*last.line, *last.aside}
        return tuple(at for at in start.line if at in alive)

    def _checkpoint(self, number: int) -> Entry:
        alive = self.checkpoints()
        for entry in alive:
            if entry.number == number and entry.manifest is not None:
                check_present(self._store, entry.manifest)
                return entry
        there = ", ".join(str(entry.number) for entry in alive) or "none"
        raise CheckpointError(f"log entry {number} is no checkpoint that still exists; entries that are: {there}")

    # ---------------------------------------------------------------- objects

    def _last(self, *, look: bool = True) -> tuple[Entry, int]:
        """The newest valid entry, and the number after all that there are now: what is decided on this entry is
        appended there, or not at all. look: False where those that were there at the last look will do."""
        numbers = self._numbers() if look or not self._seen else self._seen
        found = (entry for number in reversed(numbers) if (entry := self._entry(number)) is not None)
        return next(found, Entry(number=0, attempt=0)), 1 + max(numbers, default=0)

    def _numbers(self) -> list[int]:
        self._seen = sorted(number for name in self._store.list("log/") if (number := _number(name)) is not None)
        return self._seen

    def _checkpoints(self, numbers: Sequence[int]) -> list[Entry]:
        found = [self._entry(number) for number in numbers]
        return [entry for entry in found if entry is not None and entry.manifest is not None]

    def _entry(self, number: int) -> Entry | None:
        if number not in self._known:
            self._known[number] = self._read(number)
        return self._known[number]

    def _append(self, number: int, entry: Entry, body: dict[str, Any]) -> bool:
        state = {"attempt": entry.attempt, "branch": entry.branch, "line": entry.line, "aside": entry.aside}
        # A store whose answer was lost looks whether what is there is what it wrote: no two writers write the same.
        own = {"nonce": secrets.token_hex(8), "written_s": round(time.time(), 3)}
        raw = sign({**body, **state, **own})
        if not self._store.put_if_absent(_name(number), raw):
            return False
        self._known[number] = _parse(number, raw)
        self._seen.append(number)
        return True

    def _read(self, number: int) -> Entry | None:
        name = _name(number)
        try:
            return _parse(number, self._store.get(name))
        except (TooNew, StorageUnavailable):
            raise
        except (StorageError, KeyError, TypeError, ValueError) as error:
            self._loudly(f"log entry {name} is skipped: {error}")
            return None


def _parse(number: int, raw: bytes) -> Entry:
    name = _name(number)
    body = check(raw, name=name)
    check_schema(body, SCHEMA, name=name)
    return Entry(
        number=number,
        attempt=int(body["attempt"]),
        branch=int(body["branch"]),
        line=tuple(map(int, body["line"])),
        aside=tuple(map(int, body["aside"])),
        who=str(body.get("who", "")),
        written_s=float(body.get("written_s", 0.0)),
        manifest=of_body(body, name=name) if body["kind"] == "manifest" else None,
    )


def _name(number: int) -> str:
    return f"log/{number:08d}.json"


def _number(name: str) -> int | None:
    digits = name.removeprefix("log/").removesuffix(".json")
    return int(digits) if digits.isdecimal() and name == _name(int(digits)) else None
