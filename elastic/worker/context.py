"""What a task sees of elastic training: `parallelize` once, then one turn of `steps` for each optimizer step.

The generator owns all that must be alike on every rank: state, schedule, gradient scaling, snapshots, evaluation,
pauses. The task owns the model, its loss and the loop body, and knows neither the world size nor the step count.
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
from elastic.checkpoint.store import Store
from elastic.config import Config, ElasticError
from elastic.data.loader import MicroBatch
from elastic.events import Exit, StepRecord
from elastic.model.shape import NO_TARGET
from elastic.parallel.apply import parallelize
from elastic.parallel.fsdp import accumulate
from elastic.parallel.mesh import build_mesh
from elastic.plan import Assignment, RestorePlan, SnapshotKey
from elastic.worker.probes import Probes
from elastic.worker.shards import allocate, local_gradients, local_part, sharded_entries
from elastic.worker.step import Step, Word, learning_rate, scale, sum_over_ranks, to_device

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


class Task(Protocol):
    """What a run trains. `config.task` names a class "module:Name" that is called with the Config."""

    def train(self, ctx: Context) -> None: ...


class Samples(Protocol):
    """Where micro-batches come from: the corpus, or the throw-away ones of a rehearsal."""

    def micro_batches(self, step: int) -> list[MicroBatch]: ...

    def held_out(self) -> list[MicroBatch]: ...


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
    """One rank of one generation. `seat` is its place in a real run; None in a rehearsal, which runs one step."""

    config: Config
    assignment: Assignment
    device: torch.device
    samples: Samples
    seat: Seat | None
    ended: Exit | None = None
    step: int = 0
    _first: int = 0
    _snapshotter: save.Snapshotter | None = None
    _shards: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def parallelize(self, model: nn.Module, *, units: Iterable[nn.Module]) -> nn.Module:
        """`model`, built on the meta device, as this rank's shards on its device, not yet filled.

        units: the modules that are gathered as one, in the order of their use.
        """
        plan = self.assignment.plan
        mesh = build_mesh(plan, self.device.type)
        parallelize(model, plan=plan, mesh=mesh, units=units, precision=self.config.precision)
        allocate(model, self.device)
        self._mark("build")
        return model

    def shards(self, model: nn.Module) -> list[nn.Parameter]:
        """This rank's part of each parameter of `model`, as a plain tensor that shares its memory.

        For optimizers that treat each element by itself, as AdamW and SGD do. One over `model.parameters()` works
        too, and must be taken where whole tensors matter; it pays for DTensor's dispatch, 0.15 s at each start.
        """
        self._shards = {p: nn.Parameter(local_part(p), requires_grad=p.requires_grad) for p in model.parameters()}
        return list(self._shards.values())

    def steps(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, initialise: Initialise, loss: Loss
    ) -> Iterator[Step]:
        """One turn for each optimizer step until the generation pauses or the run is done.

        initialise(model, seed) fills the parameters of a new run, alike on every layout; loss(model, batch) is
        the sum over the batch's targets, used here for the held-out samples.
        """
        self._begin(model, optimizer, initialise)
        final = self.step >= self.assignment.until_step
        if final:
            self._write_snapshot(wait=True)
        while not final:
            began_s = time.perf_counter()
            step = self._next_step(model)
            yield step
            word, norm = self._update(step, model, optimizer)
            self.step += 1
            final = self.step >= self.assignment.until_step or word.stop > 0
            held_out = self._evaluate(model, loss) if self._evaluates() else None
            self._record(step, word, norm, held_out, time.perf_counter() - began_s)
            if final or word.snapshot == self.assignment.world:
                self._write_snapshot(wait=final)
            elif self._snapshot_due(self.step) and self.seat is not None:
                self.seat.arena.board.count_skipped()
        self.ended = Exit(kind="done" if self.step >= self.config.steps else "paused", step=self.step)

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, initialise: Initialise) -> None:
        """State of the generation's first step: from the assignment's snapshot, or from the seed."""
        entries = sharded_entries(model, optimizer, self._shards)
        plan, rank = self.assignment.restore, self.assignment.rank
        if self.seat is None or plan is None:
            initialise(model, self.config.seed)
        else:
            self._restore(entries, plan, self.seat)
        if self.seat is not None:
            self._snapshotter = save.Snapshotter(
                self.seat.arena, rank=rank, world=self.assignment.world, entries=entries, wake=self.seat.wake_fd
            )
        self._first = self.step
        self._mark("restore")

    def _restore(self, entries: Sequence[save.Entry], plan: RestorePlan, seat: Seat) -> None:
        rank = self.assignment.rank
        try:
            restore(entries, plan, rank=rank, arena=seat.arena, store=seat.store, token=seat.token)
        except OSError as error:
            raise CheckpointError(f"a source of {plan.key} can't be reached: {error}") from error
        self.step = plan.key.step

    def _next_step(self, model: nn.Module) -> Step:
        return Step(
            self.samples.micro_batches(self.step),
            number=self.step,
            seed=self.config.seed,
            device=self.device,
            before=lambda is_last: accumulate(model, is_last),
            mark=lambda name: self._phase(Phase[name.upper()]),
        )

    def _update(self, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Word, float]:
        """The step word and, unless a rank saw a value that is not finite, the optimizer's step."""
        self._phase(Phase.WORD)
        gradients = local_gradients(model.parameters())
        vote = self._snapshot_due(self.step + 1) and self._snapshotter is not None and self._snapshotter.can_write()
        word = sum_over_ranks(
            step.own_word(list(gradients.values()), stop=self._stop_ordered(), snapshot=vote), self.device
        )
        norm = math.nan
        if word.non_finite == 0 and word.tokens > 0:
            self._phase(Phase.OPTIMIZER)
            norm = scale(list(gradients.values()), word, self.config.optimizer.grad_clip)
            for parameter, gradient in gradients.items():
                if parameter in self._shards:
                    self._shards[parameter].grad = gradient
            rate = learning_rate(self.config.optimizer, self.config.steps, self.step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        return word, norm

    def _stop_ordered(self) -> bool:
        return self.seat is not None and self.seat.arena.board.drain_generation >= self.assignment.generation

    def _snapshot_due(self, step: int) -> bool:
        """Whether the boundary after `step` completed steps should have a snapshot; the generation's first always."""
        return step == self._first + 1 or step % self.config.snapshot.interval_steps == 0

    def _evaluates(self) -> bool:
        return self.step % self.config.evaluation.interval_steps == 0 or self.step == self.config.steps

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, loss: Loss) -> float:
        """Mean loss, in nats per token, of the held-out samples over all ranks."""
        self._phase(Phase.EVALUATE)
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in self.samples.held_out():
            batch = to_device(batch, self.device)
            sums[0] += loss(model, batch)
            sums[1] += (batch.targets != NO_TARGET).sum()
        model.train()
        dist.all_reduce(sums)
        total, tokens = sums.tolist()
        return total / tokens if tokens else math.nan

    def _record(self, step: Step, word: Word, norm: float, held_out: float | None, seconds: float) -> None:
        if self.seat is None:
            return
        if self.step == self._first + 1:
            self.seat.probes.mark("first_step")
        record = StepRecord(
            generation=self.assignment.generation,
            step=self.step,
            loss=word.loss / word.tokens if word.tokens else math.nan,
            tokens=int(word.tokens),
            samples=int(word.samples),
            digest=word.digest(),
            grad_norm=norm,
            lr=learning_rate(self.config.optimizer, self.config.steps, step.number),
            seconds=seconds,
            held_out=held_out,
        )
        # Before the snapshot: a step whose state survives is a step that was told.
        self.seat.probes.record(record)

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
        self._snapshotter.write(SnapshotKey(generation=self.assignment.generation, step=self.step))

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
