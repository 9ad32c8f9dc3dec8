"""The driver's seam in virtual time: messages are delayed, lost, duplicated and reordered, as the seed draws them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from elastic import events
from elastic.events import HostGone, Order, Report, Uploaded
from elastic.plan import RestorePlan, ShardSource, SnapshotKey
from tests.sim.hosts import GIVE_UP_S

if TYPE_CHECKING:
    from tests.sim.hosts import SimHost
    from tests.sim.world import World


class SimCluster:
    def __init__(self, world: World) -> None:
        self._world = world
        self._inbox: list[Report | HostGone] = []
        self._streams: set[str] = set()

    def receive(self, timeout_s: float) -> list[Report | HostGone]:
        messages, self._inbox = self._inbox, []
        return messages

    def send(self, host: str, order: Order) -> None:
        target = self._world.by_name(host)
        if target is not None:
            self._deliver(lambda: target.obey(order))

    def drop(self, host: str) -> None:
        self._streams.discard(host)

    def up(self, host: SimHost, report: Report) -> None:
        self._streams.add(host.name)
        self._deliver(lambda: self._inbox.append(report) if host.name in self._streams else None)

    def closed(self, host: SimHost) -> None:
        """The process died: its stream ends (the last messages may still be under way)."""
        if host.name in self._streams:
            self._world.after(self._world.draw(0.001, 0.05), self._inbox.append, HostGone(host=host.name, reason="EOF"))

    def lost_with_coordinator(self) -> None:
        self._inbox.clear()

    def _deliver(self, call: object) -> None:
        options, rng = self._world.options, self._world.rng
        copies = 1 + (rng.random() < options.duplicate)
        for _ in range(copies):
            if rng.random() >= options.loss:
                slow = rng.random() < options.slow
                self._world.after(self._world.draw(0.001, 1.0 if slow else 0.02), call)  # type: ignore[arg-type]


def held_out(step: int) -> float | None:
    """What the evaluation after `step` found, where there was one."""
    return float(step) if step % 5 == 0 else None


class SimCommits:
    """The commit log: a manifest at a time, sometimes refused by the store. `with_loss`: how many came with theirs;
    `outlived`: how many of a generation that had ended."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.with_loss = self.outlived = 0
        self._results: list[events.CheckpointCommitted | events.CommitFailed] = []

    def submit(
        self, key: SnapshotKey, uploads: tuple[Uploaded, ...], metrics: Mapping[str, float], without: Collection[str]
    ) -> None:
        # A coordinator that was restarted may not know it; a wrong one never.
        assert not metrics or metrics == {"held_out": held_out(key.step)}, (key, metrics)
        self.with_loss += bool(metrics)
        self.outlived += key.generation < self._world.driver.state.generation
        limit_s = GIVE_UP_S if self._world.storage_is_down else 0.3
        self._world.after(self._world.draw(0.01, limit_s), self._commit, key, uploads)

    def _commit(self, key: SnapshotKey, uploads: tuple[Uploaded, ...]) -> None:
        world = self._world
        if world.storage_is_down or (world.rng.random() < world.options.commit_failure and world.faults_on):
            self._results.append(events.CommitFailed(key=key, reason="503 from the store"))
            return
        sources = tuple(
            ShardSource(rank=u.rank, tier="storage", host="", endpoint=None, object=u.object) for u in uploads
        )
        restore = RestorePlan(key=key, world=len(uploads), sources=sources)
        world.log.append(restore)
        self._results.append(events.CheckpointCommitted(key=key, number=len(world.log), restore=restore))

    def results(self) -> list[events.CheckpointCommitted | events.CommitFailed]:
        results, self._results = self._results, []
        return results
