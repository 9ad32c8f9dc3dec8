"""The files of a corpus: what there is, in a directory, a single file or behind a URL, and on which side it goes."""

from __future__ import annotations

import hashlib
import io
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa

from elastic.config import ConfigError
from elastic.config_sections import Data, StorageOptions
from elastic.data.shards import DataError, Split
from elastic.storage.object_store import is_outage, open_filesystem

Kind = Literal["text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "nanogpt-bin", "numpy", "token-parquet"]
RECORD_KINDS: tuple[Kind, ...] = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")
TOKEN_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "nanogpt-bin": (".bin",),
    "numpy": (".npy",),
    "token-parquet": (".parquet",),
}
STDLIB = "stdlib"
# What no bad row or torn file may raise as itself.
UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException, ValueError)
_NO_TEXT = (".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".bin", ".npy", ".arrow", ".pdf", ".docx")
_NOT_SOURCE = frozenset({"site-packages", "dist-packages", "__pycache__"})
_HELD_OUT = re.compile(r"(?:^|[/._-])(?:validation|valid|val|test|held[_-]?out)(?:[/._-]|$)")
_TRAIN = re.compile(r"(?:^|[/._-])train(?:[/._-]|$)")
_BLOCK_BYTES = 8 << 20
_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """`name` is the path relative to the corpus, with forward slashes; `path` what opens it. version: changes when the
    file does. split: of all its documents; None: each goes by its content."""

    name: str
    path: str
    nbytes: int
    version: str
    kind: Kind
    split: Split | None = None


def list_files(data: Data, tokens: Kind | None = None) -> list[SourceFile]:
    """The files of the corpus, sorted by name, text files only where they are not empty.

    `tokens`: the kind of all files, of a corpus of tokens. ConfigError: nothing there, or nothing that can be read.
    DataError: a file of records is empty, or a directory can't be listed.
    """
    suffixes = data.suffixes if tokens is None else TOKEN_SUFFIXES[tokens]
    found = _list_url(data, suffixes) if _is_url(data.corpus) else _list_local(data, suffixes)
    files = [
        replace(file, kind=tokens or kind_of(file.name))
        for file in sorted(found, key=lambda file: file.name)
        if file.nbytes or tokens or kind_of(file.name) != "text"
    ]
    if not files:
        raise ConfigError(f"no non-empty file ending in {' '.join(suffixes)} under {_root(data)}; see data.suffixes")
    for file in files:
        if not file.nbytes:
            raise DataError(f"{file.path} is empty; delete it, or make it again")
    return _on_sides(files, data.held_out_every)


def kind_of(name: str) -> Kind:
    """ConfigError: a file of this name is no text, and nothing else that can be read."""
    for kind in RECORD_KINDS:
        if name.endswith(f".{kind}"):
            return kind
    if name.endswith(_NO_TEXT):
        raise ConfigError(
            f"{name} has an unsupported suffix; wanted text, {', '.join(f'.{kind}' for kind in RECORD_KINDS)}: convert "
            "it, or take its suffix out of data.suffixes"
        )
    return "text"


def split_of(name: str, held_out_every: int) -> Split:
    """About one in `held_out_every` is held out; by name, so that a file never changes sides."""
    return side(hashlib.sha256(os.fsencode(name)).digest(), held_out_every)


def side(digest: bytes, held_out_every: int) -> Split:
    return "held_out" if int.from_bytes(digest[:8]) % held_out_every == 0 else "train"


def _on_sides(files: list[SourceFile], held_out_every: int) -> list[SourceFile]:
    """Where names say which file is held out all others train; else text goes by its file's name, records by content.

    Text files are often called test: those of a corpus count only where others are called train.
    """
    said = {file.name: _said(file.name) for file in files}
    kinds = {file.kind for file in files if said[file.name] == "held_out"}
    if kinds and (kinds != {"text"} or "train" in said.values()):
        return [replace(file, split=said[file.name] or "train") for file in files]
    return [replace(file, split=split_of(file.name, held_out_every)) if file.kind == "text" else file for file in files]


def _said(name: str) -> Split | None:
    """What a path says, its outermost word."""
    held_out, train = _HELD_OUT.search(name), _TRAIN.search(name)
    if held_out and train:
        return "held_out" if held_out.start() < train.start() else "train"
    return "held_out" if held_out else "train" if train else None


# ---------------------------------------------------------------- where they lie


def _is_url(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def _root(data: Data) -> Path | str:
    if _is_url(data.corpus):
        return data.corpus.rstrip("/")
    path = sysconfig.get_path("stdlib") if data.corpus == STDLIB else data.corpus.removeprefix("file://")
    return Path(path).absolute()


def _list_local(data: Data, suffixes: tuple[str, ...]) -> Iterator[SourceFile]:
    root = Path(_root(data))
    if root.is_file():
        if not root.name.endswith(suffixes):
            raise ConfigError(
                f"data.corpus {root} has an unsupported suffix; wanted one of {' '.join(suffixes)} (data.suffixes)"
            )
        yield _local_file(root, root.name)
        return
    if not root.is_dir():
        raise ConfigError(f"data.corpus {data.corpus!r}: {root} is no directory; give one, a file, or 'stdlib'")

    def refuse(error: OSError) -> None:
        raise DataError(f"can't list {error.filename}: {error.strerror}; get the permission, or move it elsewhere")

    for parent, directories, names in os.walk(root, onerror=refuse):
        directories[:] = [name for name in directories if name not in _NOT_SOURCE]
        for path in (Path(parent, name) for name in names if name.endswith(suffixes)):
            if path.is_file():
                yield _local_file(path, path.relative_to(root).as_posix())


def _local_file(path: Path, name: str) -> SourceFile:
    status = path.stat()
    return SourceFile(name=name, path=str(path), nbytes=status.st_size, version=str(status.st_mtime_ns), kind="text")


def _list_url(data: Data, suffixes: tuple[str, ...]) -> Iterator[SourceFile]:
    try:
        fs, root = filesystem(data.corpus, data.corpus_options)
        entries: dict[str, dict[str, Any]] = fs.find(root, detail=True)
    except FileNotFoundError:
        entries = {}
    except Exception as error:  # of whatever library is below
        raise DataError(f"can't list {data.corpus}: {error}; are address, credentials and network right?") from error
    scheme = data.corpus.partition("://")[0]
    for path, entry in entries.items():
        if path.endswith(suffixes) and not path.endswith("/"):
            name = path[len(root) :].lstrip("/") or path.rpartition("/")[2]
            yield SourceFile(
                name=name, path=f"{scheme}://{path}", nbytes=int(entry["size"]), version=_version(entry), kind="text"
            )


def filesystem(url: str, options: StorageOptions) -> tuple[Any, str]:
    """The filesystem of a URL, and the path in it."""
    return _filesystem(url.partition("://")[0], options), url.partition("://")[2].rstrip("/")


@lru_cache(maxsize=4)
def _filesystem(scheme: str, options: StorageOptions) -> Any:
    return open_filesystem(f"{scheme}://", options, tries=_TRIES)[0]  # nobody above tries again


def _version(entry: dict[str, Any]) -> str:
    return str(entry.get("ETag") or entry.get("LastModified") or entry.get("mtime") or entry["size"])


# ---------------------------------------------------------------- reading


@contextmanager
def opened(file: SourceFile, options: StorageOptions) -> Iterator[IO[bytes]]:
    """The file's bytes. Whatever reading it raises becomes a DataError; so does a file that is another one by then."""
    try:
        if _is_url(file.path):
            fs, path = filesystem(file.path, options)
            with fs.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead") as stream:
                yield io.BufferedReader(stream, _BLOCK_BYTES)
        else:
            with open(file.path, "rb") as stream:
                yield stream
    except DataError:
        _check_unchanged(file, options)
        raise
    except Exception as error:
        if not isinstance(error, UNREADABLE) and not _is_url(file.path):
            raise  # a mistake of ours; behind a URL a library may raise what it likes
        _check_unchanged(file, options)
        raise unreadable(file.path, error) from error
    _check_unchanged(file, options)


def unreadable(path: str, error: BaseException) -> DataError:
    if isinstance(error, FileNotFoundError | PermissionError):
        return DataError(
            f"can't read {path}: {error.strerror or error}; get the permission, or take it out of the corpus"
        )
    told = str(error).strip().partition("\n")[0]
    if _is_url(path) and is_outage(error):
        return DataError(f"can't read {path}: storage did not answer ({told}); what is done is kept, run it again")
    return DataError(f"{path} is damaged or no such file: {told}; make it again, or take it out of the corpus")


def _check_unchanged(file: SourceFile, options: StorageOptions) -> None:
    try:
        if _is_url(file.path):
            fs, path = filesystem(file.path, options)
            entry = fs.info(path, refresh=True) if "s3" in fs.protocol else fs.info(path)
            nbytes, version = int(entry["size"]), _version(entry)
        else:
            status = os.stat(file.path)
            nbytes, version = status.st_size, str(status.st_mtime_ns)
    except OSError as error:
        raise unreadable(file.path, error) from error
    if (nbytes, version) != (file.nbytes, file.version):
        raise DataError(
            f"{file.path} changed while it was read: it had {file.nbytes} bytes, now it has {nbytes}; run this again "
            "when nobody writes it"
        )


def listing_sha256(files: Sequence[SourceFile]) -> str:
    """Of names, sizes and versions: what a second run compares."""
    text = "".join(f"{file.name!r} {file.nbytes} {file.version}\n" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()
