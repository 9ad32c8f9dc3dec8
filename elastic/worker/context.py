"""What a loop sees of elastic training: `parallelize` once, then one turn of `steps` for each optimizer step.

The generator owns all that must be alike on every rank: state, schedule, gradient scaling, snapshots, evaluation,
pauses. The loop owns the model, its loss and the body, and knows neither the world size nor the step count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.checkpoint import save
from elastic.checkpoint.arena import Arena
from elastic.checkpoint.board import Progress
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.restore import restore
from elastic.config import Config, ElasticError, TaskError
from elastic.data.loader import EvaluationSet, MicroBatch, Slice
from elastic.events import Exit, StepRecord
from elastic.parallel.apply import parallelize
from elastic.parallel.fsdp import accumulate, repeated_blocks
from elastic.parallel.mesh import build_mesh
from elastic.plan import Assignment, RestorePlan, SnapshotKey
from elastic.storage.store import Store
from elastic.worker.pace import Pace
from elastic.worker.probes import Probes
from elastic.worker.schedule import Schedule, rates_of
from elastic.worker.shards import allocate, check_buffers, is_empty, local_gradients, local_part, sharded_entries
from elastic.worker.state import State, check_alike
from elastic.worker.step import Step, Word, scale, sum_over_ranks

_BUFFER_POLL_S = 0.002


class Phase(IntEnum):
    """Where in a step a trainer is: the arena's progress word."""

    START = 0
    FORWARD = 1
    BACKWARD = 2
    WORD = 3
    OPTIMIZER = 4
    EVALUATE = 5
    SNAPSHOT = 6


class Samples(Protocol):
    """Where micro-batches come from: the corpus, or the throw-away ones of a rehearsal."""

    def micro_batches(self, step: int) -> list[Slice]: ...

    def held_out(self) -> list[EvaluationSet]: ...


class SnapshotBlocked(ElasticError):
    """The state of a last step could not be kept in memory: no buffer became free within the limit."""


Loss = Callable[[nn.Module, MicroBatch], Tensor]
Initialise = Callable[[nn.Module, int], None]


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a trainer has of its host: the arena, the run's storage, the host's ear, the movers' word."""

    arena: Arena
    store: Store
    probes: Probes
    wake_fd: int
    token: str


@dataclass(kw_only=True)
class Context:
    """One rank of one generation. `seat` is its place in a real run; None in a rehearsal, which runs one step.

    step: optimizer steps completed. model: what `parallelize` returned. state: what a failure must not cost besides
    the model and the optimizer.
    """

    config: Config
    assignment: Assignment
    device: torch.device
    samples: Samples
    seat: Seat | None
    model: nn.Module | None = None
    state: State = field(default_factory=State)
    entries: Sequence[save.Entry] = ()
    ended: Exit | None = None
    step: int = 0
    _first: int = 0
    _step_s: float = 0.0
    _upkeep_s: float = 0.0
    _snapshot_s: float = 0.0
    _mover_cpu_ns: int = 0
    _empty: bool = False
    _hooks: list[Callable[[], object]] = field(default_factory=list)
    _current: Step | None = None
    _metrics: dict[str, float] = field(default_factory=dict)
    _syncs: bool = True  # as torch builds it
    _snapshotter: save.Snapshotter | None = None
    _pace: Pace = field(init=False)
    _parameters: list[nn.Parameter] = field(init=False)
    _shards: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    @property
    def is_rehearsal(self) -> bool:
        """Whether this is a throw-away step ahead of time, on made-up samples: nothing should be written or sent."""
        return self.seat is None

    def parallelize(self, model: nn.Module, *, units: Iterable[nn.Module] | None = None) -> nn.Module:
        """`model` as this rank's shards on its device.

        Built as usual it keeps its values: each rank has made the same ones, since torch's generator is seeded
        before the task's code runs. Built on the meta device it is not yet filled; `steps` wants `initialise` then.
        units: the modules that are gathered as one, in the order of their use; else the repeated blocks that are
        found. TaskError: a model that can't be trained so.
        """
        self._empty = is_empty(model)
        check_buffers(model)
        plan = self.assignment.plan
        mesh = build_mesh(plan, self.device.type)
        units = repeated_blocks(model) if units is None else units
        parallelize(model, plan=plan, mesh=mesh, units=units, precision=self.config.precision)
        if self._empty:
            allocate(model, self.device)
        self.model = model
        self._mark("build")
        return model

    def shards(self, model: nn.Module) -> list[nn.Parameter]:
        """This rank's part of each parameter of `model`, in their order, as a plain tensor that shares its memory.

        For optimizers that treat each element by itself, as AdamW and SGD do. One over `model.parameters()` works
        too, and must be taken where whole tensors matter; it pays for DTensor's dispatch, 0.15 s at each start.
        """
        self._shards = {p: nn.Parameter(local_part(p), requires_grad=p.requires_grad) for p in model.parameters()}
        return list(self._shards.values())

    def on_start(self, hook: Callable[[], object]) -> None:
        """Call `hook` once in this generation, after the state is restored or new, before the first step."""
        self._hooks.append(hook)

    def batch(self) -> MicroBatch:
        """This rank's samples of the turn in one piece, for a loop that does not accumulate gradients.

        TaskError: they would come in several pieces, here or in the smallest allowed world.
        """
        batch, hosts = self.config.batch, self.config.hosts_min
        most = -(-batch.global_samples // hosts)
        if batch.micro_samples < most and not self.is_rehearsal:
            raise TaskError(
                f"ctx.batch() gives a rank's samples in one piece, but on {hosts} hosts (hosts_min) a rank takes "
                f"{most} of {batch.global_samples} and batch.micro_samples is {batch.micro_samples}: raise it to "
                f"{most}, or loop over step.micro_batches()"
            )
        if self._current is None:
            raise TaskError("ctx.batch() outside of the loop over ctx.steps(): a step's samples exist in its turn")
        return next(self._current.micro_batches())

    def report(self, **values: float | Tensor) -> None:
        """Numbers for the step's record, each a mean over the targets of the micro-batch at hand (outside of the
        micro-batches: over those of this rank). The record has the means over the step's targets of all ranks.

        Every rank reports the same names in a step, at most eight. In an evaluation nothing is recorded.
        """
        if self._current is not None:
            self._current.report(values)

    def steps(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss | None = None,
        initialise: Initialise | None = None,
        schedule: Schedule | None = None,
    ) -> Iterator[Step]:
        """One turn for each optimizer step until the generation pauses or the run is done.

        loss(model, batch): the sum over the batch's targets, here for the held-out samples; without it there is no
        evaluation. initialise(model, seed) fills the parameters of a new run, alike on every layout.
        schedule(step) multiplies each group's learning rate in the step after `step` completed ones; else
        warm-up and cosine of `config.optimizer` do, unless an lr_scheduler is registered in `state`.
        """
        self._begin(model, optimizer, initialise)
        rates = rates_of(optimizer, self.config, schedule, is_registered=self.state.schedules(optimizer))
        final = self.step >= self.assignment.until_step
        if final:
            self._write_snapshot(wait=True)
        began_s = time.perf_counter()
        while not final:
            for group, group_rate in zip(optimizer.param_groups, rates(self.step)):
                group["lr"] = group_rate
            rate = float(optimizer.param_groups[0]["lr"])
            step = self._current = self._next_step(model, optimizer)
            yield step
            step.update()
            self._current = None
            assert step.ended is not None
            word, _ = step.ended
            self.step += 1
            if self.step == self._first + 1:
                self.state.pack()
                check_alike(self.entries, self.device)
            final = self.step >= self.assignment.until_step or word.stop > 0
            held_out = self._evaluate(model, loss) if loss is not None and self._evaluates() else {}
            self._record(step, held_out, rate=rate, seconds=time.perf_counter() - began_s)
            began_s = time.perf_counter()
            if final or word.snapshot == self.assignment.world:
                self._write_snapshot(wait=final)
            elif self._pace.is_due(self.step) and self.seat is not None:
                self.seat.arena.board.count_skipped()
            self._upkeep_s += time.perf_counter() - began_s
        self.ended = Exit(kind="done" if self.step >= self.config.steps else "paused", step=self.step)

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, initialise: Initialise | None) -> None:
        """State of the generation's first step: from the assignment's snapshot, or new."""
        if model is not self.model:
            raise TaskError(
                f"ctx.steps() got a {type(model).__name__} that ctx.parallelize() did not return; train what it "
                "returns, and compile it in place with model.compile()"
            )
        self._parameters = list(model.parameters())  # sharded now; a walk through the modules takes 0.5 ms a step
        self.entries = [*sharded_entries(model, optimizer, self._shards), *self.state.entries()]
        plan, rank = self.assignment.restore, self.assignment.rank
        if self.seat is not None and plan is not None:
            self._restore(self.entries, plan, self.seat)
            self.state.unpack()
        elif initialise is not None:
            initialise(model, self.config.seed)
        elif self._empty:
            raise TaskError("the model was built on the meta device: give it values with initialise(model, seed)")
        if self.seat is not None:
            self._snapshotter = save.Snapshotter(
                self.seat.arena, rank=rank, world=self.assignment.world, entries=self.entries, wake=self.seat.wake_fd
            )
        self._first = self.step
        wanted = self.config.snapshot
        self._pace = Pace(first=self.step, fixed=wanted.interval_steps or None, cost_max=wanted.cost_max)
        for hook in self._hooks:
            hook()
        self._mark("restore")

    def _restore(self, entries: Sequence[save.Entry], plan: RestorePlan, seat: Seat) -> None:
        rank, world = self.assignment.rank, self.assignment.world
        try:
            restore(entries, plan, rank=rank, world=world, arena=seat.arena, store=seat.store, token=seat.token)
        except OSError as error:
            raise CheckpointError(f"a source of {plan.key} can't be reached: {error}") from error
        self.step = plan.key.step

    def _next_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        return Step(
            self.samples.micro_batches(self.step),
            number=self.step,
            seed=self.config.seed,
            device=self.device,
            before=lambda is_last: self._accumulate(model, is_last),
            mark=lambda name: self._phase(Phase[name.upper()]),
            end=lambda step: self._update(step, optimizer),
        )

    def _accumulate(self, model: nn.Module, is_last: bool) -> None:
        """Only where it changes: each call walks through all modules. A new model is set for a single micro-batch."""
        if is_last != self._syncs:
            accumulate(model, is_last)
            self._syncs = is_last

    def _update(self, step: Step, optimizer: torch.optim.Optimizer) -> tuple[Word, float]:
        """The step word and, unless a rank saw a value that is not finite, the optimizer's step."""
        self._phase(Phase.WORD)
        gradients = local_gradients(self._parameters)
        parts = list(gradients.values())
        began_s = time.perf_counter()
        vote = self._pace.is_due(self.step + 1) and self._snapshotter is not None and self._snapshotter.can_write()
        own = step.own_word(
            parts,
            stop=self._stop_ordered(),
            snapshot=vote,
            step_s=self._step_s,
            snapshot_s=self._snapshot_s,
        )
        self._upkeep_s += time.perf_counter() - began_s
        word = sum_over_ranks(own, self.device)
        self._snapshot_s = 0.0
        self._pace.learn(step_s=word.step_s / self.assignment.world, snapshot_s=word.snapshot_s / self.assignment.world)
        self._metrics = step.metrics(word, own, self.assignment.world) if self.seat is not None else {}
        norm = math.nan
        if word.non_finite == 0 and word.tokens > 0:
            self._phase(Phase.OPTIMIZER)
            norm = scale(parts, word, self.config.optimizer.grad_clip)
            for parameter, gradient in gradients.items():
                if parameter in self._shards:
                    self._shards[parameter].grad = gradient
            optimizer.step()
        optimizer.zero_grad()
        for parameter in self._parameters:
            parameter.grad = None
        return word, norm

    def _stop_ordered(self) -> bool:
        return self.seat is not None and self.seat.arena.board.drain_generation >= self.assignment.generation

    def _evaluates(self) -> bool:
        return self.step % self.config.evaluation.interval_steps == 0 or self.step == self.config.steps

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, loss: Loss) -> dict[str, float]:
        """Mean loss, in nats per token, over all ranks: of each held-out set by its name, under "" of those that
        count."""
        self._phase(Phase.EVALUATE)
        model.eval()
        sets = self.samples.held_out()
        sums = torch.zeros(len(sets), 2, dtype=torch.float64, device=self.device)
        for row, one in zip(sums, sets):
            for batch in one.batches:
                row[0] += loss(model, batch.to(self.device))
                row[1] += batch.targets
        model.train()
        dist.all_reduce(sums)
        told = {one.name: row for one, row in zip(sets, sums)}
        told[""] = sums[[one.counts for one in sets]].sum(0)
        return {name: float(total / tokens) if tokens else math.nan for name, (total, tokens) in told.items()}

    def _record(self, step: Step, held_out: dict[str, float], *, rate: float, seconds: float) -> None:
        if self.seat is None or step.ended is None:
            return
        began_s = time.perf_counter()
        word, norm = step.ended
        if self.step == self._first + 1:
            self.seat.probes.mark("first_step")
        record = StepRecord(
            generation=self.assignment.generation,
            step=self.step,
            loss=step.loss,
            tokens=int(word.tokens),
            samples=int(word.samples),
            digest=word.digest(),
            grad_norm=norm,
            lr=rate,
            seconds=seconds,
            held_out=held_out.pop("", None),
            held_out_sets=held_out if len(held_out) > 1 else {},
            upkeep_s=self._upkeep_s,
            metrics=self._metrics,
        )
        # Before the snapshot: a step whose state survives is a step that was told.
        self.seat.probes.record(record)
        self._step_s, self._upkeep_s = seconds, time.perf_counter() - began_s

    def _write_snapshot(self, *, wait: bool) -> None:
        """Copy this rank's shards into the arena; `wait` for a free buffer where the state must not be lost."""
        if self.seat is None or self._snapshotter is None:
            return
        self._phase(Phase.SNAPSHOT)
        deadline_s = time.monotonic() + self.config.control.drain_timeout_s
        while wait and not self._snapshotter.can_write():
            if time.monotonic() > deadline_s:
                raise SnapshotBlocked(
                    f"no arena buffer became free in {self.config.control.drain_timeout_s:.0f} s to hold step "
                    f"{self.step}: no newer snapshot than {self.seat.arena.board.keep} became safe"
                )
            time.sleep(_BUFFER_POLL_S)
        self.state.pack()
        began_s = time.perf_counter()
        self._snapshotter.write(SnapshotKey(generation=self.assignment.generation, step=self.step))
        self._snapshot_s = time.perf_counter() - began_s + self._mover_s(self.seat)
        self._pace.taken(self.step)

    def _mover_s(self, seat: Seat) -> float:
        """CPU seconds of this host's mover since the snapshot before, where it shares cores with the trainers."""
        if self.device.type != "cpu":
            return 0.0
        before, self._mover_cpu_ns = self._mover_cpu_ns, seat.arena.board.mover_cpu_ns
        return max(0, self._mover_cpu_ns - before) / 1e9 if before else 0.0

    def _mark(self, name: str) -> None:
        if self.seat is not None:
            self.seat.probes.mark(name)

    def _phase(self, phase: Phase) -> None:
        if self.seat is not None:
            self.seat.arena.board.progress = Progress(
                generation=self.assignment.generation,
                step=self.step,
                phase=phase,
                at_ns=time.monotonic_ns(),
            )
