"""What a task keeps besides its model and optimizer and wants back after a failure: `ctx.state`.

Each value becomes entries of the snapshot like those of the model: tensors as they are, plain values as JSON in a
tensor of fixed size. What is not registered does not survive.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from elastic.checkpoint.errors import StateError
from elastic.checkpoint.save import Entry

ROOM_BYTES = 4096


class State(MutableMapping[str, Any]):
    """Name -> a tensor; a dict of tensors; an object with `state_dict` and `load_state_dict` that are plain, such as
    an lr_scheduler; or a plain value (what JSON keeps as it is, up to 4 KiB).

    A DTensor is saved by its shards. Everything else must be alike on every rank. All names are given before the
    first step; afterwards a plain value may be replaced, and a tensor that is assigned is copied into the one here.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._rooms: dict[str, Tensor] = {}
        self._closed = False

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not self._closed:
            self._values[name] = value
        elif name not in self._values:
            raise StateError(f"ctx.state[{name!r}] is new after the first step has begun; register it before")
        elif name in self._rooms and not hasattr(self._values[name], "load_state_dict"):
            self._values[name] = value
        else:
            _copy_into(name, self._values[name], value)

    def __delitem__(self, name: str) -> None:
        raise StateError(f"ctx.state[{name!r}] can't be taken back: the snapshots have it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def entries(self) -> list[Entry]:
        """Everything registered, as state to be saved; no further names are taken. StateError: a value can't be."""
        self._closed = True
        found: list[Entry] = []
        for name, value in self._values.items():
            if isinstance(value, Tensor):
                found.append((f"state.{name}", value.detach()))
            elif isinstance(value, Mapping) and value and all(isinstance(part, Tensor) for part in value.values()):
                found += [(f"state.{name}.{key}", part.detach()) for key, part in value.items()]
            else:
                self._rooms[name] = torch.zeros(ROOM_BYTES, dtype=torch.uint8)
                found.append((f"state.{name}", self._rooms[name]))
        self.pack()
        return found

    def pack(self) -> None:
        """Plain values into their entries: before each snapshot."""
        for name, room in self._rooms.items():
            value = self._values[name]
            text = _json(name, value.state_dict() if hasattr(value, "state_dict") else value)
            room.copy_(torch.from_numpy(np.frombuffer(text.ljust(ROOM_BYTES), dtype=np.uint8).copy()))

    def unpack(self) -> None:
        """Plain values out of their entries: after a restore."""
        for name, room in self._rooms.items():
            saved, value = json.loads(room.numpy().tobytes()), self._values[name]
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                self._values[name] = saved
            if isinstance(value, LRScheduler):  # a part of its state lies in the optimizer's groups
                for group, rate in zip(value.optimizer.param_groups, value.get_last_lr()):
                    group["lr"] = rate

    def schedules(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is an lr_scheduler of `optimizer` among the values?"""
        return any(isinstance(v, LRScheduler) and v.optimizer is optimizer for v in self._values.values())


def _copy_into(name: str, kept: Any, value: Any) -> None:
    fits = isinstance(kept, Tensor) and isinstance(value, Tensor) and kept.shape == value.shape
    if not fits:
        raise StateError(
            f"ctx.state[{name!r}] is {_kind(kept)}, got {_kind(value)}; after the first step has begun only "
            "a tensor of the same shape or, for a plain value, another plain value can take its place"
        )
    with torch.no_grad():
        kept.copy_(value)


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


def _json(name: str, value: Any) -> bytes:
    try:
        text = json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StateError(
            f"ctx.state[{name!r}] is not a plain value ({error}); keep numbers, text, lists, dicts"
        ) from error
    if "NaN" not in text and json.loads(text) != value:
        raise StateError(
            f"ctx.state[{name!r}] would come back from JSON changed (tuples become lists, keys become text); "
            "keep it as lists and dicts with keys of text"
        )
    encoded = text.encode()
    if len(encoded) > ROOM_BYTES:
        raise StateError(
            f"ctx.state[{name!r}] takes {len(encoded)} bytes as JSON, at most {ROOM_BYTES}; "
            "keep large state as a tensor"
        )
    return encoded


def check_alike(entries: Sequence[Entry], device: torch.device) -> None:
    """Collective, where there is something to compare. StateError: a tensor that is not sharded, other than the
    optimizer's, differs between ranks: which of them a restore takes would depend on the layout."""
    copies = [(name, tensor) for name, tensor in entries if not isinstance(tensor, DTensor)]
    crcs = {name: _crc(tensor) for name, tensor in copies if not name.startswith("optimizer.")}
    if not crcs:
        return
    own = torch.tensor([zlib.crc32(repr(sorted(crcs.items())).encode())], dtype=torch.int64, device=device)
    everyones = own.new_empty(dist.get_world_size())
    dist.all_gather_single(everyones, own)
    if len(set(everyones.tolist())) == 1:
        return
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, crcs)
    names = sorted({name for one in told for name in one if any(other.get(name) != one[name] for other in told)})
    raise StateError(
        f"{', '.join(names[:5])} differ between ranks; what is not a DTensor must be alike on each of them, "
        "or what is saved would depend on the layout: derive it from (seed, step), reduce it over the ranks, or "
        "make it a DTensor"
    )


def _crc(tensor: Tensor) -> int:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), zlib.crc32(raw.data))
