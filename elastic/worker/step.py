"""One optimizer step: its schedule, its random numbers, and the step word by which all ranks decide together.

The word is summed over the ranks before the optimizer runs. Everything that changes what the ranks do at this
step's boundary is read from the sum, so all do the same; nothing else may.
"""

from __future__ import annotations

import hashlib
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from elastic.data.loader import MicroBatch, Slice
from elastic.data.order import digest

METRICS_MAX = 8

_LIMB_BITS = 16
_LIMBS = 4


def random_seed(seed: int, step: int, first_sample: int, stage: int = 0) -> int:
    """Seed of one micro-batch's random numbers: they are derived, so no state of them has to be saved."""
    key = hashlib.sha256(f"{seed} {step} {first_sample} {stage}".encode()).digest()
    return int.from_bytes(key[:8]) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One rank's part of the step word, or their sum. All but loss, norm and metrics are counts, exact in float64.

    loss: nats. norm_squared: of the summed gradient's shard, before division by the tokens. non_finite, stop,
    snapshot: how many ranks say so. step_s, snapshot_s: see `Pace.learn`. names: CRC32 of the metrics' names. limbs:
    the digest of the sample ids in four 16-bit parts. metrics: for each name, in their order, the sum of value x
    targets and that of the targets.
    """

    loss: float
    norm_squared: float
    tokens: float
    samples: float
    non_finite: float
    stop: float
    snapshot: float
    step_s: float = 0.0
    snapshot_s: float = 0.0
    names: float = 0.0
    limbs: tuple[float, ...] = (0.0,) * _LIMBS
    metrics: tuple[float, ...] = (0.0,) * (2 * METRICS_MAX)

    def digest(self) -> str:
        """16 hex digits; carries between the limbs' sums are done here."""
        total = sum(int(limb) << (_LIMB_BITS * index) for index, limb in enumerate(self.limbs))
        return f"{total % 2**64:016x}"


_SCALARS = [field.name for field in fields(Word) if field.name not in ("limbs", "metrics")]


def limbs_of(value: int) -> tuple[float, ...]:
    """A 64-bit number as four 16-bit parts, lowest first: float64 sums of up to 2**37 of them are exact."""
    return tuple(float(value >> (_LIMB_BITS * index) & 0xFFFF) for index in range(_LIMBS))


def sum_over_ranks(word: Word, device: torch.device) -> Word:
    """The word's sum over the default group; equal, bit for bit, on all ranks."""
    local = [*(float(getattr(word, name)) for name in _SCALARS), *word.limbs, *word.metrics]
    vector = torch.tensor(local, dtype=torch.float64, device=device)
    if device.type == "cpu":  # Gloo passes an all-gather on half as often as an all-reduce
        gathered = vector.new_empty(dist.get_world_size() * len(local))
        dist.all_gather_single(gathered, vector)
        total = [math.fsum(column) for column in gathered.view(-1, len(local)).T.tolist()]
    else:
        dist.all_reduce(vector)
        total = vector.tolist()
    scalars, rest = dict(zip(_SCALARS, total)), total[len(_SCALARS) :]
    return Word(**scalars, limbs=tuple(rest[:_LIMBS]), metrics=tuple(rest[_LIMBS:]))


class Step:
    """What one turn of `ctx.steps` hands to the task: its micro-batches, the backward pass of each, its end."""

    def __init__(
        self,
        batches: Sequence[Slice],
        *,
        number: int,
        seed: int,
        device: torch.device,
        before: Callable[[bool], None],
        mark: Callable[[str], None],
        end: Callable[[Step], tuple[Word, float]] | None = None,
    ) -> None:
        """`number`: steps completed before this one. `before` is called with whether a micro-batch is the last;
        `end` takes the step word and the optimizer's step, and returns the word and the gradient's norm."""
        self.number = number
        self.backwards = 0
        self.ended: tuple[Word, float] | None = None
        self._batches = batches
        self._seed = seed
        self._device = device
        self._before = before
        self._mark = mark
        self._end = end
        self._losses: list[Tensor] = []
        self._targets = [batch.targets for batch in batches]
        self._at: int | None = None
        self._reported: dict[tuple[str, int | None], float | Tensor] = {}

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's slices, tensors on its device; each must get one `backward`."""
        last = len(self._batches) - 1
        for index, batch in enumerate(self._batches):
            self._before(index == last)
            seed_generators(random_seed(self._seed, self.number, batch.first_sample), self._device)
            self._mark("forward")
            self._at = index
            yield batch.to(self._device)
        self._at = None

    def backward(self, loss_sum: Tensor) -> None:
        """`loss_sum`: the micro-batch's loss summed, not averaged, over its targets."""
        self._mark("backward")
        loss_sum.backward()
        self._losses.append(loss_sum.detach())
        self.backwards += 1

    @property
    def loss(self) -> float:
        """Nats per target over all ranks; only after `update`."""
        if self.ended is None:
            raise RuntimeError("step.loss is known on every rank only after step.update(); call that first")
        word, _ = self.ended
        return word.loss / word.tokens if word.tokens else math.nan

    def update(self) -> None:
        """The optimizer's step, now: for what has to come after it (an average of the weights, an lr_scheduler).
        Without a call it comes at the end of the turn."""
        if self.ended is None:
            assert self._end is not None
            self.ended = self._end(self)

    def report(self, values: Mapping[str, float | Tensor]) -> None:
        """See `Context.report`."""
        if self.ended is not None:
            raise RuntimeError("ctx.report() after step.update(): the step word has been told; report before")
        for name, value in values.items():
            self._reported[name, self._at] = value.detach() if isinstance(value, Tensor) else value

    def own_word(
        self,
        gradients: Sequence[Tensor],
        *,
        stop: bool,
        snapshot: bool,
        step_s: float = 0.0,
        snapshot_s: float = 0.0,
    ) -> Word:
        """This rank's part; RuntimeError where a micro-batch got no backward pass."""
        if self.backwards != len(self._batches):
            raise RuntimeError(
                f"step {self.number} ran {self.backwards} backward passes for {len(self._batches)} micro-batches: "
                "call step.backward(loss) once in each turn of step.micro_batches()"
            )
        loss = float(torch.stack(self._losses).double().sum())
        norm_squared = squared_norm(gradients)
        ids = np.concatenate([batch.ids for batch in self._batches])
        return Word(
            loss=loss,
            norm_squared=norm_squared,
            tokens=float(sum(self._targets)),
            samples=float(len(ids)),
            non_finite=float(not math.isfinite(loss) or not math.isfinite(norm_squared)),
            stop=float(stop),
            snapshot=float(snapshot),
            step_s=step_s,
            snapshot_s=snapshot_s,
            names=float(zlib.crc32(repr(self._names()).encode())) if self._reported else 0.0,
            limbs=limbs_of(digest(ids)),
            metrics=self._metrics(),
        )

    def metrics(self, word: Word, own: Word, world: int) -> dict[str, float]:
        """The means by name, out of the summed word. RuntimeError: the ranks reported different names."""
        if word.names != world * own.names:
            raise RuntimeError(
                f"in step {self.number} this rank reported {self._names() or 'nothing'}, another one other names; "
                "every rank must report the same in the same step"
            )
        pairs = zip(word.metrics[::2], word.metrics[1::2])
        return {name: total / weight if weight else math.nan for name, (total, weight) in zip(self._names(), pairs)}

    def _names(self) -> list[str]:
        return sorted({name for name, _ in self._reported})

    def _metrics(self) -> tuple[float, ...]:
        """Sums of value x targets and of targets, by name, padded to a length that is always the same."""
        names = self._names()
        if len(names) > METRICS_MAX:
            raise RuntimeError(f"step {self.number} reported {len(names)} metrics, at most {METRICS_MAX}: {names}")
        sums = [0.0] * (2 * METRICS_MAX)
        for (name, at), value in self._reported.items():
            weight = sum(self._targets) if at is None else self._targets[at]
            index = 2 * names.index(name)
            sums[index] += float(value) * weight
            sums[index + 1] += weight
        return tuple(sums)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what a task may draw from: torch's generators of the CPU and `device`, numpy's and Python's global ones.

    `torch.manual_seed` also queues a call, with its stack, for every kind of device that is not initialised: 4 ms a
    step on CPU, and the queue grows for ever."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Sum of squares over all shards; float64 from the per-tensor norms on."""
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(list(gradients))
    return float(torch.stack(norms).double().square().sum())


def scale(gradients: Sequence[Tensor], word: Word, grad_clip: float) -> float:
    """Divide the summed gradient by the step's tokens and clip it, in place; returns the norm before clipping."""
    norm = math.sqrt(word.norm_squared) / word.tokens
    factor = min(1.0, grad_clip / (norm + 1e-12)) / word.tokens
    if gradients:
        torch._foreach_mul_(list(gradients), factor)
    return norm
