"""A prepared corpus held against its manifest, every byte; and what is in it, for a person."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from elastic.config import ElasticError
from elastic.data import plan_files
from elastic.data.remote import Prepared
from elastic.data.shards import (
    LOSS_MASK,
    PIECE_BYTES,
    SPLITS,
    TOKENIZER_COPY,
    Manifest,
    Mapped,
    Shard,
    Split,
    read_manifest,
)
from elastic.data.tokenizer import BYTES_TOKENIZER, BytesTokenizer, Tokenizer, open_file
from elastic.data.writer import digests

_VALUES_AT_ONCE = 8 << 20
_SHOWN_TOKENS = 1000
_SHOWN_CHARACTERS = 200


def damages(prepared: Path, manifest: Manifest) -> Iterator[str]:
    """One sentence for each thing that is wrong; nothing where all is as it was written. Memory: a few MB."""
    if manifest.tokenizer.sha256 not in ("", BYTES_TOKENIZER.sha256):
        yield from _tokenizer_damage(prepared / TOKENIZER_COPY, manifest)
    for shards in manifest.splits.values():
        for shard in shards:
            found = list(_shard_damages(prepared, shard))
            # Arrow is not given bytes that are known to be wrong.
            yield from found or _content_damages(prepared, shard, manifest)
    yield from plan_files.damages(prepared, manifest)


def _tokenizer_damage(path: Path, manifest: Manifest) -> Iterator[str]:
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.tokenizer.sha256:
            yield f"{path} is not the tokenizer that the manifest names; copy that one back"
    except OSError as error:
        yield f"can't read {path}: {error.strerror}"


def _shard_damages(prepared: Path, shard: Shard) -> Iterator[str]:
    path = prepared / shard.file
    try:
        crcs = (prepared / shard.sidecar).read_bytes()
        found = digests(path)
    except OSError as error:
        yield f"can't read {error.filename}: {error.strerror}"
        return
    if hashlib.sha256(crcs).hexdigest() != shard.pieces_sha256:
        yield f"{prepared / shard.sidecar} is not the one that was written"
        crcs = b""
    if found.nbytes != shard.nbytes:
        yield f"{path} has {found.nbytes} bytes, the manifest says {shard.nbytes}"
    pairs = zip(np.frombuffer(crcs, "<u4").tolist(), np.frombuffer(found.crcs, "<u4").tolist())
    for number, (wanted, got) in enumerate(pairs):
        start, stop = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, shard.nbytes)
        is_cut = shard.nbytes != found.nbytes and (number + 1) * PIECE_BYTES > min(shard.nbytes, found.nbytes)
        if wanted != got and not is_cut:
            yield f"{path}: bytes {start} to {stop} are damaged (CRC {got:08x}, wanted {wanted:08x})"
    if found.nbytes == shard.nbytes and found.sha256 != shard.sha256:
        yield f"{path} has SHA-256 {found.sha256[:12]}..., the manifest says {shard.sha256[:12]}..."


def _content_damages(prepared: Path, shard: Shard, manifest: Manifest) -> Iterator[str]:
    """Whether the bytes, which are those that were written, say what the manifest says."""
    path = prepared / shard.file
    try:
        with pa.memory_map(str(path)) as file:
            yield from _arrow_damages(path, file.read_buffer(shard.nbytes), shard, manifest)
    except (OSError, pa.ArrowException, IndexError, KeyError) as error:
        yield f"{path} can't be read as Arrow: {error}"


def _arrow_damages(path: Path, whole: pa.Buffer, shard: Shard, manifest: Manifest) -> Iterator[str]:
    reader = pa.ipc.open_file(pa.BufferReader(whole))
    if reader.num_record_batches != 1:
        yield f"{path} has {reader.num_record_batches} record batches, wanted 1"
        return
    batch = reader.get_batch(0)
    column = batch.column("tokens")
    wanted = pa.large_list(pa.from_numpy_dtype(manifest.dtype))
    if column.type != wanted:
        yield f"{path} holds {column.type}, wanted {wanted}"
        return
    if (len(column), len(column.values)) != (shard.documents, shard.tokens):
        yield (
            f"{path} has {len(column)} documents and {len(column.values)} tokens, the manifest says {shard.documents} "
            f"and {shard.tokens}"
        )
        return
    places = [column.values.buffers()[1].address - whole.address, column.buffers()[1].address - whole.address]
    if places != [shard.values_offset, shard.offsets_offset]:
        yield (
            f"{path}: tokens and offsets begin at bytes {places[0]} and {places[1]}, the manifest says "
            f"{shard.values_offset} and {shard.offsets_offset}"
        )
    offsets = column.offsets.to_numpy()
    if offsets[0] != 0 or offsets[-1] != shard.tokens or (np.diff(offsets) < 0).any():
        yield f"{path}: the documents' offsets do not rise from 0 to {shard.tokens}"
    values = column.values.to_numpy()
    largest = max((int(part.max()) for part in _parts(values)), default=0)
    if largest >= manifest.vocab_size:
        yield f"{path} has token {largest}, wanted less than the vocabulary of {manifest.vocab_size}"
    has_mask = LOSS_MASK in batch.schema.names
    if has_mask != (shard.mask_offset is not None):
        yield f"{path} has {'a' if has_mask else 'no'} loss mask, the manifest says otherwise"
    elif has_mask:
        mask = batch.column(LOSS_MASK)
        if len(mask.values) != shard.tokens or any(part.max() > 1 for part in _parts(mask.values.to_numpy())):
            yield f"{path}: the loss mask is not a 0 or 1 for each token"
        if mask.values.buffers()[1].address - whole.address != shard.mask_offset:
            yield f"{path}: the loss mask does not begin at byte {shard.mask_offset}, as the manifest says"


def _parts(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(values), _VALUES_AT_ONCE):
        yield values[start : start + _VALUES_AT_ONCE]


# ---------------------------------------------------------------- inspect


def described(prepared: Path | Prepared, documents: int) -> list[str]:
    """What the corpus is, and the first `documents` of each split. DataError: nothing is prepared there."""
    manifest = read_manifest(prepared)
    used = manifest.tokenizer
    end = "not known" if used.end_of_document is None else str(used.end_of_document)
    lines = [
        f"fingerprint {manifest.fingerprint}",
        f"tokenizer   {used.name}, {used.vocab_size} tokens, end of document {end}, {manifest.dtype}",
    ]
    for split in SPLITS:
        shards = manifest.splits.get(split, ())
        tokens, rows, nbytes = (
            sum(getattr(shard, name) for shard in shards) for name in ("tokens", "documents", "nbytes")
        )
        masked = sum(shard.mask_offset is not None for shard in shards)
        lines.append(
            f"{split:11} {tokens:,} tokens, {rows:,} documents, {len(shards)} shards, {nbytes:,} bytes"
            + (f", {masked} shards with a loss mask" if masked else "")
        )
    if isinstance(prepared, Path):
        lines += plan_files.described(prepared, manifest)
    if documents > 0:
        tokenizer = _tokenizer(prepared, manifest)
        for split in (split for split in SPLITS if split in manifest.splits):
            lines += _first(prepared, manifest, split, documents, tokenizer)
    return lines


def _tokenizer(prepared: Path | Prepared, manifest: Manifest) -> Tokenizer | str:
    """Or why there is none."""
    if manifest.tokenizer.sha256 == BYTES_TOKENIZER.sha256:
        return BytesTokenizer()
    if not manifest.tokenizer.sha256:
        return "ids, for the import named no tokenizer"
    if not isinstance(prepared, Path):
        return "ids, for the tokenizer lies behind the URL"
    try:
        end = manifest.tokenizer.end_of_document
        return open_file(str(prepared / TOKENIZER_COPY), end if end is not None else "")
    except ElasticError as error:
        return f"ids, for {error}"


def _first(
    prepared: Path | Prepared, manifest: Manifest, split: Split, count: int, tokenizer: Tokenizer | str
) -> Iterator[str]:
    if isinstance(tokenizer, str):
        yield f"{split} documents as {tokenizer}"
    shards = manifest.splits[split]
    values_of = partial(Mapped, prepared, shards) if isinstance(prepared, Path) else prepared.values_of(shards)
    values = values_of(manifest.dtype, [shard.values_offset for shard in shards])
    number = 0
    for at, shard in enumerate(shards):
        offsets = _offsets(prepared, shard)
        for row in range(min(shard.documents, count - number)):
            start, stop = int(offsets[row]), int(offsets[row + 1])
            tokens = values[at][start : min(stop, start + _SHOWN_TOKENS)]
            text = " ".join(map(str, tokens.tolist())) if isinstance(tokenizer, str) else tokenizer.decode(tokens)
            shown = repr(text[:_SHOWN_CHARACTERS]) + ("..." if len(text) > _SHOWN_CHARACTERS else "")
            yield f"{split} {number}, {stop - start} tokens: {shown}"
            number += 1
        if number >= count:
            return


def _offsets(prepared: Path | Prepared, shard: Shard) -> NDArray[Any]:
    """Of its documents."""
    place, count = shard.offsets_offset, shard.documents + 1
    if isinstance(prepared, Path):
        return np.memmap(prepared / shard.file, "<i8", "r", offset=place, shape=(count,))
    return prepared.values_of([shard])("uint64", [place], [count])[0]
