"""Store, commit log and committer: who wins, who is fenced, what damage does, what is kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.checkpoint.committer import Committer
from elastic.checkpoint.errors import CheckpointError, Fenced, TooNew
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import build, restore_plan
from elastic.checkpoint.shard import check, of_object, sign, table_object
from elastic.config_sections import Checkpoint
from elastic.events import CheckpointCommitted, CommitFailed
from elastic.storage.errors import ObjectMissing, StorageError
from elastic.storage.store import DirectoryStore, Store, open_store
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import ABOUT, commits, manifest, upload

LIMIT_S = 30.0


# ---------------------------------------------------------------- store


def test_the_contract_of_a_store(store: Store) -> None:
    assert store.list("") == {}
    store.put("data/a/0.bin", b"0123456789")
    store.put("data/a/0.bin", memoryview(b"abcdefghij"))
    store.put("data/b.bin", b"x")
    assert store.get("data/a/0.bin") == b"abcdefghij" and store.get("data/a/0.bin", 2, 5) == b"cde"
    assert store.get("data/a/0.bin", 8, 50) == b"ij"
    assert store.put_if_absent("log/1.json", b"first") and not store.put_if_absent("log/1.json", b"second")
    assert store.get("log/1.json") == b"first"
    assert store.list("data/") == {"data/a/0.bin": 10, "data/b.bin": 1}
    assert store.list("data/a") == {"data/a/0.bin": 10} and store.list("nothing/") == {}
    store.delete("data/a/0.bin")
    store.delete("data/a/0.bin")
    assert store.list("") == {"data/b.bin": 1, "log/1.json": 5}
    with pytest.raises(ObjectMissing):
        store.get("data/a/0.bin")
    for bad in ("", "/x", "a//b", "../x", "a/.hidden"):
        with pytest.raises(StorageError):
            store.put(bad, b"")


def test_a_file_half_written_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/.tmp-1-2-3-0.bin").write_bytes(b"half")
    assert DirectoryStore(tmp_path).list("data/") == {}


def test_a_folder_that_another_writer_empties_is_made_again(tmp_path: Path) -> None:
    """As when all hosts probe one directory at once: whoever deletes the last object takes the folder away."""

    def churn(name: str) -> None:
        store = DirectoryStore(tmp_path)
        for _ in range(300):
            store.put(f"probe/{name}", b"x")
            store.delete(f"probe/{name}")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(churn, "abcd")) == [None] * 4


def test_what_storage_refuses_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="can't write"):
        open_store(str(tmp_path / "file")).put("data/0.bin", b"x")
    with pytest.raises(StorageError, match="storage nosuch://: "):
        open_store("nosuch://x")
    open_store(f"file://{tmp_path}/ok").put("data/0.bin", b"x")
    assert (tmp_path / "ok/data/0.bin").read_bytes() == b"x"


# ---------------------------------------------------------------- log


def test_claims_rise_and_the_newest_manifest_is_found(store: Store) -> None:
    log = CommitLog(store)
    assert (log.claim("a"), log.newest()) == (1, None)
    assert log.commit(1, manifest(store, key(1, 10))) == 2
    assert log.commit(1, manifest(store, key(1, 20))) == 3
    other = CommitLog(store)
    assert other.claim("b") == 2
    found = other.newest()
    assert found is not None and (found.key, found.samples, found.world) == (key(1, 20), 480, 2)
    plan = restore_plan(found)
    assert [(s.rank, s.tier, s.object) for s in plan.sources] == [
        (0, "storage", "data/1-1-20/0.bin"),
        (1, "storage", "data/1-1-20/1.bin"),
    ]
    assert [entry.number for entry in other.entries()] == [1, 2, 3, 4]


def test_the_older_attempt_is_fenced(store: Store) -> None:
    old, new = CommitLog(store), CommitLog(store)
    assert old.claim("old") == 1
    ready = manifest(store, key(1, 10))
    assert new.claim("new") == 2
    with pytest.raises(Fenced) as caught:
        old.commit(1, ready)
    assert caught.value.by_attempt == 2 and new.newest() is None


def _race(root: Path, attempt: int, start: multiprocessing.synchronize.Event, out: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    store = DirectoryStore(root)
    log = CommitLog(store)
    ready = manifest(store, key(attempt, attempt), attempt)
    log.entries()
    start.wait(LIMIT_S)
    try:
        out.put((attempt, log.commit(attempt, ready) if attempt == 1 else log.claim("second"), 0))
    except Fenced as error:
        out.put((attempt, 0, error.by_attempt))


def test_commit_and_claim_race_for_one_number_and_exactly_one_gets_it(tmp_path: Path) -> None:
    """Real processes: either the commit came first (then the claim is later), or it is fenced."""
    context = multiprocessing.get_context("fork")
    for turn in range(6):
        root = tmp_path / str(turn)
        assert CommitLog(DirectoryStore(root)).claim("first") == 1
        start, out = context.Event(), context.Queue()
        racers = [context.Process(target=_race, args=(root, attempt, start, out)) for attempt in (1, 2)]
        for racer in racers:
            racer.start()
        start.set()
        results = {attempt: rest for attempt, *rest in (out.get(timeout=LIMIT_S) for _ in racers)}
        for racer in racers:
            racer.join(LIMIT_S)
        entries = CommitLog(DirectoryStore(root)).entries()
        kinds = ["manifest" if entry.manifest else "claim" for entry in entries]
        assert results[2] == [2, 0]
        if results[1][1]:
            assert results[1] == [0, 2] and kinds == ["claim", "claim"]
        else:
            assert results[1] == [2, 0] and kinds == ["claim", "manifest", "claim"]


def test_many_claims_at_once_are_all_different(store: Store) -> None:
    claims: list[int] = []
    threads = [threading.Thread(target=lambda: claims.append(CommitLog(store).claim("x"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(claims) == list(range(1, 9))


def damage_table(store: Store) -> None:
    raw = store.get("data/1-1-20/1.json")
    store.put("data/1-1-20/1.json", raw.replace(b'"rank":1', b'"rank":0'))


def damage_entry(store: Store) -> None:
    raw = bytearray(store.get("log/00000003.json"))
    raw[len(raw) // 2] ^= 1
    store.delete("log/00000003.json")
    store.put("log/00000003.json", bytes(raw))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda store: store.delete("data/1-1-20/1.bin"), "no bytes"),
        (lambda store: store.put("data/1-1-20/1.bin", b"short"), "5 bytes"),
        (lambda store: store.delete("data/1-1-20/0.json"), "0.json"),
        (damage_table, "not the one that was committed"),
        (damage_entry, "log/00000003.json"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_loudly_for_the_one_before(
    store: Store, damage: Callable[[Store], None], word: str
) -> None:
    log = CommitLog(store)
    log.claim("a")
    log.commit(1, manifest(store, key(1, 10)))
    log.commit(1, manifest(store, key(1, 20)))
    damage(store)
    said: list[str] = []
    found = CommitLog(store, said.append).newest()
    assert found is not None and found.key == key(1, 10)
    assert len(said) == 1 and word in said[0]


@pytest.mark.parametrize("number", [1, 2], ids=["claim", "manifest"])
def test_a_newer_schema_is_refused_not_skipped(store: Store, number: int) -> None:
    """An older checkpoint in its place would undo what a newer elastic trained."""
    log = CommitLog(store)
    log.claim("a")
    log.commit(1, manifest(store, key(1, 10)))
    body = check(store.get(f"log/{number:08d}.json"), name="x")
    body.pop("sha256")
    store.put("log/00000003.json", sign({**body, "schema": 99}))
    for refused in (CommitLog(store).newest, lambda: CommitLog(store).claim("b")):
        with pytest.raises(TooNew, match=r"log/00000003.json has schema 99, this elastic reads 2: .*; upgrade elastic"):
            refused()


def test_a_newer_shard_is_refused_with_a_sentence(store: Store) -> None:
    (uploaded, _) = upload(store, key(1, 10))
    name = table_object(uploaded.object)
    body = check(store.get(name), name=name)
    body.pop("sha256")
    with pytest.raises(TooNew, match="has schema 2, this elastic reads 1: a newer one wrote it; upgrade elastic"):
        of_object(sign({**body, "schema": 2}), name=name)


def test_a_manifest_needs_every_shard_whole(store: Store) -> None:
    uploads = upload(store, key(1, 10), world=3)
    arguments = {"about": ABOUT, "attempt": 1, "key": key(1, 10), "samples": 0}
    assert build(store, uploads, **arguments).world == 3  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1\]"):
        build(store, uploads[:2], **arguments)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"wanted rank 0 of step 11"):
        build(store, uploads, **{**arguments, "key": key(1, 11)})  # type: ignore[arg-type]
    store.put(uploads[1].object, b"cut")
    with pytest.raises(CheckpointError, match="has 3 bytes"):
        build(store, uploads, **arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------- committer


def committer(store: Store, attempt: int, *, keep: int = 2, said: list[str] | None = None) -> Committer:
    log = CommitLog(store, (said if said is not None else []).append)
    return Committer(store, log, attempt, about=ABOUT, samples_per_step=24, keep=Checkpoint(keep=keep))


def outcome(worker: Committer) -> CheckpointCommitted | CommitFailed:
    deadline = time.monotonic() + LIMIT_S
    while True:
        if found := worker.results():
            (result,) = found
            return result
        assert time.monotonic() < deadline, "no result of the commit"
        os.sched_yield()


def test_the_newest_are_kept_and_the_rest_is_deleted_after_the_commit(store: Store) -> None:
    CommitLog(store).claim("a")
    upload(store, key(1, 5))  # never committed
    store.put("data/foreign/x.bin", b"not ours")
    worker = committer(store, 1)
    for step in (10, 20, 30):
        worker.submit(key(1, step), upload(store, key(1, step)), {})
        result = outcome(worker)
        assert isinstance(result, CheckpointCommitted) and result.key == key(1, step)
    assert worker.close()
    folders = sorted({name.split("/")[1] for name in store.list("data/")})
    assert folders == ["1-1-20", "1-1-30", "foreign"]
    newest = CommitLog(store).newest()
    assert newest is not None and newest.key == key(1, 30)
    assert [entry.number for entry in CommitLog(store).checkpoints()] == [3, 4]


def test_the_base_in_use_outlives_what_was_given_up(store: Store) -> None:
    """keep 2: after going back from 30 to 10 the first commit keeps 10, the only one it could fall back to."""
    CommitLog(store).claim("a")
    commits(store, 10, 20, 30)
    CommitLog(store).claim("back", base=2)
    worker = committer(store, 2)
    found = []
    for step in (12, 14):
        worker.submit(key(2, step), upload(store, key(2, step), attempt=2), {})
        assert isinstance(outcome(worker), CheckpointCommitted)
        found.append(sorted({name.split("/")[1] for name in store.list("data/")}))
    assert worker.close()
    assert found == [["1-1-10", "2-2-12"], ["2-2-12", "2-2-14"]]


def test_what_comes_before_a_commit_can_fail_it(store: Store) -> None:
    CommitLog(store).claim("a")

    def refuse() -> None:
        raise CheckpointError("the journal is not there yet")

    log = CommitLog(store)
    worker = Committer(store, log, 1, about=ABOUT, samples_per_step=1, keep=Checkpoint(keep=2), before_commit=refuse)
    worker.submit(key(1, 10), upload(store, key(1, 10)), {})
    result = outcome(worker)
    assert isinstance(result, CommitFailed) and "not there yet" in result.reason and CommitLog(store).newest() is None
    assert worker.close()


def test_a_commit_asked_for_twice_is_one_checkpoint(store: Store) -> None:
    CommitLog(store).claim("a")
    worker = committer(store, 1)
    uploads = upload(store, key(1, 10))
    worker.submit(key(1, 10), uploads, {})
    first = outcome(worker)
    worker.close()
    again = committer(store, 1)
    again.submit(key(1, 10), uploads, {})
    assert outcome(again) == first
    again.close()


def test_failures_are_results_and_the_worker_lives(store: Store) -> None:
    CommitLog(store).claim("a")
    worker = committer(store, 1)
    worker.submit(key(1, 10), upload(store, key(1, 10))[:1], {})
    result = outcome(worker)
    assert isinstance(result, CommitFailed) and "ranks [0]" in result.reason and not result.fenced_by
    CommitLog(store).claim("b")
    worker.submit(key(1, 10), upload(store, key(1, 10)), {})
    result = outcome(worker)
    assert isinstance(result, CommitFailed) and result.fenced_by == 2
    assert store.list("data/1-1-10/"), "a fenced attempt deletes nothing"
    worker.close()


def test_log_entries_are_plain_json_that_a_stranger_can_read(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    CommitLog(store).claim("me")
    entry = json.loads((tmp_path / "log/00000001.json").read_bytes())
    assert (entry["kind"], entry["attempt"], entry["who"]) == ("claim", 1, "me")
