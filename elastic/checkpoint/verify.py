"""Every byte of a checkpoint in storage, held against its CRCs: what is damaged, by tensor, block and object."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic.checkpoint.blocks import SUB_BLOCK, Table, check_coverage
from elastic.checkpoint.manifest import Manifest, ShardRecord, read_index
from elastic.checkpoint.shard import Shard, of_object, table_object
from elastic.storage.errors import StorageError, StorageUnavailable
from elastic.storage.store import Store

READ_BYTES = 8 * SUB_BLOCK
THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Bytes of one shard that are read at once."""

    record: ShardRecord
    shard: Shard
    start: int
    stop: int


def damages(store: Store, manifest: Manifest, progress: Callable[[int], None] = lambda nbytes: None) -> Iterator[str]:
    """One sentence for each thing that is wrong; nothing where all is as it was committed.

    Memory: THREADS times READ_BYTES, and the tables. progress: hears how many bytes were looked at, again and again.
    StorageUnavailable: nothing can be said now.
    """
    tables: dict[int, Table] = {}
    stretches: list[_Stretch] = []
    sizes = store.list(manifest.index_object.rpartition("/")[0] + "/")
    with ThreadPoolExecutor(THREADS) as pool:
        all_described = pool.map(lambda record: _described(store, manifest, record), manifest.shards)
        for record, described in zip(manifest.shards, all_described):
            if isinstance(described, str):
                yield described
                continue
            tables[record.rank] = described.blocks()
            size = sizes.get(record.object)
            if size != record.nbytes:
                yield _wrong_size(record, size)
            stretches += _stretches(record, described, min(size or 0, record.nbytes))
        for stretch, found in zip(stretches, pool.map(lambda s: _damaged(store, s), stretches)):
            yield from found
            progress(stretch.stop - stretch.start)
    yield from _damaged_index(store, manifest, tables)


def _described(store: Store, manifest: Manifest, record: ShardRecord) -> Shard | str:
    """The shard's own table, or what is wrong with it."""
    name = table_object(record.object)
    try:
        raw = store.get(name)
        if hashlib.sha256(raw).hexdigest() != record.table_sha256:
            return f"{name} is not the one that was committed"
        shard = of_object(raw, name=name)
        shard.blocks()
    except StorageUnavailable:
        raise
    except StorageError as error:
        return str(error)
    if (shard.key, shard.rank, shard.nbytes) != (manifest.key, record.rank, record.nbytes):
        return f"{name} describes rank {shard.rank} of {shard.key}, the manifest says otherwise"
    return shard


def _wrong_size(record: ShardRecord, size: int | None) -> str:
    if size is None:
        return f"{record.object} does not exist, the manifest says {record.nbytes} bytes"
    return f"{record.object} ends after {size} bytes, the manifest says {record.nbytes}"


def _stretches(record: ShardRecord, shard: Shard, nbytes: int) -> Iterator[_Stretch]:
    """Whole sub-blocks: the CRC of a cut one says nothing more than its size."""
    whole = nbytes if nbytes == record.nbytes else nbytes // SUB_BLOCK * SUB_BLOCK
    for start in range(0, whole, READ_BYTES):
        yield _Stretch(record=record, shard=shard, start=start, stop=min(start + READ_BYTES, whole))


def _damaged(store: Store, stretch: _Stretch) -> list[str]:
    record, start, stop = stretch.record, stretch.start, stretch.stop
    try:
        data = memoryview(store.get(record.object, start, stop))
    except StorageUnavailable:
        raise
    except StorageError as error:
        return [str(error)]
    if len(data) != stop - start:
        return [f"{record.object}: of bytes {start} to {stop} only {len(data)} came, though its size is right"]
    return [
        stretch.shard.damage(at // SUB_BLOCK, where=record.object, blocks_told=None)
        for at in range(start, stop, SUB_BLOCK)
        if zlib.crc32(data[at - start : at - start + SUB_BLOCK]) != stretch.shard.crcs[at // SUB_BLOCK]
    ]


def _damaged_index(store: Store, manifest: Manifest, tables: dict[int, Table]) -> Iterator[str]:
    try:
        _, indexed = read_index(store, manifest)
        if len(tables) == manifest.world:
            check_coverage(tables)
            if any(sorted(map(repr, indexed[rank])) != sorted(map(repr, tables[rank])) for rank in tables):
                yield f"{manifest.index_object} does not say what the shards' own tables say"
    except StorageUnavailable:
        raise
    except StorageError as error:
        yield str(error)
