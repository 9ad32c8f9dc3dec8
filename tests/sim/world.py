"""A whole cluster drawn from one seed: how many nodes, which faults, how often. Replays exactly.

Two phases: safety (faults on, checkers after every turn), then liveness (faults off, enough hosts stay up, the run
must finish in bounded time).
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic import events
from elastic.config import Config
from elastic.controller.driver import Driver
from elastic.controller.state import TERMINAL
from elastic.events import Exit, Holding, StepRecord
from elastic.plan import Assignment, RestorePlan, ShardSource, shard_object
from elastic.telemetry import journal
from tests.sim import checkers
from tests.sim.clock import VirtualClock
from tests.sim.cluster import SimCluster, SimCommits, held_out
from tests.sim.faults import KINDS, thaw
from tests.sim.hosts import Quality, Shard, SimHost, Trainer, chain


@dataclass(frozen=True, kw_only=True)
class Options:
    """The personality of one seed."""

    nodes: int
    slots: int
    loss: float
    duplicate: float
    slow: float
    commit_failure: float
    step_s: float
    fault_every_s: float
    faults: tuple[str, ...]
    bad_nodes: float

    @staticmethod
    def draw(rng: random.Random) -> Options:
        kinds = tuple(KINDS)
        return Options(
            nodes=rng.randint(1, 4),
            slots=rng.randint(1, 3),
            loss=rng.choice((0.0, 0.0, 0.02, 0.2)),
            duplicate=rng.choice((0.0, 0.0, 0.1)),
            slow=rng.choice((0.0, 0.05, 0.3)),
            commit_failure=rng.choice((0.0, 0.3)),
            step_s=rng.choice((0.05, 0.2, 0.6)),
            fault_every_s=rng.choice((2.0, 6.0, 15.0)),
            faults=tuple(sorted(rng.sample(kinds, rng.randint(1, len(kinds))))),
            bad_nodes=rng.choice((0.0, 0.1, 0.4)),
        )


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.options = Options.draw(self.rng)
        self.config = self._draw_config()
        self.clock = VirtualClock()
        self.faults_on = True
        self.hosts: list[SimHost] = []
        self.storage: dict[str, int] = {}
        self.disks: dict[str, dict[str, Holding]] = {}
        self.disk_contents: dict[tuple[str, str], int | None] = {}  # None: damaged
        self.storage_down_until_s = 0.0
        self.log: list[RestorePlan] = []
        self.restarts = 0
        self.from_disk = 0
        self.quality: dict[str, Quality] = {}
        self.cut: set[str] = set()
        self._nodes = 0
        self._incarnations = 0
        self._buffer = io.BytesIO()
        self.cluster = SimCluster(self)
        self.commits = SimCommits(self)
        self.driver = self.coordinate(None)
        self.driver.take(
            events.RunStarted(run="sim", attempt=1, generation=0, durable=None, disk="sim" if self.has_disks else "")
        )
        self.checkers = checkers.Checkers(self)
        for _ in range(self.options.nodes):
            self.add_node()
        self.after(0.0, self._turn)
        self.after(self.draw(0.5, 2.0) * self.options.fault_every_s, self._fault)

    def _draw_config(self) -> Config:
        most = min(self.options.nodes * self.options.slots, 8)
        rng = self.rng
        return Config.model_validate(
            {
                "run": "sim",
                "steps": rng.randint(40, 120),
                "hosts_min": rng.randint(1, most),
                "hosts_max": most,
                "batch": {"global_samples": 24, "micro_samples": 3},
                "snapshot": {
                    "partner": rng.random() < 0.9, "sources_max": rng.randint(1, 3),
                    "disk": rng.choice(("", "/disk")), "disk_interval_steps": rng.choice((0, 0, 7)),
                },
                "checkpoint": {"interval_steps": rng.choice((0, 5, 20, 50))},
                "control": {
                    "heartbeat_s": 0.5, "silence_s": 3.0, "start_wait_s": 10.0, "hosts_wait_s": 3600.0,
                    "start_timeout_s": 20.0, "failures_without_progress_max": 1000,
                },
                "admission": {
                    "enabled": rng.random() < 0.9, "rest_s_max": rng.choice((20.0, 600.0)),
                    "forget_s": rng.choice((10.0, 600.0)),
                },
                "policies": {"leave_out_slow": rng.choice(("off", "observe", "act"))},
            }
        )  # fmt: skip

    def coordinate(self, state: Any) -> Driver:
        return Driver(self.config, self.cluster, self.commits, self._buffer, self.clock, state)

    # ------------------------------------------------------------ time

    def draw(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def after(self, delay_s: float, call: Callable[..., Any], *args: Any) -> None:
        self.clock.after(delay_s, lambda: call(*args))

    @property
    def storage_is_down(self) -> bool:
        return self.faults_on and self.clock.now_s() < self.storage_down_until_s

    @property
    def has_disks(self) -> bool:
        return bool(self.config.snapshot.disk)

    def disk_of(self, node: str) -> dict[str, Holding]:
        """By the names of objects; it outlives the node's hosts."""
        return self.disks.setdefault(node, {})

    def put_on_disk(self, node: str, shard: Shard) -> None:
        name = shard_object(1, shard.key, shard.rank)
        held = Holding(key=shard.key, rank=shard.rank, world=shard.world, tier="disk", sealed=True, nbytes=1, attempt=1)
        self.disk_of(node)[name], self.disk_contents[node, name] = held, shard.content

    def damaged_source(self, assignment: Assignment) -> ShardSource | None:
        for source in self._needed(assignment):
            if source.tier == "disk" and self._disk_content(source) is None:
                return source
        return None

    def _disk_content(self, source: ShardSource) -> int | None:
        node = source.host.partition("/")[0]
        return self.disk_contents[node, source.object] if source.object in self.disk_of(node) else None

    def awake(self, host: SimHost, call: Callable[..., Any], *args: Any) -> bool:
        """True if `host` can act now; a frozen one does the same thing once it is thawed."""
        if host.alive and host.frozen:
            self.after(0.3, call, *args)
        return host.alive and not host.frozen

    def run(self, until_s: float) -> None:
        while self.driver.state.phase not in TERMINAL and self.clock.step(until_s):
            pass

    def _turn(self) -> None:
        self.driver.turn(0.0)
        self.checkers.after_turn()
        self.after(0.1, self._turn)

    @property
    def journal(self) -> bytes:
        return self._buffer.getvalue()

    def entries(self) -> list[dict[str, Any]]:
        return list(journal.read(self.journal))

    def story(self, lines: int = 40) -> str:
        told = [f"{e['t']:.2f} {e['event']['kind']}: {e['reason']}" for e in self.entries() if e["reason"]]
        return "\n".join([f"seed {self.seed}", str(self.options), repr(self.config), *told[-lines:]])

    # ------------------------------------------------------------ hosts

    def by_name(self, name: str) -> SimHost | None:
        return next((host for host in self.hosts if host.name == name and host.alive), None)

    def add_node(self) -> None:
        self._nodes += 1
        bad = self.faults_on and self.rng.random() < self.options.bad_nodes
        self.quality[f"n{self._nodes}"] = self.rng.choice(("short", "broken", "slow")) if bad else "good"
        for slot in range(self.options.slots):
            self.add_host(f"n{self._nodes}", slot)

    def add_host(self, node: str, slot: int) -> None:
        self._incarnations += 1
        host = SimHost(world=self, node=node, slot=slot, incarnation=self._incarnations)
        host.order_at_s = self.clock.now_s()
        self.hosts.append(host)
        self.after(self.draw(0.1, 1.0), host.report)
        self.after(self.draw(1.0, 6.0), self.warm, host)
        self.after(0.5, self._beat, host)

    def warm(self, host: SimHost) -> None:
        """Its template is up; it takes part once its node is checked."""
        host.up = True
        if host.check is None and self.config.admission.enabled:
            host.examine()
        host.report()

    def _beat(self, host: SimHost) -> None:
        if host.alive:
            host.check_lease()
            host.report()
            self.after(0.5, self._beat, host)

    def reborn(self, host: SimHost) -> None:
        """An evicted host forgets everything and comes back as a new one."""
        if host.alive:
            host.alive = False
            self.add_host(host.node, host.slot)

    def kill_host(self, host: SimHost) -> None:
        host.alive = False
        self.cluster.closed(host)
        self.peers_notice(host)

    def peers_notice(self, host: SimHost) -> None:
        """A closed connection wakes the other ranks of the generation."""
        trainer = host.trainer
        if trainer is None or (trainer.exit and trainer.exit.kind in ("paused", "done")):
            return
        for other in self._group(trainer.assignment):
            if other is not host and other.trainer:
                self.after(self.draw(0.02, 0.1), self._peer_exit, other, other.trainer)

    def _peer_exit(self, host: SimHost, trainer: Trainer) -> None:
        awake = self.awake(host, self._peer_exit, host, trainer)
        if awake and host.trainer is trainer and not trainer.exit and trainer.joined:
            host.stop_trainer(Exit(kind="peer", step=trainer.step, code=1, detail="connection closed by peer"))

    # ------------------------------------------------------------ the training group

    def _group(self, assignment: Assignment) -> list[SimHost]:
        names = {member.host for member in assignment.members}
        generation = assignment.generation
        return [
            h
            for h in self.hosts
            if h.name in names and h.alive and h.trainer and h.trainer.assignment.generation == generation
        ]

    def joined(self, assignment: Assignment) -> None:
        group = self._group(assignment)
        if len(group) == assignment.world and all(h.trainer.joined and not h.trainer.exit for h in group):  # type: ignore[union-attr]
            self.after(self.draw(0.05, 0.3), self._step, assignment, False)

    def _can_step(self, group: list[SimHost], assignment: Assignment) -> bool:
        whole = len(group) == assignment.world
        return whole and all(not h.frozen and h.trainer and h.trainer.joined and not h.trainer.exit for h in group)

    def _step(self, assignment: Assignment, drain: bool) -> None:
        """One step of all ranks, or none: the collectives see to that."""
        group = self._group(assignment)
        if not self._can_step(group, assignment):
            if len(group) == assignment.world and any(h.frozen for h in group):
                self.after(0.5, self._step, assignment, drain)  # hangs in the collective until thawed
            return
        done = group[0].trainer.step  # type: ignore[union-attr]
        if drain or done >= assignment.until_step:
            self._pause(group, assignment)
            return
        self.checkers.stepped(assignment)
        snapshot = all(h.can_snapshot() for h in group)  # the step word: all ranks or none
        draining = any(h.trainer.draining for h in group)  # type: ignore[union-attr]
        for host in group:
            trainer = host.trainer
            assert trainer is not None
            trainer.step = done + 1
            trainer.content = (trainer.content * 6_364_136_223_846_793_005 + done) % (1 << 61)
            trainer.records.append(self._record(assignment, done + 1))
            if snapshot:
                self._snapshot(host)
            if not trainer.marks:
                trainer.marks = {"first_step": 0.1}
            host.report()
        self.after(self.options.step_s * self.draw(0.8, 1.2), self._step, assignment, draining)

    def _record(self, assignment: Assignment, step: int) -> StepRecord:
        return StepRecord(
            generation=assignment.generation, step=step, loss=1.0, tokens=24, samples=24, digest="0", grad_norm=1.0,
            lr=0.1, seconds=0.1, held_out=held_out(step),
        )  # fmt: skip

    def _snapshot(self, host: SimHost) -> None:
        shard = host.begin_snapshot()
        if shard is not None:
            self.after(self.draw(0.0, 0.03), self._written, host, host.trainer, shard, host.trainer.content)  # type: ignore[union-attr]

    def _written(self, host: SimHost, trainer: Trainer, shard: Any, content: int) -> None:
        awake = self.awake(host, self._written, host, trainer, shard, content)
        if awake and host.trainer is trainer and (not trainer.exit or trainer.exit.kind in ("paused", "done")):
            shard.content = content
            self.after(self.draw(0.001, 0.1), host.seal, shard)

    def _pause(self, group: list[SimHost], assignment: Assignment) -> None:
        """The boundary's state is always in the arena, sealed before the exit is told."""
        for host in group:
            trainer = host.trainer
            assert trainer is not None
            have = any(s.key.generation == assignment.generation and s.key.step == trainer.step for s in host.own)
            if not have and not host.can_snapshot():
                self.after(0.1, self._step, assignment, True)
                return
        for host in group:
            trainer = host.trainer
            assert trainer is not None
            mine = [s for s in host.own if s.key.generation == assignment.generation and s.key.step == trainer.step]
            shard = mine[0] if mine else host.begin_snapshot()
            assert shard is not None
            shard.content, shard.sealed = trainer.content, True
            kind = "done" if trainer.step >= self.config.steps else "paused"
            self.after(self.draw(0.0, 0.1), self._ended, host, trainer, Exit(kind=kind, step=trainer.step, code=0))

    def _ended(self, host: SimHost, trainer: Trainer, ended: Exit) -> None:
        if self.awake(host, self._ended, host, trainer, ended) and host.trainer is trainer and not trainer.exit:
            host.stop_trainer(ended)

    def unreachable(self, assignment: Assignment) -> SimHost | str:
        """The first source of this rank's state that does not answer; "" if all do."""
        for source in self._needed(assignment):
            if source.tier == "storage":  # read directly where the host that should relay it fails
                continue
            holder = self.by_name(source.host)
            if holder is None:
                return source.host
            if holder is not None and holder.frozen:
                return holder
        return ""

    def needs_storage(self, assignment: Assignment) -> bool:
        return any(source.tier == "storage" for source in self._needed(assignment))

    def _needed(self, assignment: Assignment) -> tuple[ShardSource, ...]:
        plan = assignment.restore
        if plan is None:
            return ()
        # In the same layout a rank reads its own shard only, in another one some of each.
        return plan.sources if plan.world != assignment.world else (plan.sources[assignment.rank],)

    def restore(self, host: SimHost, assignment: Assignment) -> tuple[int, int]:
        """(step, state), read from the sources of the plan; all are there, sealed and right."""
        plan = assignment.restore
        if plan is None:
            return 0, chain(0)
        contents = set()
        for source in self._needed(assignment):
            holder = self.by_name(source.host)
            if source.tier == "storage" or holder is None:
                contents.add(self.storage[source.object])
                continue
            if source.tier == "disk":
                content = self._disk_content(source)
                assert content is not None, f"{source} is damaged, and was read\n{self.story()}"
                contents.add(content)
                self.from_disk += 1
                continue
            shards = holder.own if source.tier == "own" else holder.received
            found = [s for s in shards if s.key == plan.key and s.rank == source.rank and s.content is not None]
            found = [s for s in found if s.sealed or holder is host]
            assert found, f"{source} is not there for {host.name}\n{self.story()}"
            contents.add(found[0].content)
        assert contents == {chain(plan.key.step)}, f"restored {contents}, wanted {plan.key}\n{self.story()}"
        return plan.key.step, chain(plan.key.step)

    # ------------------------------------------------------------ faults

    def _fault(self) -> None:
        if self.faults_on:
            KINDS[self.rng.choice(self.options.faults)](self)
            self.after(self.draw(0.2, 2.0) * self.options.fault_every_s, self._fault)

    def up(self) -> list[SimHost]:
        """Hosts that live and are not frozen."""
        return [host for host in self.hosts if host.alive and not host.frozen]

    def heal(self) -> None:
        """Faults end; every node is let back in and enough hosts are up."""
        self.faults_on = False
        self.options = Options(**{**self.options.__dict__, "loss": 0.0, "commit_failure": 0.0})
        for host in self.hosts:
            if host.frozen:
                thaw(self, host)
        for node in list(self.driver.state.quarantined):
            self.driver.take(events.NodeReleased(node=node, why="healed"))
        self.driver.take(events.ResumeRequested(who="sim", why="healed"))
        self.driver.take(events.ResizeRequested(nodes=None, hosts=None, who="sim", why="healed"))
        self.cut.clear()
        while sum(self.quality[host.node] in ("good", "slow") for host in self.up()) < self.config.hosts_min:
            self.add_node()
