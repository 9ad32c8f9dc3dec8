"""What was chosen: the layout of one generation, and what one trainer is told to do in it.

A plan holds for exactly one generation. Which samples step t uses does not depend on it; how the ranks
divide them does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class SnapshotKey:
    """Names one snapshot: `generation` fixes the layout (which rank holds which block), `step` the state.

    `step` counts completed optimizer steps: the state of step 0 is the initialised model.
    """

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a listening socket is reached from other nodes."""

    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parallelism of one generation; `shares[r]` is how many of a step's samples rank r takes, in rank order.

    All ranks run `micro_batches` slices a step (ZeRO-3 gathers in step); shares differ in rows only.
    """

    world: int
    shares: tuple[int, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        assert len(self.shares) == self.world, (self.shares, self.world)
        assert min(self.shares) >= self.micro_batches >= 1, (self.shares, self.micro_batches)

    def share_of(self, rank: int) -> tuple[int, int]:
        """Half-open range of rank's samples within a step's [0, global_samples)."""
        start = sum(self.shares[:rank])
        return start, start + self.shares[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One host of a generation. Its index in `Assignment.members` is its rank."""

    host: str
    node: str
    domain: str
    mover: Endpoint
    store: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """One place where the shard of `rank` (of the snapshot's own layout) can be read.

    tier "own": the arena buffer that this rank's trainer wrote, on `host`; "received": a partner copy in the
    arena of `host`; "disk": `object` on the disk of `host`'s node; "storage": an object of a committed checkpoint.
    `endpoint` is the mover that serves it; of an object in storage, the one that fetches it for all, None: each for
    itself.
    """

    rank: int
    tier: Literal["own", "received", "disk", "storage"]
    host: str
    endpoint: Endpoint | None
    object: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """State to start from: a snapshot and, per rank of its layout, one source. `sources` covers each rank once."""

    key: SnapshotKey
    world: int
    sources: tuple[ShardSource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Steps `first` to `last`, as `generation` of `attempt` completed them."""

    attempt: int
    generation: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOrder:
    """What of a run is to lie on the disk of a node, in `folder` of `snapshot.disk`. write: this snapshot next. keep:
    the newest that are whole; what is older than all of them is deleted. remove: all of it, at the end."""

    folder: str
    attempt: int
    write: SnapshotKey | None = None
    keep: tuple[SnapshotKey, ...] = ()
    remove: bool = False


def shard_object(attempt: int, key: SnapshotKey, rank: int) -> str:
    """The name of the bytes of one rank's shard, in storage and on a node's disk."""
    return f"data/{attempt}-{key.generation}-{key.step}/{rank}.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All that one trainer needs for one generation. `restore` None: initialise the model from the seed.

    The trainer pauses by itself when `until_step` steps are complete (the run's end, or a scheduled resize).
    `partner` is the mover that gets this rank's second copy; None where no other failure domain exists.
    """

    run: str
    attempt: int
    generation: int
    rank: int
    plan: Plan
    members: tuple[Member, ...]
    restore: RestorePlan | None
    until_step: int
    partner: Endpoint | None

    @property
    def world(self) -> int:
        return self.plan.world
