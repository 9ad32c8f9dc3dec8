"""The whole head dies by SIGKILL and its disk is lost: the real coordinator, a real host, the run's storage is left."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import ray

from elastic import segments
from elastic.checkpoint.log import CommitLog
from elastic.cluster.coordinator import GENERATIONS_LOST_MAX, Coordinator
from elastic.cluster.host import run_host
from elastic.config import Config
from elastic.proof import verify_data
from elastic.report import summary_lines
from elastic.resume import Resume
from elastic.storage.store import store_at
from elastic.telemetry import ledger
from elastic.telemetry.lineage import lineage
from elastic.worker.template import die_with_parent
from tests.process.running import LIMIT_S, settings_of, small

pytestmark = pytest.mark.timeout(400)

STEPS = 30


def head(config: Config, asked: Resume, parent_pid: int) -> None:
    """One submission without Ray: a coordinator, and its only host in the same process."""
    die_with_parent(parent_pid)
    coordinator = Coordinator(config, f"token-{os.getpid()}", asked, ray_address="no Ray here")
    coordinator.begin(f"group-{os.getpid()}")
    run_host(settings_of(coordinator, config, "n0"), stopped=lambda: False)
    outcome = coordinator.outcome(LIMIT_S)
    assert not ray.is_initialized(), "nothing of this test may join, or start, a Ray cluster"
    assert outcome is not None and outcome["phase"] == "finished", outcome


def submit(config: Config, asked: Resume) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=head, args=(config, asked, os.getpid()))
    process.start()
    return process


def finish(config: Config, asked: Resume) -> None:
    process = submit(config, asked)
    process.join(LIMIT_S)
    assert process.exitcode == 0, process.exitcode


def test_the_run_goes_on_with_its_whole_account_and_can_go_back(tmp_path: Path) -> None:
    config = small(tmp_path, steps=STEPS, hosts_max=1, checkpoint={"interval_steps": 5, "keep": 8})
    journal = config.run_dir() / segments.FILE
    process = submit(config, Resume())
    deadline_s = time.monotonic() + LIMIT_S
    while (newest := CommitLog(store_at(config.place())).newest()) is None or newest.key.step < 10:
        assert process.is_alive() and time.monotonic() < deadline_s, newest
        time.sleep(0.02)
    process.kill()
    process.join(LIMIT_S)
    journal.unlink()
    known = lineage(segments.entries(config.place()))
    assert [record["step"] for record in known][: newest.key.step] == list(range(1, newest.key.step + 1))

    finish(config, Resume())
    entries = segments.entries(config.place())
    assert [e["event"]["attempt"] for e in entries if e["event"]["kind"] == "RunStarted"] == [1, 2]
    assert max(entry["generation"] for entry in entries) > GENERATIONS_LOST_MAX
    assert verify_data(config.place())[0].startswith(f"{STEPS} steps of the committed lineage, {12 * STEPS} samples")
    assert ledger.fold(entries).microseconds["unknown"] > 0
    assert any("unknown" in line for line in summary_lines(config.place()))
    journal.unlink()
    assert segments.entries(config.place()) == entries, "the end is in storage too"

    losses = {record["step"]: record["loss"] for record in lineage(entries)}
    finish(config, Resume(point="10"))
    entries = segments.entries(config.place())
    assert {record["step"]: record["loss"] for record in lineage(entries)} == losses, "redone, bit for bit"
    assert "starts from the checkpoint of step 10 (log entry" in next(
        entry["reason"] for entry in reversed(entries) if entry["event"]["kind"] == "RunStarted"
    )
    assert verify_data(config.place())[0].startswith(f"{STEPS} steps of the committed lineage, {12 * STEPS} samples")
