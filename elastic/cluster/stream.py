"""The one persistent stream per host: reports up, orders down, as length-prefixed JSON over TCP.

`Server` is the coordinator's end and implements the driver's `Cluster` seam, `Client` is the host's. Both messages
are level-triggered, so a frame that finds a full buffer is dropped: the next one carries the same state.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from elastic.events import HostGone, Order, Report, from_json, to_json
from elastic.plan import Endpoint

log = logging.getLogger(__name__)

FRAME_BYTES_MAX = 64 << 20
HELLO_BYTES_MAX = 4096
# A host that reads nothing (frozen) costs the coordinator at most this much memory.
PENDING_BYTES_MAX = 8 << 20
HELLO_TIMEOUT_S = 10.0
BACKOFF_S = (0.02, 1.0)
# A peer that vanished without FIN: the kernel gives the connection up after this long without an acknowledgement.
USER_TIMEOUT_MS = 30_000


class StreamError(Exception):
    """The bytes of the other side are not this protocol; the connection is closed."""


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


class _Frames:
    """Frames over one non-blocking socket, with bounded buffers both ways."""

    def __init__(self, sock: socket.socket, bytes_max: int) -> None:
        self.sock = sock
        self.bytes_max = bytes_max
        self._incoming = bytearray()
        self.pending = bytearray()

    def push(self, message: dict[str, Any]) -> bool:
        """Queue one message; False when the buffer is full and the message was dropped."""
        body = json.dumps(message, separators=(",", ":")).encode()
        frame = len(body).to_bytes(4, "big") + body
        if self.pending and len(self.pending) + len(frame) > PENDING_BYTES_MAX:
            return False
        self.pending += frame
        return True

    def flush(self) -> None:
        """Write what the socket takes. OSError: the connection broke."""
        with contextlib.suppress(BlockingIOError):
            while self.pending:
                del self.pending[: self.sock.send(memoryview(self.pending)[:1_048_576])]

    def pull(self) -> str:
        """Read what has arrived, a bounded amount; returns why the stream ended, "" while it is open."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(8):
                try:
                    chunk = self.sock.recv(262_144)
                except (ConnectionError, TimeoutError) as error:
                    return error.strerror or str(error)
                if not chunk:
                    return "end of file"
                self._incoming += chunk
        return ""

    def messages(self) -> Iterator[dict[str, Any]]:
        """The complete frames that were read. StreamError: what came is not the protocol."""
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "big")
            if size > self.bytes_max:
                raise StreamError(f"frame of {size} bytes, at most {self.bytes_max} are allowed")
            if len(self._incoming) - 4 < size:
                return
            message = json.loads(self._incoming[4 : 4 + size])
            del self._incoming[: 4 + size]
            if not isinstance(message, dict):
                raise StreamError(f"frame holds {type(message).__name__}, wanted an object")
            yield message


class _Connection:
    def __init__(self, sock: socket.socket, peer: str, since_s: float) -> None:
        self.frames = _Frames(sock, HELLO_BYTES_MAX)
        self.peer = peer
        self.since_s = since_s
        self.welcome = False
        self.dropping = False
        self.host: str | None = None


class Server:
    """The coordinator's end: one selector loop inside `receive`, all methods but `wake` from one thread."""

    def __init__(self, token: str, address: str = "127.0.0.1", port: int = 0) -> None:
        self._token = token
        self._listener = socket.create_server((address, port), backlog=4096)
        self._listener.setblocking(False)
        self.endpoint = Endpoint(address=address, port=self._listener.getsockname()[1])
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._strangers: set[_Connection] = set()
        self._hosts: dict[str, _Connection] = {}
        self._facts: deque[Report | HostGone] = deque()

    def wake(self) -> None:
        """Make a `receive` that waits in another thread return."""
        os.eventfd_write(self._wake_fd, 1)

    def receive(self, timeout_s: float) -> list[Report | HostGone]:
        """All facts that have arrived, waiting up to `timeout_s` for the first; empty after `wake` or the limit."""
        deadline_s = time.monotonic() + timeout_s
        woken = False
        while not self._facts and not woken:
            left_s = deadline_s - time.monotonic()
            for key, mask in self._selector.select(max(0.0, left_s)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                    woken = True
                else:
                    self._serve(key.data, mask)
            self._expire()
            if left_s <= 0:
                break
        facts = list(self._facts)
        self._facts.clear()
        return facts

    def send(self, host: str, order: Order) -> None:
        """Queue `order`; a host that is unknown or gone is ignored."""
        connection = self._hosts.get(host)
        if connection is None:
            return
        taken = connection.frames.push(to_json(order))
        if not taken and not connection.dropping:
            log.warning("%s reads too slowly, orders are dropped from %d on; the newest is sent again", host, order.seq)
        connection.dropping = not taken
        self._flush(connection)

    def drop(self, host: str) -> None:
        """Close the stream of `host`, without a `HostGone`. It may connect again."""
        connection = self._hosts.pop(host, None)
        if connection is not None:
            connection.host = None
            self._close(connection, "dropped")

    def close(self) -> None:
        for connection in [*self._strangers, *self._hosts.values()]:
            connection.host = None
            self._close(connection, "server closed")
        self._selector.close()
        self._listener.close()
        os.close(self._wake_fd)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, (address, port, *_) = self._listener.accept()
                _tune(sock)
                connection = _Connection(sock, f"{address}:{port}", time.monotonic())
                self._strangers.add(connection)
                self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection, mask: int) -> None:
        if connection.frames.sock.fileno() < 0:
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if not mask & selectors.EVENT_READ or connection.frames.sock.fileno() < 0:
            return
        try:
            ended = connection.frames.pull()
            for message in connection.frames.messages():
                self._take(connection, message)
        except (StreamError, ValueError) as error:
            ended = f"not the protocol: {error}"
        if ended:
            self._close(connection, ended)

    def _take(self, connection: _Connection, message: dict[str, Any]) -> None:
        if not connection.welcome:
            if not hmac.compare_digest(str(message.get("token", "")), self._token):
                raise StreamError("wrong token")
            connection.welcome = True
            connection.frames.bytes_max = FRAME_BYTES_MAX
            return
        report = from_json(message)
        if not isinstance(report, Report):
            raise StreamError(f"{type(report).__name__} from a host, wanted Report")
        if connection.host != report.host:
            self._name(connection, report.host)
        self._facts.append(report)

    def _name(self, connection: _Connection, host: str) -> None:
        """From now on `connection` is the stream of `host`: an older one of that name is closed."""
        if connection.host is not None and self._hosts.get(connection.host) is connection:
            del self._hosts[connection.host]
        older = self._hosts.pop(host, None)
        if older is not None:
            older.host = None
            self._close(older, "replaced")
        self._strangers.discard(connection)
        connection.host = host
        self._hosts[host] = connection

    def _flush(self, connection: _Connection) -> None:
        try:
            connection.frames.flush()
        except OSError as error:
            self._close(connection, error.strerror or str(error))
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.frames.pending else 0)
        self._selector.modify(connection.frames.sock, wanted, connection)

    def _close(self, connection: _Connection, why: str) -> None:
        if connection.frames.sock.fileno() >= 0:
            self._selector.unregister(connection.frames.sock)
            connection.frames.sock.close()
        self._strangers.discard(connection)
        if connection.host is None:
            log.info("stream from %s closed: %s", connection.peer, why)
        elif self._hosts.get(connection.host) is connection:
            del self._hosts[connection.host]
            self._facts.append(HostGone(host=connection.host, reason=f"stream closed: {why}"))

    def _expire(self) -> None:
        limit_s = time.monotonic() - HELLO_TIMEOUT_S
        for connection in [c for c in self._strangers if c.since_s < limit_s]:
            self._close(connection, f"no token and report within {HELLO_TIMEOUT_S:.0f} s")


class Client:
    """A host's end: non-blocking, connects again by itself. Call `poll` when `fileno` is ready and each `wait_s`."""

    def __init__(self, address: str, port: int, token: str) -> None:
        self._peer = (address, port)
        self._token = token
        self._frames: _Frames | None = None
        self._newest: Report | None = None
        self.connected = False
        self._backoff_s = BACKOFF_S[0]
        self._retry_at_s = 0.0

    def fileno(self) -> int:
        """The socket's descriptor, -1 while there is none."""
        return self._frames.sock.fileno() if self._frames is not None else -1

    @property
    def writing(self) -> bool:
        """Whether the descriptor is to be watched for writing too."""
        return self._frames is not None and (not self.connected or bool(self._frames.pending))

    def wait_s(self) -> float:
        """Seconds until `receive` has to be called even if nothing arrives: the next try to connect."""
        return max(0.0, self._retry_at_s - time.monotonic()) if self._frames is None else 3600.0

    def send(self, report: Report) -> bool:
        """Send the newest state; it replaces one that still waits. False while not connected: then it is dropped."""
        if self._frames is None or not self.connected:
            return False
        self._newest = report
        self._flush()
        return self.connected

    def receive(self) -> list[Order]:
        """Orders that have arrived; also connects and writes. To be called when `fileno` is ready or `wait_s` over."""
        if self._frames is None:
            self._connect()
        if self._frames is not None and not self.connected:
            self._finish_connecting()
        if self._frames is None or not self.connected:
            return []
        self._flush()
        return self._pull()

    def close(self) -> None:
        if self._frames is not None:
            self._frames.sock.close()
        self._frames = None
        self.connected = False

    def _pull(self) -> list[Order]:
        if self._frames is None:
            return []
        orders = []
        try:
            ended = self._frames.pull()
            for message in self._frames.messages():
                order = from_json(message)
                if not isinstance(order, Order):
                    raise StreamError(f"{type(order).__name__} from the coordinator, wanted Order")
                orders.append(order)
                self._backoff_s = BACKOFF_S[0]
        except (StreamError, ValueError) as error:
            ended = f"not the protocol: {error}"
        if ended:
            self._lost(ended)
        return orders

    def _flush(self) -> None:
        assert self._frames is not None
        try:
            if not self._frames.pending and self._newest is not None:
                self._frames.push(to_json(self._newest))
                self._newest = None
            self._frames.flush()
        except OSError as error:
            self._lost(error.strerror or str(error))

    def _connect(self) -> None:
        if time.monotonic() < self._retry_at_s:
            return
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        _tune(sock)
        self._frames = _Frames(sock, FRAME_BYTES_MAX)
        code = sock.connect_ex(self._peer)
        if code not in (0, errno.EINPROGRESS):
            self._lost(os.strerror(code))

    def _finish_connecting(self) -> None:
        assert self._frames is not None
        sock = self._frames.sock
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._lost(os.strerror(code))
            return
        try:
            sock.getpeername()
        except OSError:
            return  # still under way
        self.connected = True
        self._frames.push({"token": self._token})
        self._flush()

    def _lost(self, why: str) -> None:
        log.info("no stream to the coordinator at %s:%d: %s", *self._peer, why)
        self.close()
        self._newest = None
        self._retry_at_s = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
