"""A corpus behind a URL reads as the same in a directory, through a cache on the node that outlives processes."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.config import Config
from elastic.data import cache, fetch, pieces
from elastic.data.cache import HEADER_BYTES, Cache
from elastic.data.shards import PIECE_BYTES, Corpus, DataError, read_manifest
from elastic.storage.errors import StorageError, StorageUnavailable
from tests.data.behind import SEQ_LEN, Gets, behind, copied, corpus_in
from tests.data.inputs import prepared_of, write_jsonl

LIMIT_S = 30.0


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch) -> Gets:
    return Gets(monkeypatch)


def train(place: Any) -> Corpus:
    return Corpus.open(place, "train")


def every(corpus: Corpus) -> np.ndarray:
    return np.random.default_rng(1).permutation(corpus.windows(SEQ_LEN)).astype(np.uint64)


def same(ours: Corpus, prepared: Path, indices: np.ndarray | None = None) -> bool:
    indices = every(ours) if indices is None else indices
    wanted = train(prepared).gather(indices, SEQ_LEN)
    return bool((ours.gather(indices, SEQ_LEN) == wanted).all())


def count_of_pieces(prepared: Path) -> int:
    """That hold tokens of training, at most."""
    return sum(-(-shard.nbytes // PIECE_BYTES) for shard in read_manifest(prepared).splits["train"])


def in_child(call: Callable[[], Any]) -> multiprocessing.Process:
    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    return child


def test_the_same_windows_and_each_piece_once(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    ours = train(behind(prepared, tmp_path / "cache"))
    assert ours.dtype == np.uint16 and not gets.pieces and not list(tmp_path.glob("cache/*.bin"))
    assert len(read_manifest(prepared).splits["train"]) > 2
    assert ours.window(3, SEQ_LEN).tolist() == train(prepared).window(3, SEQ_LEN).tolist() and len(gets.pieces) == 1
    assert same(ours, prepared)
    assert len(set(gets.pieces)) == len(gets.pieces) <= count_of_pieces(prepared)
    again = train(behind(prepared, tmp_path / "cache"))
    assert same(again, prepared) and len(gets.pieces) <= count_of_pieces(prepared)


def test_only_what_is_read_is_fetched(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    corpus = train(behind(prepared, tmp_path / "cache"))
    crossing = int(np.cumsum([shard.tokens for shard in read_manifest(prepared).splits["train"]])[0]) // SEQ_LEN
    assert same(corpus, prepared, np.array([crossing, 0, crossing], np.uint64)) and len(gets.pieces) == 3
    wanted = corpus.expect(np.array([1, 2, 6000], np.uint64), SEQ_LEN)
    assert wanted is not None and 0 < wanted.nbytes <= PIECE_BYTES  # the first two lie in a piece that is here
    until(lambda: wanted.is_here)
    assert corpus.expect(np.array([6000], np.uint64), SEQ_LEN).nbytes == 0 and len(gets.pieces) == 4


def until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_processes_of_a_node_fetch_a_piece_once(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    names = tmp_path / "names"

    def child() -> None:
        gets.rule = lambda key, start, data: (time.sleep(0.02), data)[1]
        assert same(train(behind(prepared, tmp_path / "cache")), prepared)
        with names.open("a") as file:
            file.write("".join(f"{key} {start}\n" for key, start in gets.pieces))
        os._exit(0)

    children = [in_child(child) for _ in range(3)]
    for one in children:
        one.join(LIMIT_S)
        assert one.exitcode == 0
    lines = names.read_text().splitlines()
    assert len(set(lines)) == len(lines) <= count_of_pieces(prepared)


def test_killed_while_it_writes(prepared: Path, tmp_path: Path, gets: Gets, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def half(descriptor: int, data: Any, offset: int) -> int:
        if len(data) == PIECE_BYTES and offset:
            real(descriptor, bytes(data[:1000]), offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, data, offset)

    def child() -> None:
        monkeypatch.setattr(os, "pwrite", half)
        same(train(behind(prepared, tmp_path / "cache")), prepared)

    one = in_child(child)
    one.join(LIMIT_S)
    assert one.exitcode == -signal.SIGKILL
    assert same(train(behind(prepared, tmp_path / "cache")), prepared)


def test_after_a_reboot_what_is_there_is_held_against_its_crc(
    prepared: Path, tmp_path: Path, gets: Gets, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same(train(behind(prepared, tmp_path / "cache")), prepared)
    shard = read_manifest(prepared).splits["train"][1]
    with (tmp_path / "cache" / f"{shard.sha256}.bin").open("r+b") as file:
        file.seek(PIECE_BYTES + 5000)
        byte = file.read(1)[0]
        file.seek(PIECE_BYTES + 5000)
        file.write(bytes([byte ^ 1]))
    monkeypatch.setattr(cache, "_boot_id", lambda: b"another")
    gets.pieces.clear()
    assert same(train(behind(prepared, tmp_path / "cache")), prepared)
    assert gets.pieces == [(shard.file, PIECE_BYTES)]
    state = (tmp_path / "cache" / f"{shard.sha256}.state").read_bytes()
    assert b"another" in state[:HEADER_BYTES] and set(state[HEADER_BYTES:]) == {cache.PRESENT}


def test_a_damaged_state_file_begins_anew(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    assert same(train(behind(prepared, tmp_path / "cache")), prepared)
    for shard, content in zip(read_manifest(prepared).splits["train"], (b"", b"x" * 70)):
        (tmp_path / "cache" / f"{shard.sha256}.state").write_bytes(content)
        (tmp_path / "cache" / f"{shard.sha256}.crc").write_bytes(b"nonsense")
    assert same(train(behind(prepared, tmp_path / "cache")), prepared)


def test_wrong_bytes_are_fetched_again_then_named(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    seen: list[int] = []

    def once(key: str, start: int, data: bytes) -> bytes:
        seen.append(start)
        return data if len(seen) > 1 else b"x" + data[1:]

    gets.rule = once
    assert same(train(behind(prepared, tmp_path / "cache")), prepared)
    there = copied(prepared, tmp_path / "there")
    shard = read_manifest(there).splits["train"][0]
    with (there / shard.file).open("r+b") as file:
        file.seek(PIECE_BYTES + 7)
        file.write(b"\x00\x01\x02")
    gets.rule = lambda key, start, data: data
    corpus = train(behind(there, tmp_path / "other"))
    assert same(corpus, prepared, np.arange(900, dtype=np.uint64))
    named = rf"{shard.file}: bytes {PIECE_BYTES} to {2 * PIECE_BYTES} \(piece 1\) are damaged: .*, 3 times; upload"
    with pytest.raises(DataError, match=named):
        corpus.gather(np.arange(1500, dtype=np.uint64), SEQ_LEN)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: path.unlink(), "is missing, which the manifest names: the corpus there was changed or deleted"),
        (lambda path: path.write_bytes(b"short"), r"has 5 bytes, the manifest says \d+: it was changed"),
        (lambda path: path.with_suffix(".crc").write_bytes(b"1234"), "is not the one that the manifest names"),
    ],
)
def test_a_corpus_that_changed_is_one_sentence(
    prepared: Path, tmp_path: Path, change: Callable[[Path], Any], sentence: str
) -> None:
    there = copied(prepared, tmp_path / "there")
    corpus = train(behind(there, tmp_path / "cache"))
    change(there / read_manifest(there).splits["train"][0].file)
    with pytest.raises(DataError, match=sentence):
        corpus.window(0, SEQ_LEN)


def test_refused_is_an_error_at_once_and_down_is_waited_for(
    prepared: Path, tmp_path: Path, gets: Gets, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "THREADS", 1)  # else the third refusal may be told after the first answer
    answers = iter([StorageUnavailable("x: can't read: no answer")] * 3)

    def down(key: str, start: int, data: bytes) -> bytes:
        for error in answers:
            raise error
        return data

    gets.rule = down
    with caplog.at_level(logging.WARNING):
        assert same(train(behind(prepared, tmp_path / "cache")), prepared)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "does not answer" in told[0] and "no answer" in told[0] and "answers again" in told[1]

    def refuse(key: str, start: int, data: bytes) -> bytes:
        raise StorageError("AccessDenied: these credentials may not do this")

    gets.rule = refuse
    with pytest.raises(DataError, match=r"data\.prepared: AccessDenied"):
        train(behind(prepared, tmp_path / "other")).window(0, SEQ_LEN)


def test_a_late_answer_is_asked_for_twice(
    prepared: Path, tmp_path: Path, gets: Gets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LATE_S_FIRST", 0.1)
    slow: list[int] = []

    def first_is_slow(key: str, start: int, data: bytes) -> bytes:
        slow.append(start)
        time.sleep(3.0 if len(slow) == 1 else 0.0)
        return data

    gets.rule = first_is_slow
    corpus = train(behind(prepared, tmp_path / "cache"))
    began_s = time.monotonic()
    assert same(corpus, prepared, np.array([5], np.uint64)) and time.monotonic() - began_s < 2.0
    assert corpus.remote is not None
    assert (corpus.remote.pieces.counts.requests, corpus.remote.pieces.counts.second_requests) == (2, 1)


def test_old_shards_make_room(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TEND_EVERY_S", 0.0)
    bound = 4 << 20
    corpus = train(behind(prepared, tmp_path / "cache", cache_bytes_max=bound))
    for _ in range(2):
        for index in range(0, corpus.windows(SEQ_LEN), 200):
            assert same(corpus, prepared, np.array([index], np.uint64))
        used = sum(512 * path.stat().st_blocks for path in (tmp_path / "cache").glob("*.bin"))
        assert used <= bound + 2 * PIECE_BYTES


def test_a_deleted_shard_is_held_anew(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    corpus = train(behind(prepared, tmp_path / "cache"))
    assert same(corpus, prepared, np.arange(900, dtype=np.uint64))
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert same(corpus, prepared)
    assert same(train(behind(prepared, tmp_path / "cache")), prepared)


@pytest.mark.parametrize("what", ["full", "file", "limit"])
def test_a_cache_that_refuses_is_read_without(
    prepared: Path, tmp_path: Path, gets: Gets, monkeypatch: pytest.MonkeyPatch, caplog: Any, what: str
) -> None:
    place, real = tmp_path / "cache", os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if len(data) == PIECE_BYTES and len(gets.pieces) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    if what == "full":
        monkeypatch.setattr(os, "pwrite", full)
    elif what == "file":
        place.write_bytes(b"")
    else:
        monkeypatch.setattr(os, "ftruncate", lambda *given: (_ for _ in ()).throw(OSError(errno.EFBIG, "too large")))
    monkeypatch.setattr(pieces, "STREAM_BYTES", 4 << 20)
    corpus = train(behind(prepared, place))
    indices = every(corpus)[:300]
    with caplog.at_level(logging.WARNING):
        assert same(corpus, prepared, indices)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"can't write into data.cache {place}"
    ]
    assert corpus.remote is not None
    stream = corpus.remote.pieces._stream
    assert corpus.remote.pieces.streams and stream.nbytes <= 4 << 20
    assert corpus.expect(indices[:3], SEQ_LEN) is not None


def test_locks_exclude_descriptors_not_only_processes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"")
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert cache._lock(first, 5, 1) and not cache._lock(second, 5, 1) and cache._lock(second, 6, 1)
    os.close(first)
    assert cache._lock(second, 5, 1)
    os.close(second)


def test_the_manifest_is_kept_for_an_outage(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = behind(prepared, tmp_path / "cache")
    wanted = read_manifest(place).fingerprint
    with pytest.raises(DataError, match="prepare it first into a directory, then `elastic data upload` it there"):
        read_manifest(behind(tmp_path / "nothing", tmp_path / "cache"))

    def down(*given: Any) -> bytes:
        raise StorageUnavailable("no answer")

    monkeypatch.setattr("elastic.storage.store.DirectoryStore.get", down)
    assert read_manifest(place).fingerprint == wanted
    with pytest.raises(StorageUnavailable):
        read_manifest(behind(prepared, tmp_path / "never"))


def test_files_of_dead_processes_go(prepared: Path, tmp_path: Path) -> None:
    shard = read_manifest(prepared).splits["train"][0]
    ours = Cache(str(tmp_path), 1 << 30)
    ours.hold(shard)
    (old := tmp_path / "x.crc.1.tmp").write_bytes(b"")
    os.utime(old, (0, 0))
    assert ours.make_room(set(), is_full=True) == [] and not old.exists()


def test_more_shards_than_may_be_open(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "HELD_MAX", 2)
    corpus = train(behind(prepared, tmp_path / "cache"))
    for index in range(0, corpus.windows(SEQ_LEN), 300):
        assert same(corpus, prepared, np.array([index], np.uint64))
    assert same(corpus, prepared) and corpus.remote is not None and len(corpus.remote.pieces._held) <= 3


def test_a_fork_begins_anew(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    corpus = train(behind(prepared, tmp_path / "cache"))
    assert same(corpus, prepared, np.array([0], np.uint64))

    def child() -> None:
        assert same(corpus, prepared)
        os._exit(0)

    one = in_child(child)
    one.join(LIMIT_S)
    assert one.exitcode == 0 and same(corpus, prepared)


def test_masks_are_fetched_too(tmp_path: Path, gets: Gets) -> None:
    lines = [{"prompt": f"question {number} ", "completion": f"answer {number}"} for number in range(400)]
    write_jsonl(tmp_path / "a.jsonl", lines)
    prepared = prepared_of(tmp_path / "a.jsonl", tmp_path / "out", shard_bytes=4096)
    ours, theirs = train(behind(prepared, tmp_path / "cache")), train(prepared)
    indices = np.arange(ours.windows(16), dtype=np.uint64)
    wanted = ours.expect(indices, 16)
    assert wanted is not None
    until(lambda: wanted.is_here)
    a, b = ours.rows(indices, 16), theirs.rows(indices, 16)
    assert a.learned is not None and b.learned is not None
    assert (a.tokens == b.tokens).all() and (a.learned == b.learned).all() and not a.learned.all()


def test_documents_apart(prepared: Path, tmp_path: Path, gets: Gets) -> None:
    ours, theirs = train(behind(prepared, tmp_path / "cache")), train(prepared)
    ours.is_apart = theirs.is_apart = True
    indices = every(ours)[:200]
    a, b = ours.rows(indices, SEQ_LEN), theirs.rows(indices, SEQ_LEN)
    assert a.documents is not None and b.documents is not None and a.documents.max() > 0
    assert (a.documents == b.documents).all() and (a.tokens == b.tokens).all()


def test_bins_are_not_read_from_a_url(prepared: Path, tmp_path: Path) -> None:
    data = {"prepared": f"file://{prepared}", "cache": str(tmp_path), "packing": "best_fit"}
    with pytest.raises(
        ValueError, match=r"data\.packing best_fit can't read file://.*: its plans and documents must lie"
    ):
        Config.model_validate({"data": data})
