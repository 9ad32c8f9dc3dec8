"""Simulated hosts, trainers and movers: what tests/process does with real processes, in virtual time.

A trainer's state is one integer, a hash chain over the steps it took, so that a restore from wrong, torn or mixed
shards shows at once. Arenas follow the product's own rule for reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from elastic.checkpoint.arena import State, reusable
from elastic.events import Exit, Holding, NodeCheck, Order, Report, StepRecord, TrainerReport, Uploaded, UploadFailure
from elastic.plan import Assignment, DiskOrder, Endpoint, Member, SnapshotKey

if TYPE_CHECKING:
    from tests.sim.world import World

Quality = Literal["good", "slow", "broken", "short"]

RECORDS_MAX = 1024
GIVE_UP_S = 6.0  # most, until a request to storage that is down is given up
READ_TIMEOUT_S = 5.0


@cache
def chain(step: int) -> int:
    """The one right state after `step` steps."""
    return 17 if step == 0 else (chain(step - 1) * 6_364_136_223_846_793_005 + step - 1) % (1 << 61)


@dataclass(slots=True)
class Shard:
    """One arena buffer. `content` None: being written."""

    key: SnapshotKey
    rank: int
    world: int
    content: int | None
    sealed: bool = False
    pinned: bool = False

    @property
    def state(self) -> State:
        return State.WRITING if self.content is None else State.SEALED if self.sealed else State.WRITTEN


@dataclass(slots=True)
class Trainer:
    assignment: Assignment
    step: int = 0
    content: int = 0
    joined: bool = False
    marks: dict[str, float] = field(default_factory=dict)
    exit: Exit | None = None
    records: list[StepRecord] = field(default_factory=list)
    draining: bool = False


@dataclass(slots=True)
class SimHost:
    """One host process with its arena. `alive` False: gone. `frozen`: does nothing, but its memory is there."""

    world: World
    node: str
    slot: int
    incarnation: int
    alive: bool = True
    frozen: bool = False
    up: bool = False
    check: NodeCheck | None = None
    seq: int = 0
    order: Order | None = None
    order_at_s: float = 0.0
    trainer: Trainer | None = None
    own: list[Shard] = field(default_factory=list)
    received: list[Shard] = field(default_factory=list)
    uploads: list[Uploaded] = field(default_factory=list)
    uploading: SnapshotKey | None = None
    upload_failure: UploadFailure | None = None
    skipped: int = 0
    disk_failure: UploadFailure | None = None
    steps_seen: SnapshotKey | None = None
    finished: bool = False
    name: str = field(init=False)
    _writing: SnapshotKey | None = None

    def __post_init__(self) -> None:
        self.name = f"{self.node}/{self.slot}.{self.incarnation}"

    @property
    def ready(self) -> bool:
        checked = self.check is not None or not self.world.config.admission.enabled
        looked = not self.world.has_disks or self.order is not None
        return self.up and checked and looked and not self._short

    @property
    def _short(self) -> bool:
        return self.world.config.admission.enabled and self.world.quality[self.node] == "short"

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(address=self.name, port=1)

    # ------------------------------------------------------------ reports

    def report(self) -> None:
        """Send the whole present state up."""
        if not self.alive or self.frozen or self.finished:
            return
        self.seq += 1
        self.world.cluster.up(self, self._report())

    def _report(self) -> Report:
        trainer = self.trainer
        steps: tuple[StepRecord, ...] = ()
        if trainer and (trainer.assignment.rank == 0 or trainer.exit):
            seen = self.steps_seen
            done = seen.step if seen and seen.generation == trainer.assignment.generation else 0
            steps = tuple(r for r in trainer.records if r.step > done)[:RECORDS_MAX]
        return Report(
            host=self.name,
            seq=self.seq,
            node=self.node,
            domain=self.node,
            slot=self.slot,
            ready=self.ready,
            warm=self.ready,
            mover=self.endpoint,
            store=self.endpoint,
            trainer=self._trainer_report(),
            step=trainer.step if trainer else 0,
            holdings=tuple(self._holdings()),
            steps=steps,
            uploads=tuple(self.uploads),
            upload_failure=self.upload_failure,
            disk_failure=self.disk_failure,
            skipped=self.skipped,
            check=self.check,
            sent_s=self.world.clock.now_s() + 3.0 * self.slot,
        )

    def _trainer_report(self) -> TrainerReport:
        trainer = self.trainer
        if trainer is None:
            return TrainerReport()
        phase = "exited" if trainer.exit else "running" if trainer.marks else "starting"
        return TrainerReport(
            phase=phase, generation=trainer.assignment.generation, pid=1, marks=dict(trainer.marks), exit=trainer.exit
        )

    def _holdings(self) -> list[Holding]:
        return [
            Holding(key=s.key, rank=s.rank, world=s.world, tier=tier, sealed=s.sealed, nbytes=1)
            for tier, shards in (("own", self.own), ("received", self.received))
            for s in shards
            if s.content is not None
        ] + ([*self.world.disk_of(self.node).values()] if self.order is not None else [])

    def examine(self) -> None:
        """Check the node; the network again and again until some neighbour answers."""
        if not self.world.awake(self, self.examine):
            return
        quality = self.world.quality[self.node]
        named = self.order.neighbours if self.order and quality != "short" else ()
        tried = [(member.host, self._reaches(member)) for member in named]
        answered = [host for host, reached in tried if reached][:1]
        self.check = NodeCheck(
            memory_free_bytes=0 if quality == "short" else 8 << 30,
            disk_free_bytes=8 << 30,
            gemm_gflops=10.0 if quality == "slow" else self.world.draw(90.0, 110.0),
            gemm_wrong=int(quality == "broken"),
            link_to="".join(answered),
            unreached={host: "no answer" for host, reached in tried if not reached},
        )
        if named and not answered:
            self.world.after(10.0, self.examine)
        self.report()

    def _reaches(self, member: Member) -> bool:
        other, cut = self.world.by_name(member.host), self.world.cut
        apart = member.node != self.node and (member.node in cut or self.node in cut)
        return other is not None and not other.frozen and not apart

    # ------------------------------------------------------------ orders

    def obey(self, order: Order) -> None:
        if not self.alive or self.frozen or self.finished or (self.order and order.seq <= self.order.seq):
            return
        self.order, self.order_at_s = order, self.world.clock.now_s()
        if order.evicted:
            self.world.reborn(self)
            return
        self.steps_seen = order.steps_seen
        generation = self.trainer.assignment.generation if self.trainer else 0
        if self.trainer and (generation < order.generation or not order.running) and not self.trainer.exit:
            self.stop_trainer(Exit(kind="stopped", step=self.trainer.step, signal=9))
        if order.running and order.assignment and order.generation > generation and self.ready:
            self.trainer = Trainer(assignment=order.assignment)
            self.world.after(self.world.draw(0.02, 0.2), self.join, self.trainer)
        if order.drain and self.trainer and not self.trainer.exit:
            self.trainer.draining = True
        if order.upload is not None:
            self._upload(order.upload)
        if order.disk is not None:
            self._obey_disk(order.disk)
        self.finished = order.finish
        self.report()

    def check_lease(self) -> None:
        late = self.world.clock.now_s() - self.order_at_s > self.world.config.control.lease_s
        if self.alive and not self.frozen and self.trainer and not self.trainer.exit and late:
            self.stop_trainer(Exit(kind="stopped", step=self.trainer.step, detail="lease"))

    def stop_trainer(self, ended: Exit) -> None:
        assert self.trainer is not None
        self.trainer.exit = ended
        for shard in [*self.own]:
            if shard.content is None:
                self.own.remove(shard)
        self.report()

    def _obey_disk(self, order: DiskOrder) -> None:
        disk = self.world.disk_of(self.node)
        for at in [at for at, held in disk.items() if order.keep and held.key < min(order.keep)]:
            del disk[at]
        shard = next((s for s in self.own if s.key == order.write and s.sealed), None)
        if order.write is not None and shard is not None and order.write != self._writing:
            self._writing = order.write
            self.world.after(self.world.draw(0.01, 2.0), self._on_disk, shard, order.write, shard.content)

    def _on_disk(self, shard: Shard, key: SnapshotKey, content: int | None) -> None:
        if not self.world.awake(self, self._on_disk, shard, key, content):
            return
        if shard.key != key or self.world.draw(0.0, 1.0) < self.world.options.commit_failure:
            number = 1 + (self.disk_failure.number if self.disk_failure else 0)
            self.disk_failure = UploadFailure(key=key, reason="drawn", number=number)
        else:
            self.world.put_on_disk(self.node, shard)
        self.report()

    def _upload(self, key: SnapshotKey) -> None:
        shard = next((s for s in self.own if s.key == key and s.sealed), None)
        done = any(u.key == key for u in self.uploads)
        if done or self.uploading is not None:
            return
        if shard is None:
            failed = self.upload_failure is not None and self.upload_failure.key == key
            if not failed and all(own.key != key for own in self.own):
                self._upload_failed(key, "not in this host's arena any more")
            return
        self.uploading, shard.pinned = key, True
        limit_s = GIVE_UP_S if self.world.storage_is_down else 0.5
        self.world.after(self.world.draw(0.01, limit_s), self._uploaded, shard, shard.key, shard.content)

    def _uploaded(self, shard: Shard, key: SnapshotKey, content: int | None) -> None:
        if not self.world.awake(self, self._uploaded, shard, key, content):
            return
        self.uploading, shard.pinned = None, False
        if self.world.storage_is_down:
            self._upload_failed(key, "503 from the store")
            self.report()
            return
        assert content is not None and shard.key == key
        name = f"{key.generation}-{key.step}/{shard.rank}"
        self.world.storage[name] = content
        self.uploads = [*self.uploads[-4:], Uploaded(key=key, rank=shard.rank, object=name, nbytes=1)]
        self.report()

    def _upload_failed(self, key: SnapshotKey, reason: str) -> None:
        number = 1 + (self.upload_failure.number if self.upload_failure else 0)
        self.upload_failure = UploadFailure(key=key, reason=reason, number=number)

    # ------------------------------------------------------------ trainer

    def join(self, trainer: Trainer) -> None:
        """Rendezvous and restore; the last of the world to join sets the group going."""
        if not self.world.awake(self, self.join, trainer) or trainer is not self.trainer or trainer.exit:
            return
        silent = self.world.unreachable(trainer.assignment)
        if isinstance(silent, SimHost):
            self.world.after(READ_TIMEOUT_S, self._read_failed, trainer, silent.name)
            return
        if silent:
            self._read_failed(trainer, silent)
            return
        if (damaged := self.world.damaged_source(trainer.assignment)) is not None:
            detail = f"{damaged.object} on the disk of {damaged.host} is damaged"
            self.stop_trainer(Exit(kind="peer", step=0, code=1, detail=detail, damaged=True))
            return
        if self.world.storage_is_down and self.world.needs_storage(trainer.assignment):
            self.world.after(self.world.draw(0.01, GIVE_UP_S), self._storage_failed, trainer)
            return
        trainer.step, trainer.content = self.world.restore(self, trainer.assignment)
        trainer.joined = True
        self.world.joined(trainer.assignment)

    def _storage_failed(self, trainer: Trainer) -> None:
        if self.world.awake(self, self._storage_failed, trainer) and trainer is self.trainer and not trainer.exit:
            self.stop_trainer(Exit(kind="storage", step=0, code=1, detail="503 from the store"))

    def _read_failed(self, trainer: Trainer, blame: str) -> None:
        awake = self.world.awake(self, self._read_failed, trainer, blame)
        if awake and trainer is self.trainer and not trainer.exit:
            self.stop_trainer(Exit(kind="peer", step=0, code=1, detail="restore: no answer", blame=blame))

    def begin_snapshot(self) -> Shard | None:
        """Claim an own buffer, or None: counted, never waited for."""
        assert self.trainer is not None
        assignment = self.trainer.assignment
        key = SnapshotKey(generation=assignment.generation, step=self.trainer.step)
        shard = Shard(key=key, rank=assignment.rank, world=assignment.world, content=None)
        if self._claim(self.own, shard, 2):
            return shard
        self.skipped += 1
        return None

    def _claim(self, shards: list[Shard], new: Shard, most: int) -> bool:
        if len(shards) < most:
            shards.append(new)
            return True
        for index, shard in enumerate(shards):
            if self._reusable(shard):
                shards[index] = new
                return True
        return False

    def _reusable(self, shard: Shard) -> bool:
        keep = self.order.keep if self.order else None
        generation = self.order.generation if self.order else 0
        return not shard.pinned and reusable(shard.state, shard.key, generation=generation, keep=keep)

    def can_snapshot(self) -> bool:
        return len(self.own) < 2 or any(self._reusable(shard) for shard in self.own)

    def seal(self, shard: Shard) -> None:
        """The mover: checksum, then to the partner."""
        if not self.world.awake(self, self.seal, shard) or shard not in self.own or shard.content is None:
            return
        shard.sealed = True
        self.report()
        self.copy_to_partner(shard, shard.key)

    def copy_to_partner(self, shard: Shard, key: SnapshotKey) -> None:
        """Oldest first, until the partner has taken it or it is safe: all ranks then agree on which comes next."""
        trainer = self.trainer
        if not self.alive or trainer is None or shard.key != key:
            return
        partner = trainer.assignment.partner
        keep = self.order.keep if self.order else None
        if partner is None or key.generation != trainer.assignment.generation or (keep is not None and key <= keep):
            return
        pending = [s.key for s in self.own if s.key.generation == key.generation and (keep is None or s.key > keep)]
        target = self.world.by_name(partner.address)
        if self.frozen or min(pending) < key:
            self.world.after(0.05, self.copy_to_partner, shard, key)
        elif target is not None:
            self.world.after(self.world.draw(0.005, 0.1), target.receive, replace(shard), shard, self)

    def receive(self, copy: Shard, original: Shard, sender: SimHost) -> None:
        if not sender.alive or sender.frozen or original.key != copy.key:
            return
        if self.frozen or (self.alive and not self._take_in(copy)):
            self.world.after(0.05, sender.copy_to_partner, original, copy.key)

    def _take_in(self, copy: Shard) -> bool:
        if any(s.key == copy.key and s.rank == copy.rank for s in self.received):
            return True
        # One pending copy per source: a fast source must not take the room of a slow one.
        mine = [s for s in self.received if s.rank == copy.rank and s.key.generation == copy.key.generation]
        if any(not self._reusable(s) and s.key != (self.order and self.order.keep) for s in mine):
            return False
        if self._claim(self.received, replace(copy, sealed=True), 2 * self.world.config.snapshot.sources_max):
            self.report()
            return True
        return False
