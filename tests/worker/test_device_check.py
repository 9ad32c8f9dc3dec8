"""The device's check: right on this machine's CPU, and it finds each kind of wrong number."""

from __future__ import annotations

import pytest
import torch

from elastic.worker import device_check

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_this_machine_passes(precision: str) -> None:
    found = device_check.examine(CPU, precision)
    assert found["gemm_wrong"] == found["copy_wrong"] == 0
    assert found["gemm_gflops"] > 0 and found["copy_gbs"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("damage", [1.0, -1.0, 0.5, float("nan"), float("inf"), 1e30])
def test_one_wrong_number_is_found(dtype: torch.dtype, damage: float) -> None:
    left, right = (device_check.whole_numbers(64, dtype, seed) for seed in (1, 2))
    weights = device_check.whole_numbers(64, torch.float64, 3)[0]
    product = torch.mm(torch.from_numpy(left).to(dtype), torch.from_numpy(right).to(dtype))
    wanted = left @ (right @ weights)
    assert device_check.wrong_rows(product, weights, wanted) == 0
    product[5, 7] += damage
    assert device_check.wrong_rows(product, weights, wanted) == 1


def test_a_gpu_that_is_not_there_is_told() -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has one")
    assert device_check.examine(torch.device("cuda", 0), "float32") == {"gpus": 0}
