"""Writers in processes of their own, that are killed or frozen at the n-th point of what they do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from elastic.config_sections import StorageOptions
from elastic.storage.object_store import ObjectStore
from elastic.storage.store import DirectoryStore
from tests.storage import protocol
from tests.storage.disk import Disk, watched

LIMIT_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.storage.crashes", "s3fs"])


@dataclass(kw_only=True)
class Told:
    """What a writer said before it ended, in order. found: (attempt, step) of the checkpoint that it starts from, if
    any. ended: how, in its own words; "" if it was killed."""

    points: int = 0
    claimed: int = 0
    found: list[tuple[int, int]] = field(default_factory=list)
    committing: list[tuple[int, int]] = field(default_factory=list)
    committed: list[tuple[int, int, int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ended: str = ""
    disk: Disk = field(default_factory=Disk)

    def hear(self, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "op":
            self.disk.do(rest[0])
        elif kind == "claimed":
            self.claimed, self.found = rest
        elif kind == "committing":
            self.committing.append((rest[0], rest[1]))
        elif kind == "committed":
            self.committed.append((rest[0], rest[1], rest[2]))
        elif kind == "failed":
            self.failed.append(rest[0])
        elif kind == "ended":
            self.ended, self.points = rest


class Writer:
    """An attempt in a process. `hear` reads what it says."""

    def __init__(self, target: Any, *args: Any) -> None:
        self._ours, theirs = _context.Pipe(duplex=False)
        self.process = _context.Process(target=_live, args=(theirs, target, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.told = Told()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self) -> tuple[Any, ...] | None:
        """The next message, None after the last."""
        assert self._ours.poll(LIMIT_S), f"writer {self.pid} says nothing"
        try:
            message: tuple[Any, ...] = self._ours.recv()
        except EOFError:
            return None
        self.told.hear(message)
        return message

    def until_frozen(self) -> None:
        until_s = time.monotonic() + LIMIT_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until_s, "the writer was not stopped"
            time.sleep(0.0005)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> int:
        """Its exit code, after all that it said."""
        while self.hear() is not None:
            pass
        self.process.join(LIMIT_S)
        assert self.process.exitcode is not None, "the writer did not end"
        self._ours.close()
        return self.process.exitcode


@contextmanager
def writer(target: Any, *args: Any) -> Iterator[Writer]:
    found = Writer(target, *args)
    try:
        yield found
    finally:
        if found.process.is_alive():
            found.process.kill()
            found.process.join(LIMIT_S)


def _live(out: Connection, target: Any, *args: Any) -> None:
    points = [0]
    try:
        target(out, points, *args)
        out.send(("ended", "done", points[0]))
    except protocol.FencedOff:
        out.send(("ended", "fenced", points[0]))
    except BaseException as error:
        out.send(("ended", f"{type(error).__name__}: {error}", points[0]))
        raise


def on_directory(
    out: Connection, points: list[int], top: Path, aside: Path, steps: int, at: int | None, number: signal.Signals
) -> None:
    """An attempt on the directory top/run; at point `at` it gets the signal."""

    def point() -> None:
        if points[0] == at:
            if number == signal.SIGSTOP:
                out.send(("frozen",))
            signal.pthread_kill(threading.get_ident(), number)  # to this very thread: it does not get beyond this line
        points[0] += 1

    with watched(top, lambda op: out.send(("op", op)), point):
        store = DirectoryStore(top / "run")
        protocol.attempt(store, aside, steps=steps, tell=lambda *message: out.send(message))
        point()  # after the last operation


def on_objects(
    out: Connection,
    points: list[int],
    url: str,
    options: StorageOptions,
    environment: dict[str, str],
    aside: Path,
    steps: int,
    large_bytes: int,
) -> None:
    """An attempt on an object store."""
    os.environ.update(environment)
    store = ObjectStore(url, options)
    protocol.attempt(store, aside, steps=steps, tell=lambda *message: out.send(message), large_bytes=large_bytes)
