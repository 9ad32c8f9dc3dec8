"""The journal in the run's storage: immutable copies of stretches of the local file, so that a lost head loses seconds.

`journal/<attempt>-<number>.jsonl` holds whole lines as they are in the file; an attempt's segments, joined, are the
beginning of its lines. So where file and storage differ, each attempt's longer copy is the right one. So that a run of
weeks is read in seconds, each MERGED of them become one object, `<attempt>-<first>-<last>.jsonl`, and are then deleted;
an object that another one covers is not read.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.checkpoint.errors import CheckpointError
from elastic.config import Place
from elastic.storage.errors import ObjectMissing, StorageError, StorageUnavailable
from elastic.storage.store import Store, store_at
from elastic.telemetry import journal

FILE = "journal.jsonl"
SEAL_EVERY_S = 5.0
SEGMENT_BYTES_MAX = 4 << 20
MERGED = 64
READS_AT_ONCE = 8
READ_TRIES = 5

STARTED = b'"kind":"RunStarted"'  # as journal.encode writes it; within a text the quotes would be escaped

logger = logging.getLogger(__name__)


def exist(place: Place) -> bool:
    """Is there a journal, as a file or in segments?"""
    return (place.directory / FILE).exists() or bool(store_at(place).list("journal/"))


def entries(place: Place) -> list[dict[str, Any]]:
    """The run's journal, from its file and its segments, whichever knows more of each attempt."""
    path = place.directory / FILE
    here = _by_attempt(path)
    try:
        merged = _merged(here, store_at(place))
    except StorageUnavailable as error:
        if not here:
            raise
        logger.warning("only the journal of this machine is read: %s", error)
        merged = here
    return list(journal.read(b"".join(merged.values()), str(path)))


def recover(path: Path, store: Store) -> bool:
    """Bring the file up to what storage holds. True: it lacked lines, so the very last ones may be lost for ever."""
    here = _by_attempt(path)
    there = _merged(here, store)
    if there == here:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_bytes(b"".join(there.values()))
    os.replace(aside, path)
    return True


def _by_attempt(path: Path) -> dict[int, bytes]:
    """The file's lines by the attempt that wrote them, in order, without what has no end. Only first lines are read."""
    data = path.read_bytes() if path.exists() else b""
    data = data[: data.rfind(b"\n") + 1]
    starts, attempts = [0], [0]
    at = data.find(STARTED)
    while at >= 0:
        start = data.rfind(b"\n", 0, at) + 1
        entry = journal.decode(data[start : data.index(b"\n", at) + 1])
        if entry is not None:
            starts.append(start)
            attempts.append(entry["event"]["attempt"])
        at = data.find(STARTED, at + 1)
    parts = {a: data[start:stop] for a, start, stop in zip(attempts, starts, [*starts[1:], len(data)])}
    return {attempt: lines for attempt, lines in parts.items() if lines}


def _merged(here: dict[int, bytes], store: Store) -> dict[int, bytes]:
    for left in reversed(range(READ_TRIES)):
        try:
            return dict(sorted({**here, **_longer(here, store)}.items()))
        except ObjectMissing:  # merged, and deleted, since it was listed
            if not left:
                raise
    raise AssertionError


def _longer(here: dict[int, bytes], store: Store) -> dict[int, bytes]:
    """What storage has more of than `here`."""
    found = {}
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for attempt, sealed in _sealed(store).items():
            if sum(segment.nbytes for segment in sealed) > len(here.get(attempt, b"")):
                found[attempt] = b"".join(pool.map(lambda segment: store.get(segment.name), sealed))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """An object with the segments `first` to `last` of an attempt."""

    name: str
    first: int
    last: int
    nbytes: int


def _sealed(store: Store) -> dict[int, list[_Segment]]:
    """By attempt the objects that hold all that it has sealed, each segment once, in order."""
    listed: dict[int, list[_Segment]] = {}
    for key, nbytes in store.list("journal/").items():
        numbers = key.removeprefix("journal/").removesuffix(".jsonl").split("-")
        if len(numbers) in (2, 3) and all(number.isdecimal() for number in numbers):
            attempt, first, last = int(numbers[0]), int(numbers[1]), int(numbers[-1])
            if key == _name(attempt, first, last):
                listed.setdefault(attempt, []).append(_Segment(name=key, first=first, last=last, nbytes=nbytes))
    found: dict[int, list[_Segment]] = {}
    for attempt, segments in listed.items():
        found[attempt] = []
        for segment in sorted(segments, key=lambda one: (one.first, -one.last)):
            if not found[attempt] or segment.last > found[attempt][-1].last:
                found[attempt].append(segment)
    return found


def _name(attempt: int, first: int, last: int | None = None) -> str:
    upto = f"-{last:08d}" if last is not None and last != first else ""
    return f"journal/{attempt:05d}-{first:08d}{upto}.jsonl"


def _merge(store: Store, attempt: int, last: int) -> None:
    """The MERGED segments up to `last` become one object. Whatever dies in between, they are all there."""
    first = last - MERGED + 1
    names, merged = [_name(attempt, number) for number in range(first, last + 1)], _name(attempt, first, last)
    if not store.list(merged):  # else somebody merged them, and died while it deleted them
        store.put_if_absent(merged, b"".join(map(store.get, names)))
    for name in names:
        store.delete(name)


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Bytes [at, stop) of the file (None: as far as it grows) go to storage as segments `number`, `number` + 1, ..."""

    attempt: int
    number: int
    at: int
    stop: int | None


class Sealer:
    """Copies the file's lines to storage, every few seconds in its own thread and whenever `seal` is called.

    What earlier attempts could not seal any more goes first. The file is the buffer, so a store that is down costs
    neither memory nor the driver's time. `path` must have been through `recover`.
    """

    def __init__(self, path: Path, store: Store, *, attempt: int, every_s: float = SEAL_EVERY_S) -> None:
        self._path, self._store, self._every_s = path, store, every_s
        self._lock = threading.Lock()
        self._attempt, self._stretches = attempt, list[_Stretch]()
        self._to_merge: list[tuple[int, int]] = []
        self._failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sealer", daemon=True)
        self._thread.start()

    def seal(self) -> None:
        """All lines that the file holds now are in storage on return. CheckpointError: storage refuses them."""
        with self._lock:
            size = self._path.stat().st_size if self._path.exists() else 0
            if not self._stretches:  # not earlier: who makes a sealer does not wait for storage
                sealed = _sealed(self._store)
                self._stretches = _unsealed(self._path, sealed, self._attempt)
                self._to_merge = _unmerged(sealed)
            while self._stretches:
                stretch = self._stretches[0]
                data = self._read(stretch) if stretch.at < size else b""
                if data:
                    stretch.at += self._put(_name(stretch.attempt, stretch.number), data)
                    if stretch.number % MERGED == 0:
                        self._to_merge.append((stretch.attempt, stretch.number))
                    stretch.number += 1
                elif stretch.stop is None:
                    return
                else:
                    self._stretches.pop(0)

    def close(self, timeout_s: float = 10.0) -> None:
        """Seals what is left, if storage takes it within the limit."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _read(self, stretch: _Stretch) -> bytes:
        """Whole lines, at least one if there is one, at most about SEGMENT_BYTES_MAX."""
        most = SEGMENT_BYTES_MAX if stretch.stop is None else min(SEGMENT_BYTES_MAX, stretch.stop - stretch.at)
        with self._path.open("rb") as file:
            file.seek(stretch.at)
            data = file.read(most)
            if data and not data.endswith(b"\n"):
                data += file.readline()
        return data[: data.rfind(b"\n") + 1]

    def _put(self, name: str, data: bytes) -> int:
        """How many of the bytes are in storage now."""
        if self._store.put_if_absent(name, data):
            return len(data)
        there = self._store.get(name)
        if data.startswith(there):
            return len(there)  # an earlier try had arrived
        raise CheckpointError(
            f"{name} holds other lines than {self._path}: another coordinator writes as this attempt; end one of them"
        )

    def _work(self) -> None:
        while not self._closed.wait(self._every_s):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self.seal()
            while self._to_merge:
                _merge(self._store, *self._to_merge[0])
                self._to_merge.pop(0)
            self._failing = False
        except (StorageError, OSError) as error:  # tried again; the file has all of it
            if not self._failing:
                logger.warning("the journal can't be copied to the run's storage: %s", error)
            self._failing = True


def _unsealed(path: Path, sealed: dict[int, list[_Segment]], attempt: int) -> list[_Stretch]:
    """What of the file is not in storage, by attempt; the last one is open, for `attempt`."""
    here = _by_attempt(path)
    here.setdefault(attempt, b"")
    found, at = [], 0
    for writer, lines in here.items():
        there, stop = sealed.get(writer, []), at + len(lines)
        number = 1 + (there[-1].last if there else 0)
        stretch = _Stretch(attempt=writer, number=number, at=at + sum(one.nbytes for one in there), stop=stop)
        if writer == attempt:
            found.append(replace(stretch, stop=None))
        elif stretch.at < stop:
            found.append(stretch)
        at = stop
    return found


def _unmerged(sealed: dict[int, list[_Segment]]) -> list[tuple[int, int]]:
    """What `_merge` has left to do, of whoever died before it."""
    found = []
    for attempt, segments in sealed.items():
        single = {segment.last for segment in segments if segment.first == segment.last}
        wanted = range(MERGED, 1 + max(single, default=0), MERGED)
        found += [(attempt, last) for last in wanted if single.issuperset(range(last - MERGED + 1, last + 1))]
    return found
