"""Trainer side of recovery: fills live tensors from a snapshot that may have any other layout.

Near before far: this host's arena by plain copies, then the movers of other hosts, then storage. Everything
but the own arena is verified by its CRCs, and every element is accounted for before training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from elastic.checkpoint.arena import Arena, Buffer
from elastic.checkpoint.blocks import (
    Block,
    Box,
    Index,
    Read,
    Table,
    box_of,
    decode_bytes,
    index,
    missing,
    reads,
    runs,
    spans,
    sub_blocks,
    touched,
)
from elastic.checkpoint.errors import CheckpointError, SourceFailed, StateError
from elastic.checkpoint.save import Entry, local, view, wanted
from elastic.checkpoint.shard import Shard, of_buffer, of_object, table_object
from elastic.checkpoint.store import Store
from elastic.checkpoint.wire import MoverClient
from elastic.plan import RestorePlan, ShardSource

Bytes = npt.NDArray[np.uint8]
Spans = list[tuple[int, int]]
Place = Literal["own", "received", "peer", "storage"]
Target = tuple[Block, torch.Tensor]

T = TypeVar("T")
U = TypeVar("U")

THREADS = 8  # sources opened and read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Bytes that were read, by where they lay; in "peer" and "storage" whole sub-blocks count."""

    nbytes: dict[Place, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """One rank's shard where it lies. `image` gives the shard's bytes, valid and verified within the spans."""

    place: Place
    nbytes: int
    table: Table
    image: Callable[[Spans], Bytes]


def restore(
    entries: Sequence[Entry],
    plan: RestorePlan,
    *,
    rank: int,
    arena: Arena,
    store: Store,
    token: str,
    timeout_s: float = 10.0,
) -> Restored:
    """Fills every tensor of `entries` (from save.entries) with the state that `plan` names.

    `rank` is this trainer's in the new layout: where the layout did not change, its own shard is all it needs.
    `timeout_s` limits each wait for a peer. CheckpointError: a source is gone or damaged, or an element has no
    source; some tensors may be overwritten by then. StateError: the names, shapes or dtypes are not those saved.
    """
    boxes = [(wanted(name, tensor), local(tensor)) for name, tensor in entries]
    targets = [(block, tensor) for block, tensor in boxes if block is not None]
    opened: dict[int, _Opened] = {}
    have: Index = {}
    found: list[tuple[Target, list[Read]]] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for group in _near_to_far(plan, rank, arena):
            opened.update(_each(pool, lambda source: _open(source, plan, arena, store, token, timeout_s), group))
            have = index({source: shard.table for source, shard in opened.items()})
            found = [((block, tensor), reads(block, have)) for block, tensor in targets]
            if not any(missing(block, parts) for (block, _), parts in found):
                _check_all_wanted(have, entries, plan)
                return _fill(pool, opened, found)
    unknown = [name for name, tensor in entries if tensor.numel() and name not in have]
    if unknown:
        raise StateError(
            f"the snapshot of step {plan.key.step} does not have {_few(unknown)}: it is of another model or "
            "optimizer, or this is newly registered state; start a new run, or go back to what was saved"
        )
    gaps = [(block.name, missing(block, parts)) for (block, _), parts in found]
    lacking = [f"{name} ({count} elements)" for name, count in gaps if count]
    raise CheckpointError(f"{plan.key} has no source for {_few(lacking)}; try another copy or an older checkpoint")


def _check_all_wanted(have: Index, entries: Sequence[Entry], plan: RestorePlan) -> None:
    left = sorted(have.keys() - {name for name, _ in entries})
    if left:
        raise StateError(
            f"the snapshot of step {plan.key.step} has {_few(left)}, which this task does not have or register; "
            "start a new run, or go back to what was saved"
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _each(pool: ThreadPoolExecutor, work: Callable[[T], U], items: Sequence[T]) -> Iterable[U]:
    """In parallel where there are several: the usual recovery has one source and needs no thread."""
    return pool.map(work, items) if len(items) > 1 else map(work, items)


def _near_to_far(plan: RestorePlan, rank: int, arena: Arena) -> Iterator[list[ShardSource]]:
    """Sources in this arena, then this rank's own shard, then the rest: tables are read only as far as needed."""
    held = {source: buffer for source in plan.sources if (buffer := _in_arena(source, plan, arena))}
    here = sorted(held, key=lambda source: held[source].tier != "own")  # own bytes need no CRC: first choice
    mine = [source for source in plan.sources if source.rank == rank and source not in held]
    for group in (here, mine, [s for s in plan.sources if s not in held and s not in mine]):
        if group:
            yield group


def _in_arena(source: ShardSource, plan: RestorePlan, arena: Arena) -> Buffer | None:
    return None if source.tier == "storage" else arena.find(plan.key, source.rank)


def _open(
    source: ShardSource, plan: RestorePlan, arena: Arena, store: Store, token: str, timeout_s: float
) -> tuple[int, _Opened]:
    buffer = _in_arena(source, plan, arena)
    if buffer is not None and buffer.tier == "own":
        _check_world(source.rank, buffer.world, plan)
        return source.rank, _Opened(
            place="own", nbytes=buffer.nbytes, table=decode_bytes(buffer.table()), image=lambda _: buffer.data
        )
    place: Place
    if buffer is not None:
        place, shard, read = "received", of_buffer(buffer), _read_arena(buffer)
    elif source.tier == "storage":
        shard = of_object(store.get(table_object(source.object)), name=table_object(source.object))
        place, read = "storage", _read_store(store, source, shard)
    else:
        if source.endpoint is None:
            raise CheckpointError(f"rank {source.rank}'s shard of {plan.key} is on {source.host}, no address known")
        with _blaming(source), MoverClient(source.endpoint, token=token, timeout_s=timeout_s) as client:
            shard = client.describe(plan.key, source.rank)
        place, read = "peer", _read_mover(source, plan, shard, token, timeout_s)
    if (shard.key, shard.rank) != (plan.key, source.rank):
        raise CheckpointError(f"got rank {shard.rank} of {shard.key}, wanted rank {source.rank} of {plan.key}")
    _check_world(source.rank, shard.world, plan)

    def image(wanted_spans: Spans) -> Bytes:
        data = read(wanted_spans)
        shard.verify(data, wanted_spans, where=f"{place} ({source.object or source.host})")
        return data

    return source.rank, _Opened(place=place, nbytes=shard.nbytes, table=shard.blocks(), image=image)


@contextmanager
def _blaming(source: ShardSource) -> Iterator[None]:
    """Say which host it was: the controller looks for its shards elsewhere."""
    try:
        yield
    except CheckpointError as error:
        raise SourceFailed(source.host, str(error)) from error


def _check_world(rank: int, world: int, plan: RestorePlan) -> None:
    if world != plan.world:
        raise CheckpointError(f"rank {rank}'s shard of {plan.key} is one of {world}, the plan says {plan.world}")


def _read_arena(buffer: Buffer) -> Callable[[Spans], Bytes]:
    return lambda _: buffer.data


def _read_mover(
    source: ShardSource, plan: RestorePlan, shard: Shard, token: str, timeout_s: float
) -> Callable[[Spans], Bytes]:
    endpoint = source.endpoint
    assert endpoint is not None

    def read(wanted_spans: Spans) -> Bytes:
        data = np.empty(shard.nbytes, dtype=np.uint8)  # only the pages that are filled become memory
        with _blaming(source), MoverClient(endpoint, token=token, timeout_s=timeout_s) as client:
            client.read(plan.key, source.rank, wanted_spans, data)
        return data

    return read


def _read_store(store: Store, source: ShardSource, shard: Shard) -> Callable[[Spans], Bytes]:
    def read(wanted_spans: Spans) -> Bytes:
        data = np.empty(shard.nbytes, dtype=np.uint8)
        for start, stop in wanted_spans:
            got = store.get(source.object, start, stop)
            if len(got) != stop - start:
                raise CheckpointError(
                    f"{source.object} is cut short: bytes {start} to {stop} of {shard.nbytes} are {len(got)} only; "
                    "use an older checkpoint"
                )
            data[start:stop] = np.frombuffer(got, dtype=np.uint8)
        return data

    return read


def _fill(pool: ThreadPoolExecutor, opened: dict[int, _Opened], found: list[tuple[Target, list[Read]]]) -> Restored:
    """Fetches what the reads touch, all sources at once, and copies as they arrive."""
    by_rank: dict[int, list[tuple[Target, Read]]] = {}
    for target, reads_of_target in found:
        for read in reads_of_target:
            by_rank.setdefault(read.rank, []).append((target, read))
    jobs = [(opened[rank], parts) for rank, parts in by_rank.items()]
    nbytes: dict[Place, int] = {}
    for (source, parts), (data, count) in zip(jobs, _each(pool, lambda job: _fetch(*job), jobs)):
        nbytes[source.place] = nbytes.get(source.place, 0) + count
        pairs = [_views(block, tensor, read, data) for (block, tensor), read in parts]
        with torch.no_grad():
            torch._foreach_copy_([into for into, _ in pairs], [out for _, out in pairs])
    return Restored(nbytes=nbytes)


def _fetch(source: _Opened, parts: list[tuple[Target, Read]]) -> tuple[Bytes, int]:
    if source.place == "own":
        return source.image([]), source.nbytes
    mask = np.zeros(sub_blocks(source.nbytes), dtype=np.bool_)
    for (block, _), part in parts:
        starts, _, run_nbytes = runs(part, block)
        touched(starts, run_nbytes, mask)
    wanted_spans = spans(mask, source.nbytes)
    return source.image(wanted_spans), sum(stop - start for start, stop in wanted_spans)


def _views(block: Block, tensor: torch.Tensor, read: Read, data: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The box of `read` in the live tensor and in the source's bytes."""
    source = view(data, read.source, at=read.source.at).view(read.source.sizes)
    if read.box == box_of(block) == box_of(read.source):
        return tensor, source
    return tensor[_slices(read.box, block)], source[_slices(read.box, read.source)]


def _slices(box: Box, block: Block) -> tuple[slice, ...]:
    """`box`, global, as indices into the local array of `block`."""
    return tuple(slice(start - offset, start - offset + size) for start, size, offset in zip(*box, block.offsets))
