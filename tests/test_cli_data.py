"""`elastic data` as a person types it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from elastic import cli
from elastic.data.shards import Corpus
from tests.data.inputs import rows, write_jsonl


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", rows(100))
    data = {"corpus": str(tmp_path / "a.jsonl"), "prepared": str(tmp_path / "out"), "held_out_every": 4}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"run": "a", "data": data}))
    return tmp_path / "job.yaml"


def test_prepare_inspect_verify(capsys: pytest.CaptureFixture[str], job: Path) -> None:
    out = job.parent / "out"
    code, told, _ = run(capsys, "data", "prepare", str(job))
    assert code == 0 and told.splitlines()[-1] == str(out / "manifest.json")
    assert told.startswith("prepared 1 files, 100 documents, ")
    code, told, _ = run(capsys, "data", "inspect", str(out), "--documents", "2")
    assert code == 0 and len(told.splitlines()) == 8 and "train 0, " in told
    code, told, _ = run(capsys, "data", "verify", str(out))
    assert code == 0 and told.startswith("OK: 2 shards, ")
    shard = next(out.glob("train-*.arrow"))
    content = bytearray(shard.read_bytes())
    content[2000] ^= 4
    shard.write_bytes(content)
    code, _, told = run(capsys, "data", "verify", str(out))
    assert code == 1 and told.startswith(f"elastic: {shard}: bytes 0 to {len(content)} are damaged")


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], job: Path) -> None:
    code, _, told = run(capsys, "data", "prepare", str(job), "--set", "data.text_field=body")
    assert code == 1 and told.startswith(f"elastic: {job.parent}/a.jsonl line 1 has no field 'body', only id, text")
    code, _, told = run(capsys, "data", "prepare", str(job), "--set", "data.tokenizer=nowhere.json")
    assert code == 2 and told.startswith("elastic: data.tokenizer nowhere.json: No such file or directory; give")
    code, _, told = run(capsys, "data", "prepare", str(job), "--set", "data.shard_tokens=4096")
    assert code == 2 and "unknown key data.shard_tokens" in told
    code, _, told = run(capsys, "data", "prepare", str(job), "--set", "model.vocab_size=256")
    assert code == 2 and told.startswith(
        "elastic: model.vocab_size 256 is below the 257 tokens of the corpus's tokenizer"
    )
    code, _, told = run(capsys, "config", "check", str(job), "--set", "model.vocab_size=256")
    assert code == 2 and "model.vocab_size 256 is below" in told
    for command in ("verify", "inspect"):
        code, _, told = run(capsys, "data", command, str(job.parent))
        assert code == 1 and "manifest.json is missing; prepare it first" in told


def test_import_then_train_on_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.arange(3000, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(300, dtype="<u2").tofile(tmp_path / "val.bin")
    out = tmp_path / "out"
    given = ("data", "import", str(tmp_path), str(out), "--format", "nanogpt-bin", "--vocab-size")
    code, _, told = run(capsys, *given, "2999")
    assert code == 1 and "train.bin has token 2999, wanted 0 to 2998" in told
    code, told, _ = run(capsys, *given, "3000")
    assert code == 0 and told.splitlines()[-1] == str(out / "manifest.json")
    assert Corpus.open(out, "held_out").window(0, 299).tolist() == list(range(300))
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({"data": {"corpus": "imported", "prepared": str(out)}, "batch": {"global_samples": 11}})
    )
    code, told, _ = run(capsys, "data", "prepare", str(tmp_path / "job.yaml"), "--set", "model.vocab_size=3000")
    assert code == 0 and told == f"{out}/manifest.json\n"
    again = ("data", "prepare", str(tmp_path / "job.yaml"), "--set", "model.vocab_size=3000")
    code, _, told = run(capsys, *again, "--set", "batch.global_samples=12")
    assert code == 1 and "what is trained on has 11 windows of seq_len 256, a step takes 12 samples" in told


def test_upload_and_what_lies_behind_a_url(capsys: pytest.CaptureFixture[str], job: Path) -> None:
    run(capsys, "data", "prepare", str(job))
    out, url = job.parent / "out", f"file://{job.parent}/there"
    code, _, told = run(capsys, "data", "verify", url)
    assert code == 1 and "prepare it first into a directory, then `elastic data upload` it there" in told
    code, told, _ = run(capsys, "data", "upload", str(out), url)
    assert code == 0 and told.splitlines()[-1] == f"{url}/manifest.json"
    code, told, _ = run(capsys, "data", "verify", url)
    assert code == 0 and told.startswith("OK: 2 shards, ")
    code, told, _ = run(capsys, "data", "inspect", url, "--documents", "0")
    assert code == 0 and len(told.splitlines()) == 4
    code, told, _ = run(capsys, "data", "prepare", str(job), "--set", f"data.prepared={url}")
    assert code == 0 and told.splitlines() == [f"{url}/manifest.json"]
    code, _, told = run(capsys, "data", "upload", str(out), str(job.parent / "copy"))
    assert code == 2 and "is no URL; wanted one as s3://bucket/prefix" in told
    code, _, told = run(capsys, "data", "upload", str(out), url, "--endpoint", "here")
    assert code == 2 and told.startswith("elastic: --endpoint here: wanted http:// or https:// before it")
