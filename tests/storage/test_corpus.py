"""A prepared corpus read from a real S3 service: the same, each byte once for a node, whatever dies or is damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs

from elastic.config_sections import StorageOptions
from elastic.data.shards import PIECE_BYTES, Corpus, DataError, read_manifest
from elastic.data.upload import damages_behind, upload
from tests.data.behind import SEQ_LEN, behind, corpus_in
from tests.data.inputs import quiet
from tests.storage.reading import digest_of, outcome, process, windows_of
from tests.storage.servers import KEY, SECRET, Proxy, Seaweed

LIMIT_S = 60.0


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus_in(tmp_path_factory.mktemp("corpus"), tokens=8_000_000)


@pytest.fixture
def direct(seaweed: Seaweed) -> StorageOptions:
    return StorageOptions(endpoint=seaweed.endpoint, region="us-east-1")


@pytest.fixture
def there(prepared: Path, url: str, direct: StorageOptions, tmp_path: Path) -> str:
    upload(prepared, behind(url, tmp_path, prepared_options=direct), progress=quiet)
    return url


def wanted(prepared: Path, rank: int = 0, world: int = 1) -> str:
    corpus = Corpus.open(prepared, "train")
    return digest_of(corpus, windows_of(corpus, rank, world))


def used_bytes(prepared: Path) -> int:
    return sum(2 * shard.tokens for shard in read_manifest(prepared).splits["train"])


def cached(cache: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in cache.glob("*.bin"))


def test_two_processes_of_a_node_read_an_epoch_and_each_byte_once(
    prepared: Path, there: str, direct: StorageOptions, tmp_path: Path
) -> None:
    ours = [process(there, direct, tmp_path / "cache", rank=rank, world=2) for rank in (0, 1)]
    told = [outcome(one, LIMIT_S) for one in ours]
    assert [one["digest"] for one in told] == [wanted(prepared, rank, 2) for rank in (0, 1)]
    assert sum(one["nbytes"] for one in told) <= 1.1 * used_bytes(prepared), told
    later = outcome(process(there, direct, tmp_path / "cache"), LIMIT_S)
    assert (later["digest"], later["requests"]) == (wanted(prepared), 0)


def test_killed_while_it_fetches(prepared: Path, there: str, direct: StorageOptions, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = process(there, direct, cache, pause_s=0.01)
    deadline_s = time.monotonic() + LIMIT_S
    while cached(cache) < used_bytes(prepared) // 4:
        assert time.monotonic() < deadline_s and one.poll() is None
    os.kill(one.pid, signal.SIGKILL)
    one.communicate()
    assert outcome(process(there, direct, cache), LIMIT_S)["digest"] == wanted(prepared)


@pytest.mark.long  # SeaweedFS takes its time to come back; tests/data does it with a directory
def test_the_service_is_killed_and_comes_back(
    prepared: Path, there: str, direct: StorageOptions, tmp_path: Path, seaweed: Seaweed
) -> None:
    one = process(there, direct, tmp_path / "cache", pause_s=0.02)
    while cached(tmp_path / "cache") < 2 * PIECE_BYTES:
        assert one.poll() is None
    seaweed.stop()
    try:
        time.sleep(7.0)  # longer than one request is tried
        assert one.poll() is None
    finally:
        seaweed.start()
    told = outcome(one, LIMIT_S)
    assert told["digest"] == wanted(prepared)
    assert "storage does not answer, it is tried again without end" in told["log"] and "answers again" in told["log"]


def test_a_flipped_byte_is_named(prepared: Path, there: str, direct: StorageOptions, tmp_path: Path) -> None:
    fs = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=direct.endpoint, skip_instance_cache=True)
    shard = read_manifest(prepared).splits["train"][0]
    content = bytearray(fs.cat_file(f"{there}/{shard.file}"))
    content[PIECE_BYTES + 77] ^= 16
    fs.pipe_file(f"{there}/{shard.file}", bytes(content))
    place = behind(there, tmp_path / "cache", prepared_options=direct)
    with pytest.raises(DataError, match=rf"{shard.file}: bytes {PIECE_BYTES} to {2 * PIECE_BYTES} \(piece 1\) are dam"):
        Corpus.open(place, "train").gather(np.arange(1500, dtype=np.uint64), SEQ_LEN)
    told = list(damages_behind(place, read_manifest(place)))
    assert len(told) == 2 and f"bytes {PIECE_BYTES} to" in told[0]


def test_refused_is_said_at_once(there: str, options: StorageOptions, proxy: Proxy, tmp_path: Path) -> None:
    place = behind(there, tmp_path / "cache", prepared_options=options)
    corpus = Corpus.open(place, "train")
    proxy.rule = lambda request: "403 AccessDenied" if ".arrow" in request.path else ""
    with pytest.raises(DataError, match=r"data\.prepared: .*AccessDenied"):
        corpus.window(0, SEQ_LEN)
    with pytest.raises(DataError, match="prepare it first into a directory"):
        read_manifest(behind(f"{there}/nothing", tmp_path / "cache", prepared_options=options))


def test_cut_and_late_answers(
    prepared: Path, there: str, options: StorageOptions, proxy: Proxy, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def break_some(request: Any) -> str:
        if ".arrow" not in request.path:
            return ""
        seen.append(request)
        return {3: "cut", 5: "late", 7: "503 SlowDown", 9: "refuse"}.get(len(seen), "")

    proxy.rule = break_some
    corpus = Corpus.open(behind(there, tmp_path / "cache", prepared_options=options), "train")
    assert digest_of(corpus, windows_of(corpus, 0, 1)) == wanted(prepared)
    assert len(seen) > 9


def test_threads_start_at_first_use_and_end(
    there: str, direct: StorageOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.data.fetch.IDLE_S", 0.2)
    before = set(threading.enumerate())  # other corpora have some

    def fetching() -> bool:
        return any(thread.name == "fetch" for thread in set(threading.enumerate()) - before)

    corpus = Corpus.open(behind(there, tmp_path / "cache", prepared_options=direct), "train")
    assert not fetching()
    corpus.window(0, SEQ_LEN)
    assert fetching()
    deadline_s = time.monotonic() + LIMIT_S
    while fetching():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    corpus.window(2000, SEQ_LEN)


def test_a_full_disk(prepared: Path, there: str, direct: StorageOptions, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(cache)], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        told = outcome(process(there, direct, cache), LIMIT_S)
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=True)
    assert told["streams"] and told["digest"] == wanted(prepared)
    assert told["log"].count("can't write into data.cache") == 1 and "No space left on device" in told["log"]
