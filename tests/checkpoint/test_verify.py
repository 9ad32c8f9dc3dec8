"""Verification in storage finds every kind of damage, and names it."""

from __future__ import annotations

import pytest

from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.probe import probe
from elastic.checkpoint.shard import table_object
from elastic.checkpoint.verify import damages
from elastic.storage.store import MemoryStore
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import manifest


def test_a_whole_checkpoint_has_no_damage(store: MemoryStore) -> None:
    assert list(damages(store, manifest(store, key(1, 10), 1))) == []


def test_each_damage_is_named(store: MemoryStore) -> None:
    whole = manifest(store, key(1, 10), 1)
    name = whole.shards[1].object
    data = bytearray(store.get(name))
    for bit in (0, 8 * len(data) - 1, 4 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        store.put(name, bytes(flipped))
        (told,) = damages(store, whole)
        assert name in told and "rank 1's shard" in told and "fail their CRC" in told
    store.put(name, bytes(data[:-1]))
    (told,) = damages(store, whole)
    assert told == f"{name} ends after {len(data) - 1} bytes, the manifest says {len(data)}"
    store.delete(name)
    (told,) = damages(store, whole)
    assert name in told and "does not exist" in told
    store.put(name, bytes(data))
    store.put(table_object(name), store.get(table_object(whole.shards[0].object)))
    (told,) = damages(store, whole)
    assert told == f"{table_object(name)} is not the one that was committed"


class Overwriting(MemoryStore):
    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


def test_a_store_that_takes_a_name_twice_is_refused() -> None:
    store = MemoryStore()
    probe(store, "here")
    assert store.list("") == {}
    with pytest.raises(CheckpointError, match=r"s3://b/p: a second writer was not refused .* Azure\) or a directory"):
        probe(Overwriting(), "s3://b/p")
