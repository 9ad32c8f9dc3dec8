"""Documents -> shards: one Arrow file and its CRCs, written aside, made durable and named by their content."""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from elastic.data.shards import LOSS_MASK, PIECE_BYTES, DataError, Shard, Split, TokenDtype, Values, sidecar_of
from elastic.storage.files import replace_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """crcs: little-endian uint32 CRC-32 of each PIECE_BYTES."""

    nbytes: int
    sha256: str
    crcs: bytes


@dataclass(slots=True, kw_only=True)
class Writer:
    """The shards of one group and one split: documents that wait for their shard, and the shards written.

    A document that does not fit into what remains of `shard_bytes` begins the next shard; no document is cut.
    """

    directory: Path
    split: Split
    group: int
    dtype: TokenDtype
    vocab_size: int
    shard_bytes: int
    shards: list[Shard] = field(default_factory=list)
    _documents: list[Values] = field(default_factory=list)
    _masks: list[NDArray[np.uint8] | None] = field(default_factory=list)
    _tokens: int = 0
    _is_masked: bool = False

    def add(self, tokens: Values, mask: NDArray[np.uint8] | None = None) -> None:
        """`mask`: uint8 [len(tokens)], 1 where a token is learned; None: all are."""
        is_masked = self._is_masked or mask is not None
        if self._documents and self._nbytes(len(tokens), is_masked) > self.shard_bytes:
            self.flush()
            is_masked = mask is not None
        self._documents.append(tokens)
        self._masks.append(mask)
        self._tokens += len(tokens)
        self._is_masked = is_masked

    def flush(self) -> None:
        """Write what waits as one shard. DataError: a token is not in the vocabulary, or the disk refuses."""
        if not self._documents:
            return
        offsets = np.cumsum([0, *(len(document) for document in self._documents)], dtype=np.int64)
        values = np.concatenate(self._documents)
        masks = [np.ones(len(d), np.uint8) if m is None else m for d, m in zip(self._documents, self._masks)]
        mask = np.concatenate(masks) if self._is_masked else None
        self._documents, self._masks, self._tokens, self._is_masked = [], [], 0, False
        if len(values) and (largest := int(values.max())) >= self.vocab_size:
            raise DataError(
                f"token {largest} of group {self.group} is not below the vocabulary of {self.vocab_size}; "
                "is this the tokenizer that the text was made with?"
            )
        self.shards.append(self._write(offsets, values, mask))

    def _nbytes(self, tokens: int, is_masked: bool) -> int:
        token_bytes = np.dtype(self.dtype).itemsize + is_masked
        return (self._tokens + tokens) * token_bytes + 8 * (len(self._documents) + 2)

    def _write(self, offsets: NDArray[np.int64], values: Values, mask: NDArray[np.uint8] | None) -> Shard:
        stem = f"{self.split}-{self.group:05d}-{len(self.shards):05d}"
        aside = self.directory / f"{stem}.{os.getpid()}.tmp"
        try:
            _write_arrow(aside, offsets, values, mask)
            found = digests(aside)
            file = f"{stem}-{found.sha256[:12]}.arrow"
            values_offset, offsets_offset, mask_offset = _places(aside, found.nbytes)
            replace_file(self.directory / sidecar_of(file), found.crcs)
            aside.replace(self.directory / file)
        except OSError as error:
            raise unwritable(self.directory, error) from error
        finally:
            aside.unlink(missing_ok=True)
        return Shard(
            file=file,
            nbytes=found.nbytes,
            tokens=len(values),
            documents=len(offsets) - 1,
            sha256=found.sha256,
            values_offset=values_offset,
            offsets_offset=offsets_offset,
            mask_offset=mask_offset,
            pieces_sha256=hashlib.sha256(found.crcs).hexdigest(),
        )


def digests(path: Path) -> Digests:
    """Of a file, read once, a piece at a time. OSError: it can't be read."""
    sha256, crcs, nbytes = hashlib.sha256(), [], 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            sha256.update(piece)
            crcs.append(zlib.crc32(piece))
            nbytes += len(piece)
    return Digests(nbytes=nbytes, sha256=sha256.hexdigest(), crcs=np.array(crcs, dtype="<u4").tobytes())


def unwritable(directory: Path, error: OSError) -> DataError:
    return DataError(
        f"can't write into {directory}: {error.strerror or error}; make room or get the permission, "
        "then run it again: what is done is kept"
    )


def _write_arrow(path: Path, offsets: NDArray[np.int64], values: Values, mask: NDArray[np.uint8] | None) -> None:
    """One record batch, one row per document."""
    columns = {"tokens": values} if mask is None else {"tokens": values, LOSS_MASK: mask}
    batch = pa.record_batch(
        [pa.LargeListArray.from_arrays(_arrow(offsets), _arrow(column)) for column in columns.values()],
        names=list(columns),
    )
    with path.open("wb") as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), batch.schema) as writer:
            writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())


def _arrow(values: NDArray[Any]) -> pa.Array:
    """The same memory; `pa.array` would import pandas, which takes most of a second."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _places(path: Path, nbytes: int) -> tuple[int, int, int | None]:
    """Bytes at which values, offsets and mask begin in the file."""
    with pa.memory_map(str(path)) as file:
        whole = file.read_buffer(nbytes)
        batch = pa.ipc.open_file(pa.BufferReader(whole)).get_batch(0)
        places = {}
        for name in batch.schema.names:
            column = batch.column(name)
            assert column.offset == 0 and column.values.offset == 0, "a freshly written column starts at its buffer"
            places[name] = (column.values.buffers()[1].address - whole.address, column.buffers()[1].address)
        values_offset, offsets_address = places["tokens"]
        mask_offset = places[LOSS_MASK][0] if LOSS_MASK in places else None
        return values_offset, offsets_address - whole.address, mask_offset
