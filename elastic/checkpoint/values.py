"""Floating-point values from one precision to another, rounded to nearest even as torch does, without torch.

numpy has no bfloat16: it is the upper half of a float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.errors import CheckpointError

FLOATS = ("float16", "bfloat16", "float32", "float64")

Bytes = npt.NDArray[np.uint8]


def cast(data: Bytes, got: str, wanted: str, *, name: str) -> Bytes:
    """CheckpointError: a finite value of tensor `name` would become infinite, or one of the dtypes is no float."""
    if got == wanted:
        return data
    if got not in FLOATS or wanted not in FLOATS:
        raise CheckpointError(f"{name} is {got}, wanted {wanted}; only {', '.join(FLOATS)} are converted")
    values = _decode(data, got)
    with np.errstate(over="ignore", invalid="ignore"):
        encoded = _encode(values, wanted)
    lost = np.isfinite(values) & ~np.isfinite(_decode(encoded, wanted))
    if lost.any():
        raise CheckpointError(f"{name} has {values[lost][0]}, which {wanted} can't hold; choose a wider dtype")
    return encoded


def _decode(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    if dtype != "bfloat16":
        return data.view(dtype)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _encode(values: npt.NDArray[Any], dtype: str) -> Bytes:
    if dtype != "bfloat16":
        return values.astype(dtype).view(np.uint8)
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded).view(np.uint8)
