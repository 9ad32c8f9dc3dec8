"""The network of an object store, as S3 clients see it: a delay for each request, a limit on each connection's rate.

A process of its own that forwards to one S3 server and counts bytes. It stands in for neither storage nor errors:
what goes wrong is `tests.storage.servers.Proxy`'s part. Bodies go from socket to socket inside the kernel (splice),
because on a small machine the proxy, the server and the clients share the cores: measured, 0.1 CPU seconds a GB.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LATENCY_S = 0.025
RATE_BYTES_S = 80e6
CHUNK_BYTES = 256 << 10
AHEAD_S = 0.001  # shorter pauses are not worth a wake-up
HEAD_BYTES_MAX = 64 << 10
COUNTS = "/-counts"  # no bucket's name
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_EXPECT = re.compile(rb"\r\nexpect: *100-continue", re.IGNORECASE)


class SlowProxy:
    """Starts the process; `close` ends it, and it ends with whoever started it."""

    def __init__(self, upstream: str) -> None:
        command = [sys.executable, "-m", "bench.slow_proxy", upstream.removeprefix("http://")]
        self._process = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def counts(endpoint: str) -> Counter[str]:
    """Since the last call: requests by method ("GET"), body bytes by method and way ("GET in": to the client)."""
    with urllib.request.urlopen(endpoint + COUNTS) as answer:
        return Counter(json.load(answer))


# ---------------------------------------------------------------- in the process


class _Counts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, method: str, sent: int, received: int) -> None:
        with self._lock:
            self._counter.update({method: 1, f"{method} out": sent, f"{method} in": received})

    def take(self) -> Counter[str]:
        with self._lock:
            taken, self._counter = self._counter, Counter()
            return taken


class _Half:
    """One of the two sockets of a connection: heads are read, bodies are spliced to the other."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._read = b""

    def head(self) -> bytes:
        """Up to and with the empty line; EOFError where the other side is done."""
        while (end := self._read.find(b"\r\n\r\n")) < 0:
            got = self.sock.recv(HEAD_BYTES_MAX)
            if not got:
                raise EOFError
            self._read += got
        head, self._read = self._read[: end + 4], self._read[end + 4 :]
        return head

    def line(self) -> bytes:
        """Of a chunked body."""
        while (end := self._read.find(b"\r\n")) < 0:
            got = self.sock.recv(HEAD_BYTES_MAX)
            if not got:
                raise EOFError
            self._read += got
        line, self._read = self._read[: end + 2], self._read[end + 2 :]
        return line

    def relay(self, to: _Half, nbytes: int, pipe: tuple[int, int]) -> None:
        """At most RATE_BYTES_S."""
        began_s, done = time.monotonic(), min(len(self._read), nbytes)
        if done:
            to.sock.sendall(self._read[:done])
            self._read = self._read[done:]
        while done < nbytes:
            if (wait_s := done / RATE_BYTES_S - (time.monotonic() - began_s)) > AHEAD_S:
                time.sleep(wait_s)
            got = os.splice(self.sock.fileno(), pipe[1], min(CHUNK_BYTES, nbytes - done), flags=os.SPLICE_F_MOVE)
            if not got:
                raise EOFError
            done += got
            while got:
                got -= os.splice(pipe[0], to.sock.fileno(), got, flags=os.SPLICE_F_MOVE)
        if (wait_s := nbytes / RATE_BYTES_S - (time.monotonic() - began_s)) > 0:
            time.sleep(wait_s)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _serve(ours: socket.socket, upstream: tuple[str, int], counts: _Counts) -> None:
    """One connection and its twin to the server, both kept alive."""
    with contextlib.suppress(OSError, EOFError), ours, socket.create_connection(upstream) as theirs, _pipe() as pipe:
        client, server = _Half(ours), _Half(theirs)
        while True:
            head = client.head()
            method, path, _ = head.split(b" ", 2)
            if path == COUNTS.encode():
                client.sock.sendall(_answer(json.dumps(counts.take()).encode()))
                continue
            time.sleep(LATENCY_S)
            if _EXPECT.search(head):
                client.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                head = _EXPECT.sub(b"", head)
            server.sock.sendall(head)
            sent = _body(client, server, head, pipe)
            answer = server.head()
            client.sock.sendall(answer)
            is_empty = method == b"HEAD" or answer.split(b" ", 2)[1] in (b"204", b"304")
            received = 0 if is_empty else _body(server, client, answer, pipe)
            counts.add(method.decode(), sent, received)


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


def _body(source: _Half, to: _Half, head: bytes, pipe: tuple[int, int]) -> int:
    if _CHUNKED.search(head):
        return _chunks(source, to, pipe)
    found = _LENGTH.search(head)
    nbytes = int(found[1]) if found else 0
    source.relay(to, nbytes, pipe)
    return nbytes


def _chunks(source: _Half, to: _Half, pipe: tuple[int, int]) -> int:
    total = 0
    while True:
        line = source.line()
        nbytes = int(line.partition(b";")[0], 16)
        to.sock.sendall(line)
        source.relay(to, nbytes + 2, pipe)
        total += nbytes
        if not nbytes:
            return total


def main() -> None:
    host, _, port = sys.argv[1].partition(":")
    counts = _Counts()
    listen = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(f"http://127.0.0.1:{listen.getsockname()[1]}", flush=True)

    def accept() -> None:
        while True:
            ours, _ = listen.accept()
            threading.Thread(target=_serve, args=(ours, (host, int(port)), counts), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()  # ends with whoever holds the other end


if __name__ == "__main__":
    main()
