"""Whether a store is one to entrust a run to: asked with real requests, before anything rests on it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from elastic.checkpoint.errors import CheckpointError
from elastic.config import ConfigError, Place
from elastic.storage.errors import StorageError, StorageUnavailable
from elastic.storage.store import Store, store_at

TRY_S, PAUSE_S = 2.0, 0.5  # the driver's tries are short, so that somebody who waits is told early
FOREIGN_SHOWN = 3
# What a run of ours keeps at the top of its prefix; the last four only where that is the driver's directory as well.
OURS = frozenset(
    (
        "log", "data", "journal", "config", "config.yaml", "logs", "pins", "probe",
        "journal.jsonl", "driver.lock", "coordinator.json", "storage.json",
    )
)  # fmt: skip


def check_storage(place: Place, say: Callable[[str], None]) -> None:
    """The driver's own check, before anything starts; an outage is waited for as long as one request would be.

    ConfigError: a mistake, in one sentence. StorageUnavailable: it still does not answer.
    """
    limit_s = place.options.deadline_s
    store, deadline_s, told = store_at(place.within(TRY_S)), time.monotonic() + limit_s, False
    while True:
        try:
            probe(store, place.url)
            return check_ours(store, place.url)
        except StorageUnavailable as error:
            if time.monotonic() >= deadline_s:
                raise
            if not told:
                say(f"storage does not answer yet, trying for {limit_s:.0f} s: {error}")
            told = True
            time.sleep(PAUSE_S)
        except StorageError as error:
            raise ConfigError(f"storage: {error}") from error


def try_storage(place: Place, say: Callable[[str], None]) -> None:
    """As `check_storage`; of a directory that is not there yet nothing stays."""
    root = place.directory
    made = [] if "://" in place.url else [path for path in (root, *root.parents) if not path.exists()]
    try:
        check_storage(place, say)
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def probe(store: Store, where: str) -> None:
    """Objects can be created, read, listed and deleted, and a name is taken only once.

    CheckpointError: one sentence on what can't be done and what to change; StorageUnavailable: it may pass.
    """
    key = f"probe/{secrets.token_hex(8)}"
    try:
        _write_and_read(store, where, key)
    except StorageUnavailable:
        raise
    except StorageError:
        with suppress(StorageError):
            store.delete(key)
        raise
    store.delete(key)


def _write_and_read(store: Store, where: str, key: str) -> None:
    first, second = secrets.token_bytes(64), secrets.token_bytes(64)
    if not store.put_if_absent(key, first):
        raise CheckpointError(f"{where}: refuses to create {key}, a name that nobody has used; is it writable?")
    if store.put_if_absent(key, second) or store.get(key) != first:
        raise CheckpointError(
            f"{where}: a second writer was not refused an existing name (If-None-Match: *), so two drivers could "
            "both commit; use a service that honours it (AWS S3, MinIO, SeaweedFS, Google, Azure) or a directory"
        )
    if store.get(key, 10, 20) != first[10:20]:
        raise CheckpointError(f"{where}: asked for bytes 10 to 20 of {key} it sent others; is a cache in between?")
    if store.list("probe/").get(key) != len(first):
        raise CheckpointError(f"{where}: {key} was written and is not listed; lists must be up to date")


def check_ours(store: Store, where: str) -> None:
    """CheckpointError: no run has begun there, but somebody else's objects are there."""
    if store.list("log/"):
        return
    foreign = [key for key in store.list("") if key.partition("/")[0] not in OURS]
    if foreign:
        some = ", ".join(foreign[:FOREIGN_SHOWN]) + (", ..." if len(foreign) > FOREIGN_SHOWN else "")
        raise CheckpointError(
            f"{where} holds {len(foreign)} objects that are no run of elastic ({some}); give this run another name "
            "(--set run=NAME) or another storage"
        )
