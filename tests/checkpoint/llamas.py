"""Checkpoints of the built-in model, from real FSDP ranks and without movers; and what reads them back."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic import resume
from elastic.checkpoint.arena import Arena
from elastic.checkpoint.blocks import encode_bytes, place
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import Manifest, build, restore_plan
from elastic.checkpoint.reader import Reader, whole
from elastic.checkpoint.restore import restore
from elastic.checkpoint.save import Entry, entries, local, owned, wanted
from elastic.checkpoint.shard import Shard, table_object, to_object
from elastic.config import Config
from elastic.events import Uploaded
from elastic.model.transformer import Transformer, initialise, loss_sum
from elastic.plan import SnapshotKey
from elastic.storage.store import DirectoryStore, Store, store_at
from tests.parallel.ranks import run
from tests.process.running import small

State = dict[str, np.ndarray]

KEY = SnapshotKey(generation=1, step=3)
# No world divides these evenly; several query heads share a key head.
SIZES = {"dim": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 40, "seq_len": 16, "dropout": 0.0}


def job(path: Path, **changes: Any) -> Config:
    """A job of the small Llama. Keys of `model` are changed by `model`."""
    model = {**SIZES, **changes.pop("model", {})}
    return small(path, model=model, **{"run": "r", **changes})


def build_model(config: Config, world: int, *, seed: int) -> tuple[Transformer, torch.optim.Optimizer]:
    """world: 0 for a plain process without a group."""
    model = Transformer(config.model)
    model.to(torch.float64 if config.precision == "float64" else torch.float32)
    if world:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    initialise(model, seed)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def train_step(model: Transformer, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, model.config.vocab_size, (2, 16), generator=generator)
    loss_sum(model(tokens), tokens.roll(1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def full(found: list[Entry]) -> State:
    return {name: whole_bytes(tensor) for name, tensor in found}


def whole_bytes(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def equal(got: State, want: State) -> bool:
    return got.keys() == want.keys() and all(np.array_equal(got[name], want[name]) for name in want)


def save_rank(rank: int, world: int, config: Config) -> State:
    """Trains three steps and stores this rank's shard as its mover would; returns the whole state."""
    model, optimizer = build_model(config, world, seed=1)
    for step in range(3):
        train_step(model, optimizer, step)
    found = entries(model, optimizer)
    store_shard(store_at(config.place()), found, rank=rank, world=world)
    return full(found)


def store_shard(store: Store, found: list[Entry], *, rank: int, world: int) -> None:
    mine = [(wanted(name, tensor), tensor) for name, tensor in found]
    kept = [(block, tensor) for block, tensor in mine if block and owned(block, tensor, rank, world)]
    table, nbytes = place(block for block, _ in kept)
    data = np.zeros(nbytes, dtype=np.uint8)
    for block, (_, tensor) in zip(table, kept):
        data[block.at : block.at + block.nbytes] = whole_bytes(local(tensor))
    crcs = np.array([zlib.crc32(data[at : at + (1 << 20)]) for at in range(0, nbytes, 1 << 20)], dtype=np.uint32)
    shard = Shard(key=KEY, rank=rank, world=world, nbytes=nbytes, table=encode_bytes(table), crcs=crcs)
    store.put(object_of(rank), data.data)
    store.put(table_object(object_of(rank)), to_object(shard))


def object_of(rank: int) -> str:
    return f"data/1-{KEY.generation}-{KEY.step}/{rank}.bin"


def commit(config: Config, world: int) -> Manifest:
    store = store_at(config.place())
    sizes = store.list("data/")
    uploads = [Uploaded(key=KEY, rank=r, object=object_of(r), nbytes=sizes[object_of(r)]) for r in range(world)]
    about = resume.about(config, "f")
    manifest = build(store, uploads, about=about, attempt=1, key=KEY, samples=3 * config.batch.global_samples)
    log = CommitLog(store)
    resume.save_config(config, store, attempt=log.claim("test"))
    log.commit(1, manifest)
    return manifest


def trained(config: Config, *, world: int = 3) -> State:
    """A run with one checkpoint of step 3, saved by so many FSDP ranks; its whole state."""
    states = run(world, save_rank, config)
    commit(config, world)
    return states[0]


def read(config: Config) -> tuple[State, Manifest]:
    """All of the run's newest checkpoint."""
    store = DirectoryStore(config.run_dir())
    manifest = CommitLog(store).newest()
    assert manifest is not None
    reader = Reader(store, manifest)
    return {
        block.name: reader.read(whole(block.name, block.dtype, block.global_shape)) for block in reader.blocks
    }, manifest


def restore_rank(rank: int, world: int, config: Config) -> State:
    """The run's newest checkpoint as trainers of another layout take it."""
    model, optimizer = build_model(config, world, seed=100 + rank)
    found, store = entries(model, optimizer), store_at(config.place())
    manifest = CommitLog(store).newest()
    assert manifest is not None
    arena = Arena.create(own_bytes=64, received_bytes=64, received_buffers=0)
    restore(found, restore_plan(manifest), rank=rank, world=world, arena=arena, store=store, token="")
    return full(found)
