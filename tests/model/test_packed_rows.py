"""Documents that share a row: computed as if each were alone."""

from __future__ import annotations

import pytest
import torch

from elastic.config_sections import Model
from elastic.model.documents import causal_mask, cu_seqlens_of, positions_of
from elastic.model.transformer import Transformer, initialise, loss_sum

LENGTHS = ((5, 1, 10), (3, 13), (16,))
DOCUMENTS = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]).to(
    torch.int32
)
CONFIG = Model(vocab_size=19, dim=24, layers=2, heads=6, kv_heads=2, ffn_dim=40, seq_len=16)


def build(**changes: object) -> Transformer:
    model = Transformer(CONFIG.model_copy(update=changes)).to(torch.float64)
    initialise(model, 0)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(19, DOCUMENTS.shape, generator=torch.Generator().manual_seed(0))


def alone(values: torch.Tensor) -> list[torch.Tensor]:
    """Each document as a row of its own."""
    return [part[None] for row, lengths in zip(values, LENGTHS) for part in row.split(lengths)]


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert len(found) == len(list(model.parameters()))
    return found


def targets() -> torch.Tensor:
    """The tokens one later; none at a document's last."""
    found = tokens().roll(-1, dims=1)
    found[:, -1] = -100
    found[:, :-1][DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1]] = -100
    return found


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 6}, {"tie_embeddings": True}], ids=str)
def test_packed_documents_equal_documents_alone(changes: dict[str, object]) -> None:
    model = build(**changes)
    packed = model(tokens(), DOCUMENTS)
    loss_sum(packed, targets()).backward()
    together = gradients(model)
    for part, rows, wanted in zip(alone(packed), alone(tokens()), alone(targets()), strict=True):
        logits = model(rows)
        assert (logits - part).abs().max() < 1e-12
        loss_sum(logits, wanted).backward()
    for name, gradient in gradients(model).items():
        assert (gradient - together[name]).abs().max() < 1e-12, name


def test_joined_documents_do_not() -> None:
    model = build()
    differences = [
        (model(rows) - part).abs().max() for part, rows in zip(alone(model(tokens())), alone(tokens()), strict=True)
    ]
    assert [bool(difference > 1e-6) for difference in differences] == [False, True, True, False, True, False]


def test_one_document_a_row_is_what_it_is_without() -> None:
    model = build()
    assert (model(tokens(), torch.zeros_like(DOCUMENTS)) - model(tokens())).abs().max() < 1e-12


def test_rows_without_documents_take_the_causal_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(options)
        return attention(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    build()(tokens())
    assert [(one["attn_mask"], one["is_causal"]) for one in seen] == [(None, True)] * 2
    build()(tokens(), DOCUMENTS)
    assert seen[2]["attn_mask"] is seen[3]["attn_mask"] is not None, "made once, for all layers"


def test_positions_mask_and_boundaries() -> None:
    assert positions_of(DOCUMENTS).tolist() == [
        [place for length in lengths for place in range(length)] for lengths in LENGTHS
    ]
    assert cu_seqlens_of(DOCUMENTS).tolist() == [0, 5, 6, 16, 19, 32, 48]
    assert cu_seqlens_of(DOCUMENTS).dtype == torch.int32 and positions_of(DOCUMENTS).dtype == torch.int64
    mask = causal_mask(DOCUMENTS)
    assert mask.shape == (3, 1, 16, 16) and mask.dtype == torch.bool
    for row, lengths in enumerate(LENGTHS):
        blocks = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths))
        assert torch.equal(mask[row, 0], blocks.bool())
