"""A prepared corpus, read: the manifest, and fixed windows over the token stream of one split.

Shards are Arrow IPC files; the manifest records where in each file the token values begin, so a reader maps
them directly: no copy, no footer to parse, no Arrow library in the process that trains.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard, overload

import numpy as np
from numpy.typing import NDArray

from elastic.config import ElasticError
from elastic.data.documents import Boundaries, apart
from elastic.data.order import Order, order_of
from elastic.data.rows import Rows
from elastic.schema import refusal

if TYPE_CHECKING:
    from elastic.data.fetch import Wanted
    from elastic.data.remote import Fetched, Prepared, Remote

MANIFEST = "manifest.json"
TOKENIZER_COPY = "tokenizer.json"
SCHEMA = 2
PIECE_BYTES = 1 << 20
LOSS_MASK = "loss_mask"  # a column beside the tokens: 0 where one is not learned
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
ROWS_PER_SHARD_MIN = 4
TokenDtype = Literal["uint16", "uint32"]
Values = NDArray[np.unsignedinteger[Any]]  # uint16 or uint32
_AGAIN = "prepare the corpus again after deleting"


class DataError(ElasticError):
    """Prepared data is missing, damaged or too small; the message names the file and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One Arrow file of `nbytes` bytes: little-endian values of all documents at byte `values_offset`, as many as
    `tokens`; their int64 boundaries at `offsets_offset`, documents + 1 of them; a uint8 for each token at
    `mask_offset`, 1 where it is learned, or None where all are. pieces_sha256: of the sidecar of CRCs."""

    file: str
    nbytes: int
    tokens: int
    documents: int
    sha256: str
    values_offset: int
    offsets_offset: int
    mask_offset: int | None
    pieces_sha256: str

    @property
    def sidecar(self) -> str:
        """The file with the CRC-32 of each PIECE_BYTES of this one, little-endian uint32."""
        return sidecar_of(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTokenizer:
    """sha256: of its file. end_of_document: the token that ends each document; None: not known (imported tokens)."""

    name: str
    sha256: str
    vocab_size: int
    end_of_document: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What was prepared, from what. It holds no path and no time: the same input gives the same bytes.

    `source` identifies the input: a hash over each file's relative path and content.
    """

    tokenizer: UsedTokenizer
    dtype: TokenDtype
    source: str
    splits: dict[str, tuple[Shard, ...]]

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Hash of everything above: two corpora with the same fingerprint hold the same samples."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        content = {"fingerprint": self.fingerprint, **self._content()}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "tokenizer": as_json(self.tokenizer),
            "dtype": self.dtype,
            "source": self.source,
            "splits": {name: [as_json(shard) for shard in shards] for name, shards in self.splits.items()},
        }


def as_json(record: Shard | UsedTokenizer) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def sidecar_of(file: str) -> str:
    return f"{file.removesuffix('.arrow')}.crc"


def dtype_of(vocab_size: int) -> TokenDtype:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def read_manifest(prepared: Path | Prepared) -> Manifest:
    """The manifest in directory or at URL `prepared`. DataError: there is none, or it is not what was written.
    StorageUnavailable: the URL's storage is down.

    Looks at no shard: 16,000 of them take a fraction of a second.
    """
    path = f"{prepared}/{MANIFEST}"
    try:
        raw = json.loads(Path(path).read_bytes() if isinstance(prepared, Path) else prepared.manifest_bytes())
        schema, fingerprint = raw.pop("schema"), raw.pop("fingerprint")
        if why := refusal(path, schema, SCHEMA):
            raise DataError(f"{why}, or {_AGAIN} {prepared}")
        splits = {name: tuple(Shard(**shard) for shard in split) for name, split in raw.pop("splits").items()}
        manifest = Manifest(tokenizer=UsedTokenizer(**raw.pop("tokenizer")), splits=splits, **raw)
    except FileNotFoundError:
        how = "" if "://" not in path else " into a directory, then `elastic data upload` it there"
        raise DataError(f"no corpus in {prepared}: {MANIFEST} is missing; prepare it first{how}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no manifest ({error!r}); {_AGAIN} {prepared}") from error
    if manifest.fingerprint != fingerprint:
        raise DataError(
            f"{path} was changed: it says fingerprint {fingerprint}, its content gives "
            f"{manifest.fingerprint}; {_AGAIN} {prepared}"
        )
    return manifest


def check_sizes(prepared: Path, shards: Sequence[Shard]) -> None:
    """DataError: a shard is missing or has another size (reading a map past its file's end is a SIGBUS)."""
    for shard in shards:
        path = prepared / shard.file
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise DataError(f"can't open shard {path}: {error.strerror}; prepare the corpus again") from error
        if nbytes != shard.nbytes:
            raise DataError(
                f"shard {path} has {nbytes} bytes, the manifest says {shard.nbytes}; prepare the corpus again"
            )


class ByShard(Sequence[Values]):
    """An array for each shard, which is had when it is asked for."""

    @abstractmethod
    def of_shard(self, index: int) -> Values: ...

    @overload
    def __getitem__(self, index: int) -> Values: ...
    @overload
    def __getitem__(self, index: slice) -> list[Values]: ...
    def __getitem__(self, index: int | slice) -> Values | list[Values]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self.of_shard(index)


class Mapped(ByShard):
    """Values of each shard's tokens, mapped when they are first asked for: thousands are never all open.

    offsets: where they begin in each file; None: they are not there, and 1 for every token. counts: of the values of
    each shard, where there is not one for each token.
    """

    def __init__(
        self,
        prepared: Path,
        shards: Sequence[Shard],
        dtype: TokenDtype | Literal["uint8", "uint64"],
        offsets: Sequence[int | None],
        counts: Sequence[int] | None = None,
    ) -> None:
        self._prepared = prepared
        self._shards = shards
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._offsets = offsets
        self._counts = [shard.tokens for shard in shards] if counts is None else counts
        self._mapped: dict[int, Values] = {}

    def __len__(self) -> int:
        return len(self._shards)

    def of_shard(self, index: int) -> Values:
        if (found := self._mapped.get(index)) is not None:
            return found
        shard, offset, count = self._shards[index], self._offsets[index], self._counts[index]
        path = self._prepared / shard.file
        if offset is None:
            return np.broadcast_to(np.ones((), self._dtype), (count,))
        try:
            mapped = np.memmap(path, self._dtype, "r", offset=offset, shape=(count,))
        except (OSError, ValueError) as error:
            raise DataError(f"can't map shard {path}: {error}; prepare the corpus again") from error
        values: Values = np.asarray(mapped)
        self._mapped[index] = values
        return values


class Corpus:
    """One split of a prepared corpus, memory-mapped. `values`: the tokens of each shard, of one dtype.

    masks: uint8 of each token in the same places, 1 where it is learned; None: all are. boundaries: of its documents,
    where they are known. is_apart: windows tell them apart; it may be set before anything is read.
    """

    is_apart = False

    def __init__(
        self,
        *,
        fingerprint: str,
        vocab_size: int,
        values: Sequence[Values],
        lengths: Sequence[int] | None = None,
        masks: Corpus | None = None,
        documents: Sequence[Values] | None = None,
    ) -> None:
        """`lengths` of the values, where those are mapped only when needed. `documents`: 64-bit boundaries of the
        documents in each shard, from 0 to its length."""
        self.fingerprint = fingerprint
        self.vocab_size = vocab_size
        self.masks = masks
        self._values = values
        self._ends = np.cumsum([len(part) for part in values] if lengths is None else lengths, dtype=np.int64)
        self.tokens = int(self._ends[-1])
        self.boundaries = None if documents is None else Boundaries(documents, self._ends)

    @classmethod
    def open(cls, prepared: Path | Prepared, split: Split) -> Self:
        """Map the shards of `split`. DataError: nothing prepared, no such split, a file of wrong size. Of a URL only
        the manifest is read now. StorageUnavailable: not even that can be."""
        manifest = read_manifest(prepared)
        shards = manifest.splits.get(split, ())
        if not shards:
            raise DataError(f"{prepared} has no split {split!r}, it has {', '.join(manifest.splits) or 'none'}")
        if isinstance(prepared, Path):
            check_sizes(prepared, shards)
        values_of = partial(Mapped, prepared, shards) if isinstance(prepared, Path) else prepared.values_of(shards)
        lengths, of_masks = [shard.tokens for shard in shards], [shard.mask_offset for shard in shards]
        masks = values_of("uint8", of_masks) if any(at is not None for at in of_masks) else None
        places, counts = [shard.offsets_offset for shard in shards], [shard.documents + 1 for shard in shards]
        return cls(
            fingerprint=manifest.fingerprint,
            vocab_size=manifest.vocab_size,
            values=values_of(manifest.dtype, [shard.values_offset for shard in shards]),
            lengths=lengths,
            masks=Corpus(fingerprint="", vocab_size=2, values=masks, lengths=lengths) if masks else None,
            documents=values_of("uint64", places, counts),
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 or uint32, of every window."""
        return self._values.dtype if is_fetched(self._values) else self._values[0].dtype

    @property
    def shards(self) -> int:
        return len(self._values)

    def of_shard(self, shard: int) -> Values:
        """All its values."""
        return self._values[shard]

    def windows(self, seq_len: int) -> int:
        """How many windows of `seq_len` tokens there are; each needs one token more for its last target."""
        return max(0, (self.tokens - 1) // seq_len)

    def order_fingerprint(self, seq_len: int) -> str:
        """What its order depends on."""
        return self.fingerprint

    def order(self, *, seed: int, seq_len: int, lanes: int, name: str = "", source: int = 0) -> Order:
        """In which a run reads it whose steps have `lanes` samples. ValueError: there is no window."""
        return order_of(
            fingerprint=self.order_fingerprint(seq_len),
            seed=seed,
            windows=self.windows(seq_len),
            window_bytes=seq_len * self.dtype.itemsize,
            lanes=lanes,
            name=name,
            source=source,
        )

    def rows(self, indices: NDArray[np.uint64], seq_len: int) -> Rows:
        """Copies of these windows, with all that is known of their tokens. IndexError: there is no such window."""
        learned = None if self.masks is None else self.masks.gather(indices, seq_len)
        tokens = self.gather(indices, seq_len)
        if not self.is_apart:
            return Rows(tokens=tokens, learned=learned)
        assert self.boundaries is not None, "opened without its documents"
        begins = self.boundaries.begins(indices.astype(np.int64) * seq_len, seq_len + 1)
        documents, learned = apart(begins, learned)
        return Rows(tokens=tokens, learned=learned, documents=documents)

    @property
    def remote(self) -> Remote | None:
        """Where it is fetched from; None: it lies in files of this node."""
        return self._values.remote if is_fetched(self._values) else None

    def expect(self, indices: NDArray[np.uint64], seq_len: int) -> Wanted | None:
        """These windows are read soon. Does not wait. None: there is nothing to fetch."""
        if not is_fetched(self._values):
            return None
        wanted = self._values.expect_windows(self._ends, indices, seq_len)
        return wanted if self.masks is None else wanted.joined(self.masks.expect(indices, seq_len))

    def window(self, index: int, seq_len: int) -> Values:
        """Tokens [index * seq_len, (index + 1) * seq_len] of the split's stream: uint16 or uint32 [seq_len + 1].

        A view into the map, or a copy where it crosses shards or is fetched. IndexError: there is no such window.
        """
        if not 0 <= index < self.windows(seq_len):
            raise IndexError(f"window {index} of {self.windows(seq_len)} (seq_len {seq_len})")
        if is_fetched(self._values):
            return self.gather(np.array([index], np.uint64), seq_len)[0]
        return self._window(index, seq_len, self._values)

    def _window(self, index: int, seq_len: int, values: Sequence[Values]) -> Values:
        start, stop = index * seq_len, (index + 1) * seq_len + 1
        at = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            part, end = values[at], int(self._ends[at])
            begin = end - len(part)
            parts.append(part[start - begin : stop - begin])
            start, at = end, at + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def gather(self, indices: NDArray[np.uint64], seq_len: int) -> Values:
        """Copies of these windows: [len(indices), seq_len + 1]. IndexError: there is no such window."""
        if len(indices) and int(indices.max()) >= self.windows(seq_len):
            raise IndexError(f"window {indices.max()} of {self.windows(seq_len)} (seq_len {seq_len})")
        if is_fetched(self._values):
            return self._values.read_windows(self._ends, indices, seq_len, self._gather)
        return self._gather(indices, seq_len, self._values)

    def _gather(self, indices: NDArray[np.uint64], seq_len: int, every: Sequence[Values]) -> Values:
        starts = indices.astype(np.int64) * seq_len
        first = np.searchsorted(self._ends, starts, side="right")
        inside = first == np.searchsorted(self._ends, starts + seq_len, side="right")
        shards = np.unique(first[inside])
        if len(shards) * ROWS_PER_SHARD_MIN > len(indices):
            inside[:] = False  # so few in each that they are quicker one by one
            shards = shards[:0]
        out = np.empty((len(indices), seq_len + 1), dtype=self.dtype)  # its memory is not touched before it is filled
        for shard in shards.tolist():
            rows = np.flatnonzero(inside & (first == shard))
            values = every[shard]
            begin = int(self._ends[shard]) - len(values)
            number = -(-begin // seq_len)  # of the first window that begins in this shard
            grid = _windows_of(values[number * seq_len - begin :], seq_len)
            if len(rows) == len(indices):
                return grid[indices.astype(np.int64) - number]  # the usual case: copied once
            out[rows] = grid[indices[rows].astype(np.int64) - number]
        for row in np.flatnonzero(~inside).tolist():
            out[row] = self._window(int(indices[row]), seq_len, every)
        return out


def is_fetched(values: Sequence[Values]) -> TypeGuard[Fetched]:
    """Whether they have to be fetched before they are read. Without an import of what only that needs."""
    return hasattr(values, "expect_windows")


def _windows_of(values: Values, seq_len: int) -> Values:
    """All whole windows of `values` as the rows of a view, each sharing its last token with the next."""
    count, step = (len(values) - 1) // seq_len, values.strides[0]
    return np.lib.stride_tricks.as_strided(values, (count, seq_len + 1), (seq_len * step, step), writeable=False)
