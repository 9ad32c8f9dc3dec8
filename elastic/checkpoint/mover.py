"""The mover: one process per host that seals, sends, serves and uploads, so that no other one handles bytes.

`python -m elastic.checkpoint.mover` gets its sockets and memory as open descriptors (see `command`), so its
address and all it holds outlive it: a new one goes on where the old one died. Host and mover speak JSON
lines over the control socket. Host to mover, the first line saying the run's token and storage:

    {"token": t, "storage": {"url", "options"}}
    {"generation": g, "rank": r, "world": w, "attempt": a, "partner": {"address", "port"} | null}
    {"upload": {"generation": g, "step": s}}   {"seal": true}
    {"disk": root, "order": a DiskOrder}                              what is to lie below that directory
    {"try": [{"host", "address", "port"}, ...], "limit_s": seconds}   exchange bytes with the first that answers

Mover to host: {"ready": true}, {"changed": true} when any holding changed, {"sealed": true} when all that
was written is sealed, {"uploaded": ...} (see `uploaded_of`), {"on disk": [Holding, ...]} after each order of it,
{"failed": what, "reason": sentence, "key": of an upload or a write to disk}, {"tried": {"link_to": host or "",
"link_ms", "link_mbs", "unreached": {host: why}}}.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from elastic.checkpoint.arena import Arena, Buffer, State
from elastic.checkpoint.blocks import SUB_BLOCK
from elastic.checkpoint.disk import OnDisk
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.peers import Partner, Peers, exchange
from elastic.checkpoint.read_through import ReadThrough
from elastic.checkpoint.shard import of_buffer, put_shard
from elastic.checkpoint.wire import ECHO_BYTES_MAX
from elastic.config_sections import StorageOptions
from elastic.events import Uploaded, from_json
from elastic.plan import Endpoint, SnapshotKey
from elastic.storage.errors import StorageError
from elastic.storage.store import Store, open_store

TOKEN_S = 30.0
BUSY_S = 0.01  # between tries while the partner has no room: a newer safe step makes some
KEPT_BYTES_MIN = 128 << 20  # of storage read through: several connections' parts ahead; else as much as own snapshots
PAUSE_S = 0.5  # most, between tries after errors
NEWS_WAIT_S = 0.004  # a seal and a received copy of the same step come close together: told as one
BACKLOG_BYTES = 1 << 20  # a host that does not read its control socket loses news, not the mover
_PR_SET_PDEATHSIG = 1


def command(*, control: int, arena: int, listen: int, wake: int) -> list[str]:
    """The mover's command line; give the four descriptors to `subprocess.Popen(pass_fds=)`.

    control: one end of a unix stream socket pair; listen: a listening TCP socket; wake: an eventfd that
    trainers write to after a snapshot. The starting thread must live as long as the host (PR_SET_PDEATHSIG).
    """
    fds = {"control": control, "arena": arena, "listen": listen, "wake": wake}
    flags = [part for name, fd in fds.items() for part in (f"--{name}", str(fd))]
    return [sys.executable, "-m", "elastic.checkpoint.mover", *flags]


def uploaded_of(raw: dict[str, Any]) -> Uploaded:
    """What the mover tells as {"uploaded": raw}."""
    return Uploaded(key=SnapshotKey(**raw["key"]), rank=raw["rank"], object=raw["object"], nbytes=raw["nbytes"])


class Mover:
    """Its life: `run`. An unexpected error ends the process, and the host starts another."""

    def __init__(self, arena: Arena, listen: socket.socket, wake: int) -> None:
        self._arena = arena
        self._store: Store
        self._listen = listen
        self._wake = wake
        self._incarnation = arena.board.mover + 1
        self._attempt = 0
        self._last_failure = ""
        self._upload_wanted: SnapshotKey | None = None
        self._written = asyncio.Event()
        self._news = {"send": asyncio.Event(), "upload": asyncio.Event()}
        self._sealing = asyncio.Lock()
        self._changed_call: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pins: Counter[Buffer] = Counter()

    async def run(self, control: socket.socket) -> None:
        """Ends when the host closes the control socket."""
        self._adopt()
        reader, self._control = await asyncio.open_unix_connection(sock=control)
        async with asyncio.timeout(TOKEN_S):
            first = await reader.readline()
        if not first:
            return
        told = json.loads(first)
        self._token: str = told["token"]
        options = StorageOptions.model_validate(told["storage"]["options"])
        self._store = open_store(told["storage"]["url"], options)
        room = sum(len(buffer.room) for buffer in self._arena.own)
        bytes_max = max(room, KEPT_BYTES_MIN)
        stored = ReadThrough(self._store, bytes_max=bytes_max, deadline_s=options.deadline_s)
        self._on_disk = OnDisk(self._arena, self._pinned, self._tell, bytes_max=bytes_max)
        self._peers = Peers(self._arena, stored, self._on_disk, self._token, self._changed)
        asyncio.get_running_loop().add_reader(self._wake, self._on_wake)
        self._tell({"ready": True})
        for job in (self._accept(), self._seal_when_written(), self._upload_when_wanted(), self._on_disk.run()):
            self._start(job)
        while line := await reader.readline():
            self._obey(json.loads(line))

    def _adopt(self) -> None:
        """Takes over from a mover that died: void pins, no half-received shards, seal what it did not."""
        self._arena.board.mover = self._incarnation
        for buffer in self._arena.received:
            if buffer.state != State.SEALED:
                buffer.free()
        self._written.set()

    def _start(self, job: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)

    # ---------------------------------------------------------------- the host

    def _tell(self, message: dict[str, Any]) -> None:
        if self._control.transport.get_write_buffer_size() < BACKLOG_BYTES:
            self._control.write((json.dumps(message) + "\n").encode())

    def _changed(self) -> None:
        if self._changed_call is None:
            self._changed_call = asyncio.get_running_loop().call_later(NEWS_WAIT_S, self._tell_changed)

    def _tell_changed(self) -> None:
        self._changed_call = None
        self._arena.board.mover_cpu_ns = time.process_time_ns()
        self._tell({"changed": True})

    def _obey(self, message: dict[str, Any]) -> None:
        if "generation" in message:
            self._attempt = message["attempt"]
            if self._sender is not None:
                self._sender.cancel()
            partner = message["partner"]
            if partner is not None:
                self._sender = self._start(self._send_pending(message["generation"], Endpoint(**partner)))
        elif "upload" in message:
            self._upload_wanted = SnapshotKey(**message["upload"])
            self._news["upload"].set()
        elif "seal" in message:
            self._start(self._seal_now())
        elif "disk" in message:
            self._on_disk.obey(message["disk"], from_json(message["order"]))
        elif "try" in message:
            self._start(self._try_network(message["try"], message["limit_s"]))
        else:
            raise CheckpointError(f"unknown control message {message}; host and mover must be of one version")

    # ---------------------------------------------------------------- seal

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake)
        self._written.set()

    async def _seal_when_written(self) -> None:
        while True:
            await self._written.wait()
            self._written.clear()
            await self._seal_written()

    async def _seal_now(self) -> None:
        await self._seal_written()
        self._tell({"sealed": True})

    async def _seal_written(self) -> None:
        """The oldest first, as they are sent: else the sender would meet the newer one first."""
        async with self._sealing:
            for buffer in sorted(self._arena.own, key=lambda own: own.key):
                if buffer.state == State.WRITTEN:
                    await self._seal(buffer)

    async def _seal(self, buffer: Buffer) -> None:
        sequence, data, crcs = buffer.sequence, buffer.view, []
        for at in range(0, len(data), SUB_BLOCK):
            crcs.append(zlib.crc32(data[at : at + SUB_BLOCK]))
            if at % (8 * SUB_BLOCK) == 0:
                await asyncio.sleep(0)  # peers are served meanwhile
        array = np.array(crcs, dtype=np.uint32)
        if buffer.seal(sequence, array, zlib.crc32(buffer.table() + array.tobytes())):
            self._changed()
            for news in self._news.values():
                news.set()

    # ---------------------------------------------------------------- send

    async def _send_pending(self, generation: int, endpoint: Endpoint) -> None:
        """Sealed own shards of `generation` that are not safe yet, the oldest first, each until the partner has it.

        All ranks snapshot the same steps, so all offer the same one next; were each to send its newest, slow and
        fast ranks could fill the partners with different steps, of which none is ever complete.
        """
        partner = Partner(endpoint, self._token)
        sent: SnapshotKey | None = None
        pause_s = 0.0
        try:
            while True:
                buffer = self._next_pending(generation, sent)
                if buffer is None:
                    await self._pause("send", None)
                    continue
                key = buffer.key
                answer = await self._send(partner, buffer, key)
                if answer == "taken":
                    sent, pause_s = key, 0.0
                    continue
                pause_s = BUSY_S if answer == "busy" else min(max(2 * pause_s, BUSY_S), PAUSE_S)
                await asyncio.sleep(pause_s)
        finally:
            partner.close()

    async def _send(self, partner: Partner, buffer: Buffer, key: SnapshotKey) -> Literal["taken", "busy", "failed"]:
        try:
            answer = await partner.push(of_buffer(buffer), buffer.view)
        except (OSError, TimeoutError, StorageError) as error:
            reason = f"to the partner: {_say(error)}"
            if buffer.key == key and reason != self._last_failure:  # told once, not at each new try
                self._fail("send", reason)
                self._last_failure = reason
            return "failed"
        self._last_failure = ""
        if answer != "busy":
            return "taken"
        self._arena.board.count_partner_busy()
        return "busy"

    def _next_pending(self, generation: int, sent: SnapshotKey | None) -> Buffer | None:
        keep = self._arena.board.keep
        pending = [
            own
            for own in self._arena.own
            if own.state == State.SEALED
            and own.key.generation == generation
            and (keep is None or own.key > keep)
            and (sent is None or own.key > sent)
        ]
        return min(pending, key=lambda own: own.key.step, default=None)

    async def _pause(self, who: str, limit_s: float | None) -> None:
        """Until something was sealed (or, for uploads, wanted), or `limit_s` has passed."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news[who].wait()
        except TimeoutError:
            return
        self._news[who].clear()

    # ---------------------------------------------------------------- serve

    async def _accept(self) -> None:
        self._listen.setblocking(False)
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listen)
            self._start(self._peers.serve(sock))

    # ---------------------------------------------------------------- the network, before this host takes part

    async def _try_network(self, places: list[dict[str, Any]], limit_s: float) -> None:
        unreached, found = {}, {"link_to": "", "link_ms": 0.0, "link_mbs": 0.0}
        for place in places:
            endpoint = Endpoint(address=place["address"], port=place["port"])
            try:
                trip_s, bytes_s = await exchange(endpoint, self._token, ECHO_BYTES_MAX, limit_s)
            except (OSError, TimeoutError, StorageError) as error:
                unreached[place["host"]] = _say(error)
                continue
            found = {"link_to": place["host"], "link_ms": round(1e3 * trip_s, 3), "link_mbs": round(bytes_s / 1e6, 1)}
            break
        self._tell({"tried": {**found, "unreached": unreached}})

    # ---------------------------------------------------------------- upload

    async def _upload_when_wanted(self) -> None:
        """One upload at a time, of what was asked for last; asked again for what is there, it says so again."""
        done: Uploaded | None = None
        while True:
            wanted = self._upload_wanted
            if wanted is None:
                await self._pause("upload", None)
                continue
            buffer = next((own for own in self._arena.own if own.key == wanted and own.holding()), None)
            if done is None or done.key != wanted:
                if buffer is not None and buffer.state != State.SEALED:
                    await self._pause("upload", None)
                    continue
                done = await self._upload(buffer, wanted)
            if done is not None:
                self._tell({"uploaded": asdict(done)})
            if self._upload_wanted == wanted:
                self._upload_wanted = None

    async def _upload(self, buffer: Buffer | None, key: SnapshotKey) -> Uploaded | None:
        if buffer is None:
            self._fail("upload", f"{key} is not in this host's arena any more", key)
            return None
        attempt, sequence = self._attempt, buffer.sequence
        with self._pinned(buffer):
            try:
                # Without a limit of its own: the thread would go on, and the next upload run beside it.
                return await asyncio.to_thread(put_shard, self._store, buffer, key, sequence=sequence, attempt=attempt)
            except (OSError, TimeoutError, StorageError) as error:
                self._fail("upload", _say(error), key)
                return None

    @contextmanager
    def _pinned(self, buffer: Buffer) -> Iterator[None]:
        """No reuse while something is read from it, by an upload and a write to disk at the same time, too."""
        self._pins[buffer] += 1
        buffer.pin(self._incarnation)
        try:
            yield
        finally:
            self._pins[buffer] -= 1
            if not self._pins[buffer]:
                buffer.unpin()

    def _fail(self, what: str, reason: str, key: SnapshotKey | None = None) -> None:
        self._tell({"failed": what, "reason": reason, "key": asdict(key) if key else None})


def _say(error: BaseException) -> str:
    return str(error) or ("no progress within the limit" if isinstance(error, TimeoutError) else repr(error))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="elastic.checkpoint.mover")
    for name in ("control", "arena", "listen", "wake"):
        parser.add_argument(f"--{name}", type=int, required=True, help="an open descriptor")
    args = parser.parse_args(arguments)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # the host died before the signal was armed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the host to act on
    os.set_blocking(args.wake, False)
    listen, control = socket.socket(fileno=args.listen), socket.socket(fileno=args.control)

    async def live() -> None:
        await Mover(Arena.attach(args.arena), listen, args.wake).run(control)

    asyncio.run(live())
    os._exit(0)  # not held up by an upload that storage does not answer


if __name__ == "__main__":
    main()
