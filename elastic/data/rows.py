"""Windows that were read, with all that is known of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from elastic.data.documents import Numbering

if TYPE_CHECKING:
    from elastic.data.shards import Values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Windows that were read. tokens: uint16 or uint32 [rows, seq_len + 1]. learned: uint8 of the same shape, 0 where a
    token is not learned; None: all are. documents: uint16 or uint32 of the same shape, 0, 1, 2, ... along each row;
    None: they are joined. Where they are apart the first token of each is not learned."""

    tokens: Values
    learned: Values | None = None
    documents: Numbering | None = None

    def part(self, start: int, stop: int) -> Rows:
        """Views of rows [start, stop)."""
        return Rows(
            tokens=self.tokens[start:stop],
            learned=None if self.learned is None else self.learned[start:stop],
            documents=None if self.documents is None else self.documents[start:stop],
        )

    @classmethod
    def joined(cls, parts: Mapping[int, Rows], places: Mapping[int, NDArray[np.int64]]) -> Self:
        """Rows of several corpora as one: places[key] says where the rows of parts[key] go."""
        count = sum(len(its) for its in places.values())
        first = next(iter(parts.values())).tokens
        tokens = np.empty((count, first.shape[1]), dtype=first.dtype)
        masked = any(part.learned is not None for part in parts.values())
        learned = np.ones(tokens.shape, dtype=np.uint8) if masked else None
        numbered = [part.documents for part in parts.values() if part.documents is not None]
        documents = np.zeros(tokens.shape, dtype=numbered[0].dtype) if numbered else None
        for key, its in places.items():
            tokens[its] = parts[key].tokens
            if learned is not None and (mask := parts[key].learned) is not None:
                learned[its] = mask
            if documents is not None and (numbers := parts[key].documents) is not None:
                documents[its] = numbers
        return cls(tokens=tokens, learned=learned, documents=documents)
