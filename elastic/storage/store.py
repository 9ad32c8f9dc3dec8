"""The seam to durable storage: five methods, and the two stores that stand behind it here.

An object is written under a key that nobody else writes, or by `put_if_absent`. There is no rename and no
append. A conditional PUT on S3 fits the same five methods.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from elastic.config import Place
from elastic.config_sections import StorageOptions
from elastic.storage.bandwidth import Bandwidth
from elastic.storage.errors import ObjectMissing, StorageError, StorageUnavailable
from elastic.storage.files import sync_directory

_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)  # full for now, or a mount away
_TMP = ".tmp-"  # no key has a part that begins so: a half-written file is never an object
FOLDERS_MAX = 1000  # of which it is remembered that they are durable
OPEN_TRIES = 10
PIECE_BYTES = 8 << 20
NO_LIMIT = Bandwidth(0)


class Store(Protocol):
    """Objects by key ("data/1-3-50/0.bin"). Every method may raise StorageError; StorageUnavailable: it may pass."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Durable on return; the key must be nobody else's."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Durable on return; False, and nothing changed, where the key exists. Atomic among all writers."""

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes `[start, stop)`, fewer where the object ends before. ObjectMissing: no such key."""

    def list(self, prefix: str) -> dict[str, int]:
        """Size in bytes of every object whose key begins with `prefix`, in the order of keys."""

    def delete(self, key: str) -> None:
        """Nothing happens where the key does not exist."""


def open_store(url: str, options: StorageOptions | None = None) -> Store:
    """A directory's path or `file://` URL (made when the first object is written), or any other URL that fsspec knows.

    StorageError: it knows no such scheme. Nothing is connected before the first request.
    """
    scheme, separator, path = url.partition("://")
    if not separator or scheme == "file":
        limit = Bandwidth(1e6 * (options or StorageOptions()).upload_mbs_max)
        return DirectoryStore(Path(path if separator else url), limit)
    from elastic.storage.object_store import ObjectStore

    return ObjectStore(url, options)


def store_at(place: Place) -> Store:
    """What must outlive the run's nodes."""
    return open_store(place.url, place.options)


def check_key(key: str) -> None:
    # .metadata: what makes a folder a checkpoint of torch.distributed.checkpoint.
    if not key or any(part == "" or (part.startswith(".") and part != ".metadata") for part in key.split("/")):
        raise StorageError(f"key {key!r}: wanted parts joined by /, none of them empty or hidden")


class DirectoryStore:
    """A local or shared POSIX directory: write aside, fsync, rename or link, fsync the directory."""

    def __init__(self, root: Path, limit: Bandwidth = NO_LIMIT) -> None:
        self._root, self._limit = root, limit
        self._names = itertools.count()
        self._durable: set[Path] = set()

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._written_aside(key, data) as (aside, path):
            os.replace(aside, path)
            sync_directory(path.parent)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._written_aside(key, data) as (aside, path):
            try:
                os.link(aside, path)  # unlike rename, fails where the name is taken
            except FileExistsError:
                return False
            sync_directory(path.parent)
            return True

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._path(key)
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(-1 if stop is None else stop - start)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{path} does not exist") from error
        except OSError as error:
            raise _failure(error)(f"can't read {path}: {error.strerror}") from error

    def list(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        top = self._root / prefix.rpartition("/")[0]
        for folder, _, names in os.walk(top, onerror=_refuse_to_list):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix) and not name.startswith("."):
                    try:
                        found[key] = path.stat().st_size
                    except FileNotFoundError:
                        continue  # deleted since the walk saw it
        return dict(sorted(found.items()))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _failure(error)(f"can't delete {path}: {error.strerror}") from error
        with suppress(OSError):  # the folder holds other objects, or is gone
            path.parent.rmdir()

    def unfinished(self, before_s: float, *, delete: bool) -> Sequence[str]:
        """Files that somebody began to write before `before_s` (Unix time) and never ended; `delete` removes them."""
        found = [path for path in sorted(self._root.rglob(f"{_TMP}*")) if _written_s(path) < before_s]
        for path in found if delete else ():
            path.unlink(missing_ok=True)
        return [path.relative_to(self._root).as_posix() for path in found]

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    @contextmanager
    def _written_aside(self, key: str, data: bytes | memoryview) -> Iterator[tuple[Path, Path]]:
        path = self._path(key)
        aside = path.with_name(f"{_TMP}{os.getpid()}-{threading.get_ident()}-{next(self._names)}-{path.name}")
        try:
            with self._opened(aside) as file:
                for at in range(0, len(data), PIECE_BYTES):
                    piece = data[at : at + PIECE_BYTES]
                    self._limit.take(len(piece))
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            yield aside, path
        except OSError as error:
            raise _failure(error)(
                f"can't write {path}: {error.strerror}; check that the directory is writable and has room"
            ) from error
        finally:
            if aside.exists():
                aside.unlink()

    def _opened(self, aside: Path) -> IO[bytes]:
        """In a folder that is durable. Whoever deletes a folder's last object removes the folder too, at any time."""
        for left in reversed(range(OPEN_TRIES)):
            try:
                self._make_directory(aside.parent)
                return aside.open("wb")
            except (FileNotFoundError, FileExistsError):  # also mkdir's, of a folder that is gone when it looks again
                self._durable.clear()
                if not left:
                    raise
        raise AssertionError

    def _make_directory(self, folder: Path) -> None:
        """Down from the root each is synced, also where it is there: who made it may have died before that."""
        if folder in self._durable:
            return
        if self._root in folder.parents or not folder.parent.is_dir():
            self._make_directory(folder.parent)
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # the root's parent may be one that only others may read
            sync_directory(folder.parent)
        if len(self._durable) >= FOLDERS_MAX:
            self._durable.clear()
        self._durable.add(folder)


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")  # it was ended meanwhile


def _refuse_to_list(error: OSError) -> None:
    """A folder that can't be read is not an empty one; only one that is not there is."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise _failure(error)(f"can't list {error.filename}: {error.strerror}") from error


def _failure(error: OSError) -> type[StorageError]:
    return StorageUnavailable if error.errno in _MAY_PASS else StorageError


class MemoryStore:
    """The same contract in this process's memory: for the simulation and for tests of what uses a store."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        with self._lock:
            self._objects[key] = bytes(data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        check_key(key)
        with self._lock:
            absent = key not in self._objects
            if absent:
                self._objects[key] = bytes(data)
            return absent

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._lock:
            if key not in self._objects:
                raise ObjectMissing(f"{key} does not exist")
            return self._objects[key][start:stop]

    def list(self, prefix: str) -> dict[str, int]:
        with self._lock:
            return {k: len(v) for k, v in sorted(self._objects.items()) if k.startswith(prefix)}

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)
