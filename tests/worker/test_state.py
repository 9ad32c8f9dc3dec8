"""Registered state: into entries and back, plain values as JSON, what can't be kept, what differs between ranks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.checkpoint.errors import StateError
from elastic.worker.state import ROOM_BYTES, State, check_alike
from tests.parallel import ranks


def filled(best: float, rate: float) -> State:
    state = State()
    state["best"] = best
    state["seen"] = torch.full((2,), best)
    state["average"] = {"w": torch.full((3,), best)}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    state["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return state


def test_values_go_into_entries_and_come_back() -> None:
    saved, fresh = filled(math.inf, 0.8), filled(1.0, 0.8)
    entries = dict(saved.entries())
    saved["best"] = {"loss": 0.1, "steps": [1, 2], "name": "ü"}
    for _ in range(3):
        saved["lr_scheduler"].optimizer.step()
        saved["lr_scheduler"].step()
    saved.pack()
    into = dict(fresh.entries())
    assert list(into) == list(entries) == ["state.best", "state.seen", "state.average.w", "state.lr_scheduler"]
    for name, tensor in into.items():
        tensor.copy_(entries[name])
    fresh.unpack()
    assert fresh["best"] == saved["best"]
    assert fresh["seen"].tolist() == [math.inf, math.inf]
    assert fresh["average"]["w"].tolist() == [math.inf] * 3
    scheduler = fresh["lr_scheduler"]
    assert scheduler.state_dict() == saved["lr_scheduler"].state_dict()
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.4


def test_after_the_start_names_are_fixed_and_tensors_keep_their_place() -> None:
    state = filled(1.0, 0.1)
    entries = dict(state.entries())
    state["seen"] = torch.tensor([5.0, 6.0])
    state["seen"] += 1
    assert entries["state.seen"].tolist() == [6.0, 7.0]
    with pytest.raises(StateError, match=r"'late'\] is new after the first step"):
        state["late"] = 1
    with pytest.raises(StateError, match=r"is a tensor \[2\], got a tensor \[3\]"):
        state["seen"] = torch.zeros(3)
    with pytest.raises(StateError, match="can't be taken back"):
        del state["seen"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ((1, 2), "would come back from JSON changed"),
        (Counter({30: 1}), "would come back from JSON changed"),
        (object(), "is not a plain value"),
        ([torch.zeros(1)], "is not a plain value"),
        ("x" * ROOM_BYTES, "bytes as JSON, at most 4096"),
    ],
)
def test_what_would_not_come_back_is_refused(value: Any, sentence: str) -> None:
    state = State()
    state["it"] = value
    with pytest.raises(StateError, match=sentence):
        state.entries()


def alike(rank: int, world: int, differing: bool) -> str:
    state = State()
    state["same"] = torch.arange(3)
    state["nan"] = math.nan
    if differing:
        state["mine"] = torch.full((rank + 1,), 1.0)
        state["own"] = rank
    entries = [("optimizer.w.step", torch.tensor(float(rank))), *state.entries()]
    try:
        check_alike(entries, torch.device("cpu"))
    except StateError as error:
        return str(error)
    dist.barrier()
    return ""


def test_ranks_that_differ_are_told_by_name() -> None:
    assert ranks.run(2, alike, False) == ["", ""]
    for sentence in ranks.run(2, alike, True):
        assert sentence.startswith("state.mine, state.own differ between ranks")
