"""The learning rate as a function of the step: no state that a failure could lose."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from elastic.config import Config, TaskError
from elastic.config_sections import Optimizer

Schedule = Callable[[int], float]


def rates_of(
    optimizer: torch.optim.Optimizer, config: Config, schedule: Schedule | None, *, is_registered: bool
) -> Callable[[int], list[float]]:
    """Learning rates of the optimizer's groups as a function of the steps completed: each one's own times `schedule`,
    or warm-up and cosine of `config`; none where a registered lr_scheduler sets them.

    TaskError: there is an lr_scheduler that would start anew after each failure.
    """
    if schedule is None and is_registered:
        return lambda step: []
    if schedule is None and any("initial_lr" in group for group in optimizer.param_groups):
        raise TaskError(
            "an lr_scheduler drives the optimizer and would start anew after each failure: register it, "
            "ctx.state['lr_scheduler'] = it, or give ctx.steps(schedule=...) a function of the step instead"
        )
    own = [group["lr"] for group in optimizer.param_groups]
    factor = schedule or (lambda step: warmup_cosine(config.optimizer, config.steps, step))
    return lambda step: [rate * factor(step) for rate in own]


def warmup_cosine(optimizer: Optimizer, steps: int, step: int) -> float:
    """What the step after `step` completed ones multiplies the learning rate by: linear warm-up to 1, then cosine to
    `lr_min_ratio` at the end."""
    if step < optimizer.warmup_steps:
        return (step + 1) / optimizer.warmup_steps
    past = (step - optimizer.warmup_steps) / max(1, steps - optimizer.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, past))) / 2
    return optimizer.lr_min_ratio + (1 - optimizer.lr_min_ratio) * cosine
