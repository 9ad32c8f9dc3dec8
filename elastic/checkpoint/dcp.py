"""Checkpoints of torch.distributed.checkpoint (DCP): a pickle that says what is where, and files of `torch.save` items.

Its pickle is never loaded as one: `_Names` maps the few names that DCP writes there to inert values, and refuses any
other. Tensors are read with torch's own `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from elastic.checkpoint.blocks import ITEM_BYTES, Block, Ints
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.export import FILE_BYTES, Target
from elastic.checkpoint.reader import Bytes, Source, slices, windows
from elastic.storage.errors import ObjectMissing, StorageError
from elastic.storage.store import Store

METADATA = ".metadata"
VERSION = "1.0.0"
CHUNK_BYTES = 32 << 20  # a reader takes whole chunks into its memory

Path = tuple[str | int, ...]


# ---------------------------------------------------------------- reading


# What a pickle can reach is ours alone: one may set attributes of whatever it names, so no type of others is among it.
class _Plain:
    """In place of a class of DCP's: it takes what was pickled, and does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Index(_Plain):
    pass


class _Tensor(_Plain):
    pass


def _same(value: Any) -> Any:
    return value


def _joined(*parts: str) -> str:
    return "/".join(parts)


_CLASSES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,  # a built-in type has no attributes to set
    ("torch.serialization", "_get_layout"): _same,
    ("pathlib", "PosixPath"): _joined,
    ("pathlib._local", "PosixPath"): _joined,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Plain,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): _Tensor,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _same,
    **{
        ("torch.distributed.checkpoint.metadata", name): _Plain
        for name in ("Metadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta")
    },
}


class _Names(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in ITEM_BYTES:
            return name
        if (module, name) not in _CLASSES:
            raise CheckpointError(
                f"{METADATA} names {module}.{name}, which no checkpoint of torch.distributed.checkpoint needs: it may "
                "run code; nothing of it was run, and it is not read"
            )
        return _CLASSES[module, name]


class DcpSource:
    """The `Source` of a DCP directory. blocks: its chunks. other: keys of what is no tensor; that stays unread.

    Memory: twice the largest chunk, which whoever saved it chose.
    """

    def __init__(self, store: Store) -> None:
        """CheckpointError: no DCP checkpoint, a foreign pickle, or one whose parts do not fit each other."""
        self._store = store
        self._where: dict[tuple[str, Ints], dict[str, Any]] = {}
        self._held: tuple[Block, Bytes] | None = None
        blocks: list[Block] = []
        self.other: list[str] = []
        try:
            kinds, storage = _metadata(store)
            for index, place in storage.items():
                self._where[index.state["fqn"], tuple(index.state.get("offset") or ())] = place.state
            for name, kind in kinds.items():
                if isinstance(kind, _Tensor):
                    blocks += _chunks(name, kind)
                else:
                    self.other.append(name)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{METADATA} is not as torch.distributed.checkpoint writes it ({error!r})") from error
        self.blocks = tuple(sorted(blocks, key=self._position))
        self._of_name: dict[str, list[Block]] = {}
        for block in self.blocks:
            self._of_name.setdefault(block.name, []).append(block)

    def read(self, window: Block) -> Bytes:
        if self._held is None or not _holds(self._held[0], window):
            block = next(block for block in self._of_name[window.name] if _holds(block, window))
            self._held = (block, self._load(block))
        block, data = self._held
        shaped = data.reshape(*block.sizes, ITEM_BYTES[block.dtype])
        return np.ascontiguousarray(shaped[slices((window.offsets, window.sizes), block.offsets)]).reshape(-1)

    def _position(self, block: Block) -> tuple[str, int]:
        place = self._place(block)
        return str(place["relative_path"]), int(place["offset"])

    def _place(self, block: Block) -> dict[str, Any]:
        try:
            return self._where[block.name, block.offsets]
        except KeyError:
            raise CheckpointError(
                f"{METADATA} does not say where {block.name} at {block.offsets} lies; save it anew"
            ) from None

    def _load(self, block: Block) -> Bytes:
        import torch

        place = self._place(block)
        file, start, length = str(place["relative_path"]), int(place["offset"]), int(place["length"])
        if place.get("transform_descriptors"):
            raise CheckpointError(f"{file} was written through {place['transform_descriptors']}; save it without")
        try:
            data = self._store.get(file, start, start + length)
        except ObjectMissing as error:
            raise CheckpointError(f"{METADATA} names {file}, which is not there; fetch all of its files") from error
        if len(data) != length:
            raise CheckpointError(f"{file} ends within {block.name}: it is cut short; fetch it anew")
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise CheckpointError(f"{file}: {block.name} is no item of torch.save; save it with that serialization")
        try:
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file}: {block.name} can't be read ({str(error).splitlines()[0]})") from error
        got = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if got != (block.dtype, block.sizes):
            raise CheckpointError(
                f"{file}: {block.name} is {got[0]}{list(got[1])}, {METADATA} says {block.dtype}{list(block.sizes)}"
            )
        raw: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return raw


def _metadata(store: Store) -> tuple[dict[str, Any], dict[_Index, _Plain]]:
    raw = store.get(METADATA)
    try:
        found = _Names(io.BytesIO(raw)).load()
    except StorageError:
        raise
    except Exception as error:  # of a broken pickle: anything
        raise CheckpointError(f"{METADATA} can't be read ({error!r}): it is damaged; fetch it anew") from error
    return found.state["state_dict_metadata"], found.state["storage_data"]


def _chunks(name: str, kind: _Tensor) -> Iterator[Block]:
    dtype, shape = kind.state["properties"].state[0], kind.state["size"]
    for chunk in kind.state["chunks"]:
        offsets, sizes = chunk.state["offsets"], chunk.state["sizes"]
        if 0 in sizes:
            continue
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset < 0 or size < 0 or offset + size > whole for offset, size, whole in zip(offsets, sizes, shape)
        ):
            raise CheckpointError(f"{METADATA}: {name} has a chunk {offsets}, {sizes} outside its shape {shape}")
        yield Block(name=name, dtype=dtype, global_shape=shape, offsets=offsets, sizes=sizes)


def _holds(block: Block, window: Block) -> bool:
    return block.name == window.name and all(
        start <= at and at + size <= start + length
        for start, length, at, size in zip(block.offsets, block.sizes, window.offsets, window.sizes)
    )


# ---------------------------------------------------------------- writing


def write_dcp(
    source: Source,
    paths: Mapping[str, Path],
    target: Target,
    *,
    values: Mapping[Path, Any],
    file_bytes_max: int = FILE_BYTES,
) -> int:
    """The tensors that `paths` gives a place in a nested state dict, and `values`, plain ones; bytes of the tensors.

    `.metadata`, the pickle that DCP requires, comes last.
    """
    writer = _Writer(target, file_bytes_max)
    with writer:
        for path, value in values.items():
            writer.value(path, value)
        taken = [block for block in source.blocks if block.name in paths]
        for block in taken:
            writer.tensor(paths[block.name], block, source)
        writer.finish()
    return sum(block.nbytes for block in taken)


class _Writer:
    """Items one after the other, in files of bounded size; then the metadata that names them."""

    def __init__(self, target: Target, file_bytes_max: int) -> None:
        self._target, self._file_bytes_max = target, file_bytes_max
        self._opened: Any = None
        self._file: IO[bytes] | None = None
        self._files = 0
        self._kinds: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}
        self._paths: dict[str, Path] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._opened is not None:
            opened, self._opened, self._file = self._opened, None, None
            opened.__exit__(*error)

    def value(self, path: Path, value: Any) -> None:
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        name = self._name(path)
        self._kinds[name] = BytesStorageMetadata()
        self._storage[MetadataIndex(name)] = self._item(value)

    def tensor(self, path: Path, block: Block, source: Source) -> None:
        import torch
        from torch.distributed.checkpoint import metadata

        name, dtype = self._name(path), getattr(torch, block.dtype)
        chunks = []
        for number, window in enumerate(windows(block, CHUNK_BYTES)):
            values = torch.from_numpy(source.read(window)).view(dtype).reshape(window.sizes)
            offsets = torch.Size(window.offsets)
            chunks.append(metadata.ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(window.sizes)))
            self._storage[metadata.MetadataIndex(name, offsets, number)] = self._item(values)
        self._kinds[name] = metadata.TensorStorageMetadata(
            properties=metadata.TensorProperties(dtype=dtype), size=torch.Size(block.global_shape), chunks=chunks
        )

    def finish(self) -> None:
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        self.__exit__(None, None, None)
        found = Metadata(
            state_dict_metadata=self._kinds,
            planner_data=self._paths,
            storage_data=self._storage,
            storage_meta=StorageMeta(),
            version=VERSION,
        )
        with self._target.file(METADATA) as file:
            pickle.dump(found, file)

    def _name(self, path: Path) -> str:
        name = ".".join(map(str, path))
        self._paths[name] = path
        return name

    def _item(self, value: Any) -> Any:
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        if self._file is not None and self._file.tell() >= self._file_bytes_max:
            self.__exit__(None, None, None)
        if self._file is None:
            self._files += 1
            self._opened = self._target.file(self._file_name())
            self._file = self._opened.__enter__()
        start = self._file.tell()
        torch.save(value, self._file)
        return _StorageInfo(self._file_name(), start, self._file.tell() - start)

    def _file_name(self) -> str:
        return f"__0_{self._files - 1}.distcp"


def group_values(groups: Sequence[Mapping[str, Any]]) -> dict[Path, Any]:
    """An optimizer's param_groups, their `params` by name, as `values` of `write_dcp`."""
    return {
        ("optim", "param_groups", number, key): value
        for number, group in enumerate(groups)
        for key, value in group.items()
    }
