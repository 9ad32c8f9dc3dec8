"""A host's processes as the host sees them: template, trainers (its forks) and mover. No torch, no Ray, no waiting.

Each has descriptors to watch and a `read` for when they are ready. Death is seen through pidfds, which are ready when
all threads have ended: none writes memory any more. A trainer is the template's child: only that can tell its status.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from elastic.checkpoint import mover
from elastic.config import ElasticError, Place
from elastic.events import Exit, to_json
from elastic.plan import Assignment

PENDING_BYTES_MAX = 64 << 20
_PACKET_BYTES = 65_536
BACKOFF_S = (0.1, 5.0)
FAILURES_MAX = 20

log = logging.getLogger(__name__)


class HostError(ElasticError):
    """This host can't go on: its template or mover dies again and again, or a trainer can't be killed."""


class Retry:
    """When a process may be started again: at once, then ever later; HostError after FAILURES_MAX in a row."""

    def __init__(self, what: str) -> None:
        self.at_s = 0.0
        self._what = what
        self._failures = 0

    def failed(self, how: str) -> None:
        self._failures += 1
        if self._failures > FAILURES_MAX:
            raise HostError(
                f"the {self._what} ended {self._failures} times in a row, last with {how}; see the host's log"
            )
        self.at_s = time.monotonic() + min(BACKOFF_S[0] * 2 ** (self._failures - 1), BACKOFF_S[1])
        log.warning("the %s ended with %s, it is started again", self._what, how)

    def succeeded(self) -> None:
        self._failures = 0
        self.at_s = 0.0


class Lines:
    """JSON lines over a non-blocking unix stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._incoming = bytearray()
        self._pending = bytearray()

    @property
    def writing(self) -> bool:
        return bool(self._pending)

    def write(self, message: dict[str, Any]) -> None:
        """Queue and send what goes. Nothing happens when the other side is gone: its pidfd tells."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(self._pending) + len(line) <= PENDING_BYTES_MAX:
            self._pending += line
        self.flush()

    def flush(self) -> None:
        try:
            while self._pending:
                del self._pending[: self.sock.send(self._pending)]
        except BlockingIOError:
            return
        except OSError:
            self._pending.clear()

    def read(self) -> list[dict[str, Any]]:
        """Whole lines that have arrived, and what waits is sent; at the end of the stream the descriptor is closed."""
        self.flush()
        with contextlib.suppress(BlockingIOError):
            while self.sock.fileno() >= 0:
                try:
                    chunk = self.sock.recv(_PACKET_BYTES)
                except ConnectionError:
                    chunk = b""
                if not chunk:
                    self.sock.close()
                    break
                self._incoming += chunk
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        return [json.loads(line) for line in lines]


class Trainer:
    """A fork of the template: a standby until it is given a generation."""

    def __init__(self, pid: int, pidfd: int, channel: socket.socket) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.lines = Lines(channel)
        self.warm = False
        self.assignment: Assignment | None = None
        self.ordered_s = 0.0
        self.marks: dict[str, float] = {}
        self.told: Exit | None = None
        self.status: int | None = None
        self.killed_s: float | None = None
        self.dead_s: float | None = None
        self.sealing_s: float | None = None

    def give(self, assignment: Assignment, ordered_s: float) -> None:
        """`ordered_s`: when its order arrived, the zero of the marks."""
        self.assignment, self.ordered_s = assignment, ordered_s
        self.lines.write(to_json(assignment))

    def kill(self, now_s: float) -> None:
        """SIGKILL to it and everything it started."""
        self.killed_s = self.killed_s or now_s
        self.sweep()

    def sweep(self) -> None:
        """The process group also after its leader has ended: children of the task's code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.lines.sock.close()
        os.close(self.pidfd)


class Template:
    """The warm process; its control socket keeps packets apart and carries descriptors."""

    def __init__(self, settings: dict[str, Any], fds: Sequence[int], log_fd: int) -> None:
        """settings: JSON values for elastic.worker.template, without what is added here; fds: those it names."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings_fd = os.memfd_create("elastic-template-settings")
        told = {**settings, "parent_pid": os.getpid(), "control_fd": theirs.fileno()}
        os.pwrite(settings_fd, json.dumps(told).encode(), 0)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic.worker.template", str(settings_fd)],
            pass_fds=[theirs.fileno(), settings_fd, *fds],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
        )
        theirs.close()
        os.close(settings_fd)
        self.control.setblocking(False)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.ready = False
        self.forking = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def fork(self, *, warm: bool) -> None:
        """Ask for a trainer; one at a time."""
        assert self.ready and not self.forking
        self.forking = True
        self.control.send(json.dumps({"fork": warm}).encode())

    def read(self) -> list[tuple[dict[str, Any], list[int]]]:
        """Messages with their descriptors."""
        messages = []
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := socket.recv_fds(self.control, _PACKET_BYTES, 2):
                body, fds, _, _ = packet
                if not body:
                    break
                messages.append((json.loads(body), fds))
        return messages

    def end(self) -> str:
        """Kill it if it lives, reap it; with it go its trainers (PR_SET_PDEATHSIG). Returns how it ended."""
        return _end(self.process, self.pidfd, self.control)


class Mover:
    """The process that moves bytes; everything it needs outlives it."""

    def __init__(self, *, arena_fd: int, listen_fd: int, wake_fd: int, place: Place, token: str, log_fd: int) -> None:
        ours, theirs = socket.socketpair()
        command = mover.command(control=theirs.fileno(), arena=arena_fd, listen=listen_fd, wake=wake_fd)
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno(), arena_fd, listen_fd, wake_fd],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
        )
        theirs.close()
        self.lines = Lines(ours)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.ready = False
        self.lines.write({"token": token, "storage": {"url": place.url, "options": place.options.model_dump()}})

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> str:
        return _end(self.process, self.pidfd, self.lines.sock)


def _end(process: subprocess.Popen[bytes], pidfd: int, sock: socket.socket) -> str:
    process.kill()
    sock.close()
    try:
        code = process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        return "would not die"
    finally:
        os.close(pidfd)
    return f"signal {-code}" if code < 0 else f"exit code {code}"
