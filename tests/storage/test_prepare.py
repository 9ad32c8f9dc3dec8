"""Preparing from object storage: the same bytes as from a directory, a sentence where it can't be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import s3fs

from elastic.config import ConfigError
from elastic.config_sections import StorageOptions
from elastic.data.prepare import prepare
from elastic.data.shards import DataError
from tests.data.inputs import WRITERS, as_jsonl, contents, data_of, prepared_of, quiet, rows
from tests.storage.servers import KEY, SECRET, Proxy, Seaweed


@pytest.fixture
def options(seaweed: Seaweed) -> StorageOptions:
    return StorageOptions(endpoint=seaweed.endpoint, region="us-east-1")


@pytest.fixture
def fs(seaweed: Seaweed, bucket: str) -> Any:
    return s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=seaweed.endpoint, skip_instance_cache=True)


def test_the_same_bytes_as_from_a_directory(tmp_path: Path, fs: Any, url: str, options: StorageOptions) -> None:
    (tmp_path / "in/data").mkdir(parents=True)
    for number, (suffix, write) in enumerate(WRITERS.items()):
        write(tmp_path / f"in/data/{number}{suffix}", rows(100, 100 * number))
    for number in range(10):
        (tmp_path / f"in/{number}.py").write_text("x" * 100 * number)
    fs.put(str(tmp_path / "in"), f"{url.removeprefix('s3://')}/in", recursive=True)
    here = prepared_of(tmp_path / "in", tmp_path / "here", shard_bytes=2048)
    there = prepared_of(f"{url}/in", tmp_path / "there", shard_bytes=2048, corpus_options=options)
    assert contents(here) == contents(there)
    one = f"{url}/in/data/0.jsonl"
    assert contents(prepared_of(one, tmp_path / "one", corpus_options=options)) == contents(
        prepared_of(tmp_path / "in/data/0.jsonl", tmp_path / "own")
    )


def test_an_object_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, fs: Any, url: str, options: StorageOptions
) -> None:
    fs.pipe_file(f"{url}/a.jsonl", as_jsonl(rows(200)))

    def run_groups(function: Any, groups: Any) -> Any:
        fs.pipe_file(f"{url}/a.jsonl", as_jsonl(rows(201)))
        return map(function, groups)

    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        prepare(data_of(url, tmp_path / "out", corpus_options=options), progress=quiet, run_groups=run_groups)


def test_storage_that_does_not_answer_is_no_damaged_file(
    tmp_path: Path, fs: Any, url: str, options: StorageOptions, proxy: Proxy
) -> None:
    fs.pipe_file(f"{url}/a.jsonl", as_jsonl(rows(200)))
    proxy.rule = lambda request: "503 InternalError" if request.method == "GET" and "a.jsonl" in request.path else ""
    with pytest.raises(DataError, match=r"can't read s3://.*a\.jsonl: storage did not answer \(.*\); what is done"):
        through = options.model_copy(update={"endpoint": proxy.endpoint})
        prepare(data_of(url, tmp_path / "out", corpus_options=through), progress=quiet)


def test_what_is_not_there_or_forbidden_is_said(
    tmp_path: Path, url: str, options: StorageOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no non-empty file ending in"):
        prepare(data_of(f"{url}/nothing", tmp_path / "out", corpus_options=options), progress=quiet)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    other = options.model_copy(update={"region": "us-east-2"})  # no filesystem of before is taken
    with pytest.raises(DataError, match=r"can't list s3://.*; are address, credentials and network right\?") as told:
        prepare(data_of(url, tmp_path / "out", corpus_options=other), progress=quiet)
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()
