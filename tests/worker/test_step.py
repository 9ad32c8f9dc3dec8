"""The pure parts of a step: schedule, derived random numbers, the step word's sums, scaling and clipping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import Optimizer
from elastic.data.loader import MicroBatch
from elastic.data.order import digest
from elastic.worker.step import Step, Word, learning_rate, limbs_of, random_seed, scale, squared_norm


def test_the_rate_warms_up_to_the_peak_and_ends_at_the_floor() -> None:
    optimizer = Optimizer(lr=1.0, lr_min_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(optimizer, 100, step) for step in range(101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_the_rate_without_warm_up_starts_at_the_peak() -> None:
    assert learning_rate(Optimizer(lr=2.0, warmup_steps=0), 10, 0) == 2.0


def test_seeds_differ_by_each_of_their_parts() -> None:
    parts = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({random_seed(*part) for part in parts}) == len(parts)
    assert all(0 <= random_seed(*part) < 2**63 for part in parts)


def _word(**values: float) -> Word:
    zeros = {"loss": 0.0, "norm_squared": 0.0, "tokens": 1.0, "samples": 1.0}
    return Word(**{**zeros, "non_finite": 0.0, "stop": 0.0, "snapshot": 0.0, **values})


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=500))
def test_summed_limbs_are_the_summed_digest(digests: list[int]) -> None:
    sums = np.sum([limbs_of(value) for value in digests], axis=0)
    assert _word(limbs=tuple(sums)).digest() == f"{sum(digests) % 2**64:016x}"


def test_scaling_divides_by_all_tokens_and_clips_the_whole_norm() -> None:
    shards = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert squared_norm(shards) == 25.0
    # This rank's part of the norm is 5, the other ranks' as large: 5 * sqrt(2) over 10 tokens.
    word = _word(norm_squared=50.0, tokens=10.0)
    assert scale(shards, word, 1.0) == pytest.approx(math.sqrt(50) / 10)
    assert shards[0].tolist() == pytest.approx([0.3, 0.0])
    clipped = [torch.tensor([30.0])]
    scale(clipped, _word(norm_squared=900.0, tokens=10.0), 1.5)
    assert clipped[0].item() == pytest.approx(1.5)


def test_an_empty_share_of_the_parameters_has_no_norm() -> None:
    assert squared_norm([]) == 0.0


def _step(marks: list[str]) -> tuple[Step, torch.Tensor]:
    batches = [
        MicroBatch(
            tokens=torch.zeros(2, 3, dtype=torch.int64),
            targets=torch.tensor([[1, 2, -100], [1, -100, -100]]),
            ids=np.array([first, first + 1], dtype=np.uint64),
            first_sample=first,
        )
        for first in (10, 12)
    ]
    weight = torch.ones(1, requires_grad=True)
    return (
        Step(
            batches,
            number=7,
            seed=3,
            device=torch.device("cpu"),
            before=lambda is_last: marks.append(f"last={is_last}"),
            mark=marks.append,
        ),
        weight,
    )


def test_a_step_counts_what_it_ran() -> None:
    marks: list[str] = []
    step, weight = _step(marks)
    draws = []
    for batch in step.micro_batches():
        draws.append(torch.rand(1).item())
        step.backward((weight * batch.tokens.numel()).sum())
    word = step.own_word([torch.tensor([2.0])], stop=False, snapshot=True)
    assert (word.loss, word.norm_squared, word.tokens, word.samples) == (12.0, 4.0, 6.0, 4.0)
    assert (word.non_finite, word.stop, word.snapshot) == (0.0, 0.0, 1.0)
    assert word.digest() == f"{digest(np.arange(10, 14, dtype=np.uint64)):016x}"
    assert marks == ["last=False", "forward", "backward", "last=True", "forward", "backward"]
    again = torch.Generator().manual_seed(random_seed(3, 7, 12))
    assert draws[1] == torch.rand(1, generator=again).item()
    assert draws[0] != draws[1]


def test_a_value_that_is_not_finite_is_told() -> None:
    step, weight = _step([])
    for _ in step.micro_batches():
        step.backward((weight * math.inf).sum())
    assert step.own_word([], stop=True, snapshot=False).non_finite == 1.0
    step, weight = _step([])
    for _ in step.micro_batches():
        step.backward(weight.sum())
    assert step.own_word([torch.tensor([math.nan])], stop=False, snapshot=False).non_finite == 1.0


def test_a_forgotten_backward_pass_is_an_error_in_the_task() -> None:
    step, _ = _step([])
    for _ in step.micro_batches():
        pass
    with pytest.raises(RuntimeError, match="0 backward passes for 2 micro-batches"):
        step.own_word([], stop=False, snapshot=False)
