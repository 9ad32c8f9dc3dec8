"""Windows over a prepared split: the token stream itself, across shards, without copies, checked on open."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from elastic.config_sections import Data
from elastic.data.prepare import prepare
from elastic.data.shards import SPLITS, Corpus, DataError, Split, dtype_of, read_manifest


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (root / f"{number}.py").write_bytes(os.urandom(1 + number * 13 % 900))
    data = Data(corpus=str(root), prepared=str(root / "prepared"), held_out_every=5, shard_bytes=2048)
    return prepare(data, progress=lambda line: None).parent


def stream(prepared: Path, split: Split) -> np.ndarray:
    parts = []
    for shard in read_manifest(prepared).splits[split]:
        table = pa.ipc.open_file(pa.memory_map(str(prepared / shard.file))).read_all()
        parts.append(table["tokens"].combine_chunks().values.to_numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("seq_len", [1, 7, 100, 1500, 2500])
def test_windows_tile_the_stream(prepared: Path, split: Split, seq_len: int) -> None:
    corpus, tokens = Corpus.open(prepared, split), stream(prepared, split)
    assert corpus.tokens == len(tokens) and corpus.vocab_size == 257
    assert corpus.windows(seq_len) == (len(tokens) - 1) // seq_len
    for index in range(corpus.windows(seq_len)):
        window = corpus.window(index, seq_len)
        assert window.dtype == np.uint16 and window.shape == (seq_len + 1,)
        assert np.array_equal(window, tokens[index * seq_len : (index + 1) * seq_len + 1])


def test_a_window_inside_a_shard_is_not_copied(prepared: Path) -> None:
    window = Corpus.open(prepared, "train").window(0, 10)
    assert not window.flags.owndata and not window.flags.writeable


def test_the_last_window_keeps_its_target(prepared: Path) -> None:
    corpus = Corpus.open(prepared, "train")
    assert corpus.windows(corpus.tokens - 1) == 1 and corpus.windows(corpus.tokens) == 0
    assert corpus.window(0, corpus.tokens - 1)[-1] == 256
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"window {index} of 1"):
            corpus.window(index, corpus.tokens - 1)


def test_both_splits_have_the_fingerprint_of_the_manifest(prepared: Path) -> None:
    wanted = json.loads((prepared / "manifest.json").read_text())["fingerprint"]
    assert {Corpus.open(prepared, split).fingerprint for split in SPLITS} == {wanted}


def copy(prepared: Path, to: Path) -> Path:
    for path in (path for path in prepared.iterdir() if path.is_file()):
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_damage_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json is missing; prepare it first"):
        Corpus.open(tmp_path, "train")
    damaged = copy(prepared, tmp_path)
    shard = next(damaged.glob("train-*.arrow"))
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    with pytest.raises(DataError, match=f"has {size - 1} bytes, the manifest says {size}"):
        Corpus.open(damaged, "train")
    Corpus.open(damaged, "held_out")
    shard.unlink()
    with pytest.raises(DataError, match="can't open shard"):
        Corpus.open(damaged, "train")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"schema": 2',
            '"schema": 3',
            "has schema 3, this elastic reads 2: a newer one wrote it; upgrade elastic, or prepare the corpus again",
        ),
        (
            '"schema": 2',
            '"schema": 1',
            "has schema 1, this elastic reads 2 and no older one; .* prepare the corpus again",
        ),
        ('"vocab_size": 257', '"vocab_size": 300', "was changed"),
        ('"tokenizer"', '"tokeniser"', "is no manifest"),
        ('"splits"', '"split"', "is no manifest"),
        ("{", "[", "is no manifest"),
    ],
)
def test_a_changed_manifest_is_refused(prepared: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    manifest = copy(prepared, tmp_path) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        Corpus.open(tmp_path, "train")


def test_both_dtypes_are_read(prepared: Path) -> None:
    assert Corpus.open(prepared, "train").dtype == np.uint16
    assert dtype_of(65_536) == "uint16" and dtype_of(65_537) == "uint32"


def test_a_manifest_of_16000_shards_opens_in_well_under_a_second(prepared: Path, tmp_path: Path) -> None:
    """No shard is looked at: there are none."""
    few = read_manifest(prepared)
    shard = few.splits["train"][0]
    shards = tuple(replace(shard, file=f"train-{number:05d}-00000-{number:012x}.arrow") for number in range(16_000))
    (tmp_path / "manifest.json").write_text(replace(few, splits={"train": shards}).to_json())
    began_s = time.process_time()
    manifest = read_manifest(tmp_path)
    assert time.process_time() - began_s < 1.0
    assert len(manifest.splits["train"]) == 16_000
