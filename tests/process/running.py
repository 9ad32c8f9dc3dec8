"""A whole run on this machine without Ray: the real driver, committer and journal over local host processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic import events
from elastic.checkpoint.committer import Committer
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import About, restore_plan
from elastic.clock import RealClock
from elastic.cluster.coordinator import Coordinator
from elastic.cluster.host import HostSettings
from elastic.cluster.local import LocalCluster
from elastic.config import Config, parse
from elastic.controller.driver import Driver
from elastic.controller.state import Phase
from elastic.data.prepare import prepare
from elastic.events import HostGone, Order, Report, StepRecord
from elastic.plan import Endpoint
from elastic.resume import save_config
from elastic.storage.store import store_at
from elastic.telemetry import journal

LIMIT_S = 180.0
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box with 12 jugs of quartz\n"


def small(path: Path, **changes: Any) -> Config:
    """A run of a tiny model on a tiny corpus in `path`."""
    text = path / "text"
    text.mkdir(exist_ok=True)
    for number in range(40):
        (text / f"{number}.txt").write_text(WORDS[number:] + WORDS * (number % 7 + 2))
    raw: dict[str, Any] = {
        "run": "small",
        "steps": 30,
        "storage": str(path / "runs"),
        "hosts_min": 1,
        "hosts_max": 2,
        "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "seq_len": 32, "dropout": 0.1},
        "batch": {"global_samples": 12, "micro_samples": 3},
        "data": {
            "corpus": str(text),
            "suffixes": [".txt"],
            "prepared": str(path / "prepared"),
            "held_out_every": 5,
            "shard_bytes": 8192,
        },
        "evaluation": {"interval_steps": 10, "samples": 8},
        "checkpoint": {"interval_steps": 10},
        "snapshot": {"interval_steps": 1},
        "control": {"collective_timeout_s": 30.0, "start_wait_s": 60.0},
    }
    config = parse({**raw, **changes}, source="the test")
    prepare(config.data, progress=lambda _: None)
    return config


def settings_of(coordinator: Coordinator, config: Config, node: str) -> HostSettings:
    """Of the only host of `node`, for a coordinator without Ray."""
    reached = coordinator.endpoint()
    return HostSettings(
        coordinator=Endpoint(address=reached["address"], port=reached["port"]),
        token=reached["token"],
        config=config,
        node=node,
        domain=node,
        slot=0,
        address="127.0.0.1",
        log_dir=config.run_dir() / f"logs-{node}",
    )


class _Recorded:
    """The cluster as the driver uses it, keeping the newest report of each host and all step records."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.reports: dict[str, Report] = {}
        self._records: dict[tuple[int, int], StepRecord] = {}

    @property
    def records(self) -> list[StepRecord]:
        """One for each generation and step, in their order; which rank's, only `seconds` could tell."""
        return [record for _, record in sorted(self._records.items())]

    def receive(self, timeout_s: float) -> list[Report | HostGone]:
        facts = self._cluster.receive(timeout_s)
        for fact in facts:
            if isinstance(fact, HostGone):
                self.reports.pop(fact.host, None)
            else:
                self.reports[fact.host] = fact
                for record in fact.steps:
                    self._records.setdefault((record.generation, record.step), record)
        return facts

    def send(self, host: str, order: Order) -> None:
        self._cluster.send(host, order)

    def drop(self, host: str) -> None:
        self.reports.pop(host, None)
        self._cluster.drop(host)


class Running:
    """Use as a context manager: hosts are killed at its end."""

    def __init__(self, config: Config, path: Path, *, nodes: int, hosts_per_node: int) -> None:
        self.config = config
        self.cluster = LocalCluster(config, log_dir=path / "logs")
        self.seen = _Recorded(self.cluster)
        store = store_at(config.place())
        log = CommitLog(store)
        self.journal = config.run_dir() / "journal"
        attempt, newest = log.claim("test"), log.newest()
        save_config(config, store, attempt=attempt)
        self.committer = Committer(
            store,
            log,
            attempt,
            about=About(run=config.run, fingerprint=""),
            samples_per_step=config.batch.global_samples,
            keep=config.checkpoint,
        )
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        self._log = journal.open_for_append(self.journal)
        self.driver = Driver(config, self.seen, self.committer, self._log, RealClock())
        durable = restore_plan(newest) if newest else None
        generation = durable.key.generation if durable else 0
        self.driver.take(events.RunStarted(run=config.run, attempt=attempt, generation=generation, durable=durable))
        self.cluster.start(nodes, hosts_per_node)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()
        self.committer.close()
        self._log.close()

    def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Turn the driver until `condition`, which is tried after each turn."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, self.driver.status()
            ended = self.driver.turn(0.02)
            assert not ended or condition(), self.driver.status()

    def finish(self) -> None:
        self.until(lambda: self.driver.state.phase is Phase.FINISHED)

    def step(self, step: int) -> Callable[[], bool]:
        """Condition: the newest generation has completed `step`."""
        return lambda: self.driver.state.step >= step

    def warm(self, hosts: int) -> Callable[[], bool]:
        return lambda: sum(report.warm for report in self.seen.reports.values()) >= hosts

    def pid(self, rank: int, process: str) -> int:
        """Of the host that has `rank` in the present generation; 0 where that process is just not there."""
        return self.seen.reports[self.driver.state.members[rank]].pids.get(process, 0)

    def losses(self) -> dict[int, set[float]]:
        """All losses that were told for each step, of whichever generation."""
        found: dict[int, set[float]] = {}
        for record in self.seen.records:
            found.setdefault(record.step, set()).add(record.loss)
        return found
