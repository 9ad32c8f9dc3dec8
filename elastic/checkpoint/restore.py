"""Trainer side of recovery: fills live tensors from a snapshot that may have any other layout.

Near before far: this host's arena by plain copies, then the movers of other hosts (their arenas, the disks of their
nodes), then storage. Everything but the own arena is verified by its CRCs, and every element is accounted for before
training goes on. What several ranks want from storage is fetched by one host's mover for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
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
    spans,
    sub_blocks,
    touched,
)
from elastic.checkpoint.errors import CheckpointError, Damaged, SourceFailed, StateError
from elastic.checkpoint.read_through import stored_bytes, stored_shard
from elastic.checkpoint.save import REPLICATED_BYTES_MAX, Entry, local, replica, view, wanted
from elastic.checkpoint.shard import Shard, of_buffer
from elastic.checkpoint.wire import MoverClient
from elastic.plan import RestorePlan, ShardSource
from elastic.storage.errors import StorageError, StorageUnavailable
from elastic.storage.store import Store

Bytes = npt.NDArray[np.uint8]
Spans = list[tuple[int, int]]
Place = Literal["own", "received", "peer", "disk", "storage", "relayed"]
Target = tuple[Block, torch.Tensor]

T = TypeVar("T")
U = TypeVar("U")

THREADS = 8  # sources opened and read at once
DIRECT_THREADS = 8  # ranges that are read from storage directly, at once
DIRECT_BYTES = 8 << 20  # of each: one request, and no copy to put its parts together

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Bytes that were read, by where they lay; but for "own" whole sub-blocks count.

    "relayed": from storage through a mover that fetches for all. `detours`: why what a mover should have relayed was
    read from storage directly.
    """

    nbytes: dict[Place, int]
    detours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """One rank's shard where it lies. `image` gives the shard's bytes, valid and verified within the spans, and where
    they came from. `is_mapped`: all of it is here as it is, `image` takes no spans."""

    nbytes: int
    table: Table
    image: Callable[[Spans], tuple[Bytes, Place]]
    is_mapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """How one restore reaches its sources. `requests`: threads for what is read from storage directly. `is_alone`:
    whether no other rank wants anything of a shard with that table. `detours`: see `Restored`."""

    plan: RestorePlan
    own_rank: int | None  # this trainer's in the saved layout; None where that is another one
    arena: Arena
    store: Store
    token: str
    timeout_s: float
    requests: ThreadPoolExecutor
    is_alone: Callable[[Table], bool]
    detours: list[str] = field(default_factory=list)


def restore(
    entries: Sequence[Entry],
    plan: RestorePlan,
    *,
    rank: int,
    world: int,
    arena: Arena,
    store: Store,
    token: str,
    timeout_s: float = 10.0,
) -> Restored:
    """Fills every tensor of `entries` (from save.entries) with the state that `plan` names.

    `rank` and `world` are of the new layout: where it did not change, the own shard is all that a trainer needs.
    `timeout_s` limits each wait for a peer; a store has limits of its own. CheckpointError: a source is gone or
    damaged, or an element has no source; some tensors may be overwritten by then. StateError: the names, shapes or
    dtypes are not those saved.
    """
    boxes = [(wanted(name, tensor), local(tensor)) for name, tensor in entries]
    targets = [(block, tensor) for block, tensor in boxes if block is not None]
    opened: dict[int, _Opened] = {}
    have: Index = {}
    found: list[tuple[Target, list[Read]]] = []
    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(DIRECT_THREADS) as requests:
        reach = _Reach(
            plan=plan,
            own_rank=rank if plan.world == world else None,
            arena=arena,
            store=store,
            token=token,
            timeout_s=timeout_s,
            requests=requests,
            is_alone=lambda table: _is_alone(table, entries, rank, world),
        )
        for group in _near_to_far(reach):
            opened.update(_each(pool, lambda source: (source.rank, _open(source, reach)), group))
            have = index({source: shard.table for source, shard in opened.items()})
            found = [((block, tensor), reads(block, have)) for block, tensor in targets]
            if not any(missing(block, parts) for (block, _), parts in found):
                _check_all_wanted(have, entries, plan)
                return Restored(nbytes=_fill(pool, opened, found), detours=tuple(reach.detours))
    raise _lack(entries, plan, have, found)


def _is_alone(table: Table, entries: Sequence[Entry], rank: int, world: int) -> bool:
    """Whether this rank wants just the boxes of `table`, and no rank has copies of them to fill as well."""
    mine = {block.name: (block, tensor) for name, tensor in entries if (block := wanted(name, tensor)) is not None}
    for saved in table:
        block, tensor = mine.get(saved.name, (None, None))
        if block is None or tensor is None or box_of(block) != box_of(saved):
            return False
        if block.nbytes > REPLICATED_BYTES_MAX and replica(tensor, rank, world)[1] > 1:
            return False
    return True


def _lack(
    entries: Sequence[Entry], plan: RestorePlan, have: Index, found: list[tuple[Target, list[Read]]]
) -> CheckpointError:
    unknown = [name for name, tensor in entries if tensor.numel() and name not in have]
    if unknown:
        return StateError(
            f"the snapshot of step {plan.key.step} does not have {_few(unknown)}: it is of another model or "
            "optimizer, or this is newly registered state; start a new run, or go back to what was saved"
        )
    gaps = [(block.name, missing(block, parts)) for (block, _), parts in found]
    lacking = [f"{name} ({count} elements)" for name, count in gaps if count]
    return CheckpointError(f"{plan.key} has no source for {_few(lacking)}; try another copy or an older checkpoint")


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


def _near_to_far(reach: _Reach) -> Iterator[list[ShardSource]]:
    """Sources in this arena, then this rank's own shard, then the rest: tables are read only as far as needed."""
    sources = reach.plan.sources
    held = {source: buffer for source in sources if (buffer := _in_arena(source, reach))}
    here = sorted(held, key=lambda source: held[source].tier != "own")  # own bytes need no CRC: first choice
    mine = [source for source in sources if source.rank == reach.own_rank and source not in held]
    for group in (here, mine, [s for s in sources if s not in held and s not in mine]):
        if group:
            yield group


def _in_arena(source: ShardSource, reach: _Reach) -> Buffer | None:
    return None if source.tier == "storage" else reach.arena.find(reach.plan.key, source.rank)


def _open(source: ShardSource, reach: _Reach) -> _Opened:
    buffer = _in_arena(source, reach)
    if buffer is not None and buffer.tier == "own":
        _check_world(source.rank, buffer.world, reach.plan)
        table, data = decode_bytes(buffer.table()), buffer.data
        return _Opened(nbytes=buffer.nbytes, table=table, image=lambda _: (data, "own"), is_mapped=True)
    if buffer is not None:
        return _open_received(source, buffer, reach)
    if source.tier == "storage":
        return _open_stored(source, reach)
    return _open_peer(source, reach, _on_disk if source.tier == "disk" else _blaming)


def _open_received(source: ShardSource, buffer: Buffer, reach: _Reach) -> _Opened:
    shard, data = of_buffer(buffer), buffer.data

    def image(wanted_spans: Spans) -> tuple[Bytes, Place]:
        shard.verify(data, wanted_spans, where=f"received ({source.host})")
        return data, "received"

    return _opened(source, shard, image, reach)


def _open_peer(
    source: ShardSource, reach: _Reach, failing: Callable[[ShardSource], AbstractContextManager[None]]
) -> _Opened:
    """From its mover: out of its arena or, of tier "disk", from the disk of its node. `failing`: what that means."""
    if source.endpoint is None:
        raise CheckpointError(f"rank {source.rank}'s shard of {reach.plan.key} is on {source.host}, no address known")
    with failing(source):
        shard = _describe(source, reach)

    def image(wanted_spans: Spans) -> tuple[Bytes, Place]:
        with failing(source):
            data = _read(source, shard, wanted_spans, reach)
        shard.verify(data, wanted_spans, where=f"{source.tier} ({source.host})")
        return data, "disk" if source.tier == "disk" else "peer"

    return _opened(source, shard, image, reach)


def _open_stored(source: ShardSource, reach: _Reach) -> _Opened:
    """Through the mover of the plan where other ranks want some of it as well, else directly; directly, too, where
    that mover fails or tells of damage: a checkpoint is not given up on the word of another host's memory."""
    shard = None
    if source.rank != reach.own_rank:
        shard = _relayed(source, reach, lambda: _describe(source, reach))
    directly = shard is None
    if shard is None:
        shard = stored_shard(reach.store, source.object, reach.plan.key, source.rank)
    if source.rank == reach.own_rank:
        directly = reach.is_alone(shard.blocks())
    found = shard

    def relayed(wanted_spans: Spans) -> Bytes:
        data = _read(source, found, wanted_spans, reach)
        found.verify(data, wanted_spans, where=f"relayed by {source.host} ({source.object})")
        return data

    def image(wanted_spans: Spans) -> tuple[Bytes, Place]:
        data = None if directly else _relayed(source, reach, lambda: relayed(wanted_spans))
        if data is not None:
            return data, "relayed"
        return _read_directly(source, found, wanted_spans, reach), "storage"

    return _opened(source, shard, image, reach)


def _relayed(source: ShardSource, reach: _Reach, ask: Callable[[], T]) -> T | None:
    """What the mover answers that reads this shard for all. None: there is none, or it can't."""
    if source.endpoint is None:
        return None
    try:
        return ask()
    except StorageUnavailable:  # all ranks at once would only make it worse
        raise
    except StorageError as error:
        reach.detours.append(f"{source.object} is read directly: {source.host} should relay it, but {error}")
        log.warning(reach.detours[-1])
        return None


def _opened(source: ShardSource, shard: Shard, image: Callable[[Spans], tuple[Bytes, Place]], reach: _Reach) -> _Opened:
    if (shard.key, shard.rank) != (reach.plan.key, source.rank):
        where = source.object or source.host
        raise CheckpointError(
            f"{where} has rank {shard.rank} of {shard.key}, wanted rank {source.rank} of {reach.plan.key}"
        )
    _check_world(source.rank, shard.world, reach.plan)
    return _Opened(nbytes=shard.nbytes, table=shard.blocks(), image=image)


@contextmanager
def _blaming(source: ShardSource) -> Iterator[None]:
    """Say which host it was: the controller looks for its shards elsewhere."""
    try:
        yield
    except Damaged:
        raise
    except StorageError as error:
        raise SourceFailed(source.host, str(error)) from error


@contextmanager
def _on_disk(source: ShardSource) -> Iterator[None]:
    """Damaged: the disk does not give what was written there; that is not tried again. Else it is the mover's fault."""
    with _blaming(source):
        try:
            yield
        except (Damaged, StorageUnavailable) as error:
            raise Damaged(f"on the disk of {source.host}: {error}") from error


def _check_world(rank: int, world: int, plan: RestorePlan) -> None:
    if world != plan.world:
        raise CheckpointError(f"rank {rank}'s shard of {plan.key} is one of {world}, the plan says {plan.world}")


def _client(source: ShardSource, reach: _Reach) -> MoverClient:
    assert source.endpoint is not None
    return MoverClient(source.endpoint, token=reach.token, timeout_s=reach.timeout_s)


def _describe(source: ShardSource, reach: _Reach) -> Shard:
    with _client(source, reach) as client:
        return client.describe(reach.plan.key, source.rank, stored=source.object, disk=source.tier == "disk")


def _read(source: ShardSource, shard: Shard, wanted_spans: Spans, reach: _Reach) -> Bytes:
    data = np.empty(shard.nbytes, dtype=np.uint8)  # only the pages that are filled become memory
    with _client(source, reach) as client:
        disk = source.tier == "disk"
        client.read(reach.plan.key, source.rank, wanted_spans, data, stored=source.object, disk=disk)
    return data


def _read_directly(source: ShardSource, shard: Shard, wanted_spans: Spans, reach: _Reach) -> Bytes:
    data = np.empty(shard.nbytes, dtype=np.uint8)

    def fetch(piece: tuple[int, int]) -> None:
        found = stored_bytes(reach.store, source.object, shard, *piece)
        data[slice(*piece)] = np.frombuffer(found, dtype=np.uint8)

    pieces = [
        (start, min(start + DIRECT_BYTES, stop)) for a, stop in wanted_spans for start in range(a, stop, DIRECT_BYTES)
    ]
    list(_each(reach.requests, fetch, pieces))
    return data


def _fill(
    pool: ThreadPoolExecutor, opened: dict[int, _Opened], found: list[tuple[Target, list[Read]]]
) -> dict[Place, int]:
    """Fetches what the reads touch, all sources at once, and copies as they arrive."""
    by_rank: dict[int, list[tuple[Target, Read]]] = {}
    for target, reads_of_target in found:
        for read in reads_of_target:
            by_rank.setdefault(read.rank, []).append((target, read))
    jobs = [(opened[rank], parts) for rank, parts in by_rank.items()]
    nbytes: dict[Place, int] = {}
    for (_, parts), (data, place, count) in zip(jobs, _each(pool, lambda job: _fetch(*job), jobs)):
        nbytes[place] = nbytes.get(place, 0) + count
        pairs = [_views(block, tensor, read, data) for (block, tensor), read in parts]
        with torch.no_grad():
            torch._foreach_copy_([into for into, _ in pairs], [out for _, out in pairs])
    return nbytes


def _fetch(source: _Opened, parts: list[tuple[Target, Read]]) -> tuple[Bytes, Place, int]:
    if source.is_mapped:
        return *source.image([]), source.nbytes
    mask = np.zeros(sub_blocks(source.nbytes), dtype=np.bool_)
    for _, part in parts:
        touched(part, mask)
    wanted_spans = spans(mask, source.nbytes)
    return *source.image(wanted_spans), sum(stop - start for start, stop in wanted_spans)


def _views(block: Block, tensor: torch.Tensor, read: Read, data: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The box of `read` in the live tensor and in the source's bytes."""
    source = view(data, read.source, at=read.source.at).view(read.source.sizes)
    if read.box == box_of(block) == box_of(read.source):
        return tensor, source
    return tensor[_slices(read.box, block)], source[_slices(read.box, read.source)]


def _slices(box: Box, block: Block) -> tuple[slice, ...]:
    """`box`, global, as indices into the local array of `block`."""
    return tuple(slice(start - offset, start - offset + size) for start, size, offset in zip(*box, block.offsets))
