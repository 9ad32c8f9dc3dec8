"""The commit log: small objects `log/00000042.json`, each an attempt's claim or a manifest.

To append is to create the next number only if nobody has. That one primitive orders all attempts: whoever is
refused reads what won, and a claim by a higher attempt means that this one is fenced and must end itself.
A claim says which checkpoint its attempt starts from (`base`), so going back to an older one is as durable as a
commit: what lies between the two is off the run's line from then on.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.checkpoint.errors import CheckpointError, Fenced, TooNew
from elastic.checkpoint.manifest import Manifest, check_present, of_body, to_body
from elastic.checkpoint.shard import check, check_schema, sign
from elastic.checkpoint.store import Store

SCHEMA = 1
TRIES_MAX = 100
SEED = 0  # base of an attempt that starts from no checkpoint
NOT_SAID = -1  # base in claims of an older elastic: the newest checkpoint before the claim
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Number `number` of the log; `manifest` None: it is the claim of `attempt`, made by `who`, which starts from
    the checkpoint in entry `base`."""

    number: int
    attempt: int
    who: str = ""
    base: int = NOT_SAID
    manifest: Manifest | None = None


class CommitLog:
    """Reads and appends. Entries never change, so each is read once. One thread at a time. TooNew: see errors.

    `loudly` gets a sentence for whatever is damaged and therefore skipped.
    """

    def __init__(self, store: Store, loudly: Callable[[str], None] = _log.warning) -> None:
        self._store = store
        self._loudly = loudly
        self._known: dict[int, Entry | None] = {}  # None: damaged

    def entries(self) -> list[Entry]:
        """All valid entries by number, as far as the log reaches now."""
        for name in self._store.list("log/"):
            number = _number(name)
            if number is not None and number not in self._known:
                self._known[number] = self._read(number)
        return [entry for _, entry in sorted(self._known.items()) if entry is not None]

    def claim(self, who: str, *, base: int | None = None) -> int:
        """Opens an attempt: its number, higher than any in the log. Older attempts are fenced from here on.

        base: number of the checkpoint to start from, None: the newest. CheckpointError: there is no such one.
        """
        for _ in range(TRIES_MAX):
            attempt, number = 1 + self._newest_attempt(), self._next_number()
            start = self.newest_entry() if base is None else self._checkpoint(base)
            body = {"kind": "claim", "schema": SCHEMA, "attempt": attempt, "who": who}
            if self._append(number, {**body, "base": start.number if start else SEED}):
                return attempt
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times while claiming it; are many attempts starting?")

    def commit(self, attempt: int, manifest: Manifest) -> int:
        """Appends the manifest, which makes it a checkpoint; its number. Fenced: a higher attempt has claimed."""
        manifest = replace(manifest, attempt=attempt)
        for _ in range(TRIES_MAX):
            newest, number = self._newest_attempt(), self._next_number()
            if newest > attempt:
                raise Fenced(newest)
            if self._append(number, {"kind": "manifest", **to_body(manifest)}):
                return number
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times during one commit; who else writes to it?")

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
            except CheckpointError as error:
                self._loudly(f"checkpoint {entry.number} of step {entry.manifest.key.step} is skipped: {error}")
                continue
            return entry
        return None

    def line(self) -> list[Entry]:
        """The checkpoints that the run's present state may descend from, newest first, without the retired ones."""
        entries = self.entries()
        alive = {entry.number for entry in _alive(entries)}
        found: list[Entry] = []
        until = entries[-1].number if entries else 0
        for entry in reversed(entries):
            if entry.number > until:
                continue  # a later attempt started from before it
            if entry.number in alive:
                found.append(entry)
            elif entry.manifest is None and entry.base != NOT_SAID:
                until = entry.base
        return found

    def checkpoints(self) -> Sequence[Entry]:
        """Entries with a manifest that no later one retired, by number; also those off the run's line."""
        return _alive(self.entries())

    def _checkpoint(self, number: int) -> Entry:
        alive = self.checkpoints()
        for entry in alive:
            if entry.number == number and entry.manifest is not None:
                check_present(self._store, entry.manifest)
                return entry
        there = ", ".join(str(entry.number) for entry in alive) or "none"
        raise CheckpointError(f"log entry {number} is no checkpoint that still exists; entries that are: {there}")

    def complain(self, sentence: str) -> None:
        self._loudly(sentence)

    def _newest_attempt(self) -> int:
        return max((entry.attempt for entry in self.entries()), default=0)

    def _next_number(self) -> int:
        """After the entries that are known: what is decided on them is appended there, or not at all."""
        return 1 + max(self._known, default=0)

    def _append(self, number: int, body: dict[str, Any]) -> bool:
        # A store whose answer was lost looks whether what is there is what it wrote: no two writers write the same.
        if not self._store.put_if_absent(_name(number), sign({**body, "nonce": secrets.token_hex(8)})):
            return False
        self._known[number] = self._read(number)
        return True

    def _read(self, number: int) -> Entry | None:
        name = _name(number)
        try:
            body = check(self._store.get(name), name=name)
            if body.get("kind") == "claim":
                check_schema({"schema": SCHEMA, **body}, SCHEMA, name=name)
                base = int(body.get("base", NOT_SAID))
                return Entry(number=number, attempt=int(body["attempt"]), who=str(body["who"]), base=base)
            manifest = of_body(body, name=name)
            return Entry(number=number, attempt=manifest.attempt, manifest=manifest)
        except TooNew:
            raise
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            self._loudly(f"log entry {name} is skipped: {error}")
            return None


def _alive(entries: Sequence[Entry]) -> list[Entry]:
    found = [entry for entry in entries if entry.manifest is not None]
    retired = {number for entry in found if entry.manifest for number in entry.manifest.retired}
    return [entry for entry in found if entry.number not in retired]


def _name(number: int) -> str:
    return f"log/{number:08d}.json"


def _number(name: str) -> int | None:
    digits = name.removeprefix("log/").removesuffix(".json")
    return int(digits) if digits.isdecimal() and name == _name(int(digits)) else None
