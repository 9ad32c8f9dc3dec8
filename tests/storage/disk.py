"""What a process does to the files below a directory, operation by operation; and what of it power loss may leave.

`watched` lets this process's operations pass a point each, where it may be killed or frozen, and tells each one that
was done. `Disk` replays them and knows what is durable: of a file what was fsynced, of a directory the entries at its
last fsync. All else may be lost, cut or reordered: POSIX promises no more, whatever a file system does.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

Op = tuple[Any, ...]
ENTRIES = ("mkdir", "unlink", "rmdir", "link", "replace")


class _Watch:
    def __init__(self, top: Path, tell: Callable[[Op], None], point: Callable[[], None]) -> None:
        self._top, self._tell, self._point = str(top.resolve()), tell, point
        self._lock = threading.RLock()
        self._open, self._fsync = io.open, os.fsync

    def below(self, path: Any) -> str | None:
        """As seen from the top, which itself is ""; None: elsewhere."""
        text = os.path.abspath(os.fspath(path))
        if text == self._top:
            return ""
        return text[len(self._top) + 1 :] if text.startswith(f"{self._top}/") else None

    def entry(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            paths = [self.below(path) for path in args[: 2 if name in ("link", "replace") else 1]]
            return self.step((name, *paths), lambda: real(*args, **kwargs)) if paths[0] else real(*args, **kwargs)

        return call

    def step(self, op: Op, real: Callable[[], Any]) -> Any:
        with self._lock:  # a process that is frozen at a point does nothing in its other threads either
            self._point()
            found = real()
            self._tell(op)
            return found

    def fsync(self, fd: int) -> None:
        path = self.below(os.readlink(f"/proc/self/fd/{fd}"))
        if path is None:
            return self._fsync(fd)
        return self.step(("fsync", path), lambda: None)  # the model stands for the medium

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = None if isinstance(file, int) else self.below(file)
        if path is None or mode == "rb":
            return self._open(file, mode, *args, **kwargs)
        assert mode == "wb", f"open({path}, {mode}) is not modelled"
        return self.step(("create", path), lambda: io.BufferedWriter(_Written(file, path, self)))


class _Written(io.FileIO):
    """Each write goes in two halves, with a point between them."""

    def __init__(self, file: Any, path: str, watch: _Watch) -> None:
        super().__init__(file, "wb")
        self._path, self._watch = path, watch

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        for half in (view[: len(view) // 2], view[len(view) // 2 :]):
            done = self._watch.step(
                ("write", self._path, bytes(half)), lambda half=half: super(_Written, self).write(half)
            )
            assert done == len(half)
        return len(view)


@contextmanager
def watched(top: Path, tell: Callable[[Op], None], point: Callable[[], None] = lambda: None) -> Iterator[None]:
    """All that DirectoryStore uses, for this whole process. What goes on below `top` in other ways is missed, which
    `Disk.same` shows."""
    watch = _Watch(top, tell, point)
    with ExitStack() as stack:
        for name in ENTRIES:
            stack.enter_context(mock.patch.object(os, name, watch.entry(name, getattr(os, name))))
        stack.enter_context(mock.patch.object(os, "fsync", watch.fsync))
        stack.enter_context(mock.patch.object(io, "open", watch.open))
        yield


class _File:
    def __init__(self) -> None:
        self.data, self.durable = b"", b""


class _Folder:
    """changes: of its entries since its last fsync, in order, each whole or not at all; None takes a name away."""

    def __init__(self) -> None:
        self.entries: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}
        self.changes: list[dict[str, _File | _Folder | None]] = []

    def change(self, change: dict[str, _File | _Folder | None]) -> None:
        _apply(self.entries, change)
        self.changes.append(change)


def _apply(entries: dict[str, _File | _Folder], change: dict[str, _File | _Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """A directory that exists, is empty, and on which `ops` are done."""

    def __init__(self) -> None:
        self._top = _Folder()

    def do(self, op: Op) -> None:
        kind, path, *more = op
        folder, name = self._folder(path), path.rpartition("/")[2]
        if kind == "mkdir":
            folder.change({name: _Folder()})
        elif kind == "create":
            assert name not in folder.entries, f"{path} is written over in place"
            folder.change({name: _File()})
        elif kind == "write":
            file = folder.entries[name]
            assert isinstance(file, _File)
            file.data += more[0]
        elif kind == "fsync":
            self._sync(folder.entries.get(name) if name else self._top)
        elif kind in ("unlink", "rmdir"):
            folder.change({name: None})
        else:
            target, into = more[0].rpartition("/")[2], self._folder(more[0])
            assert into is folder, f"{kind} {path} {more[0]}: only within a directory"
            folder.change({target: folder.entries[name]} | ({name: None} if kind == "replace" else {}))

    def _sync(self, node: _File | _Folder | None) -> None:
        if isinstance(node, _File):
            node.durable = node.data
        elif node is not None:  # None: somebody has removed it since it was opened
            node.durable, node.changes = dict(node.entries), []

    def _folder(self, path: str) -> _Folder:
        node: _File | _Folder = self._top
        for name in path.split("/")[:-1]:
            assert isinstance(node, _Folder)
            node = node.entries[name]
        assert isinstance(node, _Folder)
        return node

    def same(self, top: Path) -> bool:
        """Does the real directory hold just what the operations made? Else some of them were missed."""
        return _as_it_is(self._top) == _real(top)

    def after_power_loss(self, top: Path, chance: Random | None) -> None:
        """Makes the directory `top`. chance: of what is not durable, what is left; None: nothing at all."""
        top.mkdir()
        _write(self._top, top, chance)


def _as_it_is(folder: _Folder) -> dict[str, Any]:
    return {name: _as_it_is(node) if isinstance(node, _Folder) else node.data for name, node in folder.entries.items()}


def _real(folder: Path) -> dict[str, Any]:
    return {path.name: _real(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def _write(folder: _Folder, into: Path, chance: Random | None) -> None:
    entries = dict(folder.durable)
    for change in _left(folder.changes, chance):
        _apply(entries, change)
    for name, node in entries.items():
        if isinstance(node, _Folder):
            (into / name).mkdir()
            _write(node, into / name, chance)
        else:
            (into / name).write_bytes(_left_of(node, chance))


def _left(changes: list[Any], chance: Random | None) -> list[Any]:
    """In a journal's order all up to some change, or, as without a journal, any of them."""
    if chance is None:
        return []
    if chance.random() < 0.5:
        return changes[: chance.randint(0, len(changes))]
    return [change for change in changes if chance.random() < 0.5]


def _left_of(file: _File, chance: Random | None) -> bytes:
    if chance is None or file.data == file.durable:
        return file.durable
    rest = file.data[len(file.durable) :]
    lost = chance.choice((rest, rest[: chance.randint(0, len(rest))], bytes(len(rest)), b""))
    return file.durable + lost
