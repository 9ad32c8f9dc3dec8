"""Uploads in parts that never ended are found and aborted; what a person does works on a run in S3 as well."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import s3fs

from elastic import cli
from elastic.checkpoint.log import CommitLog
from elastic.config import Place
from elastic.config_sections import StorageOptions
from elastic.report import point_to
from elastic.storage.object_store import ObjectStore
from tests.checkpoint.stored import commits
from tests.storage.servers import KEY, SECRET, Seaweed

LATER_S = 3600.0


@pytest.fixture
def s3(seaweed: Seaweed) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=seaweed.endpoint, skip_instance_cache=True)


def begin(s3: s3fs.S3FileSystem, url: str, key: str) -> str:
    """An upload of two parts that nobody ends."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    begun: dict[str, Any] = s3.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{key}")
    for number in (1, 2):
        s3.call_s3(
            "upload_part",
            Bucket=bucket,
            Key=f"{prefix}/{key}",
            UploadId=begun["UploadId"],
            PartNumber=number,
            Body=b"part",
        )
    return key


def test_they_are_found_by_age_and_aborted(
    s3: s3fs.S3FileSystem, store: ObjectStore, url: str, options: StorageOptions
) -> None:
    store.put("data/1-1-1/0.bin", b"whole")
    assert store.unfinished(time.time() + LATER_S, delete=True) == []
    ours = [begin(s3, url, f"data/1-1-2/{rank}.bin") for rank in range(5)]
    begin(s3, f"{url}0", "data/1-1-2/0.bin")  # another run's, whose name begins like ours
    assert store.unfinished(time.time() - LATER_S, delete=True) == [], "they may still be under way"
    assert sorted(store.unfinished(time.time() + LATER_S, delete=False)) == ours
    assert sorted(store.unfinished(time.time() + LATER_S, delete=True)) == ours
    assert store.unfinished(time.time() + LATER_S, delete=False) == []
    assert len(ObjectStore(f"{url}0", options).unfinished(time.time() + LATER_S, delete=False)) == 1
    assert list(store.list("")) == ["data/1-1-1/0.bin"]


def test_the_commands_find_a_run_in_s3_by_its_directory(
    store: ObjectStore, url: str, options: StorageOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    point_to(Place(directory=tmp_path / "run", url=url, options=options))
    for arguments, code, told in (
        (["pin", "20"], 0, "step 20 (log entry 3) is pinned\n"),
        (["unpin", "20"], 0, "step 20 (log entry 3) is not pinned any more\n"),
        (["rm", "10"], 0, "removed the checkpoint of step 10 (log entry 2), 128 B\n"),
        (["verify", "--all"], 0, "step 20 (log entry 3): 128 bytes of 1 tensors verified\n"),
        (["gc"], 0, "deleted 0 objects, 0 B, and 0 unfinished uploads\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["ckpt", arguments[0], str(tmp_path / "run"), *arguments[1:]])
        assert (int(ended.value.code or 0), capsys.readouterr().out) == (code, told)
    assert sorted({name.split("/")[1] for name in store.list("data/")}) == ["1-1-20"]
