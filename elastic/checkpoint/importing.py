"""Tensors from elsewhere as the first checkpoint of a run. Memory: one shard, which is of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from elastic.checkpoint.blocks import SUB_BLOCK, Block, Ints, encode_bytes, place
from elastic.checkpoint.manifest import About, Manifest, build
from elastic.checkpoint.reader import Bytes, Source, windows
from elastic.checkpoint.shard import Shard, table_object, to_object
from elastic.checkpoint.values import FLOATS, cast
from elastic.events import Uploaded
from elastic.plan import SnapshotKey
from elastic.storage.store import Store

SHARD_BYTES = 256 << 20
ATTEMPT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state of a parameter, with `step`

Kind = tuple[str, Ints]  # dtype and global shape
Part = tuple[Block, Callable[[], Bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a source gives to a run: blocks with their bytes, what is wrong, what was done on the way."""

    parts: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def adamw_state(parameters: Mapping[str, Kind]) -> dict[str, Kind]:
    """All that a checkpoint of these parameters has, trained with AdamW, by its names."""
    found: dict[str, Kind] = {}
    for name, kind in parameters.items():
        found[f"model.{name}"] = kind
        found |= {f"optimizer.{name}.{key}": kind for key in MOMENTS}
        found[f"optimizer.{name}.step"] = ("float32", ())
    return found


def steps_made(parts: Iterable[Part]) -> set[int]:
    """What the optimizer's states say, each of one parameter, by torch's convention ("optimizer.w.step")."""
    steps = [
        (block, read) for block, read in parts if block.name.startswith("optimizer.") and block.name.endswith(".step")
    ]
    return {
        int(np.frombuffer(read(), dtype=block.dtype)[0]) for block, read in steps if block.dtype in ("float32", "int64")
    }


def fit(source: Source, names: Mapping[str, str], wanted: Mapping[str, Kind], *, what_next: str) -> Fitted:
    """`source`'s tensors, by what `names` calls them here, as `wanted` says; an optimizer state that is wholly absent
    begins as zeros. problems: one sentence for each tensor that is unknown, missing or of another shape."""
    have = {names.get(block.name, block.name): block for block in source.blocks}
    theirs = {ours: name for name, ours in names.items()}
    has_moments = any(name.startswith("optimizer.") for name in have)
    fitted = Fitted()
    fitted.problems.extend(
        [f"{have[name].name} is not known to the job's model; {what_next}" for name in sorted(have.keys() - wanted)]
    )
    casts: dict[str, int] = {}
    for name, (dtype, shape) in wanted.items():
        if name not in have:
            if has_moments or not name.startswith("optimizer."):
                fitted.problems.append(
                    f"{theirs.get(name, name)} is missing, the job's model wants {dtype}{list(shape)}; {what_next}"
                )
            continue
        got = have[name]
        if got.global_shape != shape or (got.dtype != dtype and not {got.dtype, dtype} <= {*FLOATS}):
            fitted.problems.append(
                f"{got.name} is {got.dtype}{list(got.global_shape)}, the job's model wants {dtype}{list(shape)}; "
                f"{what_next}"
            )
        elif got.dtype != dtype:
            text = f"{got.dtype} to {dtype}"
            casts[text] = casts.get(text, 0) + 1
    fitted.told.extend(f"{count} tensors were converted from {text}" for text, count in casts.items())
    if fitted.problems:
        return fitted
    fitted.parts.extend(taken(source, names, {name: dtype for name, (dtype, _) in wanted.items()}))
    if not has_moments:
        fitted.parts.extend(_zeros({name: kind for name, kind in wanted.items() if name not in have}))
        fitted.told.append("the optimizer's state begins as zeros")
    return fitted


def taken(source: Source, names: Mapping[str, str], dtypes: Mapping[str, str]) -> list[Part]:
    """All of `source`, renamed; floats in the dtypes that are given."""
    parts: list[Part] = []
    for block in source.blocks:
        for window in windows(block):
            name = names.get(window.name, window.name)
            dtype = dtypes.get(name, window.dtype)
            parts.append((replace(window, name=name, dtype=dtype), _reading(source, window, dtype)))
    return parts


def _reading(source: Source, window: Block, dtype: str) -> Callable[[], Bytes]:
    return lambda: cast(source.read(window), window.dtype, dtype, name=window.name)


def _zeros(kinds: Mapping[str, Kind]) -> list[Part]:
    whole = [
        Block(name=name, dtype=dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape)
        for name, (dtype, shape) in kinds.items()
    ]
    return [(window, _zero(window.nbytes)) for block in whole for window in windows(block)]


def _zero(nbytes: int) -> Callable[[], Bytes]:
    return lambda: np.zeros(nbytes, dtype=np.uint8)


def write(
    store: Store,
    parts: Sequence[Part],
    *,
    about: About,
    step: int,
    samples: int,
    shard_bytes_max: int = SHARD_BYTES,
) -> Manifest:
    """Writes the parts as shards, and their index. It is a checkpoint once the manifest is committed.

    CheckpointError: the parts do not cover every tensor, or one can't be read.
    """
    key = SnapshotKey(generation=0, step=step)
    shards = _shards(parts, shard_bytes_max)
    uploads = []
    for rank, shard in enumerate(shards):
        name = f"data/{ATTEMPT}-{key.generation}-{key.step}/{rank}.bin"
        nbytes = _write_shard(store, name, shard, key=key, rank=rank, world=len(shards))
        uploads.append(Uploaded(key=key, rank=rank, object=name, nbytes=nbytes))
    return build(store, uploads, about=about, attempt=ATTEMPT, key=key, samples=samples)


def _shards(parts: Iterable[Part], nbytes_max: int) -> list[list[Part]]:
    shards: list[list[Part]] = [[]]
    room = nbytes_max
    for part in parts:
        if shards[-1] and part[0].nbytes > room:
            shards.append([])
            room = nbytes_max
        shards[-1].append(part)
        room -= part[0].nbytes
    return shards


def _write_shard(store: Store, name: str, parts: Sequence[Part], *, key: SnapshotKey, rank: int, world: int) -> int:
    table, nbytes = place(block for block, _ in parts)
    data = np.zeros(nbytes, dtype=np.uint8)
    for block, (_, read) in zip(table, parts):
        data[block.at : block.at + block.nbytes] = read()
    crcs = np.array([zlib.crc32(data[at : at + SUB_BLOCK].data) for at in range(0, nbytes, SUB_BLOCK)], dtype=np.uint32)
    shard = Shard(key=key, rank=rank, world=world, nbytes=nbytes, table=encode_bytes(table), crcs=crcs)
    store.put(name, data.data)
    store.put(table_object(name), to_object(shard))
    return nbytes
