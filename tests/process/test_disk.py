"""The whole job dies by SIGKILL: driver, hosts, all memory. The nodes' disks are left, with a newer step than storage.

The real coordinator, two nodes with a host each, in processes that die together.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from elastic import segments
from elastic.checkpoint.log import CommitLog
from elastic.cluster import twin
from elastic.cluster.coordinator import Coordinator
from elastic.cluster.host import HostSettings, run_host
from elastic.config import Config
from elastic.proof import verify_data
from elastic.resume import Resume, choose
from elastic.storage.store import store_at
from elastic.telemetry import ledger
from elastic.worker.template import die_with_parent
from tests.process.running import LIMIT_S, settings_of, small

pytestmark = pytest.mark.timeout(400)

STEPS = 40
DURABLE = 10


def node(settings: HostSettings, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    run_host(settings, stopped=lambda: False)


def head(configs: list[Config], parent_pid: int) -> None:
    """One submission without Ray: a coordinator and the host of node n0, in a child that of n1. Each node has a
    configuration of its own, for it has a disk of its own."""
    die_with_parent(parent_pid)
    config = configs[0]
    coordinator = Coordinator(config, f"token-{os.getpid()}", Resume(), ray_address="no Ray here")
    coordinator.begin(f"group-{os.getpid()}")
    other = settings_of(coordinator, configs[1], "n1")
    process = multiprocessing.get_context("spawn").Process(target=node, args=(other, os.getpid()))
    process.start()
    run_host(settings_of(coordinator, config, "n0"), stopped=lambda: False)
    outcome = coordinator.outcome(LIMIT_S)
    assert outcome is not None and outcome["phase"] == "finished", outcome
    process.join(LIMIT_S)


def submit(configs: list[Config]) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=head, args=(configs, os.getpid()))
    process.start()
    return process


def on_disk(path: Path) -> set[int]:
    """Steps of which both nodes have their shard, with its table."""
    found = [{int(table.parent.name.split("-")[2]) for table in path.glob(f"n{n}/*/data/*/{n}.json")} for n in (0, 1)]
    return found[0] & found[1]


def killed(tmp_path: Path) -> list[Config]:
    """A job that was killed while the disks held newer steps than storage: the configurations of its nodes."""
    config = small(tmp_path, steps=STEPS, hosts_min=2, hosts_max=2, checkpoint={"interval_steps": DURABLE})
    snapshots = [config.snapshot.model_copy(update={"disk": str(tmp_path / f"n{n}")}) for n in (0, 1)]
    configs = [config.model_copy(update={"snapshot": snapshot}) for snapshot in snapshots]
    process, log = submit(configs), CommitLog(store_at(config.place()))
    deadline_s = time.monotonic() + LIMIT_S
    while (newest := log.newest()) is None or not any(
        newest.key.step + 3 <= step < STEPS for step in on_disk(tmp_path)
    ):
        assert process.is_alive() and time.monotonic() < deadline_s, (newest, on_disk(tmp_path))
        time.sleep(0.01)
    process.kill()
    process.join(LIMIT_S)
    return configs


def story(config: Config) -> list[dict[str, Any]]:
    return segments.entries(config.place())


def finish(configs: list[Config]) -> None:
    process = submit(configs)
    process.join(LIMIT_S)
    assert process.exitcode == 0, process.exitcode


def started(entries: list[dict[str, Any]], attempt: int) -> list[tuple[dict[str, Any], str]]:
    """The generations of an attempt, each with what was said."""
    found, now = [], 0
    for entry in entries:
        if entry["event"]["kind"] == "RunStarted":
            now = entry["event"]["attempt"]
        found += [
            (action, entry["reason"])
            for action in entry["actions"]
            if now == attempt and action["kind"] == "StartGeneration"
        ]
    return found


def check_account(config: Config, tmp_path: Path) -> None:
    """Each sample was used once; nothing is left on the disks."""
    entries = story(config)
    assert verify_data(config.place())[0].startswith(f"{STEPS} steps of the committed lineage, {12 * STEPS} samples")
    assert ledger.fold(entries).seconds()["starting"] > 0
    assert [*tmp_path.glob("n*/*")] == [], "removed at the end"


def test_the_job_goes_on_from_the_disks_of_its_nodes(tmp_path: Path) -> None:
    configs = killed(tmp_path)
    config = configs[0]
    origin = choose(config, Resume()).origin
    newest = CommitLog(store_at(config.place())).newest()
    assert newest is not None and f"from the checkpoint of step {newest.key.step}" in origin
    assert "or from a newer one, up to step" in origin and "if the nodes' disks have it whole" in origin
    finish(configs)
    (first, said), *_ = started(story(config), 2)
    assert first["tier"] == "disk" and first["step"] > newest.key.step
    assert f"from step {first['step']} on the nodes' disks; the last durable checkpoint is of step" in said
    check_account(config, tmp_path)
    entries = story(config)
    undisturbed = twin.run_locally(twin.config_of(config, entries), say=lambda _: None)
    assert twin.differences(entries, undisturbed) == [], "bit for bit"


@pytest.mark.long
def test_a_flipped_bit_on_one_disk_is_told_and_something_older_taken(tmp_path: Path) -> None:
    configs = killed(tmp_path)
    config = configs[0]
    steps = sorted(on_disk(tmp_path))
    for path in tmp_path.glob("n1/*/data/*/1.bin"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    finish(configs)
    entries = story(config)
    found = [(action["step"], action["tier"]) for action, _ in started(entries, 2)]
    newest = found[-1][0]
    assert found[-1][1] == "storage" and newest < found[0][0]
    assert {tier for _, tier in found[:-1]} == {"disk"} and len(found) <= len(steps) + 1, found
    said = [entry["reason"] for entry in entries if "on the nodes' disks is damaged" in entry["reason"]]
    assert len(said) == len(found) - 1 and all("fail their CRC" in line and "n1/" in line for line in said), said
    check_account(config, tmp_path)
