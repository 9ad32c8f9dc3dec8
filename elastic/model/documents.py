"""Rows that hold several documents, as tensors: positions, the mask of attention, boundaries.

documents: integers [B, T], the number of each token's document; neighbours with the same number are one document, and
no number comes again later in a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def positions_of(documents: Tensor) -> Tensor:
    """int64 [B, T], from 0 in each document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return index - index.where(_begins(documents), 0).cummax(dim=1).values


def causal_mask(documents: Tensor) -> Tensor:
    """bool [B, 1, T, T]: whether the third dim's token may read the fourth's, which is of its document and not after
    it. Each may read itself, padding too."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


def cu_seqlens_of(documents: Tensor) -> Tensor:
    """int32 [n + 1]: where each of the n documents of the flattened rows begins, and at last B * T.

    The form that variable-length attention takes. On a GPU it waits for the device, which alone knows n.
    """
    begins = _begins(documents).flatten().nonzero().flatten()
    end = begins.new_full((1,), documents.numel())
    return torch.cat((begins, end)).to(torch.int32)


def _begins(documents: Tensor) -> Tensor:
    """bool [B, T]."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return begins
