"""Sharded training equals training on one process: same losses, norms and parameters, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from elastic.config_sections import Model
from elastic.model.transformer import Transformer, initialise, loss_sum
from elastic.parallel.apply import parallelize
from elastic.parallel.fsdp import Precision, accumulate, repeated_blocks
from elastic.parallel.mesh import build_mesh
from elastic.plan import Plan

# Odd on purpose: 37, 14 and 7 rows are not divisible by 2, 3 or 4; with 4 ranks 5 rows leave one rank none.
ODD = Model(vocab_size=37, dim=14, layers=2, heads=7, kv_heads=1, ffn_dim=9, seq_len=12)
TINY = Model(vocab_size=5, dim=8, layers=1, heads=4, kv_heads=1, ffn_dim=9, seq_len=6, tie_embeddings=True)
ROWS = 8
STEPS = 5
CLIP = 0.2

Outcome = tuple[list[float], list[float], list[float], dict[str, Any]]


def rows(config: Model, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step; each row predicts another number of tokens, so that means would differ."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab_size, (ROWS, config.seq_len + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, : row % (config.seq_len - 1)] = -100
    return tokens[:, :-1], targets


def train(model: Transformer, plan: Plan, rank: int) -> Outcome:
    """Losses, held-out losses, gradient norms before clipping, and the whole parameters after STEPS steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, held_out, norms = [], [], []
    start, stop = plan.share_of(rank)
    for step in range(STEPS):
        tokens, targets = (t[start:stop].tensor_split(plan.micro_batches) for t in rows(model.config, step))
        total = torch.zeros(2, dtype=torch.float64)
        for number, (inputs, wanted) in enumerate(zip(tokens, targets)):
            accumulate_if_sharded(model, number == plan.micro_batches - 1)
            loss = loss_sum(model(inputs), wanted)
            loss.backward()
            total += torch.stack((loss.detach(), (wanted != -100).sum()))
        loss, count = sum_over_ranks(total)
        for parameter in model.parameters():
            parameter.grad.div_(count)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss / count))
        held_out.append(evaluate(model, start, stop))
    return losses, held_out, norms, whole_parameters(model)


def accumulate_if_sharded(model: Transformer, is_last: bool) -> None:
    if dist.is_initialized():
        accumulate(model, is_last)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def evaluate(model: Transformer, start: int, stop: int) -> float:
    tokens, targets = rows(model.config, 1000)
    with torch.no_grad():
        loss = loss_sum(model(tokens[start:stop]), targets[start:stop])
    if dist.is_initialized():
        assert all(isinstance(p, DTensor) for p in model.parameters()), "evaluation left parameters gathered"
    return float(sum_over_ranks(loss))


def whole_parameters(model: Transformer) -> dict[str, Any]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in model.named_parameters()
    }


def build_sharded(config: Model, plan: Plan, precision: Precision) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config)
    mesh = build_mesh(plan, "cpu")
    parallelize(model, plan=plan, mesh=mesh, units=model.layers, precision=precision)
    model.to_empty(device="cpu")
    initialise(model, seed=3)
    return model


def build_plain(config: Model) -> Transformer:
    model = Transformer(config).to(torch.float64)
    initialise(model, seed=3)
    return model


def train_sharded(rank: int, world: int, config: Model, plan: Plan) -> Outcome:
    return train(build_sharded(config, plan, "float64"), plan, rank)


@pytest.mark.parametrize(
    ("config", "shares", "micro_batches"),
    [
        (ODD, (8,), 3),
        (ODD, (6, 2), 2),
        (ODD, (4, 3, 1), 1),
        (TINY, (3, 2, 2, 1), 1),
    ],
    ids=["1 rank", "2 ranks", "3 ranks", "4 ranks, tied, empty shards"],
)
def test_same_as_plain_pytorch(config: Model, shares: tuple[int, ...], micro_batches: int) -> None:
    plan = Plan(world=len(shares), shares=shares, micro_batches=micro_batches)
    one = Plan(world=1, shares=(ROWS,), micro_batches=1)
    losses, held_out, norms, parameters = train(build_plain(config), one, 0)
    assert min(norms) > CLIP, "clipping must act, or the test would not see it"

    for outcome in ranks.run(plan.world, train_sharded, config, plan):
        assert outcome[0] == pytest.approx(losses, rel=0, abs=1e-10)
        assert outcome[1] == pytest.approx(held_out, rel=1e-12)
        assert outcome[2] == pytest.approx(norms, rel=1e-10)
        assert outcome[3].keys() == parameters.keys()
        for name, values in outcome[3].items():
            assert abs(values - parameters[name]).max() < 1e-10, name


def initialise_sharded(rank: int, world: int, config: Model) -> dict[str, Any]:
    plan = Plan(world=world, shares=(1,) * world, micro_batches=1)
    return whole_parameters(build_sharded(config, plan, "float32"))


def test_initialisation_does_not_depend_on_the_layout() -> None:
    plain = Transformer(ODD)
    initialise(plain, seed=3)
    expected = whole_parameters(plain)
    for parameters in ranks.run(3, initialise_sharded, ODD):
        for name, values in parameters.items():
            assert (values == expected[name]).all(), name


def bfloat16_step(rank: int, world: int, config: Model) -> tuple[set[torch.dtype], ...]:
    plan = Plan(world=world, shares=(4, 4), micro_batches=2)
    model = build_sharded(config, plan, "bfloat16")
    tokens, targets = (t[4 * rank : 4 * rank + 4].tensor_split(2) for t in rows(config, 0))
    computed = set()
    for number in range(2):
        accumulate(model, number == 1)
        logits = model(tokens[number])
        computed.add(logits.dtype)
        loss = loss_sum(logits, targets[number])
        assert loss.dtype == torch.float32
        loss.backward()
    assert all(torch.isfinite(p.grad.to_local()).all() for p in model.parameters())
    return computed, {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}


def test_bfloat16_computes_low_and_keeps_high() -> None:
    for computed, kept, reduced in ranks.run(2, bfloat16_step, ODD):
        assert (computed, kept, reduced) == ({torch.bfloat16}, {torch.float32}, {torch.float32})


def fake_step(rank: int, world: int, config: Model) -> list[tuple[int, ...]]:
    """As a warm standby does: a whole step at a later rank's shapes, with nobody to talk to."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    plan = Plan(world=4, shares=(2, 2, 2, 2), micro_batches=1)
    model = build_sharded(config, plan, "float32")
    tokens, targets = rows(config, 0)
    accumulate(model, True)
    loss_sum(model(tokens[:2]), targets[:2]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    torch.optim.AdamW(model.parameters()).step()
    return [tuple(p.to_local().shape) for p in model.parameters() if p.ndim == 2][:1]


def test_a_step_runs_on_a_fake_process_group() -> None:
    assert ranks.run(1, fake_step, ODD) == [[(10, 14)]], "rank 2 of 4 holds rows 20 to 30 of the 37"


class Plain(torch.nn.Module):
    """As people write them: values from __init__, a list of blocks, a small list beside it, tied ends, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 7)
        self.blocks = torch.nn.ModuleList([*(torch.nn.Linear(7, 7) for _ in range(3)), torch.nn.Identity()])
        self.scales = torch.nn.ModuleList(torch.nn.LayerNorm(7) for _ in range(2))
        self.head = torch.nn.Linear(7, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(7))
        self.register_buffer("mask", torch.ones(7), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.scales[0](self.embed(tokens) + self.shift)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.mask
        return self.head(self.scales[1](x))


def test_repeated_blocks_are_found_unless_they_share_parameters() -> None:
    model = Plain()
    assert repeated_blocks(model) == list(model.blocks)[:3]
    model.blocks[2].bias = model.blocks[0].bias
    assert repeated_blocks(model) == []
    assert repeated_blocks(torch.nn.Linear(2, 2)) == []


def plain_steps(model: torch.nn.Module, plan: Plan, rank: int) -> tuple[list[float], dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start, stop = plan.share_of(rank)
    losses = []
    for step in range(STEPS):
        tokens, targets = (t[start:stop] for t in rows(ODD, step))
        accumulate_if_sharded(model, True)
        loss = loss_sum(model(tokens), targets)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.div_(ROWS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum_over_ranks(loss.detach())))
    return losses, whole_parameters(model)


def train_plain(rank: int, world: int) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(5)
    model, plan = Plain(), Plan(world=world, shares=(ROWS // world,) * world, micro_batches=1)
    parallelize(model, plan=plan, mesh=build_mesh(plan, "cpu"), units=repeated_blocks(model), precision="float64")
    return plain_steps(model, plan, rank)


def test_a_module_that_was_built_as_usual_keeps_its_values_on_every_layout() -> None:
    torch.manual_seed(5)
    losses, parameters = plain_steps(Plain().double(), Plan(world=1, shares=(ROWS,), micro_batches=1), 0)
    for world in (1, 2, 4):
        for outcome in ranks.run(world, train_plain):
            assert outcome[0] == pytest.approx(losses, rel=0, abs=1e-10)
            for name, values in outcome[1].items():
                assert abs(values - parameters[name]).max() < 1e-10, name
