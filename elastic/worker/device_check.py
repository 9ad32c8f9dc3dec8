"""What the device does before its host takes part: matrix products of known result and copies, timed and verified.

Runs in a throw-away fork of the template, which has a GPU open if there is one to use. Short on purpose: the best of
many small pieces is what an idle device does, also where other processes take turns on the same cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Whole = npt.NDArray[np.int64]

SECONDS = 0.1  # for each figure
ROWS = {"cpu": 256, "cuda": 4096}
COPY_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def examine(device: torch.device, precision: str) -> dict[str, Any]:
    """The device's part of `events.NodeCheck`, by field. What torch raises is told in "failed"."""
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and not gpus:
        return {"gpus": 0}
    try:
        return {"gpus": gpus, **multiply(device, DTYPES[precision]), **copy(device)}
    except RuntimeError as error:
        return {"gpus": gpus, "failed": f"its device {device} can't be used: {str(error).splitlines()[0]}"}


def multiply(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Speed, and how many rows of the first or of the last product are wrong.

    The factors are small whole numbers, so that every partial sum is exact in `dtype`, in whatever order. Row sums
    weighted with random whole numbers tell whether a row is right (Freivalds 1977), at the cost of three
    matrix-vector products in int64.
    """
    rows = ROWS[device.type]
    left, right = (whole_numbers(rows, dtype, seed) for seed in (1, 2))
    weights = np.random.default_rng(3).integers(1, 1 << 20, rows)
    wanted = left @ (right @ weights)
    ours, theirs = (torch.from_numpy(values).to(device, dtype) for values in (left, right))
    product = torch.empty(rows, rows, dtype=dtype, device=device)
    wrong, best_s = 0, 0.0
    for limit_s in (0.0, SECONDS):
        best_s = _best_s(lambda: torch.mm(ours, theirs, out=product), device, limit_s)
        wrong = max(wrong, wrong_rows(product, weights, wanted))
    return {"gemm_gflops": round(2e-9 * rows**3 / best_s, 2), "gemm_wrong": wrong}


def wrong_rows(product: Tensor, weights: Whole, wanted: Whole) -> int:
    found = torch.nan_to_num(product.to("cpu", torch.float64), nan=0.5).numpy()
    whole = np.rint(np.clip(found, -(2.0**40), 2.0**40)).astype(np.int64)
    return int(np.count_nonzero((whole @ weights != wanted) | (whole != found).any(axis=1)))


def whole_numbers(rows: int, dtype: torch.dtype, seed: int) -> Whole:
    """In float32 a sum of `rows` products stays below 2**24; bfloat16 has 8 bits, so there are few ones among zeros."""
    rng = np.random.default_rng(seed)
    if dtype is torch.bfloat16:
        return rng.choice([-1, 0, 0, 0, 0, 0, 0, 1], (rows, rows)).astype(np.int64)
    largest = int((2**24 / rows) ** 0.5) - 1
    return rng.integers(-largest, largest, (rows, rows), endpoint=True)


def copy(device: torch.device) -> dict[str, Any]:
    """Speed of what a snapshot does, from the device's memory into (on a GPU pinned) host memory."""
    count = COPY_BYTES[device.type] // 4
    source = torch.arange(count, dtype=torch.int32).to(device)
    target = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
    best_s = _best_s(lambda: target.copy_(source), device, SECONDS)
    wrong = int((target != torch.arange(count, dtype=torch.int32)).sum())
    return {"copy_gbs": round(4e-9 * count / best_s, 2), "copy_wrong": wrong}


def _best_s(call: Callable[[], Tensor], device: torch.device, limit_s: float) -> float:
    """Shortest time of one call, of at least two and as many as take `limit_s`: on a CPU of this process's own time,
    or where others take turns on the core there would be too few."""
    now_s = time.process_time if device.type == "cpu" else time.perf_counter
    began_s = now_s()
    times_s: list[float] = []
    while len(times_s) < 2 or now_s() - began_s < limit_s:
        at_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - at_s)
    return min(times_s)
