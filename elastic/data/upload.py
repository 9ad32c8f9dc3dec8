"""A prepared directory -> object storage, verified on the way, the manifest last; and what lies there, held against it.

Shards are named by their content: what an interrupted upload brought is there already for the next one.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from elastic.config import ConfigError
from elastic.data.cache import pieces_of, span_of
from elastic.data.remote import Prepared
from elastic.data.shards import MANIFEST, TOKENIZER_COPY, DataError, Manifest, Shard, check_sizes, read_manifest
from elastic.storage.errors import ObjectMissing
from elastic.storage.store import Store

Say = Callable[[str], None]


def upload(directory: Path, to: Prepared, *, progress: Say) -> str:
    """Returns the manifest's URL. DataError: a file is damaged. ConfigError: another corpus lies there. StorageError:
    storage refuses, or is down for longer than the options say; what is there is kept."""
    manifest = read_manifest(directory)
    shards = [shard for found in manifest.splits.values() for shard in found]
    check_sizes(directory, shards)
    store = to.store(to.options.deadline_s)
    there = store.list("")
    if MANIFEST in there and (other := read_manifest(to).fingerprint) != manifest.fingerprint:
        raise ConfigError(
            f"{to} holds another corpus, of fingerprint {other[:12]}; give another URL, runs may be reading that one"
        )
    for number, shard in enumerate(shards, 1):
        if there.get(shard.file) != shard.nbytes or there.get(shard.sidecar) != 4 * pieces_of(shard):
            _upload_shard(directory, shard, store)
        progress(f"{number} of {len(shards)} shards")
    if (directory / TOKENIZER_COPY).exists():
        store.put(TOKENIZER_COPY, (directory / TOKENIZER_COPY).read_bytes())
    store.put(MANIFEST, manifest.to_json().encode())
    return f"{to}/{MANIFEST}"


def _upload_shard(directory: Path, shard: Shard, store: Store) -> None:
    try:
        crcs = (directory / shard.sidecar).read_bytes()
        with (directory / shard.file).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            for what, sha256, wanted in (
                (shard.file, hashlib.sha256(content).hexdigest(), shard.sha256),
                (shard.sidecar, hashlib.sha256(crcs).hexdigest(), shard.pieces_sha256),
            ):
                if sha256 != wanted:
                    raise DataError(f"{directory / what} is damaged, nothing of it is uploaded; prepare it again")
            with memoryview(content) as view:
                store.put(shard.file, view)
    except OSError as error:
        raise DataError(f"can't read {error.filename or directory}: {error.strerror}") from error
    store.put(shard.sidecar, crcs)


def damages_behind(prepared: Prepared, manifest: Manifest) -> Iterator[str]:
    """One sentence for each thing that is wrong with the bytes behind a URL. Memory: a few pieces."""
    store = prepared.store(prepared.options.deadline_s)
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        try:
            crcs = store.get(shard.sidecar)
        except ObjectMissing:
            crcs = b""
        is_known = hashlib.sha256(crcs).hexdigest() == shard.pieces_sha256
        if not is_known:
            yield f"{prepared}/{shard.sidecar} is missing, or not the one that was uploaded"
        try:
            yield from _shard_damages(prepared, store, shard, np.frombuffer(crcs, "<u4") if is_known else None)
        except ObjectMissing:
            yield f"{prepared}/{shard.file} is missing"


def _shard_damages(
    prepared: Prepared, store: Store, shard: Shard, crcs: np.ndarray[tuple[int], np.dtype[np.uint32]] | None
) -> Iterator[str]:
    sha256 = hashlib.sha256()
    for number in range(pieces_of(shard)):
        start, stop = span_of(shard, number)
        data = store.get(shard.file, start, stop)
        sha256.update(data)
        if crcs is not None and zlib.crc32(data) != crcs[number]:
            yield f"{prepared}/{shard.file}: bytes {start} to {stop} are damaged"
    if sha256.hexdigest() != shard.sha256:
        yield f"{prepared}/{shard.file} has SHA-256 {sha256.hexdigest()[:12]}..., wanted {shard.sha256[:12]}..."
