"""The commit log: small objects `log/00000042.json`, each an attempt's claim or a manifest.

To append is to create the next number only if nobody has. That one primitive orders all attempts: whoever is
refused reads what won, and a claim by a higher attempt means that this one is fenced and must end itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.checkpoint.errors import CheckpointError, Fenced
from elastic.checkpoint.manifest import Manifest, check_present, of_body, to_body
from elastic.checkpoint.shard import check, sign
from elastic.checkpoint.store import Store

TRIES_MAX = 100
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Number `number` of the log; `manifest` None: it is the claim of `attempt`, made by `who`."""

    number: int
    attempt: int
    who: str = ""
    manifest: Manifest | None = None


class CommitLog:
    """Reads and appends. Entries never change, so each is read once. One thread at a time.

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

    def claim(self, who: str) -> int:
        """Opens an attempt: its number, higher than any in the log. Older attempts are fenced from here on."""
        for _ in range(TRIES_MAX):
            attempt = 1 + max((entry.attempt for entry in self.entries()), default=0)
            if self._append({"kind": "claim", "attempt": attempt, "who": who}) is not None:
                return attempt
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times while claiming it; are many attempts starting?")

    def commit(self, attempt: int, manifest: Manifest) -> int:
        """Appends the manifest, which makes it a checkpoint; its number. Fenced: a higher attempt has claimed."""
        manifest = replace(manifest, attempt=attempt)
        for _ in range(TRIES_MAX):
            newest = max((entry.attempt for entry in self.entries()), default=0)
            if newest > attempt:
                raise Fenced(newest)
            number = self._append({"kind": "manifest", **to_body(manifest)})
            if number is not None:
                return number
        raise CheckpointError(f"the commit log grew {TRIES_MAX} times during one commit; who else writes to it?")

    def newest(self) -> Manifest | None:
        """The newest checkpoint whose objects are all there; damaged ones are skipped, and said so."""
        for entry in reversed(self.checkpoints()):
            assert entry.manifest is not None
            try:
                check_present(self._store, entry.manifest)
            except CheckpointError as error:
                self._loudly(f"checkpoint {entry.number} of step {entry.manifest.key.step} is skipped: {error}")
                continue
            return entry.manifest
        return None

    def checkpoints(self) -> Sequence[Entry]:
        """Entries with a manifest that no later one retired, by number."""
        found = [entry for entry in self.entries() if entry.manifest is not None]
        retired = {number for entry in found if entry.manifest for number in entry.manifest.retired}
        return [entry for entry in found if entry.number not in retired]

    def complain(self, sentence: str) -> None:
        self._loudly(sentence)

    def _append(self, body: dict[str, Any]) -> int | None:
        number = 1 + max(self._known, default=0)
        if not self._store.put_if_absent(_name(number), sign(body)):
            return None
        self._known[number] = self._read(number)
        return number

    def _read(self, number: int) -> Entry | None:
        name = _name(number)
        try:
            body = check(self._store.get(name), name=name)
            if body.get("kind") == "claim":
                return Entry(number=number, attempt=int(body["attempt"]), who=str(body["who"]))
            manifest = of_body(body, name=name)
            return Entry(number=number, attempt=manifest.attempt, manifest=manifest)
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            self._loudly(f"log entry {name} is skipped: {error}")
            return None


def _name(number: int) -> str:
    return f"log/{number:08d}.json"


def _number(name: str) -> int | None:
    digits = name.removeprefix("log/").removesuffix(".json")
    return int(digits) if digits.isdecimal() and name == _name(int(digits)) else None
