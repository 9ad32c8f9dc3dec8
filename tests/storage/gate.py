"""A proxy at which something happens to the n-th request: its sender or the service dies, or the sender is frozen."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.storage.servers import Proxy

# before: it does not arrive. after: it arrives, its answer does not. half: so much of its body arrives. held: it
# arrives when `Gate.release` says so.
Moment = Literal["before", "after", "half", "held"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """At the request `kind` (see `kind_of`) that comes after `before` such ones; several threads of a writer make no
    other order sure. act: what happens then, in the proxy's thread. is_end: no later request of anybody arrives.
    answers: the request is answered all the same, after `Gate.release`."""

    kind: str
    before: int
    moment: Moment
    act: Callable[[], None]
    is_end: bool = True
    answers: bool = False


def kind_of(head: bytes, body: bytes) -> str:
    """Method, path and bytes of the body, the same for the same request of any attempt."""
    method, path, _ = head.split(b"\r\n")[0].decode().split(" ", 2)
    path = re.sub(r"\d+", "#", re.sub(r"uploadId=[^&]*", "uploadId", path))
    return f"{method} {path} {'body' if len(body) > 1 else ''}"


class Gate(Proxy):
    def __init__(self, upstream: str) -> None:
        self._strike: Strike | None = None
        self._struck = threading.Event()
        self._released = asyncio.Event()
        self._open = 0
        self._changed = threading.Condition()
        self.seen: list[str] = []
        super().__init__(upstream)

    def set(self, strike: Strike | None) -> None:
        """From here on requests are counted anew."""
        self._struck.clear()
        self._released = asyncio.Event()
        self._strike, self.seen = strike, []

    def wait_struck(self, limit_s: float) -> None:
        assert self._struck.wait(limit_s), "the request did not come"

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    def wait_idle(self, limit_s: float) -> None:
        """Until no request is under way to the service."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._open, limit_s), f"{self._open} requests are under way"

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        kind, strike = kind_of(head, body), self._strike
        if strike and strike.is_end and self._struck.is_set():
            raise ConnectionAbortedError("its sender is dead")
        self.seen.append(kind)
        if strike is None or kind != strike.kind or self.seen.count(kind) != strike.before + 1:
            return await self._pass(head, body)
        if strike.moment == "after":
            answer = await self._pass(head, body)
        strike.act()
        self._struck.set()
        if strike.moment == "half":
            await self._half(head, body)
        if strike.moment == "held" or strike.answers:
            await self._released.wait()
        if strike.moment == "held" or (strike.answers and strike.moment == "before"):
            answer = await self._pass(head, body)
        if not strike.answers:
            raise ConnectionAbortedError("its sender is dead")
        return answer

    async def _pass(self, head: bytes, body: bytes) -> bytes:
        self._count(1)
        try:
            return await super()._forward(head, body)
        finally:
            self._count(-1)

    async def _half(self, head: bytes, body: bytes) -> None:
        self._count(1)
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(head + body[: len(body) // 2])
            writer.write_eof()
            await reader.read()
            writer.close()
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._changed:
            self._open += more
            self._changed.notify_all()
