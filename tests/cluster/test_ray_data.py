"""Preparing on a real Ray cluster of this machine: the same bytes, and errors that keep their sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from elastic.cluster import ray_data
from elastic.cluster.ray_core import signals_kept
from elastic.data.prepare import prepare
from elastic.data.shards import DataError
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
