"""What makes uploaded shards a checkpoint: one small JSON object that says all of them and hashes itself.

The block tables stay in the JSON object beside each shard's data; the manifest pins them by their hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic.checkpoint.blocks import check_coverage
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.shard import check_schema, key_of, of_object, table_object
from elastic.checkpoint.store import Store
from elastic.events import Uploaded
from elastic.plan import RestorePlan, ShardSource, SnapshotKey

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard: `object` and its bytes, and the SHA-256 of the JSON object beside it (table and CRCs)."""

    rank: int
    object: str
    nbytes: int
    table_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint. `samples`: the data position. `retired`: log numbers whose data may be deleted."""

    run: str
    attempt: int
    key: SnapshotKey
    world: int
    samples: int
    fingerprint: str
    shards: tuple[ShardRecord, ...]
    retired: tuple[int, ...] = ()


def build(
    store: Store,
    uploads: tuple[Uploaded, ...],
    *,
    run: str,
    attempt: int,
    key: SnapshotKey,
    samples: int,
    fingerprint: str,
) -> Manifest:
    """Reads the uploaded tables and proves that together they are the whole state.

    CheckpointError: a shard is missing, has another size than told, or the blocks do not cover every tensor.
    """
    records, tables, worlds = [], {}, set()
    for upload in sorted(uploads, key=lambda upload: upload.rank):
        name = table_object(upload.object)
        raw = store.get(name)
        shard = of_object(raw, name=name)
        size = store.list(upload.object).get(upload.object)
        if (shard.key, shard.rank) != (key, upload.rank) or not shard.nbytes == upload.nbytes == size:
            raise CheckpointError(
                f"{upload.object} has {size} bytes, its table describes rank {shard.rank} of {shard.key} with "
                f"{shard.nbytes}; wanted rank {upload.rank} of {key} with {upload.nbytes}"
            )
        records.append(
            ShardRecord(
                rank=upload.rank,
                object=upload.object,
                nbytes=shard.nbytes,
                table_sha256=hashlib.sha256(raw).hexdigest(),
            )
        )
        tables[upload.rank] = shard.blocks()
        worlds.add(shard.world)
    if len(worlds) != 1 or list(tables) != list(range(max(worlds))):
        raise CheckpointError(f"{key} has shards of ranks {list(tables)}, worlds {sorted(worlds)}; wanted each once")
    check_coverage(tables)
    return Manifest(
        run=run,
        attempt=attempt,
        key=key,
        world=len(tables),
        samples=samples,
        fingerprint=fingerprint,
        shards=tuple(records),
    )


def check_present(store: Store, manifest: Manifest) -> None:
    """CheckpointError unless all that the manifest names is there, in full size and with the pinned tables."""
    folders = {record.object.rpartition("/")[0] + "/" for record in manifest.shards}
    sizes = {name: size for folder in folders for name, size in store.list(folder).items()}
    for record in manifest.shards:
        if sizes.get(record.object) != record.nbytes:
            got = sizes.get(record.object, "no")
            raise CheckpointError(f"{record.object} has {got} bytes, the manifest says {record.nbytes}")
        name = table_object(record.object)
        if hashlib.sha256(store.get(name)).hexdigest() != record.table_sha256:
            raise CheckpointError(f"{name} is not the one that was committed")


def restore_plan(manifest: Manifest) -> RestorePlan:
    sources = tuple(
        ShardSource(rank=record.rank, tier="storage", host="", endpoint=None, object=record.object)
        for record in manifest.shards
    )
    return RestorePlan(key=manifest.key, world=manifest.world, sources=sources)


def to_body(manifest: Manifest) -> dict[str, Any]:
    return {**asdict(manifest), "key": [manifest.key.generation, manifest.key.step], "schema": SCHEMA}


def of_body(body: Mapping[str, Any], *, name: str) -> Manifest:
    """TooNew: of a newer schema. CheckpointError: fields that do not fit."""
    check_schema(body, SCHEMA, name=name)
    try:
        return Manifest(
            run=body["run"],
            attempt=body["attempt"],
            key=key_of(body["key"]),
            world=body["world"],
            samples=body["samples"],
            fingerprint=body["fingerprint"],
            shards=tuple(ShardRecord(**record) for record in body["shards"]),
            retired=tuple(body["retired"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is no manifest: {error!r}") from error
