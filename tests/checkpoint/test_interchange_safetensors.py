"""Checkpoints as Hugging Face directories and back: names, numbers, memory, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from elastic.checkpoint import importing, llama
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.reader import Reader, whole
from elastic.checkpoint.safetensors_file import INDEX
from elastic.checkpoint.save import entries
from elastic.checkpoint.values import FLOATS, cast
from elastic.config import Config, ConfigError
from elastic.interchange import export_run, import_run
from elastic.model.transformer import Transformer
from elastic.resume import Resume, about, choose, save_config
from elastic.storage.store import DirectoryStore, store_at
from elastic.worker.pretrain import LanguageModel
from tests.checkpoint.hosts import ROOT
from tests.checkpoint.llamas import (
    build_model,
    commit,
    equal,
    job,
    read,
    restore_rank,
    store_shard,
    trained,
    whole_bytes,
)
from tests.parallel.ranks import run

Weights = dict[str, torch.Tensor]


def seeded(config: Config) -> Transformer:
    """A run with a checkpoint of a model that one rank saved; the model."""
    model, optimizer = build_model(config, 0, seed=1)
    stored(config, model, optimizer)
    return model


def stored(config: Config, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    store_shard(store_at(config.place()), entries(model, optimizer), rank=0, world=1)
    commit(config, 1)


def export(config: Config, to: Path | str, **options: Any) -> list[str]:
    return export_run(config.place(), to=str(to), **{"format": "safetensors", **options})


def weights_in(folder: Path) -> Weights:
    """Through the real library, file by file as the index says."""
    found: Weights = {}
    for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
        with safe_open(folder / file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def imported(config: Config, where: Path | str, **options: Any) -> list[str]:
    told: list[str] = []
    import_run(config, str(where), say=told.append, **options)
    return told


def refusal(config: Config, where: Path) -> str:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        imported(config, where)
    assert not store_at(config.place()).list("log/"), "there is no run"
    return str(caught.value)


# ---------------------------------------------------------------- numbers


def test_an_uneven_checkpoint_goes_out_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    config, out = job(tmp_path), tmp_path / "hf"
    state = trained(config)
    (line,) = export(config, out, file_bytes_max=20_000)
    assert line.startswith("exported step 3 of run r (log entry 2) as safetensors: ")
    weights, names = weights_in(out), llama.names(config.model)
    assert len([*out.glob("model-*-of-*.safetensors")]) > 3
    assert weights.keys() == {*names.values()}
    assert all(np.array_equal(whole_bytes(weights[theirs]), state[f"model.{ours}"]) for ours, theirs in names.items())
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())

    new = job(tmp_path, run="new")
    assert imported(new, out) == [
        "the optimizer's state begins as zeros",
        f"imported {out} as log entry 1 of run new: `elastic train` goes on from it at step 0",
    ]
    back, manifest = read(new)
    want = {name: bytes_ if name.startswith("model.") else np.zeros_like(bytes_) for name, bytes_ in state.items()}
    assert equal(back, want)
    assert (manifest.key.step, manifest.samples, manifest.about.run) == (0, 0, "new")
    assert all(equal(each, want) for each in run(2, restore_rank, new))
    assert choose(new, Resume()).origin == "from the checkpoint of step 0 (log entry 1, attempt 1)"


def test_as_many_shards_as_ranks_are_not_yet_their_layout(tmp_path: Path) -> None:
    config, new = job(tmp_path), job(tmp_path, run="new")
    seeded(config)
    state, manifest = read(config)
    parts = importing.taken(Reader(store_at(config.place()), manifest), {}, {})
    half = sum(block.nbytes for block, _ in parts) // 2 + 25_000
    written = importing.write(
        store_at(new.place()), parts, about=about(new, "f"), step=3, samples=36, shard_bytes_max=half
    )
    assert written.world == 2
    CommitLog(store_at(new.place())).commit(1, written)
    assert all(equal(each, state) for each in run(2, restore_rank, new))


def hugging_face_forward(weights: Weights, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """transformers' LlamaForCausalLM, written down anew from its definition."""
    heads, keys, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])

    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)

    inv_freq = 1.0 / config["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(tokens.shape[1], dtype=inv_freq.dtype), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    mask = torch.full((tokens.shape[1],) * 2, -math.inf, dtype=inv_freq.dtype).triu(1)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{at}self_attn.{kind}_proj.weight"].T).unflatten(-1, (count, size)).transpose(1, 2)
            for kind, count in (("q", heads), ("k", keys), ("v", keys))
        )
        q, k = (part * cos + rotate_half(part) * sin for part in (q, k))
        k, v = (part.repeat_interleave(heads // keys, dim=1) for part in (k, v))
        scores = (q @ k.transpose(2, 3) / size**0.5 + mask).softmax(-1)
        x = x + (scores @ v).transpose(1, 2).flatten(-2) @ weights[f"{at}self_attn.o_proj.weight"].T
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_faces_llama_computes_the_same_logits(tmp_path: Path, tied: bool) -> None:
    config = job(tmp_path, precision="float64", model={"tie_embeddings": tied, "rope_theta": 500.0})
    model, optimizer = build_model(config, 0, seed=1)
    with torch.no_grad():  # as they are at the start, norms of one could be exchanged
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)), alpha=0.3)
    stored(config, model, optimizer)
    out = tmp_path / "hf"
    export(config, out)
    weights, described = weights_in(out), json.loads((out / "config.json").read_text())
    assert ("lm_head.weight" in weights) is not tied
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = model(tokens)
    assert ours.std() > 0.1
    torch.testing.assert_close(hugging_face_forward(weights, described, tokens), ours, rtol=1e-9, atol=1e-9)


def test_shapes_and_optimizer_state_are_those_of_the_real_model(tmp_path: Path) -> None:
    for changes in ({}, {"precision": "float64", "model": {"tie_embeddings": True}}):
        config = job(tmp_path, **changes)
        model = LanguageModel(config).model()
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == llama.shapes(config.model)
        dtype = config.precision
        kinds = importing.adamw_state({name: (dtype, shape) for name, shape in llama.shapes(config.model).items()})
        live, _ = build_model(config, 0, seed=1)
        real = entries(live, torch.optim.AdamW(live.parameters(), fused=True))
        assert {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in real} == kinds


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("got", FLOATS)
def test_conversion_rounds_as_torch_does(got: str, wanted: str) -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    values = torch.cat((bits.view(torch.float32), torch.randn(100_000), torch.tensor([0.0, -0.0, math.inf, math.nan])))
    source = values.to(getattr(torch, got))
    target = source.to(getattr(torch, wanted))
    fits = ~(source.isfinite() & ~target.isfinite())
    source, target = source[fits].contiguous(), target[fits].contiguous()
    raw = cast(source.view(torch.uint8).numpy(), got, wanted, name="t")
    found = torch.from_numpy(raw.copy()).view(getattr(torch, wanted))
    assert torch.equal(found.isnan(), target.isnan())
    numbers = ~target.isnan()
    assert torch.equal(found[numbers], target[numbers])
    assert torch.equal(found[numbers].signbit(), target[numbers].signbit())


def test_weights_are_exported_and_imported_in_another_precision(tmp_path: Path) -> None:
    config, out = job(tmp_path), tmp_path / "hf"
    state = {name: parameter.detach().clone() for name, parameter in seeded(config).named_parameters()}
    export(config, out, dtype="bfloat16")
    weights = weights_in(out)
    names = llama.names(config.model)
    assert all(torch.equal(weights[names[name]], value.bfloat16()) for name, value in state.items())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    new = job(tmp_path, run="new")
    assert f"{len(names)} tensors were converted from bfloat16 to float32" in imported(new, out)
    back, _ = read(new)
    assert all(np.array_equal(back[f"model.{n}"], whole_bytes(v.bfloat16().float())) for n, v in state.items())


def test_a_value_that_the_dtype_cant_hold_is_named(tmp_path: Path) -> None:
    config = job(tmp_path)
    model, optimizer = build_model(config, 0, seed=1)
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    stored(config, model, optimizer)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has 1000000\.0, which float16 can't hold"):
        export(config, tmp_path / "hf", dtype="float16")
    assert not (tmp_path / "hf").exists()


# ---------------------------------------------------------------- places, interruption, memory


def test_a_task_of_ones_own_keeps_its_names(tmp_path: Path) -> None:
    config = job(tmp_path, task="mine.py:Task")
    seeded(config)
    lines = export(config, tmp_path / "out")
    assert lines[1:] == ["without config.json, names as the task has them"]
    assert "layers.0.attention.query.weight" in weights_in(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    assert "has no optimizer state" in refusal(job(tmp_path, run="new", task="mine.py:Task"), tmp_path / "out")
    export(config, tmp_path / "all", what="all")
    new = job(tmp_path, run="new", task="mine.py:Task")
    imported(new, tmp_path / "all")
    assert equal(read(new)[0], read(config)[0])


def test_damage_ends_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    config, out = job(tmp_path), tmp_path / "out" / "hf"
    seeded(config)
    (path,) = (config.run_dir() / "data").rglob("0.bin")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"0\.bin: bytes 0 to \d+ fail their CRC, model\.\S+ has some of them"):
        export(config, out)
    assert [*out.parent.iterdir()] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from elastic.checkpoint.reader import Reader
from elastic.config import Place
from elastic.interchange import export_run
read, turns = Reader.read, iter(range(9))
Reader.read = lambda self, window: read(self, window) if next(turns, None) is not None else os.kill(os.getpid(), 9)
export_run(Place.of_directory(Path(sys.argv[1])), to=sys.argv[2], format=sys.argv[3], file_bytes_max=20_000)
"""


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_killed_export_leaves_no_directory_that_looks_complete(tmp_path: Path, form: str) -> None:
    config, out = job(tmp_path), tmp_path / "out" / "it"
    seeded(config)
    done = subprocess.run([sys.executable, "-c", KILLED, str(config.run_dir()), str(out), form], cwd=ROOT, timeout=60)
    assert done.returncode == -9
    (left,) = out.parent.iterdir()
    assert left.name.startswith(".it-incomplete-") and [*left.iterdir()]
    assert not (left / INDEX).exists() and not (left / ".metadata").exists()
    export_run(config.place(), to=str(out), format=form)  # type: ignore[arg-type]


def test_to_and_from_a_url_the_index_last(tmp_path: Path) -> None:
    config, url = job(tmp_path), "memory://bucket/hf"
    model = seeded(config)
    export(config, url, file_bytes_max=20_000)
    new = job(tmp_path, run="new")
    imported(new, url)
    back, _ = read(new)
    assert all(np.array_equal(back[f"model.{n}"], whole_bytes(p)) for n, p in model.named_parameters())
    with pytest.raises(CheckpointError, match=r"memory://bucket/hf is not empty \(config\.json\)"):
        export(config, url)
    (config.run_dir() / "data" / "1-1-3" / "0.bin").write_bytes(b"cut short")
    broken = job(tmp_path, run="r")
    with pytest.raises(CheckpointError):
        export(broken, "memory://bucket/second")
    assert not fsspec.filesystem("memory").exists("/bucket/second/" + INDEX)


def test_a_target_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    config = job(tmp_path)
    seeded(config)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match="there is not an empty directory; give another place"):
        export(config, tmp_path / "there")
    (tmp_path / "empty").mkdir()
    export(config, tmp_path / "empty")
    assert (tmp_path / "empty" / INDEX).exists()


# Not getrusage: what it tells includes the process that this one was forked from.
MEASURED = """
import re, sys
from pathlib import Path
from elastic.interchange import export_run
from elastic.config import Place
def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
if sys.argv[3] == "dcp":
    import torch.distributed.checkpoint
before_kib = peak_kib()
export_run(Place.of_directory(Path(sys.argv[1])), to=sys.argv[2], format=sys.argv[3], what="all")
print((peak_kib() - before_kib) >> 10, "torch" in sys.modules, "ray" in sys.modules)
"""


@pytest.mark.long
@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, form: str) -> None:
    config, (big, wide) = job(tmp_path, task="mine.py:T"), ((160 << 20, 2), (8, 20 << 20))
    names = {"model.big": big, "model.wide": wide}
    blocks = [whole(name, "uint8", shape) for name, shape in names.items()]
    parts = [(w, lambda w=w: np.ones(w.nbytes, dtype=np.uint8)) for b in blocks for w in importing.windows(b)]
    store = store_at(config.place())
    manifest = importing.write(store, parts, about=about(config, "f"), step=1, samples=1)
    CommitLog(store).commit(1, manifest)
    save_config(config, store)
    command = [sys.executable, "-c", MEASURED, str(config.run_dir()), str(tmp_path / "out"), form]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    grown_mib, torch_loaded, ray_loaded = done.stdout.split()
    assert int(grown_mib) < 180, "of 480 MiB"
    assert (torch_loaded, ray_loaded) == (str(form == "dcp"), "False")


# ---------------------------------------------------------------- bad input


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A directory as Hugging Face would have it, two files or more."""
    config = job(tmp_path, run="source")
    seeded(config)
    export(config, tmp_path / "hf", file_bytes_max=60_000)
    return tmp_path / "hf"


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def rewrite(folder: Path, change: Any) -> None:
    """All weights in one file, changed, without an index."""
    weights = weights_in(folder)
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    change(weights)
    save_file(weights, folder / "model.safetensors")
    assert load_file(folder / "model.safetensors").keys() == weights.keys()


def test_a_missing_file_of_the_index(tmp_path: Path, hf: Path) -> None:
    first_file(hf).unlink()
    assert "names model-00001-of-" in refusal(job(tmp_path), hf) and "not there" in refusal(job(tmp_path), hf)


def test_a_truncated_file(tmp_path: Path, hf: Path) -> None:
    path = first_file(hf)
    path.write_bytes(path.read_bytes()[:-5])
    assert "it is cut short; fetch it anew" in refusal(job(tmp_path), hf)


def test_a_header_larger_than_the_file_or_none_at_all(tmp_path: Path, hf: Path) -> None:
    path = first_file(hf)
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    assert "has 10 bytes and tells of a header of 1099511627776" in refusal(job(tmp_path), hf)
    path.write_bytes(b"")
    assert "has 0 bytes and tells of a header of 0" in refusal(job(tmp_path), hf)
    path.write_bytes((8).to_bytes(8, "little") + b"no json ")
    assert "its header is no JSON object" in refusal(job(tmp_path), hf)


def write_header(path: Path, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))


def test_an_entry_that_does_not_fit_its_shape(tmp_path: Path, hf: Path) -> None:
    path = first_file(hf)
    body = json.dumps(
        {"model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}
    ).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + bytes(16))
    assert "has bytes 0 to 12, F32[2, 2] takes 16" in refusal(job(tmp_path), hf)
    write_header(path, {"model.embed_tokens.weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}})
    assert "model.embed_tokens.weight is F4, wanted one of BOOL, U8" in refusal(job(tmp_path), hf)


def test_a_wrong_dtype_and_shape(tmp_path: Path, hf: Path) -> None:
    def change(weights: Weights) -> None:
        weights["model.norm.weight"] = torch.ones(24, dtype=torch.int32)
        weights["lm_head.weight"] = torch.ones(257, 25)

    rewrite(hf, change)
    assert refusal(job(tmp_path), hf).splitlines() == [
        f"{hf}: {told}; import a model of these sizes"
        for told in (
            "model.norm.weight is int32[24], the job's model wants float32[24]",
            "lm_head.weight is float32[257, 25], the job's model wants float32[257, 24]",
        )
    ]


def test_a_tensor_too_few_and_one_too_many(tmp_path: Path, hf: Path) -> None:
    def change(weights: Weights) -> None:
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(24)
        del weights["model.layers.1.mlp.up_proj.weight"]

    rewrite(hf, change)
    assert refusal(job(tmp_path), hf).splitlines() == [
        f"{hf}: model.layers.0.self_attn.q_proj.bias is not known to the job's model; import a model of these sizes",
        f"{hf}: model.layers.1.mlp.up_proj.weight is missing, the job's model wants float32[40, 24]; "
        "import a model of these sizes",
    ]


def test_what_is_computed_anyway_is_left(tmp_path: Path) -> None:
    config = job(tmp_path, run="source", model={"tie_embeddings": True})
    seeded(config)
    export(config, tmp_path / "hf")

    def change(weights: Weights) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    rewrite(tmp_path / "hf", change)
    new = job(tmp_path, run="new", model={"tie_embeddings": True})
    imported(new, tmp_path / "hf")
    want = {n: b if n.startswith("model.") else np.zeros_like(b) for n, b in read(config)[0].items()}
    assert equal(read(new)[0], want)


def test_a_config_of_another_model(tmp_path: Path, hf: Path) -> None:
    changed = job(tmp_path, model={"kv_heads": 4, "tie_embeddings": True, "rope_theta": 5e5})
    assert refusal(changed, hf).splitlines() == [
        f"{hf}: config.json: num_key_value_heads is 2, the job's model has 4; set model.kv_heads",
        f"{hf}: config.json: tie_word_embeddings is False, the job's model has True; set model.tie_embeddings",
        f"{hf}: config.json: rope_theta is 10000.0, the job's model has 500000.0; set model.rope_theta",
    ]
    path = hf / "config.json"
    raw = json.loads(path.read_text())
    for change, sentence in (
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2.0}}, "rope_theta is 2.0"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, the job's model has 1e-05"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', the built-in model is 'llama'"),
    ):
        path.write_text(json.dumps({**raw, **change}))
        assert sentence in refusal(job(tmp_path), hf)
    path.unlink()
    assert "config.json is missing or no JSON" in refusal(job(tmp_path), hf)


def test_a_run_that_exists_and_a_folder_of_something_else(tmp_path: Path, hf: Path) -> None:
    config = job(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    assert "has neither .safetensors files nor .metadata; it has notes.txt" in refusal(config, tmp_path / "other")
    assert "is no directory" in refusal(config, tmp_path / "nowhere")
    imported(config, hf)
    with pytest.raises(ConfigError, match="holds a run already, so nothing can be imported into it"):
        imported(config, hf)
    with pytest.raises(ConfigError, match=r"step 31 of .*: wanted 0 to 30"):
        imported(job(tmp_path, run="new"), hf, step=31)


def test_an_import_cut_off_before_its_commit_is_no_run(tmp_path: Path, hf: Path) -> None:
    """The log entry comes last: what a killed import leaves is done again."""
    config = job(tmp_path)
    imported(config, hf)
    before, store = read(config)[0], DirectoryStore(config.run_dir())
    store.delete("log/00000001.json")
    assert choose(config, Resume()).origin == "from the seed"
    imported(config, hf)
    assert equal(read(config)[0], before)


def test_a_step_or_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    config = job(tmp_path)
    seeded(config)
    with pytest.raises(ConfigError, match=r"there is no checkpoint of step 7; those that exist are of steps 3"):
        export(config, tmp_path / "out", step=7)
    with pytest.raises(ConfigError, match="--dtype float16 is for"):
        export(config, tmp_path / "out", what="all", dtype="float16")
    with pytest.raises(CheckpointError, match="has no checkpoint; give the directory"):
        export(job(tmp_path, run="none"), tmp_path / "out")
    export(config, tmp_path / "out", step=3)
