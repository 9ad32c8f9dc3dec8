"""What makes uploaded shards a checkpoint: a small JSON object in the commit log, and the index that it pins.

The manifest says what the checkpoint is, and names its shards; the index beside the data says where every tensor's
blocks lie, for whoever reads it without knowing the layout (docs/checkpoint-format.md). Each rank's block table lies
beside its data too: a restore in the same layout reads nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.checkpoint.blocks import SUB_BLOCK, Block, Table, check_coverage, index
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.shard import Shard, check, check_schema, key_of, of_object, sign, table_object
from elastic.events import Uploaded
from elastic.plan import RestorePlan, ShardSource, SnapshotKey
from elastic.storage.store import Store

SCHEMA = 2
INDEX_SCHEMA = 1
REQUESTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What all checkpoints of an attempt have in common, for whoever wants to know whether they fit.

    fingerprint: of the dataset. seed: all random state follows from it and the position. config_sha256: of all that is
    computed (elastic/provenance.py). code_sha256: of elastic and the task's file. elastic: its version.
    """

    run: str
    fingerprint: str
    seed: int = 0
    config_sha256: str = ""
    code_sha256: str = ""
    elastic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard: `object` and its bytes, and the SHA-256 of the JSON object beside it (table and CRCs)."""

    rank: int
    object: str
    nbytes: int
    table_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed checkpoint. world, mesh: of the layout that saved it; axes with their sizes, outermost first.
    samples: the data position. metrics: of the newest evaluation, where that was at this very step."""

    about: About
    attempt: int
    key: SnapshotKey
    world: int
    mesh: Mapping[str, int]
    samples: int
    index_object: str
    index_sha256: str
    shards: tuple[ShardRecord, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    def objects(self) -> list[str]:
        """All that belongs to it, in the order in which it is deleted: first what makes the rest readable."""
        tables = [table_object(record.object) for record in self.shards]
        return [self.index_object, *tables, *(record.object for record in self.shards)]


def build(
    store: Store,
    uploads: Sequence[Uploaded],
    *,
    about: About,
    attempt: int,
    key: SnapshotKey,
    samples: int,
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Reads the uploaded tables, proves that together they are the whole state, and writes the index.

    CheckpointError: a shard is missing, has another size than told, or the blocks do not cover every tensor.
    """
    uploads = sorted(uploads, key=lambda upload: upload.rank)
    with ThreadPoolExecutor(1) as pool:  # in the time that the tables take
        listed = pool.submit(_sizes, store, [upload.object for upload in uploads])
        raws = read_all(store, [table_object(upload.object) for upload in uploads])
        sizes = listed.result()
    shards = [of_object(raw, name=table_object(upload.object)) for upload, raw in zip(uploads, raws)]
    for upload, shard in zip(uploads, shards):
        size = sizes.get(upload.object, "no")
        if (shard.key, shard.rank) != (key, upload.rank) or not shard.nbytes == upload.nbytes == size:
            raise CheckpointError(
                f"{upload.object} has {size} bytes, its table describes rank {shard.rank} of {shard.key} with "
                f"{shard.nbytes}; wanted rank {upload.rank} of {key} with {upload.nbytes}"
            )
    ranks, worlds = [shard.rank for shard in shards], {shard.world for shard in shards}
    if len(worlds) != 1 or ranks != list(range(max(worlds))):
        raise CheckpointError(f"{key} has shards of ranks {ranks}, worlds {sorted(worlds)}; wanted each once")
    tables = {shard.rank: shard.blocks() for shard in shards}
    check_coverage(tables)
    names = {upload.rank: upload.object for upload in uploads}
    index_object = f"{names[0].rpartition('/')[0]}/index.json"
    signed = sign(_index_body(key, shards, tables, names))
    store.put(index_object, signed)
    return Manifest(
        about=about,
        attempt=attempt,
        key=key,
        world=len(shards),
        mesh={"dp_shard": len(shards)},
        samples=samples,
        index_object=index_object,
        index_sha256=hashlib.sha256(signed).hexdigest(),
        shards=tuple(
            ShardRecord(
                rank=rank, object=names[rank], nbytes=shard.nbytes, table_sha256=hashlib.sha256(raw).hexdigest()
            )
            for rank, (shard, raw) in enumerate(zip(shards, raws))
        ),
        metrics=metrics or {},
    )


def _index_body(
    key: SnapshotKey, shards: Sequence[Shard], tables: Mapping[int, Table], names: Mapping[int, str]
) -> dict[str, Any]:
    return {
        "schema": INDEX_SCHEMA,
        "key": [key.generation, key.step],
        "sub_block": SUB_BLOCK,
        "objects": [
            {"name": names[shard.rank], "nbytes": shard.nbytes, "crc32": shard.crcs.tolist()} for shard in shards
        ],
        "tensors": {
            name: {
                "dtype": blocks[0][1].dtype,
                "shape": blocks[0][1].global_shape,
                "blocks": [[rank, block.offsets, block.sizes, block.at, block.nbytes] for rank, block in blocks],
            }
            for name, blocks in sorted(index(tables).items())
        },
    }


def read_index(store: Store, manifest: Manifest) -> tuple[dict[str, Any], dict[int, Table]]:
    """The index's body, and its blocks as the table of each shard. CheckpointError: missing, damaged or another's."""
    raw = store.get(manifest.index_object)
    if hashlib.sha256(raw).hexdigest() != manifest.index_sha256:
        raise CheckpointError(f"{manifest.index_object} is not the one that was committed")
    body = check(raw, name=manifest.index_object)
    check_schema(body, INDEX_SCHEMA, name=manifest.index_object)
    tables: dict[int, list[Block]] = {record.rank: [] for record in manifest.shards}
    for name, tensor in body["tensors"].items():
        for rank, offsets, sizes, at, _ in tensor["blocks"]:
            block = Block(
                name=name,
                dtype=tensor["dtype"],
                global_shape=tuple(tensor["shape"]),
                offsets=tuple(offsets),
                sizes=tuple(sizes),
                at=at,
            )
            tables[rank].append(block)
    return body, {rank: tuple(sorted(blocks, key=lambda block: block.at)) for rank, blocks in tables.items()}


def check_present(store: Store, manifest: Manifest) -> None:
    """CheckpointError unless all that the manifest names is there, in full size and with the pinned tables."""
    sizes = _sizes(store, (record.object for record in manifest.shards))
    for record in manifest.shards:
        if sizes.get(record.object) != record.nbytes:
            got = sizes.get(record.object, "no")
            raise CheckpointError(f"{record.object} has {got} bytes, the manifest says {record.nbytes}")
    names = [manifest.index_object, *(table_object(record.object) for record in manifest.shards)]
    hashes = [manifest.index_sha256, *(record.table_sha256 for record in manifest.shards)]
    for name, raw, sha256 in zip(names, read_all(store, names), hashes):
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise CheckpointError(f"{name} is not the one that was committed")


def read_all(store: Store, names: Sequence[str]) -> list[bytes]:
    """Several small objects at once."""
    with ThreadPoolExecutor(min(len(names), REQUESTS_AT_ONCE) or 1) as pool:
        return list(pool.map(store.get, names))


def _sizes(store: Store, objects: Iterable[str]) -> dict[str, int]:
    folders = {name.rpartition("/")[0] + "/" for name in objects}
    return {name: size for folder in folders for name, size in store.list(folder).items()}


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
            about=About(**body["about"]),
            attempt=body["attempt"],
            key=key_of(body["key"]),
            world=body["world"],
            mesh=body["mesh"],
            samples=body["samples"],
            index_object=body["index_object"],
            index_sha256=body["index_sha256"],
            shards=tuple(ShardRecord(**record) for record in body["shards"]),
            metrics=body["metrics"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is no manifest: {error!r}") from error
