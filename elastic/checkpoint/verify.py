"""Every byte of a checkpoint in storage, held against its CRCs: what is damaged, by tensor, block and object."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator

from elastic.checkpoint.blocks import SUB_BLOCK, check_coverage
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.manifest import Manifest, ShardRecord, read_index
from elastic.checkpoint.shard import Shard, of_object, table_object
from elastic.checkpoint.store import Store

READ_BYTES = 8 * SUB_BLOCK


def damages(store: Store, manifest: Manifest) -> Iterator[str]:
    """One sentence for each thing that is wrong; nothing where all is as it was committed. Memory: READ_BYTES."""
    tables = {}
    for record in manifest.shards:
        try:
            shard = _described(store, manifest, record)
        except CheckpointError as error:
            yield str(error)
            continue
        tables[record.rank] = shard.blocks()
        yield from _damaged_bytes(store, record, shard)
    if len(tables) == manifest.world:
        try:
            check_coverage(tables)
            if read_index(store, manifest)[1] != tables:
                yield f"{manifest.index_object} does not say what the shards' own tables say"
        except CheckpointError as error:
            yield str(error)


def _described(store: Store, manifest: Manifest, record: ShardRecord) -> Shard:
    name = table_object(record.object)
    raw = store.get(name)
    if hashlib.sha256(raw).hexdigest() != record.table_sha256:
        raise CheckpointError(f"{name} is not the one that was committed")
    shard = of_object(raw, name=name)
    if (shard.key, shard.rank, shard.nbytes) != (manifest.key, record.rank, record.nbytes):
        raise CheckpointError(f"{name} describes rank {shard.rank} of {shard.key}, the manifest says otherwise")
    return shard


def _damaged_bytes(store: Store, record: ShardRecord, shard: Shard) -> Iterator[str]:
    for start in range(0, shard.nbytes, READ_BYTES):
        stop = min(start + READ_BYTES, shard.nbytes)
        try:
            data = store.get(record.object, start, stop)
        except CheckpointError as error:
            yield str(error)
            return
        if len(data) != stop - start:
            yield f"{record.object} ends after {start + len(data)} bytes, the manifest says {shard.nbytes}"
            return
        for at in range(start, stop, SUB_BLOCK):
            got = zlib.crc32(data[at - start : min(at + SUB_BLOCK, stop) - start])
            if got != shard.crcs[at // SUB_BLOCK]:
                yield shard.damage(at // SUB_BLOCK, where=record.object)
