"""A checkpoint written for other software: aside first, and complete last, so that what was interrupted never looks
complete. Memory: a window of one tensor, whatever the size.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from elastic.checkpoint.blocks import ITEM_BYTES, Block
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.reader import Source, whole, windows
from elastic.checkpoint.safetensors_file import INDEX, header
from elastic.checkpoint.values import FLOATS, cast
from elastic.config_sections import StorageOptions
from elastic.storage.store import Store, open_store

FILE_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where files are made, in `folder`; with a store they go there one by one, and only one is on this disk."""

    folder: Path
    store: Store | None

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """The file is durable, or in the store, afterwards."""
        path = self.folder / name
        with path.open("w+b") as file:
            yield file
            file.flush()
            if self.store is None:
                os.fsync(file.fileno())
            else:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
                    self.store.put(name, view)
        if self.store is not None:
            path.unlink()


@contextmanager
def target(to: str, options: StorageOptions | None = None) -> Iterator[Target]:
    """`to`: a directory that does not exist or is empty, or a URL under which nothing lies.

    The directory appears with all its files, or not at all. Under a URL the file without which the rest can't be read
    must be written last. CheckpointError: something is there.
    """
    if "://" in to and not to.startswith("file://"):
        store = open_store(to, options)
        if there := next(iter(store.list("")), None):
            raise CheckpointError(f"{to} is not empty ({there}); give another place, or remove what is there")
        with tempfile.TemporaryDirectory(prefix="elastic-export-") as folder:
            yield Target(folder=Path(folder), store=store)
        return
    path = Path(to.removeprefix("file://")).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is not an empty directory; give another place, or remove what is there")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-incomplete-", dir=path.parent))
        try:
            yield Target(folder=aside, store=None)
            aside.chmod(0o755)
            fd = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(fd)
            os.close(fd)
            aside.rename(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"can't write {path}: {error.strerror}; check that the directory is writable and has room"
        ) from error


# ---------------------------------------------------------------- safetensors


def write_safetensors(
    source: Source,
    names: Mapping[str, str],
    target: Target,
    *,
    config: Mapping[str, Any] | None,
    metadata: Mapping[str, str],
    dtype: str | None = None,
    file_bytes_max: int = FILE_BYTES,
) -> int:
    """The tensors that `names` gives a name there, floats as `dtype`; how many bytes of them.

    Each file has at most `file_bytes_max` of data, or one tensor. The index comes last.
    """
    taken = [block for block in source.blocks if block.name in names]
    outputs = [_output(block, names[block.name], dtype) for block in taken]
    files = _files(list(zip(taken, outputs)), file_bytes_max)
    if config is not None:
        with target.file("config.json") as file:
            file.write(json.dumps(config, indent=2).encode())
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with target.file(name) as file:
            # transformers refuses a file that does not say "pt".
            file.write(header([output for _, output in tensors], {"format": "pt", **metadata}))
            for block, output in tensors:
                for window in windows(block):
                    data = cast(source.read(window), block.dtype, output.dtype, name=block.name)
                    file.write(data.data)
        weight_map |= {output.name: name for _, output in tensors}
    total = sum(output.nbytes for output in outputs)
    with target.file(INDEX) as file:
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        file.write(json.dumps(body, indent=2).encode())
    return total


def _output(block: Block, name: str, dtype: str | None) -> Block:
    return whole(name, dtype if dtype and block.dtype in FLOATS else block.dtype, block.global_shape)


def _files(tensors: Sequence[tuple[Block, Block]], nbytes_max: int) -> list[list[tuple[Block, Block]]]:
    """In each file the widest dtype comes first, so that every tensor lies on a multiple of its item."""
    files: list[list[tuple[Block, Block]]] = [[]]
    room = nbytes_max
    for pair in tensors:
        if files[-1] and pair[1].nbytes > room:
            files.append([])
            room = nbytes_max
        files[-1].append(pair)
        room -= pair[1].nbytes
    return [sorted(file, key=lambda pair: -ITEM_BYTES[pair[1].dtype]) for file in files]
