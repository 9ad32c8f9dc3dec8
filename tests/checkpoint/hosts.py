"""A host as the mover knows it: an arena, a listening socket, an eventfd, a control socket, the real process."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from elastic.checkpoint.arena import Arena, Buffer
from elastic.checkpoint.blocks import Block, encode_bytes, place
from elastic.checkpoint.mover import command
from elastic.plan import Endpoint, SnapshotKey

TOKEN = "token of the run"
LIMIT_S = 30.0
ROOT = Path(__file__).parents[2]


def key(generation: int, step: int) -> SnapshotKey:
    return SnapshotKey(generation=generation, step=step)


class Host:
    def __init__(
        self,
        storage: Path | str,
        *,
        nbytes: int = 4 << 20,
        received_buffers: int = 2,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.arena = Arena.create(own_bytes=nbytes, received_bytes=nbytes, received_buffers=received_buffers)
        self.arena.board.order(generation=1, keep=None)
        self.listen = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(address="127.0.0.1", port=self.listen.getsockname()[1])
        self.wake = os.eventfd(0)
        self.storage, self.options = storage, options
        self.start_mover()

    def start_mover(self) -> None:
        self.control, theirs = socket.socketpair()
        fds = [theirs.fileno(), self.arena.fd, self.listen.fileno(), self.wake]
        argv = command(control=fds[0], arena=fds[1], listen=fds[2], wake=fds[3])
        self.mover = subprocess.Popen(argv, pass_fds=fds, cwd=ROOT)
        theirs.close()
        self._heard = b""
        self.tell(token=TOKEN, storage={"url": str(self.storage), "options": dict(self.options)})
        self.hear("ready")

    def kill_mover(self) -> None:
        self.mover.kill()
        self.mover.wait(LIMIT_S)
        self.control.close()

    def signal_mover(self, number: signal.Signals) -> None:
        self.mover.send_signal(number)

    def close(self) -> None:
        if self.mover.poll() is None:
            self.kill_mover()
        self.listen.close()
        os.close(self.wake)
        os.close(self.arena.fd)

    def tell(self, **message: Any) -> None:
        self.control.sendall((json.dumps(message) + "\n").encode())

    def order(self, *, partner: Host | None, generation: int = 1, keep: SnapshotKey | None = None) -> None:
        self.arena.board.order(generation=generation, keep=keep)
        place = partner and {"address": partner.endpoint.address, "port": partner.endpoint.port}
        self.tell(generation=generation, rank=0, world=2, attempt=7, partner=place)

    def hear(self, what: str) -> dict[str, Any]:
        """The next message that has the key `what`; others are dropped."""
        for message in self._messages(f"a message with {what}"):
            if what in message:
                return message
        raise AssertionError

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Each change of a holding is told, so waiting for messages is waiting for the condition."""
        if condition():
            return
        for _ in self._messages(what):
            if condition():
                return

    def _messages(self, what: str) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + LIMIT_S
        while True:
            while b"\n" in self._heard:
                line, self._heard = self._heard.split(b"\n", 1)
                yield json.loads(line)
            ready, _, _ = select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{what} did not come within {LIMIT_S} s"
            chunk = self.control.recv(1 << 16)
            assert chunk, f"the mover ended (code {self.mover.wait(LIMIT_S)}) before {what}"
            self._heard += chunk

    def write(self, at: SnapshotKey, data: np.ndarray, *, rank: int = 0, world: int = 1, wake: bool = True) -> Buffer:
        """What a trainer's snapshot of one tensor "w" (uint8, row-sharded into `world` equal parts) does."""
        block = Block(
            name="w",
            dtype="uint8",
            global_shape=(world * len(data),),
            offsets=(rank * len(data),),
            sizes=(len(data),),
        )
        table, nbytes = place([block])
        buffer = next(own for own in self.arena.own if own.reusable())
        into = buffer.begin(at, rank=rank, world=world, nbytes=nbytes, table=encode_bytes(table))
        into[: len(data)] = data
        buffer.finish()
        if wake:
            os.eventfd_write(self.wake, 1)
        return buffer

    def holds(self, at: SnapshotKey, tier: str, *, sealed: bool = True) -> bool:
        return any(
            holding.key == at and holding.tier == tier and holding.sealed >= sealed for holding in self.arena.holdings()
        )


@contextmanager
def hosts(storage: Path, count: int, **kwargs: Any) -> Iterator[list[Host]]:
    found: list[Host] = []
    try:
        for _ in range(count):
            found.append(Host(storage, **kwargs))
        yield found
    finally:
        for host in found:
            host.close()


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
