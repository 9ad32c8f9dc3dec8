"""A host's check by itself: what is complete when, and what is tried again. Its processes are in tests/process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.check import HostCheck
from elastic.cluster.children import Lines
from elastic.config import Config
from elastic.plan import Endpoint, Member

DEVICE = {"gpus": 0, "gemm_gflops": 1.0, "gemm_wrong": 0, "copy_gbs": 1.0, "copy_wrong": 0}
LINKED = {"link_to": "b/0", "link_ms": 1.0, "link_mbs": 1.0, "unreached": {}}
STORED = {"storage_wrong": "", "storage_down": ""}
ALONE = {"link_to": "", "link_ms": 0.0, "link_mbs": 0.0, "unreached": {"b/0": "timed out"}}


class Mover:
    """The part of `children.Mover` that a check uses, with the mover's end of the socket."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.lines, self.theirs = Lines(ours), Lines(theirs)


@pytest.fixture
def mover() -> Any:
    return Mover()


def made(path: Path, **admission: Any) -> HostCheck:
    config = Config.model_validate({"admission": {"again_s": 1e-9, **admission}})
    return HostCheck(config, node="a", log_dir=path)


def member(node: str) -> Member:
    place = Endpoint(address="127.0.0.1", port=7)
    return Member(host=f"{node}/0", node=node, domain=node, mover=place, store=place)


def test_it_is_told_once_device_network_and_storage_are_known(tmp_path: Path, mover: Any) -> None:
    check = made(tmp_path)
    check.try_network(mover, (member("b"),))
    assert mover.theirs.read() == [{"try": [{"host": "b/0", "address": "127.0.0.1", "port": 7}], "limit_s": 5.0}], (
        "another node is tried at once"
    )
    check.hear_link(LINKED)
    assert check.told is None and not check.done and check.wants_device
    check.hear_device(DEVICE)
    assert check.told is None and not check.done
    check.hear_storage(STORED)
    assert check.told is not None and check.done and not check.wants_device and check.changed
    check.try_network(mover, (member("b"),))
    assert not mover.theirs.read(), "once is enough"


def test_its_own_node_is_tried_only_when_there_is_no_time_left(tmp_path: Path, mover: Any) -> None:
    check = made(tmp_path)
    check.try_network(mover, (member("a"),))
    assert not mover.theirs.read()
    check.hear_device(DEVICE)
    check.try_network(mover, (member("a"),))
    assert mover.theirs.read()


def test_a_host_that_is_alone_is_complete_without_a_link(tmp_path: Path, mover: Any) -> None:
    check = made(tmp_path)
    check.hear_storage(STORED)
    check.try_network(mover, ())
    assert not check.done
    check.hear_device(DEVICE)
    check.try_network(mover, ())
    assert check.told is not None and check.told.link_to == "" and not check.told.unreached


def test_who_reached_nobody_tries_again(tmp_path: Path, mover: Any) -> None:
    check = made(tmp_path)
    check.hear_storage(STORED)
    check.hear_device(DEVICE)
    check.hear_link(ALONE)
    assert check.told is not None and check.told.unreached == {"b/0": "timed out"}
    check.try_network(mover, (member("b"),))
    assert mover.theirs.read()
    check.hear_link(LINKED)
    assert check.told.link_to == "b/0"


def test_storage_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    check = made(tmp_path)
    check.hear_device(DEVICE)
    check.hear_link(LINKED)
    check.hear_storage({**STORED, "storage_down": "503 (3 tries)"})
    check.hear_storage({**STORED, "storage_down": "503 (4 tries)"})
    assert check.told is not None and check.told.storage_down == "503 (3 tries)"
    check.hear_storage(STORED)
    assert check.told.storage_down == ""


def test_a_device_that_does_not_fit_gets_no_standby(tmp_path: Path) -> None:
    check = made(tmp_path)
    assert not check.fits
    check.hear_device({**DEVICE, "gemm_wrong": 1})
    assert not check.fits


def test_disabled_it_is_complete_and_tells_nothing(tmp_path: Path, mover: Any) -> None:
    check = made(tmp_path, enabled=False, memory_spare_bytes=1 << 60)
    check.try_network(mover, (member("b"),))
    assert check.done and check.told is None and check.fits and not check.wants_device and not mover.theirs.read()
