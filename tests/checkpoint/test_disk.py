"""Snapshots on a node's disk: real movers write, look, delete and serve; what is damaged is known as damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.checkpoint.disk import Disk
from elastic.checkpoint.errors import CheckpointError, Damaged
from elastic.checkpoint.wire import MoverClient
from elastic.events import from_json, to_json
from elastic.plan import DiskOrder, SnapshotKey, shard_object
from tests.checkpoint.hosts import LIMIT_S, TOKEN, Host, hosts, key, random_bytes

Whole = tuple[int, int, int, int]  # attempt, generation, step, rank


def ordered(host: Host, root: Path, write: SnapshotKey | None = None, keep: tuple[SnapshotKey, ...] = ()) -> set[Whole]:
    """What the mover tells of the disk after this order."""
    host.tell(disk=str(root), order=to_json(DiskOrder(folder="r", attempt=7, write=write, keep=keep)))
    told = [from_json(raw) for raw in host.hear("on disk")["on disk"]]
    assert {holding.tier for holding in told} <= {"disk"}
    return {(held.attempt, held.key.generation, held.key.step, held.rank) for held in told}


def sealed(host: Host, at: SnapshotKey, data: Any, *, rank: int = 0) -> None:
    host.write(at, data, rank=rank)
    host.until(lambda: host.holds(at, "own"), f"{at} sealed")


def test_two_hosts_of_a_node_write_see_each_other_and_delete_what_is_old(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with hosts(tmp_path / "storage", 2) as pair:
        assert ordered(pair[0], disk) == set(), "nothing yet, and no complaint"
        for step in (1, 2, 3):
            for rank, host in enumerate(pair):
                host.arena.board.order(generation=1, keep=key(1, step - 1))
                sealed(host, key(1, step), random_bytes(3 << 20, step), rank=rank)
                found = ordered(host, disk, key(1, step))
                assert (7, 1, step, rank) in found
        assert found == {(7, 1, step, rank) for step in (1, 2, 3) for rank in (0, 1)}
        (disk / "data/7-1-1/.tmp-of-a-dead-writer").write_bytes(b"half")
        (disk / "data/6-9-99").mkdir()
        found = ordered(pair[0], disk, keep=(key(1, 2), key(1, 3)))
        assert found == {(7, 1, step, rank) for step in (2, 3) for rank in (0, 1)}
        assert sorted(path.name for path in (disk / "data").iterdir()) == ["7-1-2", "7-1-3"]


def test_what_is_there_is_served_to_others_and_damage_is_told(tmp_path: Path) -> None:
    disk, data = tmp_path / "disk", random_bytes(20 << 20)
    name = shard_object(7, key(1, 1), 0)
    with hosts(tmp_path / "storage", 2, nbytes=21 << 20) as (writer, reader):
        sealed(writer, key(1, 1), data)
        ordered(writer, disk, key(1, 1))
        client = MoverClient(reader.endpoint, token=TOKEN, timeout_s=LIMIT_S)
        with client, pytest.raises(CheckpointError, match="was not told where"):
            client.describe(key(1, 1), 0, stored=name, disk=True)
        assert ordered(reader, disk) == {(7, 1, 1, 0)}
        with MoverClient(reader.endpoint, token=TOKEN, timeout_s=LIMIT_S) as client:
            shard = client.describe(key(1, 1), 0, stored=name, disk=True)
            into = np.zeros(shard.nbytes, dtype=np.uint8)
            client.read(key(1, 1), 0, [(0, shard.nbytes)], into, stored=name, disk=True)
        shard.verify(into, [(0, shard.nbytes)], where="here")
        assert np.array_equal(into[: len(data)], data)

        path = disk / shard_object(7, key(1, 2), 0)
        writer.arena.board.order(generation=1, keep=key(1, 1))
        sealed(writer, key(1, 2), data)
        ordered(writer, disk, key(1, 2))
        with path.open("r+b") as file:
            file.seek(9 << 20)
            byte = file.read(1)[0]
            file.seek(9 << 20)
            file.write(bytes([byte ^ 1]))
        assert (7, 1, 2, 0) in ordered(reader, disk), "only reading it shows it"
        for stored, said in (
            (shard_object(7, key(1, 2), 0), "fail their CRC"),
            (shard_object(7, key(1, 5), 0), "exist"),
        ):
            at = key(1, 2) if "CRC" in said else key(1, 5)
            client = MoverClient(reader.endpoint, token=TOKEN, timeout_s=LIMIT_S)
            with client, pytest.raises(Damaged, match=said):
                client.describe(at, 0, stored=stored, disk=True)
                client.read(at, 0, [(8 << 20, 10 << 20)], into, stored=stored, disk=True)


def test_what_is_cut_short_or_has_no_table_is_not_there(tmp_path: Path) -> None:
    with hosts(tmp_path / "storage", 1) as (host,):
        for step in (1, 2, 3):
            host.arena.board.order(generation=1, keep=key(1, step - 1))
            sealed(host, key(1, step), random_bytes(1 << 20))
            ordered(host, tmp_path, key(1, step))
    os.truncate(tmp_path / shard_object(7, key(1, 1), 0), 1 << 19)
    (tmp_path / "data/7-1-2/0.json").unlink()
    (tmp_path / "data/nothing-of-ours").mkdir()
    assert [holding.key for holding in Disk(tmp_path).holdings()] == [key(1, 3)]
    (tmp_path / "data/7-1-3/0.json").write_text("{}")
    assert Disk(tmp_path).holdings() == ()


def test_a_disk_that_can_not_be_written_is_told_and_holds_no_buffer(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("in the way")
    with hosts(tmp_path / "storage", 1) as (host,):
        sealed(host, key(1, 1), random_bytes(1 << 20))
        host.tell(disk=str(tmp_path), order=to_json(DiskOrder(folder="r", attempt=7, write=key(1, 1))))
        told = host.hear("failed")
        assert (told["failed"], told["key"]) == ("disk", {"generation": 1, "step": 1})
        assert "can't write" in told["reason"]
        host.hear("on disk")
        host.arena.board.order(generation=1, keep=key(1, 2))
        assert all(own.reusable() for own in host.arena.own)
        host.tell(disk=str(tmp_path), order=to_json(DiskOrder(folder="r", attempt=7, write=key(1, 9))))
        assert "not in this host's arena" in host.hear("failed")["reason"]
