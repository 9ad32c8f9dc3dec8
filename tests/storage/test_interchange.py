"""Exports to a real S3 service and imports from it, a run in object storage between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.reader import Reader
from elastic.checkpoint.save import entries
from elastic.config import Config
from elastic.config_sections import StorageOptions
from elastic.interchange import Format, export_run, import_run
from elastic.storage.object_store import PART_BYTES, ObjectStore
from elastic.storage.store import store_at
from tests.checkpoint.llamas import State, build_model, commit, job, store_shard
from tests.storage.servers import Proxy, Request

LARGE = {"vocab_size": 200_000, "tie_embeddings": True}  # one tensor of more than two parts


def in_bucket(path: Path, url: str, options: StorageOptions, **changes: Any) -> Config:
    return job(path, storage=url, storage_options=options.model_dump(), model=LARGE, **changes)


def weights(config: Config) -> State:
    store = store_at(config.place())
    manifest = CommitLog(store).newest()
    assert manifest is not None
    reader = Reader(store, manifest)
    return {name: reader.read(block) for name, block in reader.tensors.items() if name.startswith("model.")}


@pytest.mark.parametrize(("form", "last"), [("safetensors", "model.safetensors.index.json"), ("dcp", ".metadata")])
def test_out_and_back(tmp_path: Path, url: str, options: StorageOptions, proxy: Proxy, form: Format, last: str) -> None:
    config = in_bucket(tmp_path, url, options)
    model, optimizer = build_model(config, 0, seed=1)
    store_shard(store_at(config.place()), entries(model, optimizer), rank=0, world=1)
    commit(config, 1)
    proxy.requests.clear()
    export_run(config.place(), to=f"{url}-{form}", format=form)
    written: list[Request] = [request for request in proxy.requests if request.method in ("PUT", "POST")]
    assert sum("partNumber" in request.path for request in written) >= 2, f"{PART_BYTES} in a part"
    assert last in written[-1].path
    assert last in ObjectStore(f"{url}-{form}", options).list("")
    new = in_bucket(tmp_path, url, options, run="new")
    import_run(new, f"{url}-{form}", say=lambda _: None)
    got, want = weights(new), weights(config)
    assert got.keys() == want.keys() and all((got[name] == want[name]).all() for name in want)
