"""The store over a real S3 service: the contract, and what it says and does when requests go wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic import segments
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.probe import check_storage, probe
from elastic.cluster.ray_train import checkpoint_of
from elastic.config import ConfigError, Place
from elastic.config_sections import StorageOptions
from elastic.storage import s3_bytes
from elastic.storage.bandwidth import Bandwidth
from elastic.storage.errors import ObjectMissing, StorageError, StorageUnavailable
from elastic.storage.object_store import PART_BYTES, ObjectStore
from elastic.storage.store import store_at
from elastic.telemetry import journal
from tests.storage.servers import Proxy, Request


def test_the_contract(store: ObjectStore) -> None:
    assert store.list("data/") == {}
    with pytest.raises(ObjectMissing):
        store.get("data/1/0.bin")
    store.put("data/1/0.bin", memoryview(b"0123456789"))
    store.put("data/1/1.bin", b"")
    assert store.get("data/1/0.bin") == b"0123456789"
    assert store.get("data/1/0.bin", 2, 5) == b"234"
    assert store.get("data/1/0.bin", 8, 20) == b"89"
    assert store.get("data/1/0.bin", 20, 30) == b""
    assert store.get("data/1/1.bin") == b""
    assert store.list("data/1/") == {"data/1/0.bin": 10, "data/1/1.bin": 0}
    assert store.list("data/1/0") == {"data/1/0.bin": 10}
    assert store.list("log/") == {}
    store.delete("data/1/0.bin")
    store.delete("data/1/0.bin")
    assert list(store.list("")) == ["data/1/1.bin"]


def test_a_large_object_goes_in_parts(store: ObjectStore, proxy: Proxy) -> None:
    data = os.urandom(5 * PART_BYTES + 123)
    store.put("data/1/0.bin", memoryview(data))
    assert sum("partNumber" in request.path for request in proxy.requests) == 6
    assert store.get("data/1/0.bin") == data
    assert store.get("data/1/0.bin", PART_BYTES - 5, PART_BYTES + 5) == data[PART_BYTES - 5 : PART_BYTES + 5]
    assert store.get("data/1/0.bin", 3, 3 * PART_BYTES) == data[3 : 3 * PART_BYTES]
    assert store.get("data/1/0.bin", PART_BYTES, 9 * PART_BYTES) == data[PART_BYTES:]
    assert store.get("data/1/0.bin", 3 * PART_BYTES) == data[3 * PART_BYTES :]


def test_a_shard_of_more_parts_than_a_service_takes(
    store: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_bytes, "PARTS_MAX", 3)
    data = os.urandom(5 * PART_BYTES + 123)
    store.put("data/1/0.bin", memoryview(data))
    assert sum("partNumber" in request.path for request in proxy.requests) == 3
    assert store.get("data/1/0.bin") == data


def test_an_upload_keeps_to_its_limit(url: str, options: StorageOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte is asked for before it goes, by parts; what a limit is, tests/checkpoint/test_bandwidth.py shows."""
    taken: list[tuple[float, int]] = []
    monkeypatch.setattr(Bandwidth, "take", lambda self, nbytes: taken.append((self._bytes_s, nbytes)))
    store = ObjectStore(url, options.model_copy(update={"upload_mbs_max": 2.5}))
    for nbytes in (0, 1000, 2 * PART_BYTES + 7):
        store.put(f"data/1/{nbytes}.bin", os.urandom(nbytes))
    assert sorted(taken) == [(2.5e6, nbytes) for nbytes in (0, 7, 1000, PART_BYTES, PART_BYTES)]


def test_a_large_upload_that_is_given_up_leaves_no_parts(store: ObjectStore, proxy: Proxy) -> None:
    proxy.rule = Times(9, "403 AccessDenied", lambda request: "partNumber=2" in request.path)
    with pytest.raises(StorageError, match=r"can't write part 2 of .*/data/1/0.bin: AccessDenied"):
        store.put("data/1/0.bin", os.urandom(3 * PART_BYTES))
    assert [request.method for request in proxy.requests if "uploadId" in request.path][-1] == "DELETE"


def test_only_one_of_many_creates(url: str, options: StorageOptions) -> None:
    stores = [ObjectStore(url, options) for _ in range(6)]
    won: list[int] = []

    def create(number: int) -> None:
        if stores[number].put_if_absent("log/00000001.json", b"by %d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and stores[0].get("log/00000001.json") == b"by %d" % won[0]
    assert not stores[0].put_if_absent("log/00000001.json", b"later")


def test_attempts_are_numbered_and_fenced(url: str, options: StorageOptions) -> None:
    first, second = (CommitLog(ObjectStore(url, options)) for _ in range(2))
    assert first.claim("a") == 1 and second.claim("a") == 2
    assert [entry.attempt for entry in first.entries()] == [1, 2]


def puts(request: Request) -> bool:
    return request.method == "PUT"


class Times:
    """A rule that breaks the first `count` requests that match."""

    def __init__(self, count: int, action: str, match: object = puts) -> None:
        self.left, self.action, self.match = count, action, match

    def __call__(self, request: Request) -> str:
        if self.left and self.match(request):  # type: ignore[operator]  # a predicate
            self.left -= 1
            return self.action
        return ""


@pytest.mark.parametrize("action", ["503 SlowDown", "500 InternalError", "refuse", "lost", "400 ExpiredToken"])
def test_what_passes_is_tried_again(store: ObjectStore, proxy: Proxy, action: str) -> None:
    proxy.rule = Times(3, action)
    store.put("data/1/0.bin", b"whole")
    assert store.get("data/1/0.bin") == b"whole"


def test_a_creation_whose_answer_was_lost_is_ours(store: ObjectStore, proxy: Proxy) -> None:
    proxy.rule = Times(1, "lost")
    assert store.put_if_absent("log/00000001.json", b"mine")
    assert not store.put_if_absent("log/00000001.json", b"another's")


@pytest.mark.parametrize("nbytes", [1000, 3 * PART_BYTES])
def test_an_answer_that_ends_half_way_is_no_answer(store: ObjectStore, proxy: Proxy, nbytes: int) -> None:
    data = os.urandom(nbytes)
    store.put("data/1/0.bin", data)
    proxy.rule = Times(2, "cut", lambda request: request.method == "GET")
    assert store.get("data/1/0.bin") == data


def test_one_lost_part_of_many(store: ObjectStore, proxy: Proxy) -> None:
    data = os.urandom(4 * PART_BYTES)
    proxy.rule = Times(1, "503 SlowDown", lambda request: "partNumber=3" in request.path)
    store.put("data/1/0.bin", data)
    assert store.get("data/1/0.bin") == data


def test_an_outage_is_given_up_after_the_deadline(url: str, proxy: Proxy) -> None:
    store = ObjectStore(url, StorageOptions(endpoint=proxy.endpoint, deadline_s=3.0))
    store.put("data/1/0.bin", b"x")  # clients are loaded and connected by now: that takes no part of the deadline
    proxy.rule = lambda request: "503 SlowDown"
    with pytest.raises(StorageUnavailable, match=r"can't write data/1/0.bin \(\d+ tries in 3 s\): SlowDown"):
        store.put("data/1/0.bin", b"x")


def test_mistakes_are_one_sentence_at_once(
    url: str, options: StorageOptions, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(store: ObjectStore) -> str:
        before = len(proxy.requests)
        with pytest.raises(StorageError) as caught:
            store.put("data/1/0.bin", b"x")
        assert len(proxy.requests) - before <= 2, "no use in trying again"
        return str(caught.value)

    for action, told in (
        ("404 NoSuchBucket", "there is no such bucket"),  # SeaweedFS itself makes one
        ("403 AccessDenied", "these credentials may not do this"),
        ("403 RequestTimeTooSkewed", "the clock of this machine is off"),
        ("301 PermanentRedirect", "another region"),
    ):
        proxy.rule = Times(9, action)
        assert told in refusal(ObjectStore(url, options))
    proxy.rule = lambda request: ""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "the secret key is wrong" in refusal(ObjectStore(url, options))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    assert "does not know this access key" in refusal(ObjectStore(url, options))
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    assert "credentials" in refusal(ObjectStore(url, options))


def test_nobody_listens(url: str) -> None:
    store = ObjectStore(url, StorageOptions(endpoint="http://127.0.0.1:9", deadline_s=1.0))
    with pytest.raises(StorageError, match="is the endpoint right and reachable"):
        store.list("data/")


def test_an_outage_at_start_is_told_and_waited_for(url: str, options: StorageOptions, proxy: Proxy) -> None:
    place = Place(directory=Path(), url=url, options=options)
    said: list[str] = []

    def tell(sentence: str) -> None:
        said.append(sentence)
        proxy.rule = lambda request: ""

    proxy.rule = lambda request: "503 SlowDown"
    check_storage(place, tell)
    assert len(said) == 1 and "storage does not answer yet, trying for 10 s: " in said[0] and "SlowDown" in said[0]
    proxy.rule = lambda request: "503 SlowDown"
    with pytest.raises(StorageUnavailable):
        check_storage(place.within(1.0), said.append)
    proxy.rule = lambda request: "404 NoSuchBucket"
    with pytest.raises(ConfigError, match=r"storage: .*there is no such bucket"):
        check_storage(place, said.append)


def test_a_restarted_coordinator_and_a_report_do_not_wait_for_storage(
    tmp_path: Path, url: str, options: StorageOptions, proxy: Proxy
) -> None:
    proxy.rule = lambda request: "503 SlowDown"
    place = Place(directory=tmp_path, url=url, options=options).within(0.5)
    line = journal.encode({"schema": journal.SCHEMA, "event": {"kind": "RunStarted", "attempt": 1}})
    (tmp_path / segments.FILE).write_bytes(line)
    sealer = segments.Sealer(tmp_path / segments.FILE, store_at(place), attempt=1, every_s=1000.0)
    assert not proxy.requests
    with pytest.raises(StorageUnavailable):
        sealer.seal()
    assert [entry["event"]["attempt"] for entry in segments.entries(place)] == [1]
    proxy.rule = lambda request: ""
    sealer.seal()
    assert store_at(place).list("journal/") == {"journal/00001-00000001.jsonl": len(line)}
    sealer.close()


def test_a_result_reads_its_checkpoint_where_it_is(store: ObjectStore, url: str, options: StorageOptions) -> None:
    store.put("data/1/0.bin", b"state")
    place = Place(directory=Path("elsewhere"), url=url, options=options)
    found = checkpoint_of(SimpleNamespace(path="elsewhere", filesystem=None), place)
    with found.filesystem.open_input_stream(f"{found.path}/data/1/0.bin") as stream:
        assert stream.read() == b"state"


def test_the_service_passes_the_probe(store: ObjectStore, url: str) -> None:
    probe(store, url)
    assert store.list("probe/") == {}
