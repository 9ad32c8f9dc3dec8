"""Preparing on a real Ray cluster of this machine: the same bytes, and errors that keep their sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from elastic.cluster import ray_data
from elastic.cluster.ray_core import signals_kept
from elastic.data.prepare import prepare
from elastic.data.shards import Corpus, DataError, read_manifest
from tests.data.inputs import as_jsonl, contents, data_of, prepared_of, quiet, rows, write_jsonl
from tests.data.test_tokenizer import train


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with signals_kept():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_the_same_bytes_as_here(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by relative paths, which mean nothing where a task runs."""
    (tmp_path / "in").mkdir()
    for number in range(3):
        write_jsonl(tmp_path / f"in/{number}.jsonl", rows(100, 100 * number))
    monkeypatch.chdir(tmp_path)
    data = data_of("in", Path("ray"), shard_bytes=2048, tokenizer=train(tmp_path / "t.json", "</s>"))
    data = data.model_copy(update={"tokenizer": "t.json"})
    assert contents(prepare(data, progress=quiet, run_groups=ray_data.run_groups).parent) == contents(
        prepared_of(tmp_path / "in", tmp_path / "here", shard_bytes=2048, tokenizer=str(tmp_path / "t.json"))
    )


def test_a_bad_line_is_named(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(rows(100)) + b"no JSON\n")
    data = data_of(tmp_path, tmp_path / "out", shard_bytes=2048)
    with pytest.raises(DataError, match=r"a\.jsonl line 101 is no JSON"):
        prepare(data, progress=quiet, run_groups=ray_data.run_groups)


def test_no_cluster_is_said() -> None:
    told = pytest.raises(DataError, match=r"can't prepare on Ray: .*; start one, or leave --address out")
    with told, ray_data.joined("127.0.0.1:9"):
        pass


def token_rows(count: int) -> list[dict[str, list[int]]]:
    return [{"ids": [number % 250, number // 250, 7], "loss_mask": [0, 1, number % 2]} for number in range(count)]


def test_rows_of_ray_data_become_a_corpus_whatever_their_blocks(cluster: None, tmp_path: Path) -> None:
    """In their order, with their masks; mapped by Ray Data on the way."""

    def more(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "ids": [*row["ids"], 256]}

    fingerprints = set()
    for blocks in (1, 7):
        dataset = ray.data.from_items(token_rows(20_000), override_num_blocks=blocks).map(more)
        dataset = dataset.map(lambda row: {**row, "loss_mask": [*row["loss_mask"], 1]})
        out = tmp_path / f"out{blocks}"
        manifest = ray_data.materialise(dataset, out, vocab_size=257, column="ids", progress=quiet)
        assert manifest == out / "manifest.json" and sorted(tmp_path.glob("*.rows-*")) == []
        fingerprints.add(read_manifest(out).fingerprint)
        corpus = Corpus.open(out, "train")
        tokens = np.concatenate([corpus.window(n, 4)[:4] for n in range(corpus.windows(4))]).reshape(-1, 4)
        numbers = tokens[:, 0].astype(int) + 250 * tokens[:, 1]
        assert (np.diff(numbers) > 0).all() and len(numbers) > 18_000
        assert corpus.masks is not None and corpus.masks.window(5, 4)[:4].tolist() == [0, 1, numbers[5] % 2, 1]
    assert len(fingerprints) == 1


def test_rows_that_are_no_tokens_are_refused_and_nothing_is_left(cluster: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for items, options, told in (
        (token_rows(50), {}, "no column 'tokens', only ids, loss_mask; give column="),
        ([{"tokens": "text"}], {}, "column tokens holds string, wanted lists of integers"),
        ([{"tokens": [1, 300]}] * 50, {}, "has token 300, wanted 0 to 256"),
        ([{"tokens": [1, 2], "loss_mask": [1]}] * 50, {}, "row 0 has 2 tokens and a loss_mask of 1"),
    ):
        with pytest.raises(DataError, match=told):
            ray_data.materialise(ray.data.from_items(items), out, vocab_size=257, progress=quiet, **options)
        assert not (out / "manifest.json").exists() and sorted(tmp_path.glob("*.rows-*")) == []
    with pytest.raises(DataError, match="the dataset has no"):
        ray_data.materialise(ray.data.from_items(token_rows(5)).filter(lambda row: False), out, vocab_size=257)
