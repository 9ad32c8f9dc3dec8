"""Documents -> bins of one window each: best-fit decreasing inside a shard, and the plan as it lies beside the shard.

A window has seq_len + 1 places, of which the last is only a target. A document is taken whole where it fits. A longer
one is cut into pieces of seq_len + 1 tokens, each beginning with the last token of the one before, and a rest: so each
of its tokens but the first is a target exactly once. Documents of one token, or none, have nothing to predict and are
left out. The plan is a function of the documents' lengths and seq_len, so nothing of it is state.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np

from elastic.data.documents import Integers, ranges

VERSION = 1  # of the algorithm: another one puts other tokens into window number n
_MAGIC = int.from_bytes(b"ELASPACK", "little")
_HEADER = 8  # int64: magic, version, seq_len, tokens of the shard, bins, pieces, CRC-32 of the rest, that of these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Of one shard. firsts: int64 [bins + 1], bin b has the pieces firsts[b] to firsts[b + 1]. starts, lengths: int64
    [pieces], in the shard's tokens. The pieces of a bin, and the bins by their first pieces, are in the shard's order.
    """

    firsts: Integers
    starts: Integers
    lengths: Integers

    @property
    def bins(self) -> int:
        return len(self.firsts) - 1

    def to_bytes(self, *, seq_len: int, tokens: int) -> bytes:
        """Little-endian int64: a header, then firsts, starts, lengths. tokens: of the shard."""
        body = np.concatenate([self.firsts, self.starts, self.lengths]).astype("<i8").tobytes()
        header = [_MAGIC, VERSION, seq_len, tokens, self.bins, len(self.starts), zlib.crc32(body)]
        packed = np.array(header, dtype="<i8").tobytes()
        return packed + np.array([zlib.crc32(packed)], dtype="<i8").tobytes() + body

    @classmethod
    def of_values(cls, values: Integers, *, seq_len: int, tokens: int) -> Self:
        """Views of what `to_bytes` gave, as int64. ValueError: it is not that, or is damaged."""
        if len(values) <= _HEADER or zlib.crc32(values[: _HEADER - 1].data) != values[_HEADER - 1]:
            raise ValueError("its header is damaged")
        wanted = [_MAGIC, VERSION, seq_len, tokens]
        if (got := values[:4].tolist()) != wanted:
            raise ValueError(f"its header has {got}, wanted {wanted}")
        bins, pieces, crc = values[4:7].tolist()
        body = values[_HEADER:]
        if len(body) != bins + 1 + 2 * pieces or zlib.crc32(body.data) != crc:
            raise ValueError("it is cut or damaged")
        starts = bins + 1 + pieces
        return cls(firsts=body[: bins + 1], starts=body[bins + 1 : starts], lengths=body[starts:])


def packed_fingerprint(fingerprint: str, seq_len: int) -> str:
    """Of a corpus that is read in bins: its windows hold other tokens than those of the stream."""
    return hashlib.sha256(f"{fingerprint} in bins of best_fit {VERSION} for seq_len {seq_len}".encode()).hexdigest()


def plan_of(offsets: Integers, seq_len: int) -> Plan:
    """offsets: int64 [documents + 1], the boundaries of a shard's documents."""
    starts, lengths = pieces_of(offsets, seq_len)
    which = best_fit(lengths, seq_len + 1)
    # Bins that follow each other begin near each other in the file: numbered by the first piece of each.
    _, first = np.unique(which, return_index=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    which = number[which]
    order = np.argsort(which, kind="stable")
    firsts = np.concatenate([[0], np.cumsum(np.bincount(which, minlength=len(first)), dtype=np.int64)])
    return Plan(firsts=firsts, starts=starts[order], lengths=lengths[order])


def pieces_of(offsets: Integers, seq_len: int) -> tuple[Integers, Integers]:
    """(starts, lengths) of what is to be packed, in the shard's order; see above how documents are cut."""
    tokens = np.diff(offsets)
    counts = np.where(tokens > 1, -(-(tokens - 1) // seq_len), 0)  # each piece brings up to seq_len targets
    places = ranges(np.zeros_like(counts), counts) * seq_len
    lengths = np.minimum(np.repeat(tokens, counts) - places, seq_len + 1)
    return np.repeat(offsets[:-1], counts) + places, lengths


def best_fit(lengths: Integers, capacity: int) -> Integers:
    """The bin of each piece, from 0 on: int64 [pieces]. Lengths: 1 to capacity.

    The longest piece first (of equal ones the earlier), each into the bin that it leaves the least room in, else a new
    one. Of bins with equal room the one that came to it last. One integer has a bit for each room that some bin has.
    """
    order = np.argsort(-lengths, kind="stable")
    smallest = int(lengths.min()) if len(lengths) else 0
    with_room: dict[int, list[int]] = {}
    rooms, bins = 0, 0
    found = []
    for length in lengths[order].tolist():
        if enough := rooms >> length:
            room = length + (enough & -enough).bit_length() - 1
            which = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, which = capacity, bins
            bins += 1
        found.append(which)
        if (left := room - length) >= smallest:
            with_room.setdefault(left, []).append(which)
            rooms |= 1 << left
    which_bin = np.empty(len(lengths), dtype=np.int64)
    which_bin[order] = found
    return which_bin
