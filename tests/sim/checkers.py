"""What must hold after every turn (safety) and at the end (liveness, lineage, ledger)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from elastic.controller.decide import effective
from elastic.controller.driver import replay
from elastic.controller.durability import WAIT_S_MAX, interval
from elastic.controller.state import ALIVE, Phase
from elastic.plan import Assignment, SnapshotKey
from elastic.telemetry import ledger
from elastic.telemetry.lineage import lineage
from tests.sim.hosts import chain

if TYPE_CHECKING:
    from tests.sim.world import World

ACTIONS_MAX = 16
UPLOAD_S_MAX = 20.0  # two tries to reach storage that is down, and the messages that are lost meanwhile


class Checkers:
    def __init__(self, world: World) -> None:
        self._world = world
        self._durable = 0
        self._safe: SnapshotKey | None = None
        self._owed_since_s: float | None = None

    def stepped(self, assignment: Assignment) -> None:
        """S1: a generation steps only while it is the newest, or (thawed, cut off) on hosts that are out of it."""
        state = self._world.driver.state
        if assignment.generation < state.generation:
            names = {member.host for member in assignment.members}
            assert not names & set(state.members) or names & (state.gone | state.silent), self._world.story()

    def after_turn(self) -> None:
        world, state = self._world, self._world.driver.state
        assert state.durable_step >= self._durable, f"S2 durable step went back\n{world.story()}"
        self._durable = state.durable_step
        if state.phase in ALIVE:
            assert world.config.hosts_min <= len(state.members) <= world.config.hosts_max, world.story()
        self._becomes_durable()
        if state.safe != self._safe:
            self._safe = state.safe
            if state.safe is not None and state.phase is Phase.RUNNING:
                self._survives_any_loss(state.safe, state.assignments)

    def _becomes_durable(self) -> None:
        """L2: an upload never holds its buffers for long, storage down or not; while storage is up and training goes
        on, a checkpoint that is due is committed soon, whatever failed before."""
        world, state = self._world, self._world.driver.state
        now_s, config = world.clock.now_s(), effective(state, world.config)
        if state.phase is not Phase.RUNNING or any(h.frozen for h in world.hosts):
            self._owed_since_s = None
            return
        if state.upload is not None:
            assert now_s - state.upload_since_s < UPLOAD_S_MAX, f"L2 {state.upload} is held\n{world.story()}"
        safe = state.safe.step if state.safe else 0
        is_owed = safe - state.durable_step >= interval(state, now_s, config)[0] and safe < config.steps
        if not is_owed or world.storage_is_down or world.options.commit_failure:
            self._owed_since_s = None
            return
        self._owed_since_s = self._owed_since_s or now_s
        owed_s = now_s - self._owed_since_s
        assert owed_s < WAIT_S_MAX + UPLOAD_S_MAX, f"L2 step {safe} is not durable after {owed_s} s\n{world.story()}"

    def _survives_any_loss(self, key: SnapshotKey, assignments: tuple[Assignment, ...]) -> None:
        """I3: after the loss of any one host a safe step is restorable from memory; of any one domain too, where
        every rank's partner lies in another one."""
        world = self._world
        members = assignments[0].members
        if len(members) == 1 or not world.config.snapshot.partner or any(a.partner is None for a in assignments):
            return
        domain_of = {m.host: m.domain for m in members}
        crossed = all(domain_of[a.partner.address] != members[a.rank].domain for a in assignments if a.partner)
        groups = [{m.host} for m in members]
        if crossed:
            groups += [{m.host for m in members if m.domain == d} for d in sorted({m.domain for m in members})]
        for lost in groups:
            if any(world.by_name(m.host) is None for m in members):
                return  # a fault of this very turn: the loss has happened already
            left = [h for m in members if m.host not in lost and (h := world.by_name(m.host)) is not None]
            ranks = {
                s.rank
                for h in left
                for s in [*h.own, *h.received]
                if s.key == key and s.sealed and s.content == chain(key.step)
            }
            assert ranks == set(range(len(members))), f"{key} does not survive the loss of {lost}\n{world.story()}"

    def at_end(self) -> None:
        world = self._world
        entries = world.entries()
        state = world.driver.state
        assert state.phase is Phase.FINISHED, f"L1 {state.phase} {state.detail}\n{world.story()}"
        assert replay(entries, world.config) == state, f"S9 replay differs\n{world.story()}"
        assert state.durable is not None and state.durable.key.step == world.config.steps, world.story()
        contents = {world.storage[source.object] for source in state.durable.sources}
        assert contents == {chain(world.config.steps)}, f"the durable state is wrong\n{world.story()}"
        steps = [record["step"] for record in lineage(entries)]
        assert steps == list(range(1, world.config.steps + 1)), f"S3\n{steps}\n{world.story()}"
        ledger.fold(entries)  # S7: asserts that it sums to wall time
        for entry in entries:
            assert len(entry["actions"]) <= ACTIONS_MAX, f"S8 {entry}\n{world.story()}"
        generations = [plan.key.generation for plan in world.log]
        assert generations == sorted(generations), f"S1 commits of {generations}\n{world.story()}"
        self._quarantine(entries)
        self._orders(entries)
        self._admission(entries)

    def _orders(self, entries: list[dict[str, Any]]) -> None:
        """S10: no generation starts while the run is paused, nor with more hosts or nodes than were ordered."""
        paused, nodes, hosts = False, None, None
        for entry in entries:
            event = entry["event"]
            if event["kind"] in ("PauseRequested", "ResumeRequested"):
                paused = event["kind"] == "PauseRequested"
            if event["kind"] == "ResizeRequested":
                nodes, hosts = event["nodes"], event["hosts"]
            for action in entry["actions"]:
                if action["kind"] == "StartGeneration":
                    used = {host.partition("/")[0] for host in action["hosts"]}
                    assert not paused, f"S10 {action}\n{self._world.story()}"
                    assert nodes is None or len(used) <= nodes, f"S10 {action}\n{self._world.story()}"
                    assert hosts is None or len(action["hosts"]) <= hosts, f"S10 {action}\n{self._world.story()}"

    def _quarantine(self, entries: list[dict[str, Any]]) -> None:
        """S6: no generation starts with a host of a quarantined node."""
        barred: set[str] = set()
        for entry in entries:
            event = entry["event"]
            if event["kind"] == "NodeQuarantined":
                barred.add(event["node"])
            if event["kind"] == "NodeReleased":
                barred.discard(event["node"])
            for action in entry["actions"]:
                if action["kind"] == "StartGeneration":
                    nodes = Counter(host.partition("/")[0] for host in action["hosts"])
                    assert not barred & nodes.keys(), f"S6 {action}\n{self._world.story()}"

    def _admission(self, entries: list[dict[str, Any]]) -> None:
        """S10: no generation starts with a refused host, nor with a new one of a resting node where others do."""
        refused: set[str] = set()
        until_s: dict[str, float] = {}
        before: set[str] = set()
        for entry in entries:
            for action in entry["actions"]:
                if action["kind"] == "RefuseHost":
                    refused.add(action["host"])
                elif action["kind"] == "AdmitHost":
                    refused.discard(action["host"])
                elif action["kind"] == "RestNode":
                    until_s[action["node"]] = action["until_s"]
                elif action["kind"] == "StartGeneration":
                    hosts = set(action["hosts"])
                    assert not hosts & refused, f"S10 {action}\n{self._world.story()}"
                    resting = {h for h in hosts - before if until_s.get(h.partition("/")[0], 0.0) > entry["t"]}
                    told = "too few others" in entry["reason"] and len(hosts) == self._world.config.hosts_min
                    assert not resting or told, f"S10 {resting} {entry}\n{self._world.story()}"
                    before = hosts
