"""The asyncio side of the wire: frames and bytes over one socket, each wait with a limit."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from elastic.checkpoint.blocks import SUB_BLOCK
from elastic.checkpoint.wire import FRAME_BYTES_MAX, LENGTH, frame, frame_length, parse, tune
from elastic.plan import Endpoint

PROGRESS_S = 2.0  # a peer that moves less than a sub-block in this time is given up
READ_AHEAD_BYTES = 256 << 10
_CLOSED = "the peer closed the connection"


class Pipe:
    """A connected socket with limits: no send or receive waits longer than PROGRESS_S for its next piece."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        tune(sock)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._ahead = bytearray()  # read together with a frame, not asked for yet

    @classmethod
    async def connect(cls, endpoint: Endpoint, token: str) -> Pipe:
        sock = socket.socket()
        try:
            pipe = cls(sock)
            async with asyncio.timeout(PROGRESS_S):
                await pipe._loop.sock_connect(sock, (endpoint.address, endpoint.port))
            await pipe.tell({"hello": token})
        except BaseException:
            sock.close()
            raise
        return pipe

    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for at in range(0, len(view), SUB_BLOCK):
            async with asyncio.timeout(PROGRESS_S):
                await self._loop.sock_sendall(self._sock, view[at : at + SUB_BLOCK])
            await asyncio.sleep(0)  # a fast peer does not hold up the others

    async def tell(self, message: dict[str, Any]) -> None:
        await self.send(frame(message))

    async def fill(self, into: memoryview, limit_s: float = PROGRESS_S) -> None:
        """`into` is at most a sub-block or so: the limit is on the whole of it."""
        there = min(len(into), len(self._ahead))
        into[:there] = self._ahead[:there]
        del self._ahead[:there]
        if there == len(into):
            return
        into = into[there:]
        async with asyncio.timeout(limit_s):
            while into:
                got = await self._loop.sock_recv_into(self._sock, into)
                if not got:
                    raise ConnectionResetError(_CLOSED)
                into = into[got:]

    async def hear(self, *, limit_s: float = PROGRESS_S, bytes_max: int = FRAME_BYTES_MAX) -> dict[str, Any]:
        await self._read_ahead(LENGTH.size, limit_s)
        end = LENGTH.size + frame_length(self._ahead[: LENGTH.size], bytes_max)
        await self._read_ahead(end, PROGRESS_S)
        body = self._ahead[LENGTH.size : end]
        del self._ahead[:end]
        return parse(body)

    async def _read_ahead(self, count: int, limit_s: float) -> None:
        """At least `count` bytes; what follows them comes along, so that a small message costs one read."""
        if len(self._ahead) >= count:
            return
        async with asyncio.timeout(limit_s):
            while len(self._ahead) < count:
                chunk = await self._loop.sock_recv(self._sock, READ_AHEAD_BYTES)
                if not chunk:
                    raise ConnectionResetError(_CLOSED)
                self._ahead += chunk

    def close(self) -> None:
        self._sock.close()
