"""One piece of an input file -> its documents, a line or a batch of rows at a time."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from elastic.config_sections import Data
from elastic.data.inputs import SourceFile, opened
from elastic.data.shards import LOSS_MASK, DataError

LINE_BYTES_MAX = 256 << 20
ROWS_AT_ONCE = 512
TOKENS_AT_ONCE = 1 << 20
INSTRUCTION = ("prompt", "completion")
_HEADER_MAGIC, _HEADER_BYTES = 20240520, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a file. JSON lines: those that begin in bytes [start, stop); Parquet: row groups [start, stop); of all
    else the whole."""

    file: SourceFile
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """UTF-8 texts that follow each other: one, or prompt and completion. Of a corpus of tokens their ids: int64; mask:
    uint8, 0 where one is not learned."""

    texts: tuple[bytes, ...] = ()
    tokens: NDArray[np.int64] | None = None
    mask: NDArray[np.uint8] | None = None


def documents(piece: Piece, data: Data, end_of_document: int | None = None) -> Iterator[Document]:
    """In their order, none empty. DataError: what can't be read, by file and line or row.

    `end_of_document`: where files of tokens are cut; None: every TOKENS_AT_ONCE tokens.
    """
    file = piece.file
    with opened(file, data.corpus_options) as stream:
        match file.kind:
            case "text":
                yield Document(texts=(stream.read(),))
            case "jsonl" | "jsonl.gz" | "jsonl.zst":
                yield from _of_lines(piece, stream, data.text_field)
            case "parquet":
                yield from _of_rows(piece, stream, data.text_field)
            case "token-parquet":
                yield from _of_token_rows(piece, stream)
            case "numpy":
                yield from _of_array(file, _numpy_chunks(file, stream), end_of_document)
            case "nanogpt-bin":
                yield from _of_array(file, _bin_chunks(file, stream), end_of_document)


# ---------------------------------------------------------------- JSON lines


def _of_lines(piece: Piece, stream: IO[bytes], text_field: str) -> Iterator[Document]:
    lines: Any = stream
    if piece.file.kind == "jsonl.gz":
        lines = gzip.GzipFile(fileobj=stream)
    elif piece.file.kind == "jsonl.zst":
        lines = io.BufferedReader(pa.input_stream(stream, compression="zstd"))
    at = 0
    if piece.start:
        lines.seek(piece.start - 1)
        at = piece.start - 1 + len(lines.readline())
    number, rows = 0, 0
    while piece.stop is None or at < piece.stop:
        line = lines.readline(LINE_BYTES_MAX + 1)
        if not line:
            break
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise DataError(f"{_line(piece, stream, number)} is longer than {LINE_BYTES_MAX} bytes; cut it")
        at += len(line)
        if not line.strip():
            continue
        rows += 1
        document = _of_line(piece, stream, number, line, text_field)
        if document is not None:
            yield document
    if not rows and piece.start == 0 and piece.stop is None:
        raise DataError(f"{piece.file.path} has no rows; delete it, or make it again")


def _of_line(piece: Piece, stream: IO[bytes], number: int, line: bytes, text_field: str) -> Document | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_line(piece, stream, number)} is no JSON ({error}); mend it, or delete the line") from error
    if not isinstance(row, dict):
        raise DataError(f"{_line(piece, stream, number)} is a {type(row).__name__}, wanted an object; mend it")
    fields = _fields(row, text_field)
    if fields is None:
        raise DataError(
            f"{_line(piece, stream, number)} has no field {text_field!r}, only {', '.join(row) or 'none'}; set "
            "data.text_field"
        )
    values = [row[field] for field in fields]
    for field, value in zip(fields, values):
        if not isinstance(value, str):
            raise DataError(f"{_line(piece, stream, number)}: {field} is {_short(value)}, wanted a text; mend it")
    return _of_texts(values)


def _line(piece: Piece, stream: IO[bytes], number: int) -> str:
    """The number in the whole file: lines before this piece are counted only now, where one is to be named."""
    if piece.start:
        stream.seek(0)
        left = piece.start - 1
        while left > 0 and (block := stream.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
        number += 1
    return f"{piece.file.path} line {number}"


def _fields(names: Any, text_field: str) -> tuple[str, ...] | None:
    if text_field in names:
        return (text_field,)
    return INSTRUCTION if all(field in names for field in INSTRUCTION) else None


def _of_texts(values: Sequence[str]) -> Document | None:
    """None: there is nothing in it. A lone surrogate, which JSON can hold and UTF-8 can't, becomes a question mark."""
    texts = tuple(value.encode(errors="replace") for value in values)
    return Document(texts=texts) if any(texts) else None


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---------------------------------------------------------------- Parquet


def _of_rows(piece: Piece, stream: IO[bytes], text_field: str) -> Iterator[Document]:
    table = _parquet(piece, stream)
    names = table.schema_arrow.names
    fields = _fields(names, text_field)
    if fields is None:
        raise DataError(
            f"{piece.file.path} has no column {text_field!r}, only {', '.join(names) or 'none'}; set data.text_field"
        )
    for field in fields:
        kind = table.schema_arrow.field(field).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{piece.file.path}: column {field} holds {kind}, wanted text; set data.text_field")
    for first, batch in _batches(piece, table, fields):
        for row, values in enumerate(zip(*(batch.column(field).to_pylist() for field in fields)), start=first):
            if None in values:
                raise DataError(
                    f"{piece.file.path} row {row}: {fields[values.index(None)]} is null, wanted a text; mend it"
                )
            if document := _of_texts(values):
                yield document


def _of_token_rows(piece: Piece, stream: IO[bytes]) -> Iterator[Document]:
    table = _parquet(piece, stream)
    names = table.schema_arrow.names
    field = next((name for name in ("tokens", "input_ids") if name in names), None)
    if field is None:
        raise DataError(
            f"{piece.file.path} has no column tokens or input_ids, only {', '.join(names) or 'none'}; rename the one "
            "with the tokens"
        )
    fields = (field, LOSS_MASK) if LOSS_MASK in names else (field,)
    for name in fields:
        kind = table.schema_arrow.field(name).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
            raise DataError(f"{piece.file.path}: column {name} holds {kind}, wanted lists of integers; convert it")
    for first, batch in _batches(piece, table, fields):
        for row, values in enumerate(zip(*(batch.column(name) for name in fields)), start=first):
            for name, value in zip(fields, values):
                if value.values is None or value.values.null_count:
                    raise DataError(f"{piece.file.path} row {row}: {name} holds null, wanted tokens; mend it")
            tokens, *mask = (value.values.to_numpy(zero_copy_only=False).astype(np.int64) for value in values)
            if mask and len(mask[0]) != len(tokens):
                raise DataError(
                    f"{piece.file.path} row {row} has {len(tokens)} tokens and a {LOSS_MASK} of {len(mask[0])}; wanted "
                    "one for each"
                )
            if len(tokens):
                yield Document(tokens=tokens, mask=(mask[0] != 0).astype(np.uint8) if mask else None)


def _parquet(piece: Piece, stream: IO[bytes]) -> pq.ParquetFile:
    table = pq.ParquetFile(stream)
    if not table.metadata.num_rows:
        raise DataError(f"{piece.file.path} has no rows; delete it, or make it again")
    return table


def _batches(piece: Piece, table: pq.ParquetFile, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """The number of its first row in the file, counted from 0, and each batch."""
    metadata = table.metadata
    groups = range(piece.start, metadata.num_row_groups if piece.stop is None else piece.stop)
    first = sum(metadata.row_group(number).num_rows for number in range(piece.start))
    for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=list(groups), columns=list(fields)):
        yield first, batch
        first += batch.num_rows


# ---------------------------------------------------------------- arrays of tokens


def _of_array(file: SourceFile, chunks: Iterator[Any], end_of_document: int | None) -> Iterator[Document]:
    """Cut after each end of document, where that is known, and where a document is longer than TOKENS_AT_ONCE."""
    waiting: list[Any] = []
    length = 0
    is_empty = True
    for chunk in chunks:
        tokens = chunk.astype(np.int64)
        is_empty = False
        ends = [] if end_of_document is None else (np.flatnonzero(tokens == end_of_document) + 1).tolist()
        for start, stop in zip([0, *ends], [*ends, len(tokens)]):
            part = tokens[start:stop]
            if len(part):
                waiting.append(part)
                length += len(part)
            if waiting and (stop < len(tokens) or (ends and stop == ends[-1]) or length >= TOKENS_AT_ONCE):
                yield Document(tokens=np.concatenate(waiting))
                waiting, length = [], 0
    if waiting:
        yield Document(tokens=np.concatenate(waiting))
    if is_empty:
        raise DataError(f"{file.path} has no tokens; delete it, or make it again")


def _numpy_chunks(file: SourceFile, stream: IO[bytes]) -> Iterator[Any]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.str.lstrip("<|>") not in ("u2", "u4", "i4", "i8") or len(shape) != 1:
        raise DataError(
            f"{file.path} holds {dtype} of shape {shape}, wanted uint16, uint32, int32 or int64 of one dim; convert it"
        )
    return _chunks(file, stream, dtype, count=shape[0])


def _bin_chunks(file: SourceFile, stream: IO[bytes]) -> Iterator[Any]:
    """nanoGPT: uint16 as they are, or after 256 int32: 20240520, version 1, count of tokens."""
    header = np.frombuffer(stream.read(_HEADER_BYTES), dtype=np.uint8)
    ints = header.view("<i4") if len(header) == _HEADER_BYTES else np.zeros(3, dtype="<i4")
    if ints[0] == _HEADER_MAGIC:
        if ints[1] != 1:
            raise DataError(f"{file.path} has a header of version {ints[1]}, wanted 1 (uint16); convert it")
        return _chunks(file, stream, np.dtype("<u2"), count=int(ints[2]))
    if file.nbytes % 2:
        raise DataError(f"{file.path} has {file.nbytes} bytes, wanted uint16, an even number; is it cut?")
    rest = _chunks(file, stream, np.dtype("<u2"), count=(file.nbytes - len(header)) // 2)
    return chain([header.view("<u2")], rest)


def _chunks(file: SourceFile, stream: IO[bytes], dtype: Any, *, count: int) -> Iterator[Any]:
    """DataError: the file has fewer or more than `count`."""
    while count:
        data = stream.read(min(count, TOKENS_AT_ONCE) * dtype.itemsize)
        if len(data) < min(count, TOKENS_AT_ONCE) * dtype.itemsize:
            raise DataError(f"{file.path} ends {count * dtype.itemsize - len(data)} bytes too early; copy it again")
        yield np.frombuffer(data, dtype=dtype)
        count -= len(data) // dtype.itemsize
    if stream.read(1):
        raise DataError(f"{file.path} has more bytes than its header says; make it again")
