"""Counting without building: what `shape` says is what the model has and does."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from elastic.config_sections import Model
from elastic.model import shape
from elastic.model.transformer import Transformer

CONFIGS = [
    Model(),
    Model(tie_embeddings=True),
    Model(vocab_size=50_257, dim=768, layers=12, heads=12, kv_heads=12, ffn_dim=2048),
    Model(vocab_size=37, dim=14, layers=3, heads=7, kv_heads=1, ffn_dim=9, seq_len=12),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters(config: Model) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    assert shape.parameters(config) == sum(p.numel() for p in model.parameters())
    assert shape.block_parameters(config) == sum(p.numel() for p in model.layers[0].parameters())


@pytest.mark.parametrize("config", CONFIGS[:3])
def test_flops_are_three_forward_passes(config: Model) -> None:
    with torch.device("meta"):
        model = Transformer(config)
        tokens = torch.empty(2, config.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    forward = counter.get_total_flops() / tokens.numel()
    # The backward pass costs two forward passes; torch counts no norms, which are far below 1 %.
    assert shape.flops_per_token(config) == pytest.approx(3 * forward, rel=0.01)
