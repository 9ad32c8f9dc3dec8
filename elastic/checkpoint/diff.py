"""What two checkpoints differ in: what they are of, their tensors, and, window by window, their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.blocks import ITEM_BYTES, Block
from elastic.checkpoint.manifest import Manifest
from elastic.checkpoint.reader import Reader, windows

SIDE_BYTES = 16 << 20  # of one side; a window may touch two sub-blocks more of each block that it meets

Raw = npt.NDArray[np.unsignedinteger]
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuesDiffer:
    """Of one tensor: elements whose bits differ, of how many, and the largest absolute difference of the values (nan
    where one is not a number, or both are the same infinity)."""

    name: str
    differing: int
    elements: int
    max_abs: float


def facts(manifest: Manifest) -> dict[str, Any]:
    """What the manifest says that may differ, by the name that a person reads."""
    about = manifest.about
    return {
        "run": about.run,
        "attempt": manifest.attempt,
        "generation": manifest.key.generation,
        "step": manifest.key.step,
        "samples": manifest.samples,
        "world": manifest.world,
        "mesh": dict(manifest.mesh),
        "seed": about.seed,
        "data": about.fingerprint[:12],
        "config": about.config_sha256[:12],
        "code": about.code_sha256[:12],
        "elastic": about.elastic,
        "metrics": dict(manifest.metrics),
    }


def tensors_differ(a: Reader, b: Reader) -> Iterator[tuple[str, str, str]]:
    """(name, what it is in a, in b), "" where it is not there."""
    for name in sorted({*a.tensors, *b.tensors}):
        one, other = _described(a.tensors.get(name)), _described(b.tensors.get(name))
        if one != other:
            yield name, one, other


def _described(tensor: Block | None) -> str:
    return f"{tensor.dtype}{list(tensor.global_shape)}" if tensor else ""


def values_differ(a: Reader, b: Reader) -> Iterator[ValuesDiffer]:
    """Of each tensor that both have alike in shape and dtype, by name; those without a difference are left out."""
    for name in sorted(a.tensors):
        if a.tensors[name] == b.tensors.get(name) and (found := _values(a, b, name)).differing:
            yield found


def _values(a: Reader, b: Reader, name: str) -> ValuesDiffer:
    tensor = a.tensors[name]
    dtype, differing, elements, largest = tensor.dtype, 0, 0, 0.0
    for window in windows(tensor, SIDE_BYTES):
        one, other = (side.read(window).view(f"<u{ITEM_BYTES[dtype]}") for side in (a, b))
        unlike = one != other
        differing += int(unlike.sum())
        elements += unlike.size
        if unlike.any():
            with np.errstate(invalid="ignore", over="ignore"):
                gaps = np.abs(decode(one[unlike], dtype) - decode(other[unlike], dtype))
            largest = float(np.max([largest, gaps.max()]))  # nan stays
    return ValuesDiffer(name=name, differing=differing, elements=elements, max_abs=largest)


@np.errstate(invalid="ignore")  # a signalling NaN is one more value
def decode(bits: Raw, dtype: str) -> Values:
    """The values as float64; numpy knows neither bfloat16 nor the 8-bit floats."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float8_e5m2":  # the upper byte of a float16
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    if dtype == "float8_e4m3fn":
        return _E4M3FN[bits]
    return bits.view(np.dtype(dtype).newbyteorder("<")).astype(np.float64)


def _e4m3fn() -> Values:
    """All 256 values: no infinities, one NaN of each sign."""
    bits = np.arange(256)
    exponent, fraction = (bits >> 3) & 15, (bits & 7) / 8
    size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    size[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, size, -size)


_E4M3FN = _e4m3fn()


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By key what two descriptions say otherwise; None where one does not say it."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}
