"""What happened: facts in the past tense, the two messages of the protocol, and their JSON form.

Two messages, both level-triggered (each carries the sender's whole present state, so loss, duplication and
reordering cost only time): a host sends `Report` up, the coordinator sends `Order` down. The driver turns
reports into the facts below; only those reach `decide`, and only those are journaled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from elastic.plan import Assignment, DiskOrder, Endpoint, Member, RestorePlan, SnapshotKey, Stretch

ExitKind = Literal["lost", "peer", "storage", "user", "stopped", "paused", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a trainer ended.

    lost: killed or crashed by something that is not us (code or signal say which).
    peer: a collective, the rendezvous or a restore failed because of another host; this one is never blamed.
    `blame`: that host's id, where it is known (the source that could not be read). `damaged`: the committed checkpoint
    or the snapshot on a disk that it was to start from is not what was written.
    storage: it did not answer a restore. user: an exception in the task's code; `detail` is the traceback's tail.
    stopped: killed by the host on an order. paused, done: ended by itself at a step boundary, state in the arena.
    """

    kind: ExitKind
    step: int
    code: int | None = None
    signal: int | None = None
    detail: str = ""
    blame: str = ""
    damaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReport:
    """The trainer as its host sees it. `marks`: seconds since the order arrived, by name of the phase that ended
    (start, group, build, restore, first_step), filled as they pass; phase is "running" once first_step is there."""

    phase: Literal["none", "starting", "running", "exited"] = "none"
    generation: int = 0
    pid: int = 0
    marks: dict[str, float] = field(default_factory=dict)
    exit: Exit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One shard in an arena or on the node's disk: rank `rank` of the `world` ranks of layout `key.generation`.
    attempt: that wrote it to disk."""

    key: SnapshotKey
    rank: int
    world: int
    tier: Literal["own", "received", "disk"]
    sealed: bool
    nbytes: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """A shard that lies whole in the run's storage, at `object`, with its table beside it."""

    key: SnapshotKey
    rank: int
    object: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFailure:
    """The newest upload (or write to the node's disk) that failed on a host, the `number`-th of them."""

    key: SnapshotKey
    reason: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One completed optimizer step, told by rank 0; sums are over all ranks (they came through the step word).

    loss: nats per token. digest: sum over the step's samples of hash64(id) mod 2**64, as 16 hex digits.
    seconds: wall time on rank 0 since the step before was told. upkeep_s: of it, what fault tolerance took (snapshot,
    step word, telling). held_out, held_out_sets: nats per token, where this step evaluated, and of each set, where
    there are several. metrics: what the task reported, means over the step's targets.
    """

    generation: int
    step: int
    loss: float
    tokens: int
    samples: int
    digest: str
    grad_norm: float
    lr: float
    seconds: float
    held_out: float | None = None
    held_out_sets: dict[str, float] = field(default_factory=dict)
    upkeep_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """What a host found out about its node before it takes part; once per incarnation, again only where it failed.

    memory_free_bytes: before the arena was reserved; memory_wanted_bytes: arena and, on a CPU, the trainer's state.
    disk_free_bytes: where its logs go. gpus: visible ones. gemm_gflops: GFLOP/s of the best of many matrix products in
    the run's precision, on the device that trains; gemm_wrong: rows that differ from the known result. copy_gbs:
    GB/s from the device's memory into the host's; copy_wrong: numbers that arrived changed.
    link_to: the host that some MB were sent to and came back from, "" where none was named; link_ms: best round trip;
    link_mbs: MB/s, the slower direction. unreached: hosts that did not answer, with why.
    storage_wrong: what of the run's storage can't be used from here; storage_down: why it did not answer.
    failed: why the device or the memory could not be used at all. clock_ahead_s: of the coordinator's clock, found by
    the driver.
    """

    memory_free_bytes: int = 0
    memory_wanted_bytes: int = 0
    disk_free_bytes: int = 0
    gpus: int = 0
    gemm_gflops: float = 0.0
    gemm_wrong: int = 0
    copy_gbs: float = 0.0
    copy_wrong: int = 0
    link_to: str = ""
    link_ms: float = 0.0
    link_mbs: float = 0.0
    unreached: dict[str, str] = field(default_factory=dict)
    storage_wrong: str = ""
    storage_down: str = ""
    failed: str = ""
    clock_ahead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Host -> coordinator, on every change and at least each heartbeat. Older `seq` of a host are dropped.

    ready: a trainer can be started (template up, check made); warm: a standby waits. check: None until it is made.
    sent_s: the host's wall clock, seconds since the epoch. step: newest step that the trainer's
    progress mark shows. steps: records of its last trainer that the order's `steps_seen` does not cover (a key of
    another generation covers none), oldest first, a bounded number; rank 0's host tells them as they come, every
    other host once its trainer has exited: each completed step is then known as long as one host of the generation
    lives. A trainer sends its record before it publishes a snapshot of the step, and its host reads all of them
    before it reports the exit.
    """

    host: str
    seq: int
    node: str
    domain: str
    slot: int
    ready: bool
    warm: bool
    mover: Endpoint
    store: Endpoint
    trainer: TrainerReport = TrainerReport()
    step: int = 0
    holdings: tuple[Holding, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    uploads: tuple[Uploaded, ...] = ()
    upload_failure: UploadFailure | None = None
    disk_failure: UploadFailure | None = None
    skipped: int = 0
    pids: dict[str, int] = field(default_factory=dict)
    check: NodeCheck | None = None
    sent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Coordinator -> host: the whole desired state, on every change and at least each heartbeat (it is the lease).
    The host kills a trainer of an older generation, or of this one when `running` is False; it starts
    `assignment` when `running` and no trainer of that generation was ever started here. `assignment` None with
    `running`: it was sent before. drain: pause at the next step boundary. keep: the newest safe snapshot; older
    ones may be overwritten. upload: copy this sealed own shard to storage. steps_seen: the newest record of that
    generation that is in the journal. finish: the run is over, end. evicted: this incarnation is no longer a member
    of the run; kill, forget and come back as a new host. neighbours: whom to try the network with, one that answers is
    enough. disk: what is to lie on the node's.
    """

    host: str
    seq: int
    attempt: int
    generation: int
    running: bool = False
    assignment: Assignment | None = None
    drain: bool = False
    keep: SnapshotKey | None = None
    upload: SnapshotKey | None = None
    steps_seen: SnapshotKey | None = None
    evicted: bool = False
    finish: bool = False
    neighbours: tuple[Member, ...] = ()
    disk: DiskOrder | None = None


# ---------------------------------------------------------------- facts: the input of `decide`


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """An attempt began. `durable`: the checkpoint that it starts from, None: the seed. `older`: those before it, newest
    first. `generation`: the highest that an earlier attempt may have used; numbers are never used twice. `origin`: from
    what, and why from nothing newer. `changes`: what was allowed to differ from the configuration. `disk`: the run's
    folder on the nodes' disks, "": none. `line`: what of earlier attempts may be used from there."""

    run: str
    attempt: int
    generation: int
    durable: RestorePlan | None
    older: tuple[RestorePlan, ...] = ()
    origin: str = ""
    changes: tuple[str, ...] = ()
    disk: str = ""
    line: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorRestarted:
    """The same attempt goes on in a new coordinator process, state folded from the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReported:
    """A host told something new (the driver drops steps, uploads and, while a trainer runs, holdings)."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGone:
    """A host's process ended (its stream was closed, or Ray says its actor died)."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSilent:
    """Nothing was heard of a host for longer than the limit. `stalled_s`: since any member showed progress."""

    host: str
    silent_s: float
    stalled_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted:
    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSafe:
    """Each shard of `key` lies complete in two failure domains, or in as many as the generation has."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadCompleted:
    """Each shard of `key` lies in storage; nothing is committed yet."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The manifest is entry `number` of the commit log; `restore` reads the checkpoint."""

    key: SnapshotKey
    number: int
    restore: RestorePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """The checkpoint was not committed, or not even uploaded. `fenced_by`: attempt whose claim was found, 0: none."""

    key: SnapshotKey
    reason: str
    fenced_by: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWritten:
    """Each shard of `key` lies on the disk of a node; `failed`: why not, "" where it does."""

    key: SnapshotKey
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Somebody asked the run to stop at a step boundary with a checkpoint."""

    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """Hold at the next step boundary, hosts and state kept, until `ResumeRequested`."""

    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRequested:
    """Train on at most so many nodes and hosts from the next step boundary on; None: as configured."""

    nodes: int | None
    hosts: int | None
    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """Make the next safe snapshot durable, whatever the interval."""

    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChanged:
    """`key` (one of `config_live.LIVE_KEYS`) has this value from now on, in this attempt."""

    key: str
    value: int | float | str
    who: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuarantined:
    """Its hosts take no part from the next step boundary on: on suspicion, or drained by a person."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReleased:
    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Journaled only where it changed something."""


Event = (
    RunStarted | CoordinatorRestarted | HostReported | HostGone | HostSilent | StepCompleted | StepSafe
    | UploadCompleted | CheckpointCommitted | CommitFailed | DiskWritten | StopRequested | PauseRequested
    | ResumeRequested | ResizeRequested | CheckpointRequested | SettingChanged | NodeQuarantined | NodeReleased | Tick
)  # fmt: skip

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (*Event.__args__, Report, Order, Assignment, DiskOrder, Holding, StepRecord)
}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {}


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind.__name__ not in _ADAPTERS:
        _ADAPTERS[kind.__name__] = TypeAdapter(kind)
    return _ADAPTERS[kind.__name__]


def to_json(value: object) -> dict[str, Any]:
    """A dataclass of this module as plain JSON values, its class name under "kind"."""
    return {"kind": type(value).__name__, **_adapter(type(value)).dump_python(value, mode="json")}


def from_json(raw: dict[str, Any]) -> Any:
    """The inverse of `to_json`. ValueError: unknown kind or fields that do not fit."""
    fields = dict(raw)
    kind = _KINDS.get(fields.pop("kind", ""))
    if kind is None:
        raise ValueError(f"unknown kind {raw.get('kind')!r}, known: {', '.join(sorted(_KINDS))}")
    return _adapter(kind).validate_python(fields, strict=False)
