"""The controller's hands: poll, fold, decide, journal, send. The same code on Ray, local processes, in simulation.

It owns what is not worth a journal line: when each host was last heard, which orders were sent, which shards
exist. Everything it concludes from that enters `decide` as a fact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, Protocol

from elastic import events
from elastic.clock import Clock
from elastic.config import Config
from elastic.controller.actions import CommitCheckpoint, EvictHost, UploadSnapshot
from elastic.controller.decide import decide, effective
from elastic.controller.membership import hosts_wanted, needed_nodes
from elastic.controller.orders import order_for, orders_for
from elastic.controller.safety import DiskFold, SafetyFold, UploadFold
from elastic.controller.state import ALIVE, TERMINAL, Phase, RunState
from elastic.events import HostGone, Order, Report, Uploaded
from elastic.plan import SnapshotKey
from elastic.telemetry import journal

EVALUATIONS_MAX = 64  # of how many the loss is known when their step's checkpoint is committed


class Cluster(Protocol):
    """Messages to and from hosts: over TCP for Ray and local processes, simulated in tests/sim."""

    def receive(self, timeout_s: float) -> list[Report | HostGone]:
        """All that has come, waiting up to `timeout_s` for a first message."""
        ...

    def send(self, host: str, order: Order) -> None:
        """Never blocks; a host that is gone is ignored."""
        ...

    def drop(self, host: str) -> None:
        """Close the host's stream after what was sent."""
        ...


class Commits(Protocol):
    """The commit log, off the driver's thread."""

    def submit(
        self, key: SnapshotKey, uploads: tuple[Uploaded, ...], metrics: Mapping[str, float], without: Collection[str]
    ) -> None: ...

    def results(self) -> list[events.CheckpointCommitted | events.CommitFailed]: ...


@dataclass(slots=True)
class _Heard:
    """What the driver knows of one open stream. `progress`: the newest (generation, step) its trainer showed.
    `clock_ahead_s`: of the host's clock to ours; the way of a report makes it look smaller, so the largest counts."""

    report: Report
    at_s: float
    told: tuple[Any, ...] | None = None
    progress: tuple[int, int] = (0, 0)
    sent: Order | None = None
    sent_s: float = 0.0
    upload_failures: int = 0
    disk_failures: int = 0
    silence_told_s: float = 0.0
    clock_ahead_s: float = float("-inf")


class Driver:
    """Runs one attempt. `state` and `seq` come from `replay` when a coordinator is restarted."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        commits: Commits,
        log: IO[bytes],
        clock: Clock,
        state: RunState | None = None,
    ) -> None:
        self.state = state or RunState()
        self._config = config
        self._cluster = cluster
        self._commits = commits
        self._log = log
        self._clock = clock
        self._heard: dict[str, _Heard] = {}
        self._safety = SafetyFold(self.state.assignments)
        self._uploads = UploadFold()
        self._on_disk: DiskFold | None = None
        self._submitted: tuple[SnapshotKey, float] | None = None
        self._held_out: deque[tuple[SnapshotKey, float]] = deque(maxlen=EVALUATIONS_MAX)
        self._order_seq = 0
        self._ordered: RunState | None = None
        self._progress_s = clock.now_s()
        self._turn_s = clock.now_s()
        for host, report in self.state.hosts.items():
            self._heard[host] = _Heard(report=report, at_s=self._turn_s, told=_told(report))

    def turn(self, timeout_s: float) -> bool:
        """One round. True when the run has ended (orders to finish are sent)."""
        messages = self._cluster.receive(timeout_s)
        self._forgive_own_stall(timeout_s)
        for message in messages:
            if isinstance(message, HostGone):
                self._heard.pop(message.host, None)
                self.take(message)
            else:
                self._hear(message)
        for result in self._commits.results():
            self.take(result)
        for silent in self._silences():
            self.take(silent)
        self._submit_upload()
        self.take(events.Tick())
        self._send_orders()
        return self.state.phase in TERMINAL

    def take(self, event: events.Event) -> str:
        """Decide on one fact, journal it if it changed something, act. Returns the reason, "" where nothing changed."""
        now_s = round(self._clock.now_s(), 6)  # as the journal keeps it, so that a replay decides alike
        before = self.state
        decision = decide(before, event, now_s, self._config)
        if decision.state == before and not decision.actions and not isinstance(event, events.CoordinatorRestarted):
            return ""
        self.state = decision.state
        self._log.write(
            journal.encode(_entry(now_s, event, decision.state, decision.actions, decision.reason, self._config))
        )
        self._log.flush()
        if self.state.generation != before.generation:
            self._safety = SafetyFold(self.state.assignments)
            self._progress_s = now_s
        for action in decision.actions:
            if isinstance(action, EvictHost):
                self._evict(action.host)
            elif isinstance(action, CommitCheckpoint):
                self._commit(action)
            elif isinstance(action, UploadSnapshot):
                self._uploads.forget_before(action.key)
        return decision.reason

    # ------------------------------------------------------------ reports

    def _hear(self, report: Report) -> None:
        now_s = self._clock.now_s()
        if report.host in self.state.gone:
            self._evict(report.host)
            return
        heard = self._heard.setdefault(report.host, _Heard(report=report, at_s=now_s))
        if heard.report.seq > report.seq:
            return
        heard.report, heard.at_s = report, now_s
        heard.clock_ahead_s = max(heard.clock_ahead_s, report.sent_s - now_s)
        progress = (report.trainer.generation, report.step)
        if progress > heard.progress:
            heard.progress = progress
            if report.trainer.generation == self.state.generation:
                self._progress_s = now_s
        for record in report.steps:
            self.take(events.StepCompleted(record=record))
            if record.held_out is not None:
                key = SnapshotKey(generation=record.generation, step=record.step)
                self._held_out.append((key, record.held_out))
        safe = self._safety.observe(report)
        if safe is not None:
            self.take(events.StepSafe(key=safe))
        self._uploads.observe(report)
        self._hear_disk(report)
        self._hear_failure(heard, report)
        told = _told(report)
        if heard.told != told or report.host in self.state.silent:
            heard.told = told
            self.take(events.HostReported(report=significant(_with_clock(report, heard.clock_ahead_s))))

    def _hear_disk(self, report: Report) -> None:
        key = self.state.disk.writing
        if key is None:
            return
        if self._on_disk is None or self._on_disk.key != key:
            self._on_disk = DiskFold(key, self.state.attempt)
        if self._on_disk.observe(report, len(self.state.members)):
            self.take(events.DiskWritten(key=key))

    def _hear_failure(self, heard: _Heard, report: Report) -> None:
        """A new one, of what is being copied: the first host that fails ends the try."""
        upload, disk = report.upload_failure, report.disk_failure
        if upload is not None and upload.number != heard.upload_failures:
            heard.upload_failures = upload.number
            if upload.key == self.state.upload:
                self.take(events.CommitFailed(key=upload.key, reason=f"{report.host}: {upload.reason}"))
        if disk is not None and disk.number != heard.disk_failures:
            heard.disk_failures = disk.number
            self.take(events.DiskWritten(key=disk.key, failed=f"{report.host}: {disk.reason}"))

    def _silences(self) -> Iterable[events.HostSilent]:
        now_s = self._clock.now_s()
        limit_s = effective(self.state, self._config).control.silence_s
        for host, heard in list(self._heard.items()):
            silent_s = now_s - heard.at_s
            if silent_s > limit_s and now_s - heard.silence_told_s > self._config.control.heartbeat_s:
                heard.silence_told_s = now_s
                yield events.HostSilent(host=host, silent_s=silent_s, stalled_s=now_s - self._progress_s)

    def _forgive_own_stall(self, timeout_s: float) -> None:
        """Time in which this process itself did not run is nobody's silence."""
        now_s = self._clock.now_s()
        stall_s = now_s - self._turn_s - timeout_s
        self._turn_s = now_s
        if stall_s > self._config.control.heartbeat_s:
            self._progress_s += stall_s
            for heard in self._heard.values():
                heard.at_s += stall_s

    # ------------------------------------------------------------ actions

    def _send_orders(self) -> None:
        """To whom it changed, and to all once a heartbeat."""
        now_s = self._clock.now_s()
        due = [host for host, heard in self._heard.items() if heard.sent is None or self.state is not self._ordered]
        orders = orders_for(self.state, due)
        self._ordered = self.state
        for host, heard in list(self._heard.items()):
            order = orders.get(host) or heard.sent
            assert order is not None
            changed = heard.sent != order
            if not changed and now_s - heard.sent_s < self._config.control.heartbeat_s:
                continue
            heard.sent, heard.sent_s = order, now_s
            trained = heard.report.trainer.generation
            self._send(order, trained, with_assignment=changed or trained < order.generation)

    def _send(self, order: Order, trained: int, *, with_assignment: bool) -> None:
        self._order_seq += 1
        assignment = order.assignment if with_assignment else None
        told = self.state.steps_told.get(trained)
        seen = SnapshotKey(generation=trained, step=told) if told else None
        # Microseconds of the clock, so that the orders of a restarted coordinator are newer than those before.
        seq = max(self._order_seq, round(self._clock.now_s() * 1_000_000))
        self._order_seq = seq
        self._cluster.send(order.host, replace(order, seq=seq, steps_seen=seen, assignment=assignment))

    def _evict(self, host: str) -> None:
        self._heard.pop(host, None)
        self._send(order_for(self.state, host), 0, with_assignment=False)
        self._cluster.drop(host)

    def _submit_upload(self) -> None:
        key = self.state.upload
        if key is None or self._submitted == (key, self.state.upload_since_s):
            return
        if self._uploads.complete(key, len(self.state.upload_hosts)) is not None:
            self._submitted = (key, self.state.upload_since_s)
            self.take(events.UploadCompleted(key=key))

    def _commit(self, action: CommitCheckpoint) -> None:
        key = action.key
        uploads = self._uploads.complete(key, len(self.state.upload_hosts))
        assert uploads is not None, key
        # A restarted coordinator has not heard of the evaluation; the checkpoint is as good without its loss.
        loss = dict(self._held_out).get(key)
        self._commits.submit(key, uploads, {} if loss is None else {"held_out": loss}, action.without)
        self._uploads.forget_before(key)

    def status(self) -> dict[str, Any]:
        """What a person asks first, as plain JSON values."""
        state = self.state
        return {
            "run": state.run,
            "attempt": state.attempt,
            "phase": str(state.phase),
            "generation": state.generation,
            "world": len(state.members) if state.phase in ALIVE else 0,
            "step": state.step,
            "highest_step": state.highest_step,
            "steps": self._config.steps,
            "safe_step": state.safe.step if state.safe else None,
            "durable_step": state.durable_step,
            "durable_age_s": round(self._clock.now_s() - state.durable_at_s, 1),
            "not_durable": state.not_durable,
            "incidents": state.incidents,
            "waiting_for": state.waiting_for,
            "failure": state.failure,
            "detail": state.detail,
            "members": list(state.members),
            "quarantined": dict(state.quarantined),
            "paused_by": state.paused_by,
            "nodes_wanted": state.nodes_wanted,
            "hosts_wanted": state.hosts_wanted,
            "settings": dict(state.settings),
            "would": dict(state.observed),
            "needed_nodes": sorted(needed_nodes(state)),
            "refused": dict(state.refused),
            "marked": dict(state.marked),
            "resting_s": {
                node: round(max(0.0, lost.until_s - self._clock.now_s()), 1)
                for node, lost in state.losses.items()
                if lost.until_s
            },
            "hosts": {
                host: {
                    "node": heard.report.node,
                    "slot": heard.report.slot,
                    "ready": heard.report.ready,
                    "warm": heard.report.warm,
                    "trainer": heard.report.trainer.phase,
                    "generation": heard.report.trainer.generation,
                    "step": heard.report.step,
                    "skipped": heard.report.skipped,
                    "pids": dict(heard.report.pids),
                    "check": asdict(told.check) if (told := state.hosts.get(host)) and told.check else None,
                }
                for host, heard in self._heard.items()
            },
        }


def _told(report: Report) -> tuple[Any, ...]:
    """What of a report `decide` is to hear of when it changes. What changes at every step has its own facts."""
    trainer = report.trainer
    busy = trainer.phase in ("starting", "running")
    marks = len(trainer.marks) if trainer.phase != "starting" else 0
    told = (trainer.phase, trainer.generation, trainer.pid, trainer.exit, marks)
    held = None if busy else report.holdings
    return (report.ready, report.warm, report.check, report.mover, report.store, report.pids, told, held)


def significant(report: Report) -> Report:
    """The report without what `decide` does not use; while a trainer runs, its holdings change at every step."""
    busy = report.trainer.phase in ("starting", "running")
    holdings = () if busy else report.holdings
    return replace(
        report,
        steps=(),
        step=0,
        uploads=(),
        upload_failure=None,
        disk_failure=None,
        skipped=0,
        sent_s=0.0,
        holdings=holdings,
    )


def _with_clock(report: Report, ahead_s: float) -> Report:
    """A check is journaled with the offset of its host's clock."""
    if report.check is None or not report.sent_s:
        return report
    return replace(report, check=replace(report.check, clock_ahead_s=round(ahead_s, 3)))


def _entry(
    now_s: float, event: events.Event, state: RunState, actions: tuple[Any, ...], reason: str, config: Config
) -> dict[str, Any]:
    hosts = sum(host not in state.refused for host in state.hosts)
    short = state.phase is Phase.WAITING and hosts < hosts_wanted(state, config)[0]
    return {
        "schema": journal.SCHEMA,
        "t": now_s,
        "event": events.to_json(event),
        "actions": [events.to_json(action) for action in actions],
        "reason": reason,
        "phase": str(state.phase),
        "generation": state.generation,
        "step": state.step,
        "incident": _incident(state),
        "short": short,
        "paused": bool(state.paused_by),
        "fresh": not state.steps_told and state.incidents == 0,
    }


def _incident(state: RunState) -> dict[str, Any] | None:
    """The open incident, told in every entry until it is over."""
    incident = state.incident
    if incident is None:
        return None
    return {"number": incident.number, "failure": incident.failure, "rank": incident.rank, "hosts": incident.hosts}


def replay(entries: Iterable[dict[str, Any]], config: Config) -> RunState:
    """The state after the newest attempt's entries: the fold that a restarted coordinator continues from."""
    state = RunState()
    for entry in entries:
        event = events.from_json(entry["event"])
        if isinstance(event, events.RunStarted):
            state = RunState()
        state = decide(state, event, entry["t"], config).state
    return state
