"""The safetensors format: eight bytes of header length, a JSON header, raw little-endian tensors; and directories of
such files as Hugging Face lays them out, with an index that says which file has which tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic.checkpoint.blocks import ITEM_BYTES, Block
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.reader import Bytes, strides, whole
from elastic.storage.errors import ObjectMissing
from elastic.storage.store import Store

INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100 << 20  # as the reference implementation
NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def header(tensors: Sequence[Block], metadata: Mapping[str, str]) -> bytes:
    """What stands before the data of whole tensors that follow each other in this order."""
    body: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        body[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": tensor.global_shape,
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(body, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


class SafetensorsSource:
    """The `Source` of a directory: of the files that its index names, or of all there are where it has none."""

    def __init__(self, store: Store) -> None:
        """CheckpointError: a file is missing or cut short, or a header says what can't be."""
        self._store = store
        self._at: dict[str, tuple[str, int]] = {}
        sizes = {name: size for name, size in store.list("").items() if name.endswith(".safetensors")}
        weight_map = _weight_map(store)
        files = sorted(sizes) if weight_map is None else sorted(set(weight_map.values()))
        blocks: list[Block] = []
        for file in files:
            if file not in sizes:
                raise CheckpointError(f"{INDEX} names {file}, which is not there; fetch all files of the model")
            blocks += self._open(file, sizes[file])
        self.blocks = tuple(blocks)
        lacking = sorted((weight_map or {}).keys() - self._at.keys())
        if lacking:
            raise CheckpointError(f"{INDEX} names {lacking[0]}, which no file has; fetch all files of the model anew")

    def read(self, window: Block) -> Bytes:
        file, start = self._at[window.name]
        start += sum(
            at * step for at, step in zip(window.offsets, strides(window.global_shape, ITEM_BYTES[window.dtype]))
        )
        data = self._store.get(file, start, start + window.nbytes)
        if len(data) != window.nbytes:
            raise CheckpointError(f"{file} ends within {window.name}; fetch it anew")
        return np.frombuffer(data, dtype=np.uint8)

    def _open(self, file: str, size: int) -> Iterator[Block]:
        tensors, data_at = _read_header(self._store, file, size)
        for name, entry in tensors.items():
            try:
                begin, end = map(int, entry["data_offsets"])
                dtype = _DTYPES.get(entry["dtype"])
                shape = tuple(map(int, entry["shape"]))
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{file}: the entry of {name} can't be read ({error!r}); fetch it anew"
                ) from error
            if dtype is None:
                raise CheckpointError(f"{file}: {name} is {entry['dtype']}, wanted one of {', '.join(_DTYPES)}")
            block = whole(name, dtype, shape)
            if min(shape, default=0) < 0 or begin < 0 or end - begin != block.nbytes:
                raise CheckpointError(
                    f"{file}: {name} has bytes {begin} to {end}, {entry['dtype']}{list(shape)} takes {block.nbytes}; "
                    "fetch it anew"
                )
            if data_at + end > size:
                raise CheckpointError(
                    f"{file} has {size} bytes, {name} reaches to {data_at + end}: it is cut short; fetch it anew"
                )
            if name in self._at:
                raise CheckpointError(f"{name} is both in {self._at[name][0]} and in {file}; keep one of them")
            self._at[name] = (file, data_at + begin)
            yield block


def _weight_map(store: Store) -> dict[str, str] | None:
    try:
        raw = store.get(INDEX)
    except ObjectMissing:
        return None
    try:
        return dict(json.loads(raw)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{INDEX} has no weight_map ({error!r}); fetch it anew") from error


def _read_header(store: Store, file: str, size: int) -> tuple[dict[str, Any], int]:
    """The entries, and where the data begins."""
    length = int.from_bytes(store.get(file, 0, 8), "little")
    if not 2 <= length <= min(size - 8, HEADER_BYTES_MAX):
        raise CheckpointError(
            f"{file} has {size} bytes and tells of a header of {length}: it is cut short or no safetensors file; "
            "fetch it anew"
        )
    try:
        body: dict[str, Any] = json.loads(store.get(file, 8, 8 + length))
        body.pop("__metadata__", None)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: its header is no JSON object ({error}); fetch it anew") from error
    return body, 8 + length
