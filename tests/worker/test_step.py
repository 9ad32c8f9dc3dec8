"""The pure parts of a step: schedule, derived random numbers, the step word's sums, scaling and clipping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.config_sections import Optimizer
from elastic.data.loader import Slice
from elastic.data.order import digest
from elastic.data.rows import Rows
from elastic.worker.schedule import warmup_cosine
from elastic.worker.step import Step, Word, limbs_of, random_seed, scale, squared_norm


def test_the_rate_warms_up_to_the_peak_and_ends_at_the_floor() -> None:
    optimizer = Optimizer(lr_min_ratio=0.1, warmup_steps=4)
    factors = [warmup_cosine(optimizer, 100, step) for step in range(101)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[100] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_the_rate_without_warm_up_starts_at_the_peak() -> None:
    assert warmup_cosine(Optimizer(warmup_steps=0), 10, 0) == 1.0


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
        Slice(
            rows=Rows(tokens=np.zeros((rows, 4), dtype=np.uint16)),
            ids=np.arange(first, first + rows, dtype=np.uint64),
            first_sample=first,
        )
        for first, rows in ((10, 3), (13, 1))
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
    assert (word.loss, word.norm_squared, word.tokens, word.samples) == (12.0, 4.0, 12.0, 4.0)
    assert (word.non_finite, word.stop, word.snapshot) == (0.0, 0.0, 1.0)
    assert word.digest() == f"{digest(np.arange(10, 14, dtype=np.uint64)):016x}"
    assert marks == ["last=False", "forward", "backward", "last=True", "forward", "backward"]
    again = torch.Generator().manual_seed(random_seed(3, 7, 13))
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


def test_reports_are_weighted_by_the_targets_of_their_micro_batch() -> None:
    step, weight = _step([])
    for number, _ in enumerate(step.micro_batches()):
        step.backward(weight.sum())
        step.report({"b": float(number), "a": torch.tensor(4.0)})
        step.report({"b": 10.0 * number})  # the later one counts
    step.report({"whole": 2.5})
    own = step.own_word([], stop=False, snapshot=False)
    assert step.metrics(own, own, world=1) == {"a": 4.0, "b": 2.5, "whole": 2.5}
    with pytest.raises(RuntimeError, match="every rank must report the same"):
        step.metrics(own, own, world=2)
    step.report({f"m{number}": 0.0 for number in range(8)})
    with pytest.raises(RuntimeError, match="11 metrics, at most 8"):
        step.own_word([], stop=False, snapshot=False)


def test_the_update_runs_once_and_ends_the_reports() -> None:
    step, _ = _step([])
    ended: list[Step] = []

    def end(step: Step) -> tuple[Word, float]:
        ended.append(step)
        return _word(loss=6.0, tokens=4.0), 1.0

    step._end = end
    with pytest.raises(RuntimeError, match=r"only after step\.update"):
        _ = step.loss
    step.update()
    step.update()
    assert ended == [step] and step.loss == 1.5
    with pytest.raises(RuntimeError, match="report before"):
        step.report({"a": 1.0})
