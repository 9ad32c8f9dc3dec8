"""What the cluster is to do: decisions in the imperative.

Hosts learn the desired state from `orders.order_for(state, host)`; of the actions the driver itself executes
only `EvictHost`, `CommitCheckpoint` and the two that end the run. The others name, in the journal, what changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.plan import SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGeneration:
    generation: int
    hosts: tuple[str, ...]
    step: int
    until_step: int
    restore: SnapshotKey | None
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGeneration:
    """Kill its trainers."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainGeneration:
    """Let its trainers pause at the next step boundary, state in their arenas."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictHost:
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseHost:
    """It takes no part until its check says otherwise."""

    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitHost:
    """It was refused, and is no longer."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkHost:
    """It takes part, but somebody should look at it."""

    host: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestNode:
    """New hosts of it take no part before `until_s`, unless there are too few without them."""

    node: str
    losses: int
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSnapshot:
    """`key` is safe: buffers with older snapshots may be overwritten."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSnapshot:
    key: SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSnapshot:
    """To the nodes' disks."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """`without`: an object of each checkpoint that the run went back from; they do not count any more."""

    key: SnapshotKey
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRun:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRun:
    failure: str
    detail: str


Action = (
    StartGeneration
    | StopGeneration
    | DrainGeneration
    | EvictHost
    | RefuseHost
    | AdmitHost
    | MarkHost
    | RestNode
    | KeepSnapshot
    | UploadSnapshot
    | WriteSnapshot
    | CommitCheckpoint
    | FinishRun
    | FailRun
)
