"""Checkpoints of torch.distributed.checkpoint: it loads ours, we import its own, and nothing of a pickle is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from elastic.checkpoint.dcp import METADATA
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.save import entries
from elastic.config import Config, ConfigError
from elastic.interchange import export_run, import_run
from elastic.storage.store import store_at
from tests.checkpoint.llamas import (
    State,
    build_model,
    equal,
    full,
    job,
    read,
    restore_rank,
    train_step,
    trained,
)
from tests.parallel.ranks import run


def export(config: Config, to: Path | str, **options: Any) -> list[str]:
    return export_run(config.place(), to=str(to), format="dcp", **options)


def imported(config: Config, where: Path | str, **options: Any) -> list[str]:
    told: list[str] = []
    import_run(config, str(where), say=told.append, **options)
    return told


def refusal(config: Config, where: Path) -> str:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        imported(config, where)
    assert not store_at(config.place()).list("log/"), "there is no run"
    return str(caught.value)


def two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    """As the built-in task has them (docs/interchange.md)."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=0.5)


def load_rank(rank: int, world: int, config: Config, where: Path, steps: int) -> tuple[State, list[dict[str, Any]]]:
    """DCP's own load into a model with other values; then some steps of training."""
    model, _ = build_model(config, world, seed=200)
    optimizer = two_groups(model)
    train_step(model, optimizer, 9)
    names, state = get_state_dict(model, optimizer)
    whole = {"model": names, "optim": state}
    torch_dcp.load(whole, checkpoint_id=where)
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optim"])
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for step in range(steps):
        train_step(model, optimizer, step)
    return full(entries(model, optimizer)), groups


def save_dcp_rank(rank: int, world: int, config: Config, where: Path, top: str) -> State:
    model, optimizer = build_model(config, world, seed=1)
    for step in range(2):
        train_step(model, optimizer, step)
    names, state = get_state_dict(model, optimizer)
    whole: dict[str, Any] = {"model": names, "optim": state, "epoch": 7}
    torch_dcp.save({top: whole} if top else whole, checkpoint_id=where)
    return full(entries(model, optimizer))


# ---------------------------------------------------------------- round trips


@pytest.mark.long
def test_dcp_loads_an_uneven_checkpoint_in_any_world_and_it_comes_back(tmp_path: Path) -> None:
    config, out = job(tmp_path, optimizer={"weight_decay": 0.25, "warmup_steps": 10, "lr": 1.0}), tmp_path / "dcp"
    state = trained(config)
    assert len(export(config, out, file_bytes_max=40_000)) == 1
    assert len([*out.glob("*.distcp")]) > 2
    alone, groups = load_rank(0, 0, config, out, 0)
    assert equal(alone, state)
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.25, 0.4), (0.0, 0.4)]
    assert all(equal(each, state) for each, _ in run(2, load_rank, config, out, 0))

    new = job(tmp_path, run="new")
    lines = imported(new, out)
    assert any(line.startswith("left unread: optim.param_groups.0.") for line in lines)
    back, manifest = read(new)
    assert equal(back, state) and (manifest.key.step, manifest.samples) == (3, 36)
    assert all(equal(each, state) for each in run(2, restore_rank, new))


@pytest.mark.parametrize("top", ["", "app"])
def test_what_dcp_saved_is_imported_with_its_optimizer(tmp_path: Path, top: str) -> None:
    config, where = job(tmp_path), tmp_path / "theirs"
    states = run(3, save_dcp_rank, config, where, top)
    lines = imported(config, where)
    assert "the optimizer's state begins as zeros" not in lines
    back, _ = read(config)
    assert equal(back, states[0])
    assert all(equal(each, states[0]) for each in run(2, restore_rank, config))


def test_the_model_alone_begins_with_a_fresh_optimizer(tmp_path: Path) -> None:
    config, out = job(tmp_path), tmp_path / "dcp"
    state = trained(config, world=1)
    export(config, out, what="model")
    new = job(tmp_path, run="new")
    assert "the optimizer's state begins as zeros" in imported(new, out)
    assert equal(read(new)[0], {n: b if n.startswith("model.") else np.zeros_like(b) for n, b in state.items()})


def test_to_and_from_a_url(tmp_path: Path) -> None:
    config, url = job(tmp_path), "memory://bucket/dcp"
    trained(config, world=1)
    export(config, url)
    new = job(tmp_path, run="new")
    imported(new, url)
    assert equal(read(new)[0], read(config)[0])


def test_a_task_of_ones_own_goes_out_and_comes_back(tmp_path: Path) -> None:
    """Whatever its names are; that they fit, its trainers say when they start."""
    config = job(tmp_path, task="mine.py:Task")
    trained(config, world=1)
    lines = export(config, tmp_path / "dcp")
    assert lines[1:] == ["param_groups are not in it: load with allow_partial_load"]
    new = job(tmp_path, run="new", task="mine.py:Task")
    imported(new, tmp_path / "dcp")
    assert equal(read(new)[0], read(config)[0])


# ---------------------------------------------------------------- bad input


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    config, where = job(tmp_path), tmp_path / "theirs"
    save_dcp_rank(0, 0, config, where, "")
    return where


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_foreign_pickle_is_run(tmp_path: Path, theirs: Path) -> None:
    proof, raw = tmp_path / "it ran", (theirs / METADATA).read_bytes()
    found: Metadata = pickle.loads(raw)
    found.planner_data = {"x": Bomb(proof)}
    bombs = [
        pickle.dumps(Bomb(proof)),
        pickle.dumps(found),
        b"cos\nmkdir\n(S'" + str(proof).encode() + b"'\ntR.",
        b'cbuiltins\neval\n(S\'__import__("os").mkdir("' + str(proof).encode() + b"\")'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.filesystem\nos.mkdir\n(S'" + str(proof).encode() + b"'\ntR.",
    ]
    for bomb in bombs:
        (theirs / METADATA).write_bytes(bomb)
        assert "it may run code; nothing of it was run, and it is not read" in refusal(job(tmp_path), theirs)
        assert not proof.exists()
    pickle.loads(bombs[0])
    assert proof.exists(), "it would have"


def test_a_tensor_file_with_a_foreign_pickle(tmp_path: Path, theirs: Path) -> None:
    """The items themselves go through torch's weights_only."""
    proof, found = tmp_path / "it ran", pickle.loads((theirs / METADATA).read_bytes())
    torch.save(Bomb(proof), theirs / "bomb.distcp")
    size = (theirs / "bomb.distcp").stat().st_size
    for index, place in found.storage_data.items():
        if index.fqn == "model.norm.weight":
            place.relative_path, place.offset, place.length = "bomb.distcp", 0, size
    (theirs / METADATA).write_bytes(pickle.dumps(found))
    assert "bomb.distcp: model.norm.weight can't be read" in refusal(job(tmp_path), theirs)
    assert not proof.exists()


def test_a_damaged_pickle_and_one_that_is_no_metadata(tmp_path: Path, theirs: Path) -> None:
    raw = (theirs / METADATA).read_bytes()
    for broken, sentence in (
        (raw[: len(raw) // 2], "can't be read"),
        (b"", "can't be read"),
        (pickle.dumps([1, 2]), "is not as torch.distributed.checkpoint writes it"),
        (pickle.dumps(Metadata({"model.x": 1}, storage_data={1: 2})), "is not as torch.distributed.checkpoint"),
    ):
        (theirs / METADATA).write_bytes(broken)
        assert sentence in refusal(job(tmp_path), theirs)


def test_a_file_that_is_missing_cut_short_or_damaged(tmp_path: Path, theirs: Path) -> None:
    (path,) = theirs.glob("*.distcp")
    raw = path.read_bytes()
    path.write_bytes(raw[:-4000])
    assert "it is cut short; fetch it anew" in refusal(job(tmp_path), theirs)
    path.write_bytes(bytes(len(raw)))
    assert "is no item of torch.save" in refusal(job(tmp_path), theirs)
    path.unlink()
    assert "names __0_0.distcp, which is not there" in refusal(job(tmp_path), theirs)


def test_a_checkpoint_of_another_model(tmp_path: Path, theirs: Path) -> None:
    lines = refusal(job(tmp_path, model={"ffn_dim": 48, "layers": 3}), theirs).splitlines()
    assert (
        f"{theirs}: model.layers.0.feed_forward.gate.weight is float32[40, 24], the job's model wants float32[48, 24]; "
        "import a checkpoint of this model"
    ) in lines
    assert len(lines) == 21 and lines[-1].endswith("more of this kind")


def test_chunks_that_do_not_cover_a_tensor(tmp_path: Path, theirs: Path) -> None:
    found = pickle.loads((theirs / METADATA).read_bytes())
    chunk = found.state_dict_metadata["model.norm.weight"].chunks[0]
    chunk.sizes = torch.Size([20])
    (theirs / METADATA).write_bytes(pickle.dumps(found))
    assert "model.norm.weight is float32[24], .metadata says float32[20]" in refusal(job(tmp_path), theirs)
    found.state_dict_metadata["model.norm.weight"].chunks.clear()
    (theirs / METADATA).write_bytes(pickle.dumps(found))
    assert "model.norm.weight is missing" in refusal(job(tmp_path), theirs)


def test_damage_leaves_no_directory(tmp_path: Path) -> None:
    config = job(tmp_path)
    trained(config, world=1)
    (path,) = (config.run_dir() / "data").rglob("0.bin")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="fail their CRC"):
        export(config, tmp_path / "out" / "dcp")
    assert [*(tmp_path / "out").iterdir()] == []
