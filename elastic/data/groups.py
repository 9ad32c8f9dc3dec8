"""The work of preparing, cut into groups: each a pure function of its part of the input, done once, kept on disk.

How the input is cut depends on its files and the settings, never on the number of workers, so neither do the shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from elastic.config_sections import Data
from elastic.data.inputs import Kind, SourceFile, opened, side
from elastic.data.records import Document, Piece, documents
from elastic.data.shards import (
    PIECE_BYTES,
    SCHEMA,
    SPLITS,
    DataError,
    Shard,
    Split,
    UsedTokenizer,
    Values,
    as_json,
    dtype_of,
)
from elastic.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from elastic.data.writer import Writer, unwritable
from elastic.storage.files import replace_file, sync_directory

PARTS = "parts"
# Keys of `Data` that change nothing in the shards.
HOW_READ = ("documents", "packing", "prepared_options", "cache", "cache_bytes_max", "ahead_s", "ahead_bytes_max")
_TEXTS_BYTES = 2 << 20  # that are tokenised at once
# A compressed file's text is larger: by how much, about.
_WEIGHTS: dict[Kind, int] = {"jsonl.gz": 4, "jsonl.zst": 4, "parquet": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the input becomes shards in `directory`. tokens: the kind of its files, where they hold tokens already."""

    data: Data
    directory: str
    used: UsedTokenizer
    tokens: Kind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """nbytes: of text in it, about. key: changes with whatever its result depends on."""

    number: int
    pieces: tuple[Piece, ...]
    nbytes: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDone:
    """source: a hash of all that was read."""

    number: int
    key: str
    source: str
    splits: dict[Split, tuple[Shard, ...]]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shards in self.splits.values() for shard in shards)


RunGroups = Callable[[Callable[[Group], GroupDone], Sequence[Group]], Iterator[GroupDone]]


def cut(recipe: Recipe, files: Sequence[SourceFile]) -> list[Group]:
    """The groups, in the order of the files: JSON lines and Parquet may be cut inside a file, all else is not.

    A group is about what makes one shard: two bytes of text for a byte of tokens, half a one where text is bytes.
    """
    data = recipe.data
    group_bytes = data.shard_bytes if recipe.tokens or data.tokenizer == BYTES else 2 * data.shard_bytes
    groups: list[Group] = []
    waiting: list[Piece] = []
    nbytes = 0

    def close() -> None:
        nonlocal waiting, nbytes
        if waiting:
            key = _key(recipe, waiting)
            groups.append(Group(number=len(groups), pieces=tuple(waiting), nbytes=nbytes, key=key))
            waiting, nbytes = [], 0

    for piece, weight in (found for file in files for found in _pieces(file, data, group_bytes)):
        if nbytes + weight > group_bytes:
            close()
        waiting.append(piece)
        nbytes += weight
    close()
    return groups


def prepare_group(recipe: Recipe, group: Group) -> GroupDone:
    """Tokenise the pieces of `group`, write their shards, then the record of the group.

    Where it fails its shards stay without a record: another process may be at the same ones (a lost parent's child, a
    task that runs twice), and only who holds the directory's lock knows. DataError: the input can't be read, or the
    directory can't be written.
    """
    data, directory = recipe.data, Path(recipe.directory)
    writers: dict[Split, Writer] = {
        split: Writer(
            directory=directory,
            split=split,
            group=group.number,
            dtype=dtype_of(recipe.used.vocab_size),
            vocab_size=recipe.used.vocab_size,
            shard_bytes=data.shard_bytes,
        )
        for split in SPLITS
    }
    tokenizer = None if recipe.tokens else open_tokenizer(data)
    if tokenizer is not None and tokenizer.used != recipe.used:
        raise DataError(f"{data.tokenizer} changed while data was prepared with it; run it again")
    source = _fill(writers, group, recipe, tokenizer)
    for writer in writers.values():
        writer.flush()
    splits: dict[Split, tuple[Shard, ...]] = {split: tuple(writers[split].shards) for split in SPLITS}
    done = GroupDone(number=group.number, key=group.key, source=source, splits=splits)
    try:
        sync_directory(directory)
        replace_file(_record(directory, group.number), json.dumps(_to_json(done)).encode())
        sync_directory(directory / PARTS)
    except OSError as error:
        raise unwritable(directory, error) from error
    return done


def finished(directory: Path, group: Group) -> GroupDone | None:
    """What an earlier run made of the same group, if all of it is there by name and size."""
    try:
        raw = json.loads(_record(directory, group.number).read_bytes())
        if raw["key"] != group.key:
            return None
        splits: dict[Split, tuple[Shard, ...]] = {
            split: tuple(Shard(**shard) for shard in raw["splits"][split]) for split in SPLITS
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(is_whole(directory, shard) for shards in splits.values() for shard in shards):
        return None
    return GroupDone(number=group.number, key=group.key, source=raw["source"], splits=splits)


def recorded(directory: Path) -> set[str]:
    """The files that the records of groups name."""
    found: set[str] = set()
    for path in (directory / PARTS).glob("*.json"):
        try:
            splits = json.loads(path.read_bytes())["splits"]
            found |= {name for shards in splits.values() for raw in shards for name in files_of(Shard(**raw))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a record that can't be read names nothing, and its group is done anew
    return found


def files_of(shard: Shard) -> tuple[str, str]:
    return shard.file, shard.sidecar


def is_whole(directory: Path, shard: Shard) -> bool:
    """Whether shard and CRCs are there and as long as they should be."""
    try:
        sizes = [(directory / name).stat().st_size for name in files_of(shard)]
    except OSError:
        return False
    return sizes == [shard.nbytes, 4 * -(-shard.nbytes // PIECE_BYTES)]


# ---------------------------------------------------------------- cutting


def _pieces(file: SourceFile, data: Data, group_bytes: int) -> Iterator[tuple[Piece, int]]:
    """Each with its weight: bytes of text, about."""
    weight = file.nbytes * _WEIGHTS.get(file.kind, 1)
    if weight <= group_bytes or file.kind not in ("jsonl", "parquet"):
        yield Piece(file=file), weight
    elif file.kind == "jsonl":
        count = -(-file.nbytes // group_bytes)
        edges = [file.nbytes * number // count for number in range(count + 1)]
        for start, stop in pairwise(edges):
            yield Piece(file=file, start=start, stop=stop), stop - start
    else:
        with opened(file, data.corpus_options) as stream:
            metadata = pq.ParquetFile(stream).metadata
            weights = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
        start = 0
        for stop in range(1, len(weights) + 1):
            if stop == len(weights) or sum(weights[start : stop + 1]) > group_bytes:
                yield Piece(file=file, start=start, stop=stop), sum(weights[start:stop])
                start = stop
        if not weights:
            yield Piece(file=file), 0


def _key(recipe: Recipe, pieces: Sequence[Piece]) -> str:
    settings = recipe.data.model_dump(
        mode="json", exclude={"prepared", "corpus", "corpus_options", "suffixes", "tokenizer", *HOW_READ}
    )
    parts = [
        [piece.file.name, piece.file.nbytes, piece.file.version, piece.file.split, piece.start, piece.stop]
        for piece in pieces
    ]
    described = [SCHEMA, settings, as_json(recipe.used), recipe.tokens, parts]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- one group


def _fill(writers: dict[Split, Writer], group: Group, recipe: Recipe, tokenizer: Tokenizer | None) -> str:
    """Read and tokenise; returns the hash of what was read."""
    source = hashlib.sha256()
    waiting: list[tuple[Writer, Document]] = []
    nbytes = 0
    for piece in group.pieces:
        content = hashlib.sha256()
        for document in documents(piece, recipe.data, recipe.used.end_of_document):
            digest = hashlib.sha256(
                b"\0".join(document.texts) if document.tokens is None else document.tokens.tobytes()
            )
            content.update(digest.digest())
            writer = writers[piece.file.split or side(digest.digest(), recipe.data.held_out_every)]
            if tokenizer is None:
                if document.mask is not None:
                    content.update(document.mask.tobytes())
                writer.add(_checked(document, piece, recipe).astype(writer.dtype), document.mask)
                continue
            waiting.append((writer, document))
            nbytes += sum(map(len, document.texts))
            if nbytes >= _TEXTS_BYTES:
                _tokenise(waiting, tokenizer)
                waiting, nbytes = [], 0
        source.update(f"{piece.file.name!r} {piece.start} {piece.stop} {content.hexdigest()}\n".encode())
    if tokenizer is not None:
        _tokenise(waiting, tokenizer)
    return source.hexdigest()


def _tokenise(waiting: Sequence[tuple[Writer, Document]], tokenizer: Tokenizer) -> None:
    encoded = iter(tokenizer.encode([text for _, document in waiting for text in document.texts]))
    for writer, document in waiting:
        parts = [next(encoded) for _ in document.texts]
        end = np.array([tokenizer.used.end_of_document], dtype=writer.dtype)
        tokens: Values = np.concatenate([*parts, end])
        writer.add(tokens, _mask(parts) if len(parts) > 1 else None)


def _mask(parts: Sequence[Values]) -> NDArray[np.uint8]:
    """Of prompt, completion and end: only the prompt is not learned."""
    prompt, completion = parts
    mask = np.ones(len(prompt) + len(completion) + 1, dtype=np.uint8)
    mask[: len(prompt)] = 0
    return mask


def _checked(document: Document, piece: Piece, recipe: Recipe) -> NDArray[np.int64]:
    tokens = document.tokens
    assert tokens is not None, "a file of tokens has nothing else"
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < recipe.used.vocab_size:
            raise DataError(
                f"{piece.file.path} has token {token}, wanted 0 to {recipe.used.vocab_size - 1}; give the --vocab-size "
                "of its tokenizer"
            )
    return tokens


def _record(directory: Path, number: int) -> Path:
    return directory / PARTS / f"{number:05d}.json"


def _to_json(done: GroupDone) -> dict[str, Any]:
    splits = {split: [as_json(shard) for shard in shards] for split, shards in done.splits.items()}
    return {"key": done.key, "source": done.source, "splits": splits}
