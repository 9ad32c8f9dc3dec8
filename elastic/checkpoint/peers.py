"""The mover's side of the wire: serve reads, take in partners' shards, push own ones. All of it asyncio.

No peer can hold up another: each connection is a task, every wait on it has a limit, and a shard that
does not arrive whole leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import sys
import time
import zlib
from asyncio import Task
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np

from elastic.checkpoint.arena import Arena, Buffer, State
from elastic.checkpoint.blocks import SUB_BLOCK
from elastic.checkpoint.disk import OnDisk
from elastic.checkpoint.errors import CheckpointError, Damaged
from elastic.checkpoint.pipe import Pipe
from elastic.checkpoint.read_through import PART_BYTES, PARTS_AT_ONCE, ReadThrough, in_parts
from elastic.checkpoint.shard import Shard, facts_nbytes, is_small, key_of, of_buffer, of_header
from elastic.checkpoint.wire import (
    ECHO_BYTES_MAX,
    FACTS_BYTES_MAX,
    frame,
)
from elastic.plan import Endpoint, SnapshotKey
from elastic.storage.errors import StorageError, StorageUnavailable

IDLE_S = 600.0  # a connection without a request is closed; its owner opens another when it needs one
CONNECTIONS_MAX = 512
HELLO_BYTES_MAX = 4096
ROUND_TRIPS = 5
TRANSFERS = 3
SIGN_OF_LIFE_S = 2.0  # between them, while storage has not answered yet

Answer = Literal["done", "have", "busy"]
T = TypeVar("T")


class Partner:
    """The connection over which own shards go to the partner; opened when needed, again after any error."""

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self._endpoint = endpoint
        self._token = token
        self._pipe: Pipe | None = None
        self._was_busy = False

    async def push(self, shard: Shard, data: memoryview) -> Answer:
        """OSError, TimeoutError: unreachable or silent. CheckpointError: it refused, or the CRC failed there."""
        try:
            self._pipe = self._pipe or await Pipe.connect(self._endpoint, self._token)
            answer = await _push(self._pipe, shard, data, ask_first=self._was_busy or not is_small(shard.header()))
        except BaseException:
            self.close()
            raise
        self._was_busy = answer == "busy"
        return answer

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None


async def _push(pipe: Pipe, shard: Shard, data: memoryview, *, ask_first: bool) -> Answer:
    if ask_first:
        await pipe.tell({"push": shard.header()})
        answer = await pipe.hear()
        if "go" in answer:
            await pipe.send(shard.facts())
            await pipe.send(data)
            answer = await pipe.hear()
    else:
        request = frame({"push": shard.header(), "whole": True})
        await pipe.send(b"".join((request, shard.facts(), data)))
        answer = await pipe.hear()
    return "busy" if "busy" in answer else "have" if "have" in answer else "done"


async def exchange(endpoint: Endpoint, token: str, nbytes: int, limit_s: float) -> tuple[float, float]:
    """(round trip in s, bytes per s of the slower direction) to another mover; each the best of several tries.

    OSError, TimeoutError: no answer in `limit_s`. CheckpointError: it refused, or the bytes came back changed.
    """
    async with asyncio.timeout(limit_s):
        pipe = await Pipe.connect(endpoint, token)
        try:
            trips_s = [sum(await _echo(pipe, 1, limit_s)) for _ in range(ROUND_TRIPS)]
            slower_s = [max(await _echo(pipe, nbytes, limit_s)) for _ in range(TRANSFERS)]
            return min(trips_s), nbytes / min(slower_s)
        finally:
            pipe.close()


async def _echo(pipe: Pipe, nbytes: int, limit_s: float) -> tuple[float, float]:
    """Seconds until the other side had all of it, and from there until it was back."""
    sent, back = os.urandom(nbytes), bytearray(nbytes)
    began_s = time.monotonic()
    await pipe.tell({"echo": nbytes})
    await pipe.send(sent)
    await pipe.hear(limit_s=limit_s)
    there_s = time.monotonic()
    for at in range(0, nbytes, SUB_BLOCK):
        await pipe.fill(memoryview(back)[at : at + SUB_BLOCK])
    if back != sent:
        raise CheckpointError(f"of {nbytes} bytes some came back changed")
    return there_s - began_s, time.monotonic() - there_s


class _Arrived:
    """Bytes that came with their request, read like a pipe."""

    def __init__(self, data: bytearray) -> None:
        self._rest = memoryview(data)

    async def fill(self, into: memoryview) -> None:
        into[:] = self._rest[: len(into)]
        self._rest = self._rest[len(into) :]


class Peers:
    """Serves every peer that knows the token. `changed` is called when a received shard appeared or went."""

    def __init__(
        self, arena: Arena, stored: ReadThrough, on_disk: OnDisk, token: str, changed: Callable[[], None]
    ) -> None:
        self._arena = arena
        self._stored = stored
        self._on_disk = on_disk
        self._token = token
        self._changed = changed
        self._filling: set[int] = set()  # indices of received buffers that a connection is writing
        self._open = 0

    async def serve(self, sock: socket.socket) -> None:
        if self._open >= CONNECTIONS_MAX:
            sock.close()
            return
        self._open += 1
        pipe = Pipe(sock)
        try:
            await self._greet(pipe)
            while True:
                await self._answer(pipe, await pipe.hear(limit_s=IDLE_S))
        except ConnectionResetError:
            pass  # the usual end: the peer has what it wanted, or is dead
        except (OSError, TimeoutError, StorageError, KeyError, TypeError, ValueError) as error:
            print(f"mover: dropped a peer: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            pipe.close()
            self._open -= 1

    async def _greet(self, pipe: Pipe) -> None:
        hello = await pipe.hear(bytes_max=HELLO_BYTES_MAX)
        if not hmac.compare_digest(str(hello.get("hello")).encode(), self._token.encode()):
            await pipe.tell({"error": "the token is not this run's; is the peer of another run?"})
            raise CheckpointError("its token is not this run's")

    async def _answer(self, pipe: Pipe, request: dict[str, Any]) -> None:
        try:
            if "push" in request:
                await self._receive(pipe, request["push"], is_whole=request.get("whole", False))
            elif "describe" in request:
                await self._describe(pipe, key_of(request["describe"]), request)
            elif "echo" in request:
                await self._return(pipe, request["echo"])
            elif "read" in request:
                await self._read(pipe, key_of(request["read"]), request)
            else:
                raise CheckpointError(f"unknown request {sorted(request)}; do both sides run the same version?")
        except StorageUnavailable as error:
            await pipe.tell({"error": str(error), "storage": True})
        except StorageError as error:
            await pipe.tell({"error": str(error), "damaged": isinstance(error, Damaged)})

    def _source(self, request: dict[str, Any]) -> ReadThrough:
        if not request.get("disk"):
            return self._stored
        if self._on_disk.reads is None:
            raise CheckpointError("this mover was not told where on its disk the run's snapshots lie")
        return self._on_disk.reads

    async def _describe(self, pipe: Pipe, key: SnapshotKey, request: dict[str, Any]) -> None:
        rank, name = request["rank"], request["object"]
        buffer = self._sealed(key, rank, name)
        if buffer is not None:
            shard = of_buffer(buffer)
        else:
            shard = await _patiently(pipe, self._source(request).shard(name, key, rank))
        await pipe.tell(shard.header())
        await pipe.send(shard.facts())

    def _sealed(self, key: SnapshotKey, rank: int, name: str) -> Buffer | None:
        """None: not here, but in storage, as the object `name`."""
        buffer = self._arena.find(key, rank)
        if buffer is not None and buffer.state == State.SEALED:
            return buffer
        if not name:
            held = "not here" if buffer is None else "not sealed yet"
            raise CheckpointError(f"rank {rank}'s shard of {key} is {held}")
        return None

    async def _return(self, pipe: Pipe, nbytes: int) -> None:
        if not 0 < nbytes <= ECHO_BYTES_MAX:
            raise ConnectionAbortedError(f"asked to return {nbytes} bytes, at most {ECHO_BYTES_MAX} are")
        data = bytearray(nbytes)
        for at in range(0, nbytes, SUB_BLOCK):
            await pipe.fill(memoryview(data)[at : at + SUB_BLOCK])
        await pipe.tell({"nbytes": nbytes})
        await pipe.send(memoryview(data))

    async def _read(self, pipe: Pipe, key: SnapshotKey, request: dict[str, Any]) -> None:
        rank, name, spans = request["rank"], request["object"], request["spans"]
        buffer = self._sealed(key, rank, name)
        if buffer is None:
            source = self._source(request)
            shard = await _patiently(pipe, source.shard(name, key, rank))
            _check_spans(spans, shard.nbytes)
            await _relay(pipe, source, name, shard, spans)
            return
        sequence, data = buffer.sequence, buffer.view
        _check_spans(spans, len(data))
        await pipe.tell({"nbytes": sum(stop - start for start, stop in spans)})
        for start, stop in spans:
            await pipe.send(data[start:stop])
        if buffer.sequence != sequence:  # the reader's CRCs would find it as well; this says it sooner
            raise ConnectionAbortedError("the buffer was reused while it was read")

    async def _receive(self, pipe: Pipe, header: dict[str, Any], *, is_whole: bool) -> None:
        arrived = await _rest_of(pipe, header) if is_whole else None  # first: refused or not, the pipe stays in step
        key, rank = key_of(header["key"]), header["rank"]
        if key.generation < self._arena.board.generation:
            raise CheckpointError(f"{key} is of an older generation than {self._arena.board.generation}")
        held = self._arena.find(key, rank)
        if held is not None and held.tier == "received":
            await pipe.tell({"have": True})
            return
        if facts_nbytes(header) > FACTS_BYTES_MAX:
            raise CheckpointError(f"a table of {header['table_nbytes']} bytes is too large")
        place = self._place(key, rank)
        if place is None:
            await pipe.tell({"busy": "no received buffer is free"})
            return
        buffer = self._arena.received[place]
        buffer.check_fits(header["nbytes"], header["table_nbytes"])
        self._filling.add(place)
        try:
            if arrived is None:
                await pipe.tell({"go": True})
            await self._fill(arrived or pipe, buffer, header)
        finally:
            self._filling.discard(place)
            if buffer.state == State.WRITING:
                buffer.free()
        await pipe.tell({"done": True})

    def _place(self, key: SnapshotKey, rank: int) -> int | None:
        """A received buffer to fill; None while there is none, or while `rank` has a copy here that is not safe yet:
        a fast source must not take the room of a slow one, or no step would ever be complete."""
        keep = self._arena.board.keep
        for i, buffer in enumerate(self._arena.received):
            mine = buffer.rank == rank and buffer.key.generation == key.generation
            if mine and buffer.key != keep and (i in self._filling or not buffer.reusable()):
                return None
        free = [
            (buffer.state != State.FREE, buffer.key, i)
            for i, buffer in enumerate(self._arena.received)
            if i not in self._filling and buffer.reusable()
        ]
        return min(free)[2] if free else None

    async def _fill(self, source: Pipe | _Arrived, buffer: Buffer, header: dict[str, Any]) -> None:
        facts = bytearray(facts_nbytes(header))
        for at in range(0, len(facts), SUB_BLOCK):
            await source.fill(memoryview(facts)[at : at + SUB_BLOCK])
        try:
            shard = of_header(header, bytes(facts))
        except StorageError as error:
            if isinstance(source, _Arrived):
                raise
            # Its data is on the way: only a new connection is in step again.
            raise ConnectionAbortedError(str(error)) from error
        lost = buffer.holding() is not None
        buffer.begin(shard.key, rank=shard.rank, world=shard.world, nbytes=shard.nbytes, table=shard.table)
        if lost:
            self._changed()
        damaged = await self._fill_data(source, shard, buffer.view)
        if damaged is not None:
            raise CheckpointError(shard.damage(damaged, where="received by the partner"))
        buffer.finish()
        buffer.seal(buffer.sequence, shard.crcs, zlib.crc32(facts))
        self._changed()

    async def _fill_data(self, source: Pipe | _Arrived, shard: Shard, data: memoryview) -> int | None:
        """Reads all of it, so that the connection stays in step; returns the first damaged sub-block."""
        damaged = None
        for i, at in enumerate(range(0, len(data), SUB_BLOCK)):
            piece = data[at : at + SUB_BLOCK]
            await source.fill(piece)
            await asyncio.sleep(0)  # a fast peer does not hold up the others
            if damaged is None and zlib.crc32(piece) != np.uint32(shard.crcs[i]):
                damaged = i
        return damaged


async def _patiently(pipe: Pipe, task: Task[T]) -> T:
    """Its result; meanwhile the peer hears that this mover is alive. The task goes on for others, whatever the peer."""
    while not task.done():
        await asyncio.wait((task,), timeout=SIGN_OF_LIFE_S)
        if not task.done():
            await pipe.tell({"wait": True})
    return task.result()


async def _relay(pipe: Pipe, source: ReadThrough, name: str, shard: Shard, spans: list[tuple[int, int]]) -> None:
    """From storage or disk, as the parts come; the next ones are fetched meanwhile."""
    pieces = in_parts(spans)
    for i, (number, start, stop) in enumerate(pieces):
        for ahead, *_ in pieces[i + PARTS_AT_ONCE - 1 : i + PARTS_AT_ONCE] if i else pieces[:PARTS_AT_ONCE]:
            source.part(name, shard, ahead)
        part = await _patiently(pipe, source.part(name, shard, number))
        await pipe.tell({"nbytes": stop - start})
        await pipe.send(memoryview(part)[start % PART_BYTES : start % PART_BYTES + stop - start])


def _check_spans(spans: list[tuple[int, int]], nbytes: int) -> None:
    if any(not 0 <= start < stop <= nbytes for start, stop in spans):
        raise CheckpointError(f"spans must lie within [0, {nbytes}), got {spans[:3]}")


async def _rest_of(pipe: Pipe, header: dict[str, Any]) -> _Arrived:
    if not is_small(header):
        raise ConnectionAbortedError(f"a shard of {header['nbytes']} bytes was sent unasked; only small ones may be")
    data = bytearray(facts_nbytes(header) + header["nbytes"])
    await pipe.fill(memoryview(data))
    return _Arrived(data)
