"""What a host holds open for its processes and what outlives each of them: arena, listening sockets, wake-up, log."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from elastic.checkpoint.arena import Arena
from elastic.plan import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What outlives every process of the crew, held open by the host."""

    arena: Arena
    wake_fd: int
    mover_listener: socket.socket
    store_listener: socket.socket
    log_fd: int

    def endpoint(self, listener: socket.socket) -> Endpoint:
        address, port = listener.getsockname()
        return Endpoint(address=address, port=port)

    def close(self) -> None:
        self.mover_listener.close()
        self.store_listener.close()
        for fd in (self.wake_fd, self.log_fd, self.arena.fd):
            os.close(fd)


def reserve(*, address: str, log: Path, shard_bytes: int, received_buffers: int) -> Resources:
    """Open them; an arena buffer takes `shard_bytes`. CheckpointError: not enough memory."""
    return Resources(
        arena=Arena.create(own_bytes=shard_bytes, received_bytes=shard_bytes, received_buffers=received_buffers),
        wake_fd=os.eventfd(0, os.EFD_NONBLOCK),
        mover_listener=socket.create_server((address, 0), backlog=512),
        store_listener=socket.create_server((address, 0), backlog=4096),
        log_fd=os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
    )
