"""The twin of a chaos run: the same job without faults, that changes its world at the same steps by plan.

It runs as local processes without Ray; the trainers are the same. What a run computed is held against it with `==`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic import events
from elastic.checkpoint.committer import Committer
from elastic.checkpoint.log import CommitLog
from elastic.clock import RealClock
from elastic.cluster.local import LocalCluster
from elastic.config import Config, ElasticError
from elastic.controller.driver import Driver
from elastic.data.feed import fingerprint_of
from elastic.data.prepare import prepare_for
from elastic.resume import about, save_config
from elastic.storage.store import store_at
from elastic.telemetry import journal
from elastic.telemetry.lineage import lineage, schedule

TURN_S = 0.05
SECONDS_PER_STEP_MAX = 60.0
COMPARED = ("loss", "grad_norm", "tokens", "samples", "digest", "held_out", "lr", "metrics")


class TwinError(ElasticError):
    """The twin itself did not run to its end."""


def config_of(config: Config, entries: list[dict[str, Any]]) -> Config:
    """The same optimisation problem; the worlds of the run's lineage at the same steps."""
    changes = [{"step": step, "hosts": world} for step, world in schedule(entries)]
    worlds = [change["hosts"] for change in changes]
    raw = config.model_dump(mode="json")
    return Config.model_validate(
        {**raw, "run": f"{config.run}-twin", "schedule": changes, "hosts_min": min(worlds), "hosts_max": max(worlds)}
    )


def run_locally(config: Config, *, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run `config` from the seed on local processes; returns its journal. An older run of its name is removed."""
    prepare_for(config, progress=say)
    run_dir = config.run_dir().resolve()
    shutil.rmtree(run_dir, ignore_errors=True)
    sections = {"data": config.data.absolute(), "evaluation": config.evaluation.absolute()}
    absolute = config.model_copy(update={"storage": str(run_dir.parent), **sections})
    store = store_at(absolute.place())
    log = CommitLog(store)
    attempt = log.claim("twin")
    save_config(absolute, store, attempt=attempt)
    commits = Committer(
        store,
        log,
        attempt,
        about=about(config, fingerprint_of(config.data, config.model.seq_len)),
        samples_per_step=config.batch.global_samples,
        keep=config.checkpoint,
    )
    path = run_dir / "journal.jsonl"
    with tempfile.TemporaryDirectory(prefix=f"elastic-{config.run}-") as disk:
        cluster = LocalCluster(absolute, log_dir=Path(disk))
        try:
            with journal.open_for_append(path) as file:
                driver = Driver(absolute, cluster, commits, file, RealClock())
                driver.take(events.RunStarted(run=config.run, attempt=attempt, generation=0, durable=None))
                cluster.start(1, config.hosts_max)
                _drive(driver, config)
        finally:
            cluster.close()
            commits.close()
    return journal.read_file(path)


def _drive(driver: Driver, config: Config) -> None:
    deadline_s = time.monotonic() + config.control.start_wait_s + SECONDS_PER_STEP_MAX * config.steps
    while not driver.turn(TURN_S):
        if time.monotonic() > deadline_s:
            raise TwinError(f"the twin is at step {driver.state.step} of {config.steps} after its time limit")
    if driver.state.failure:
        raise TwinError(f"the twin failed, {driver.state.failure}: {driver.state.detail}")
    grace_s = time.monotonic() + 5.0
    while driver.status()["hosts"] and time.monotonic() < grace_s:
        driver.turn(TURN_S)


def differences(run: list[dict[str, Any]], twin: list[dict[str, Any]]) -> list[str]:
    """One line for each step whose record is not equal, bit for bit; empty when the run equals its twin."""
    ours = {record["step"]: record for record in lineage(run)}
    theirs = {record["step"]: record for record in lineage(twin)}
    found = []
    for step in sorted(ours.keys() | theirs.keys()):
        if step not in ours or step not in theirs:
            found.append(f"step {step}: only in the {'twin' if step in theirs else 'run'}")
            continue
        unequal = [name for name in COMPARED if ours[step].get(name) != theirs[step].get(name)]
        found += [f"step {step}: {name} {ours[step][name]!r}, twin {theirs[step][name]!r}" for name in unequal]
    return found
