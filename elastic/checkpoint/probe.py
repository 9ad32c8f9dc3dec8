"""Whether a store is one to entrust a run to: asked with real requests, before anything rests on it."""

from __future__ import annotations

import secrets

from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.store import Store


def probe(store: Store, where: str) -> None:
    """Objects can be created, read, listed and deleted, and a name is taken only once.

    CheckpointError: one sentence on what can't be done and what to change.
    """
    key, first, second = f"probe/{secrets.token_hex(8)}", secrets.token_bytes(64), secrets.token_bytes(64)
    try:
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
    finally:
        store.delete(key)
