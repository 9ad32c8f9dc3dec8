"""`elastic logs`: what a run's trainers and hosts printed, from its storage, while it runs and afterwards. No Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator

from elastic.cluster.driver_lock import is_driven
from elastic.config import Place
from elastic.report import ReportError, entries_of
from elastic.storage.store import store_at
from elastic.telemetry.logs import PREFIX, Reading, Tail, first_failure, last_lines, merged, ranks_text

POLL_S = 1.0


def trainer_lines(place: Place, *, generation: int | None, rank: int | None, follow: bool) -> Iterator[str]:
    """Lines of one generation (None: the newest), of one rank or of all as one; of a failed one what broke comes first.

    follow: go on, also into newer generations if none was named, until no driver holds the run. ReportError:
    there is no such output.
    """
    reading = Reading(store_at(place), generation=generation, rank=rank)
    _check(place, reading.known(), generation, rank)
    shown: int | None = None
    told: set[int] = set()
    while True:
        over = not follow or not is_driven(place.directory)  # before reading: what came until then is read
        texts = reading.texts(whole_lines=not over)
        if reading.generation != shown or over:
            for ended in (shown, reading.generation):
                yield from _failure(place, ended, told)
        if reading.generation != shown:
            shown = reading.generation
            yield f"-- generation {shown}, {ranks_text(sorted(texts))}"
        yield from merged(texts) if rank is None else texts.get(rank, "").splitlines()
        if over:
            return
        time.sleep(POLL_S)


def _check(place: Place, known: dict[int, list[int]], generation: int | None, rank: int | None) -> None:
    where = f"{place.url}/{PREFIX}"
    if not known:
        raise ReportError(f"{where} holds no output yet; trainers' first lines come some seconds after they start")
    if generation is not None and generation not in known:
        raise ReportError(f"{where} holds no output of generation {generation}; there are {', '.join(map(str, known))}")
    chosen = generation or max(known)
    if rank is not None and rank not in known[chosen]:
        raise ReportError(f"{where} holds none of rank {rank} in generation {chosen}; got {ranks_text(known[chosen])}")


def _failure(place: Place, generation: int | None, told: set[int]) -> Iterator[str]:
    """What ended `generation`, and the last lines of the rank that failed first; each generation's once."""
    if generation is None or generation in told:
        return
    failure = first_failure(entries_of(place), generation)
    if failure is None:
        return
    told.add(generation)
    rank = failure["rank"]
    who = ", ".join(failure["hosts"]) if rank is None else f"rank {rank} on {failure['hosts'][0]}"
    yield f"generation {generation} ended: {failure['failure']}, {who}"
    if rank is not None:
        texts = Reading(store_at(place), generation=generation, rank=rank).texts()
        for line in last_lines(texts.get(rank, "(nothing that it printed came to storage)")):
            yield f"  {line}"


def host_lines(place: Place) -> Iterator[str]:
    """Of each host: its own log, its template's, its mover's, its standbys'."""
    store = store_at(place)
    for key in store.list(f"{PREFIX}host-"):
        tail = Tail.from_object(store.get(key))
        yield f"-- {key.removeprefix(PREFIX)}: {tail.path} on node {tail.node}"
        yield from tail.after(0, whole_lines=False)[0].splitlines()
