"""A corpus whose windows are bins of whole documents: any window is read at once, nothing is carried from one to the
next."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic.data.documents import Integers, Numbering, groups, numbering, ranges
from elastic.data.order import Numbers
from elastic.data.packing import VERSION, Plan, packed_fingerprint, plan_of
from elastic.data.rows import Rows
from elastic.data.shards import Corpus, DataError, Split, Values

# Without its files a plan of so many documents is computed where it is needed, in some seconds; not a larger one.
DOCUMENTS_MAX = 1_000_000
NOTHING: Integers = np.zeros(0, dtype=np.int64)
AGAIN = "delete it, if it is there, and run `elastic data prepare` on the job"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The plan of one shard, `shard_tokens` long, in a file. tokens: of all its pieces."""

    file: str
    shard_tokens: int
    bins: int
    tokens: int

    def read(self, prepared: Path, seq_len: int) -> Plan:
        """Mapped and held against its checksum. DataError: it is missing or damaged."""
        path = prepared / self.file
        try:
            values: Integers = np.asarray(np.memmap(path, "<i8", "r"))
            plan = Plan.of_values(values, seq_len=seq_len, tokens=self.shard_tokens)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"can't read packing plan {path}: {why}; {AGAIN}") from error
        if (plan.bins, int(plan.lengths.sum())) != (self.bins, self.tokens):
            raise DataError(f"packing plan {path} is another one than its table names; {AGAIN}")
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All plan files of a split for one seq_len, in the order of its shards."""

    seq_len: int
    files: tuple[PlanFile, ...]

    @property
    def bins(self) -> int:
        return sum(file.bins for file in self.files)

    @property
    def filled(self) -> float:
        """The part of all places in windows, each of seq_len + 1, that holds a token."""
        return sum(file.tokens for file in self.files) / max(1, self.bins * (self.seq_len + 1))

    def to_json(self, fingerprint: str) -> str:
        content = {"version": VERSION, "fingerprint": fingerprint, "files": [asdict(file) for file in self.files]}
        return json.dumps(content, indent=1) + "\n"


def table_name(split: Split, seq_len: int) -> str:
    return f"packing-{split}-{seq_len}.json"


def read_table(prepared: Path, split: Split, seq_len: int, fingerprint: str) -> Table | None:
    """None: there is none for the corpus with this fingerprint. DataError: it can't be read."""
    path = prepared / table_name(split, seq_len)
    try:
        raw = json.loads(path.read_bytes())
        if (raw["version"], raw["fingerprint"]) != (VERSION, fingerprint):
            return None
        return Table(seq_len=seq_len, files=tuple(PlanFile(**file) for file in raw["files"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"can't read packing table {path} ({error!r}); {AGAIN}") from error


class Plans:
    """Of all shards of a split, each read when it is first asked for. bins: of each shard."""

    def __init__(self, bins: Sequence[int], read: Callable[[int], Plan]) -> None:
        self.ends: Integers = np.cumsum(bins, dtype=np.int64)
        self.count = int(self.ends[-1])
        self._read = read
        self._known: dict[int, Plan] = {}

    def of_shard(self, shard: int) -> Plan:
        if shard not in self._known:
            self._known[shard] = self._read(shard)
        return self._known[shard]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Laid:
    """Rows of places: of each the token in its shard, its document, whether it is learned, whether it is no padding."""

    taken: Integers
    documents: Numbering
    learned: NDArray[np.uint8]
    is_real: NDArray[np.bool_]


def _laid_out(counts: Integers, starts: Integers, lengths: Integers, width: int) -> _Laid:
    """counts: int64 [rows], how many of the pieces (starts, lengths: int64 [pieces]) are in each row.

    A row is its pieces and, as one more of them, its padding: `width` places in all.
    """
    stops = np.cumsum(counts + 1)
    real = ranges(stops - counts - 1, counts)
    all_lengths = np.zeros(len(starts) + len(counts), dtype=np.int64)
    all_lengths[real] = lengths
    sums = np.concatenate([[0], np.cumsum(all_lengths)])
    all_lengths[stops - 1] = width - (sums[stops] - sums[stops - counts - 1])
    places = np.cumsum(all_lengths) - all_lengths
    shifts = -places  # padding reads from the shard's first token on, as well as any
    shifts[real] += starts
    shape = (len(counts), width)
    numbers = ranges(np.zeros_like(counts), counts + 1).astype(numbering(width))
    documents = np.repeat(numbers, all_lengths).reshape(shape)
    is_real = documents < counts[:, None].astype(documents.dtype)
    learned = is_real.astype(np.uint8)
    learned.reshape(-1)[places[real]] = 0
    taken = (np.arange(len(counts) * width) + np.repeat(shifts, all_lengths)).reshape(shape)
    return _Laid(taken=taken, documents=documents, learned=learned, is_real=is_real)


class PackedCorpus(Corpus):
    """place: where its plans lie, with its split; None: they are computed."""

    is_apart = True
    place: tuple[Path, Split] | None = None

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._known: dict[int, Plans] = {}

    def windows(self, seq_len: int) -> int:
        """How many bins there are. DataError: none, or their plan can't be had."""
        return self._plans(seq_len).count

    def order_fingerprint(self, seq_len: int) -> str:
        return packed_fingerprint(self.fingerprint, seq_len)

    def window(self, index: int, seq_len: int) -> Values:
        return self.gather(np.array([index], dtype=np.uint64), seq_len)[0]

    def gather(self, indices: Numbers, seq_len: int) -> Values:
        return self.rows(indices, seq_len).tokens

    def rows(self, indices: Numbers, seq_len: int) -> Rows:
        """The documents of each bin one after another; then, to the end of the row, token 0, which is not learned and
        has a document number of its own."""
        plans = self._plans(seq_len)
        if len(indices) and int(indices.max()) >= plans.count:
            raise IndexError(f"bin {indices.max()} of {plans.count} (seq_len {seq_len})")
        bins = indices.astype(np.int64)
        its = np.searchsorted(plans.ends, bins, side="right")
        counts = np.empty(len(bins), dtype=np.int64)
        starts, lengths = [NOTHING], [NOTHING]
        found = list(groups(its))
        for shard, rows in found:
            plan = plans.of_shard(shard)
            inside = bins[rows] - (int(plans.ends[shard]) - plan.bins)
            low = plan.firsts[inside]
            counts[rows] = plan.firsts[inside + 1] - low
            pieces = ranges(low, counts[rows])
            starts.append(plan.starts[pieces])
            lengths.append(plan.lengths[pieces])
        by_shard = np.concatenate([NOTHING, *(rows for _, rows in found)])
        laid = _laid_out(counts[by_shard], np.concatenate(starts), np.concatenate(lengths), seq_len + 1)
        tokens = np.empty(laid.taken.shape, dtype=self.dtype)
        learned, done = laid.learned, 0
        for shard, rows in found:
            part = slice(done, done := done + len(rows))
            self.of_shard(shard).take(laid.taken[part], mode="clip", out=tokens[part])
            # A shard without a mask has one 1 for all its tokens, which `take` would first write out.
            if self.masks is not None and (mask := self.masks.of_shard(shard)).strides != (0,):
                learned[part] &= mask.take(laid.taken[part], mode="clip")
        tokens *= laid.is_real
        whole = Rows(tokens=tokens, learned=learned, documents=laid.documents)
        return whole if len(found) < 2 else Rows.joined({0: whole}, {0: by_shard})

    def _plans(self, seq_len: int) -> Plans:
        if seq_len not in self._known:
            self._known[seq_len] = self._find(seq_len)
        if not self._known[seq_len].count:
            raise DataError("no document of the corpus has two tokens: there is nothing to predict; give it more text")
        return self._known[seq_len]

    def _find(self, seq_len: int) -> Plans:
        if self.place is not None:
            prepared, split = self.place
            if table := read_table(prepared, split, seq_len, self.fingerprint):
                files = table.files
                return Plans([file.bins for file in files], lambda shard: files[shard].read(prepared, seq_len))
        return self._computed(seq_len)

    def _computed(self, seq_len: int) -> Plans:
        assert self.boundaries is not None, "opened without its documents"
        count = sum(len(self.boundaries.of_shard(shard)) - 1 for shard in range(self.shards))
        if count > DOCUMENTS_MAX:
            where = self.place[0] if self.place else "memory"
            raise DataError(
                f"{where} has no packing plan for seq_len {seq_len}, and with {count:,} documents it is too large to "
                "be packed at each start; run `elastic data prepare` on the job where that directory can be written"
            )
        plans = [plan_of(self.boundaries.of_shard(shard), seq_len) for shard in range(self.shards)]
        return Plans([plan.bins for plan in plans], plans.__getitem__)
