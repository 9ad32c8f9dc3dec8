"""The language model: causal, relative in position, whole after `to_empty`, initialised by name."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from elastic.config_sections import Model
from elastic.model import shape
from elastic.model.transformer import Transformer, initialise, loss_sum, rotate

CONFIG = Model(vocab_size=19, dim=24, layers=2, heads=3, kv_heads=1, ffn_dim=40, seq_len=16)


def build(config: Model = CONFIG, *, seed: int = 0) -> Transformer:
    model = Transformer(config).to(torch.float64)
    initialise(model, seed)
    return model


def tokens(rows: int = 3, *, config: Model = CONFIG) -> torch.Tensor:
    return torch.randint(config.vocab_size, (rows, config.seq_len), generator=torch.Generator().manual_seed(0))


def test_logits_see_the_past_only() -> None:
    model, before = build(), tokens()
    after = before.clone()
    after[:, 9:] = (after[:, 9:] + 1) % CONFIG.vocab_size
    changed = (model(before) - model(after)).abs().amax(dim=(0, 2)) > 1e-12
    assert changed.tolist() == [False] * 9 + [True] * 7


def test_each_position_depends_on_the_first() -> None:
    model, before = build(), tokens()
    after = before.clone()
    after[:, 0] = (after[:, 0] + 1) % CONFIG.vocab_size
    assert ((model(before) - model(after)).abs().amax(dim=(0, 2)) > 1e-12).all()


def test_whole_after_meta_and_to_empty() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG)
    model.to(torch.float64).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialise(model, 0)
    assert not list(model.buffers())
    assert torch.equal(model(tokens()), build()(tokens()))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_reach_each_parameter(tied: bool) -> None:
    model = build(CONFIG.model_copy(update={"tie_embeddings": tied}))
    loss_sum(model(tokens()), tokens()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_rotation_makes_products_relative() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    turned_q, turned_k = rotate(q.expand(1, 20, 1, 8), k.expand(1, 20, 1, 8), theta=100.0)
    products = turned_q[0, :, 0] @ turned_k[0, :, 0].T
    for distance in (0, 1, 7):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products[0, 0] == pytest.approx(float(q @ k)) and abs(products[7, 0] - products[0, 0]) > 1e-3
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(1, 20, 1))


def test_rotation_of_bfloat16_tells_late_positions_apart() -> None:
    x = torch.ones(1, 512, 1, 8, dtype=torch.bfloat16)
    (turned,) = rotate(x, theta=10_000.0)
    assert turned.dtype == torch.bfloat16
    (exact,) = rotate(x.to(torch.float64), theta=10_000.0)
    assert (turned - exact).abs().max() < 0.02


def test_grouped_heads_equal_repeated_ones() -> None:
    grouped = build()
    full = build(CONFIG.model_copy(update={"kv_heads": 3}))
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            state[name] = state[name].repeat(3, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(full(tokens()), grouped(tokens()), rtol=0, atol=1e-12)


def test_loss_is_a_sum_over_the_wanted_targets() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[1, 2, -100, 3, 4], [-100, 0, 6, 5, -100]])
    expected = sum(
        -F.log_softmax(logits[row, position], dim=-1)[targets[row, position]]
        for row in range(2)
        for position in range(5)
        if targets[row, position] >= 0
    )
    assert loss_sum(logits, targets).item() == pytest.approx(expected.item())
    assert loss_sum(logits, torch.full_like(targets, -100)).item() == 0.0
    assert loss_sum(logits.to(torch.bfloat16), targets).dtype == torch.float32


def test_initialisation_depends_on_seed_and_name_only() -> None:
    torch.manual_seed(1)
    first = build()
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), build().parameters()))
    other = build(seed=1)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    blocks = first.layers
    assert not torch.equal(blocks[0].attention.query.weight, blocks[1].attention.query.weight)
    assert not torch.equal(blocks[0].feed_forward.up.weight, blocks[0].feed_forward.gate.weight)


def test_initialisation_has_the_stated_deviations() -> None:
    config = Model(dim=128, layers=2)
    model = build(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("project.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (2 if residual else 1), rel=0.05), name
    loss = loss_sum(model(tokens(config=config)), tokens(config=config)) / (3 * config.seq_len)
    assert loss.item() == pytest.approx(math.log(config.vocab_size), abs=0.1)


def test_dropout_acts_in_training_only_and_follows_the_seed() -> None:
    model = build(CONFIG.model_copy(update={"dropout": 0.3}))
    torch.manual_seed(5)
    first = model(tokens())
    assert not torch.equal(first, model(tokens()))
    torch.manual_seed(5)
    assert torch.equal(first, model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), build()(tokens()))


def test_learns_a_repeated_row() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = tokens(1)
    for _ in range(60):
        loss = loss_sum(model(text[:, :-1]), text[:, 1:]) / (CONFIG.seq_len - 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1


@pytest.mark.parametrize("tie", [False, True])
def test_shape_counts_tensors_and_their_longest_row(tie: bool) -> None:
    sizes = Model(dim=16, layers=3, heads=2, kv_heads=1, ffn_dim=40, tie_embeddings=tie)
    with torch.device("meta"):
        found = list(Transformer(sizes).parameters())
    assert len(found) == shape.tensors(sizes)
    assert max(p.numel() // p.shape[0] for p in found) == shape.row_values(sizes)
