"""The controller's whole memory: one frozen value, its phases and its invariants.

Only `decide` makes a new one. Recovery from the journal is a fold of the events through `decide`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic.config import Config
from elastic.controller.actions import Action
from elastic.controller.checkpoint_pace import Pace
from elastic.events import Report
from elastic.plan import Assignment, RestorePlan, SnapshotKey, Stretch


class Phase(StrEnum):
    """Why a phase is left is data (`RunState.incident`, `RunState.draining`), not another phase."""

    WAITING = "waiting"  # no trainers; leaves when a membership forms
    STARTING = "starting"  # a generation was ordered; leaves with its first completed step
    RUNNING = "running"
    STOPPING = "stopping"  # trainers are being killed; leaves when all are reaped or their hosts are gone
    SAVING = "saving"  # trainers ended at the last step; its snapshot is being committed
    FINISHED = "finished"
    STOPPED = "stopped"  # by request, with a checkpoint
    FAILED = "failed"


TERMINAL = frozenset({Phase.FINISHED, Phase.STOPPED, Phase.FAILED})
ALIVE = frozenset({Phase.STARTING, Phase.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One failure, from what broke to the first completed step of the next generation.

    failure: user code, lost process, lost host, lost node, silent host, storage outage, broken connection, start
    timeout, drain timeout. `detail`: the first failing rank's last lines.
    """

    number: int
    failure: str
    generation: int
    step: int
    hosts: tuple[str, ...]
    rank: int | None
    detail: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLosses:
    """How often a node was lost while it took part, at most once a generation. `generation`: of the last time.
    `until_s`: until when it rests, 0.0 if it does not. `joined_s`: since when it takes part again."""

    count: int
    generation: int
    until_s: float
    joined_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Snapshots on the nodes' disks, in `folder` ("": none). line: what of earlier attempts may be used. unusable: what
    proved damaged. writing: the present one, since `since_s`, or when the last one ended. kept: the newest that are
    whole, oldest first. failures: in a row."""

    folder: str = ""
    line: tuple[Stretch, ...] = ()
    unusable: frozenset[SnapshotKey] = frozenset()
    writing: SnapshotKey | None = None
    since_s: float = 0.0
    kept: tuple[SnapshotKey, ...] = ()
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`step`: completed steps of the lineage. `highest_step`: ever completed, maybe undone since. `steps_told`: by
    generation, the last step whose record is in the journal; a host that was silent may still tell older ones.

    `hosts`: newest report of each live host. `silent`: those of them that nothing is heard of; they take no part
    until they report again, and then find that their generation is over. `gone`: ids that may never take part
    again. `refused`, `held`, `marked`: hosts that may not take part, may only where there are too few others, may and
    were found odd; each with why. `losses`: by node. `paused_by`, `nodes_wanted`, `hosts_wanted`, `checkpoint_wanted`,
    `settings`: what people ordered. `observed`: what policies in observe mode would do, by what it concerns. `keep`:
    what hosts may not overwrite. `older`: checkpoints before `durable`, newest first. `damaged`: what the run
    went back from: commits take it off the line. `pace`: what checkpoints cost.
    `began_s`: when the attempt did. `durable_at_s`: when `durable` was committed, or the attempt began.
    `upload_hosts`: who has a shard of what is uploaded, by rank. `upload_since_s`: when the present upload began, or
    the last one failed. `not_durable`: why the newest tries to commit a checkpoint failed, and since when.
    `waiting_for`: why no membership forms. `enough_since_s`: since when
    WAITING has had hosts_min ready hosts, None while it has not.
    """

    run: str = ""
    attempt: int = 0
    phase: Phase = Phase.WAITING
    since_s: float = 0.0
    began_s: float = 0.0
    generation: int = 0
    hosts: Mapping[str, Report] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    quarantined: Mapping[str, str] = field(default_factory=dict)
    paused_by: str = ""
    nodes_wanted: int | None = None
    hosts_wanted: int | None = None
    checkpoint_wanted: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    observed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    marked: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, NodeLosses] = field(default_factory=dict)
    assignments: tuple[Assignment, ...] = ()
    step: int = 0
    highest_step: int = 0
    steps_told: Mapping[int, int] = field(default_factory=dict)
    safe: SnapshotKey | None = None
    keep: SnapshotKey | None = None
    durable: RestorePlan | None = None
    older: tuple[RestorePlan, ...] = ()
    damaged: tuple[RestorePlan, ...] = ()
    upload: SnapshotKey | None = None
    upload_hosts: tuple[str, ...] = ()
    upload_since_s: float = 0.0
    commit_failures: int = 0
    pace: Pace = field(default_factory=Pace)
    durable_at_s: float = 0.0
    not_durable: str = ""
    not_durable_since_s: float = 0.0
    disk: Disk = field(default_factory=Disk)
    draining: str = ""
    drain_since_s: float = 0.0
    stop_why: str = ""
    waiting_for: str = ""
    enough_since_s: float | None = None
    candidate_since_s: float | None = None
    incident: Incident | None = None
    incidents: int = 0
    failures_without_progress: int = 0
    highest_at_failure: int = -1
    failure: str = ""
    detail: str = ""

    @property
    def members(self) -> tuple[str, ...]:
        """Hosts of the present generation, by rank."""
        return tuple(member.host for member in self.assignments[0].members) if self.assignments else ()

    @property
    def present(self) -> tuple[Report, ...]:
        """Reports of the hosts that are heard of."""
        return tuple(report for host, report in self.hosts.items() if host not in self.silent)

    @property
    def durable_step(self) -> int:
        return self.durable.key.step if self.durable else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`reason` says why, also for "nothing to do"; it is empty where the event changed nothing."""

    state: RunState
    actions: tuple[Action, ...] = ()
    reason: str = ""


def released(state: RunState) -> SnapshotKey | None:
    """What hosts may not overwrite: what is being copied from memory, else the newest safe snapshot of this generation,
    else what was kept. What an earlier generation's upload reads is protected by the movers' pins alone."""
    busy = [key for key in (state.upload, state.disk.writing) if key is not None and key.generation == state.generation]
    if busy:
        return min(busy)
    newest = state.safe
    return newest if newest is not None and newest.generation == state.generation else state.keep


def headline(detail: str) -> str:
    """The first line of a detail that may hold a traceback, or nothing."""
    return detail.partition("\n")[0]


def check(state: RunState, config: Config) -> None:
    """Assert every invariant; `decide` calls it on each new state."""
    members = state.members
    assert len(set(members)) == len(members), members
    assert not state.gone & state.hosts.keys(), state.gone & state.hosts.keys()
    assert state.silent <= state.hosts.keys(), state.silent - state.hosts.keys()
    assert state.step <= state.highest_step, (state.step, state.highest_step)
    assert state.step <= config.steps, (state.step, config.steps)
    if state.phase in ALIVE:
        assert config.hosts_min <= len(members) <= config.hosts_max, members
        assert all(a.generation == state.generation for a in state.assignments)
        assert all(a.rank == rank for rank, a in enumerate(state.assignments))
        assert all(host in state.hosts for host in members), (members, tuple(state.hosts))
        assert not state.silent & set(members), state.silent & set(members)
    if state.phase is Phase.FAILED:
        assert state.failure
