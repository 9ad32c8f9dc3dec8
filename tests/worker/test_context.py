"""What a loop of one's own asks its context for."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from elastic.config import Config, TaskError
from elastic.worker.context import Context


def context(**batch: int) -> Context:
    config = Config.model_validate({"hosts_min": 3, "hosts_max": 4, "batch": batch})
    nothing = cast(Any, object())
    return Context(config=config, assignment=nothing, device=torch.device("cpu"), samples=nothing, seat=nothing)


def test_a_batch_in_one_piece_must_be_one_in_the_smallest_world() -> None:
    with pytest.raises(TaskError, match=r"a rank takes 9 of 25 and batch.micro_samples is 8: raise it to 9"):
        context(global_samples=25, micro_samples=8).batch()
    with pytest.raises(TaskError, match=r"outside of the loop"):
        context(global_samples=25, micro_samples=9).batch()
