"""Tokens of other software become the same kind of corpus, token by token; what does not fit is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.config import ConfigError, ElasticError
from elastic.data.importing import Format, import_tokens
from elastic.data.prepare import prepare
from elastic.data.shards import Corpus, read_manifest
from elastic.data.verify import damages, described
from tests.data.inputs import data_of, documents, quiet
from tests.data.test_tokenizer import train

END = 7


def stream(count: int, seed: int = 0, vocab_size: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab_size, size=count)


def with_header(tokens: np.ndarray, count: int | None = None, version: int = 1) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, version, len(tokens) if count is None else count
    return header.tobytes() + tokens.astype("<u2").tobytes()


def imported(source: Path, out: Path, format: Format, **changes: Any) -> Path:
    fields: dict[str, Any] = {"vocab_size": 1000, "shard_bytes": 4096, "held_out_every": 4}
    return import_tokens(str(source), out, format=format, progress=quiet, **{**fields, **changes}).parent


def tokens_of(prepared: Path, split: Any) -> list[int]:
    return np.concatenate(documents(prepared, split)).tolist()


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 5000])
def test_nanogpt_files_keep_every_token(tmp_path: Path, header: bool, count: int) -> None:
    for name, seed in (("x_train_000001.bin", 1), ("x_val_000000.bin", 2)):
        tokens = stream(count, seed)
        (tmp_path / name).write_bytes(with_header(tokens) if header else tokens.astype("<u2").tobytes())
    for end in (None, END):
        prepared = imported(tmp_path, tmp_path / f"out{end}", "nanogpt-bin", end_of_document=end)
        assert tokens_of(prepared, "train") == stream(count, 1).tolist()
        assert tokens_of(prepared, "held_out") == stream(count, 2).tolist()
        assert not list(damages(prepared, read_manifest(prepared)))


def test_documents_end_where_their_token_says(tmp_path: Path) -> None:
    """Also in the last one, which has no end, and over the limit of what is read at once."""
    tokens = stream(2_500_000)
    tokens[(tokens == END) & (np.arange(len(tokens)) % 3 > 0)] = 8
    tokens[-1] = 9
    np.save(tmp_path / "a.npy", tokens.astype(np.uint16))
    prepared = imported(tmp_path, tmp_path / "out", "numpy", end_of_document=END, shard_bytes=1 << 20)
    wanted = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == END) + 1)]
    train, held_out = (
        [document.tolist() for document in documents(prepared, split)] for split in ("train", "held_out")
    )
    assert sorted(train + held_out) == sorted(wanted)
    assert len(held_out) == pytest.approx(len(wanted) / 4, rel=0.2)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64, ">i4"])
def test_numpy_arrays_of_each_kind(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "train.npy", stream(3000).astype(dtype))
    np.save(tmp_path / "val.npy", stream(300, 1).astype(dtype))
    prepared = imported(tmp_path, tmp_path / "out", "numpy")
    assert tokens_of(prepared, "train") == stream(3000).tolist()
    assert Corpus.open(prepared, "train").dtype == np.uint16


def test_a_large_vocabulary_takes_uint32(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", stream(3000, vocab_size=100_000).astype(np.int64))
    np.save(tmp_path / "val.npy", stream(30, vocab_size=100_000).astype(np.int64))
    prepared = imported(tmp_path, tmp_path / "out", "numpy", vocab_size=100_000)
    assert Corpus.open(prepared, "train").dtype == np.uint32
    assert tokens_of(prepared, "train") == stream(3000, vocab_size=100_000).tolist()


@pytest.mark.parametrize("column", ["tokens", "input_ids"])
@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())])
def test_rows_of_parquet_are_documents(tmp_path: Path, column: str, kind: pa.DataType) -> None:
    rows = [stream(number % 50, number).tolist() for number in range(200)]
    table = pa.table({column: pa.array(rows, kind), "attention_mask": pa.array(rows, kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=16)
    prepared = imported(tmp_path / "a.parquet", tmp_path / "out", "parquet")
    found = [d.tolist() for split in ("train", "held_out") for d in documents(prepared, split)]
    assert sorted(found) == sorted(row for row in rows if row)


def test_a_job_trains_on_what_was_imported(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", stream(3000).astype(np.uint16))
    np.save(tmp_path / "val.npy", stream(300).astype(np.uint16))
    out = imported(tmp_path, tmp_path / "out", "numpy")
    assert prepare(data_of("imported", out), progress=quiet) == out / "manifest.json"
    with pytest.raises(ConfigError, match="vocab_size 257 is below the 1000 tokens"):
        prepare(data_of("imported", out), progress=quiet, model_vocab_size=257)
    (tmp_path / "a.py").write_text("x")
    with pytest.raises(ConfigError, match="holds an imported corpus; set"):
        prepare(data_of(tmp_path, out), progress=quiet)
    next(out.glob("*.crc")).unlink()
    with pytest.raises(ElasticError, match=r"\.crc is missing or cut; prepare or import it again"):
        prepare(data_of("imported", out), progress=quiet)


def test_the_tokenizer_of_an_import_is_kept(tmp_path: Path) -> None:
    path = train(tmp_path / "t.json", "</s>")
    np.save(tmp_path / "train.npy", np.array([70, 71, 0, 72, 0], dtype=np.uint16))
    np.save(tmp_path / "val.npy", np.array([70, 0], dtype=np.uint16))
    prepared = imported(tmp_path, tmp_path / "out", "numpy", tokenizer=path)
    manifest = read_manifest(prepared)
    assert manifest.tokenizer.end_of_document == 0 and manifest.vocab_size == 1000
    assert len(documents(prepared, "train")) == 2 and not list(damages(prepared, manifest))
    assert "train 0, 3 tokens: " in described(prepared, 1)[4]
    bare = imported(tmp_path, tmp_path / "bare", "numpy")
    assert described(bare, 1)[4:6] == [
        "train documents as ids, for the import named no tokenizer",
        "train 0, 5 tokens: '70 71 0 72 0'",
    ]
    with pytest.raises(ConfigError, match="--vocab-size 300 is below the 400 tokens of"):
        imported(tmp_path, tmp_path / "small", "numpy", tokenizer=path, vocab_size=300)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.bin", stream(600).astype("<u2").tobytes()[:-1], "has 1199 bytes, wanted uint16, an even number"),
        ("a.bin", with_header(stream(600))[:-4], "ends 4 bytes too early"),
        ("a.bin", with_header(stream(600)) + b"xx", "has more bytes than its header says"),
        ("a.bin", with_header(stream(600), version=2), "has a header of version 2, wanted 1"),
        ("a.bin", with_header(stream(0)), "has no tokens"),
        ("a.bin", b"", "is empty"),
        ("a.bin", np.full(600, 1000, "<u2").tobytes(), "has token 1000, wanted 0 to 999; give the --vocab-size"),
        ("a.npy", np.full(600, -1), "has token -1, wanted 0 to 999"),
        ("a.npy", np.zeros((5, 5), np.uint16), r"holds uint16 of shape \(5, 5\), wanted"),
        ("a.npy", np.zeros(5, np.float32), "holds float32 of shape"),
        ("a.npy", b"no array", "is damaged or no such file"),
        ("a.npy", np.zeros(0, np.uint16), "has no tokens"),
        ("a.parquet", pa.table({"text": ["a"]}), "has no column tokens or input_ids, only text"),
        ("a.parquet", pa.table({"tokens": [[0.5]]}), "column tokens holds list<element: double>, wanted lists of"),
        ("a.parquet", pa.table({"tokens": [[1], None]}), "row 1: tokens holds null"),
        ("a.parquet", pa.table({"tokens": [[1], [2, None]]}), "row 1: tokens holds null"),
        ("a.parquet", pa.table({"tokens": pa.array([], pa.list_(pa.int32()))}), "has no rows"),
        ("a.parquet", pa.table({"tokens": [[1, 2**40]]}), "has token 1099511627776, wanted 0 to 999"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str, content: Any, told: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        pq.write_table(content, path)
    format: Format = {".bin": "nanogpt-bin", ".npy": "numpy", ".parquet": "parquet"}[path.suffix]
    with pytest.raises(ElasticError, match=told) as raised:
        imported(path, tmp_path / "out", format)
    assert str(path) in str(raised.value)
    assert not (tmp_path / "out/manifest.json").exists() and not list((tmp_path / "out").rglob("*.arrow"))


def test_an_end_of_document_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", stream(3000).astype(np.uint16))
    with pytest.raises(ConfigError, match="--end-of-document 1000: wanted 0 to 999"):
        imported(tmp_path, tmp_path / "out", "numpy", end_of_document=1000)
