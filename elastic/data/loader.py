"""(feed, step, plan, rank) -> the micro-batches of one rank, read ahead of their use.

There is no state to save: a step's samples follow from its number. Tokens stay as narrow as they are stored until they
are on the device. The one module of this room that imports torch.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from dataclasses import dataclass

import numpy as np
import torch

from elastic.data.ahead import Ahead
from elastic.data.feed import Feed, check_windows
from elastic.data.fetch import Wanted
from elastic.data.order import Numbers
from elastic.data.rows import Rows
from elastic.data.shards import Corpus, DataError
from elastic.model.documents import cu_seqlens_of, positions_of
from elastic.model.shape import NO_TARGET
from elastic.plan import Plan
from elastic.storage.errors import StorageUnavailable

PADDING_ID = 2**64 - 1
AHEAD_BYTES = 16 << 20
AHEAD_STEPS_MAX = 64
IDS_AT_ONCE = 4096
READ_BYTES = 1 << 20  # in one go: larger arrays leave the caches, and their memory is new to the process each time
_READ_WAIT_S = 120.0
_CLOSE_WAIT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward-backward slice, on the trainer's device.

    tokens, targets: int64 [rows, seq_len], targets are the tokens one later, -100 where nothing is predicted.
    ids: uint64 [rows], 2**64 - 1 for padding. first_sample: the global number of the first row's sample.
    documents: int32 [rows, seq_len], which document of its row a token is of: 0, 1, 2, ... along the row, padding at a
    row's end as if it were one; None: `data.documents` is joined, a row is read as one text.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    ids: Numbers
    first_sample: int
    documents: torch.Tensor | None = None

    @property
    def positions(self) -> torch.Tensor:
        """int64 [rows, seq_len]: each token's place in its document, from 0."""
        return positions_of(self._numbered())

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [n + 1]: where each of the n documents begins in the flattened rows x seq_len tokens, and their count.

        No document goes on into the next row. On a GPU each use waits for the device: take it once for all layers.
        """
        return cu_seqlens_of(self._numbered())

    def _numbered(self) -> torch.Tensor:
        return torch.zeros_like(self.tokens, dtype=torch.int32) if self.documents is None else self.documents


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """A micro-batch as it was read; a row of padding has id 2**64 - 1."""

    rows: Rows
    ids: Numbers
    first_sample: int

    @property
    def targets(self) -> int:
        """How many tokens are predicted."""
        real = self.ids != PADDING_ID
        if self.rows.learned is not None:
            return int(np.count_nonzero(self.rows.learned[real, 1:]))
        return int(real.sum()) * (self.rows.tokens.shape[1] - 1)

    def to(self, device: torch.device) -> MicroBatch:
        windows = torch.from_numpy(self.rows.tokens).to(device, non_blocking=True)
        targets = windows[:, 1:].to(torch.int64)
        if (padding := self.ids == PADDING_ID).any():
            targets[torch.from_numpy(padding).to(device)] = NO_TARGET
        if self.rows.learned is not None:
            targets[torch.from_numpy(self.rows.learned[:, 1:] == 0).to(device)] = NO_TARGET
        documents = None
        if self.rows.documents is not None:
            documents = torch.from_numpy(self.rows.documents).to(device, non_blocking=True)[:, :-1].to(torch.int32)
        return MicroBatch(
            tokens=windows[:, :-1].to(torch.int64),
            targets=targets,
            ids=self.ids,
            first_sample=self.first_sample,
            documents=documents,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationSet:
    """One rank's batches of a held-out set. counts: in the run's held-out loss."""

    name: str
    batches: list[Slice]
    counts: bool = True


class Loader:
    """The training samples of one rank, step by step, at least one step ahead.

    The reading thread starts at the first use, not before: trainers are forked, and no thread survives that.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        global_samples: int,
        plan: Plan,
        rank: int,
        ahead_bytes: int = AHEAD_BYTES,
        wait_s: float = math.inf,
    ) -> None:
        """ahead_bytes: of steps that are ready, about. wait_s: for storage that does not answer, before that is raised
        as StorageUnavailable; who asks again waits on."""
        assert sum(plan.shares) == global_samples, (plan.shares, global_samples)
        self.wait_s = wait_s
        self._feed = feed
        self._global_samples = global_samples
        self._share = plan.share_of(rank)
        rows = np.array_split(np.arange(self._share[1] - self._share[0]), plan.micro_batches)
        self._cuts = [(int(part[0]), int(part[-1]) + 1) for part in rows]
        # Two, for they are asked for different steps in turn.
        self._ids, self._ids_ahead = (_Ids(feed, global_samples, self._share) for _ in range(2))
        corpus = feed.corpora[0]
        token_bytes = corpus.dtype.itemsize + (3 if corpus.is_apart else 0)  # its document, whether it is learned
        step_bytes = (self._share[1] - self._share[0]) * (feed.seq_len + 1) * token_bytes
        self._ahead = min(max(2, ahead_bytes // max(1, step_bytes)), AHEAD_STEPS_MAX)
        self.steps_at_once = max(1, READ_BYTES // max(1, step_bytes))
        self._reader: _Reader | None = None

    def micro_batches(self, step: int) -> list[Slice]:
        """What this rank takes of samples [step * B, (step + 1) * B): `plan.micro_batches` slices.

        Steps in sequence come from the background; a jump reads anew from there. Raises what reading raised.
        """
        if self._reader is None or self._reader.next_step != step:
            self.close()
            self._reader = _Reader(self, step, self._ahead, Ahead(self.expect, self._feed.remotes))
        return self._reader.take()

    def read(self, step: int, steps: int = 1) -> list[list[Slice]]:
        """The same of several steps, read now in this thread, in one go: each call has its price."""
        ids = self._ids.of(step, steps)
        read = self._feed.read(ids)
        start, stop = self._share
        share, found = stop - start, []
        for number in range(steps):
            slices = []
            for a, b in self._cuts:
                at, first = number * share, (step + number) * self._global_samples + start + a
                slices.append(Slice(rows=read.part(at + a, at + b), ids=ids[at + a : at + b], first_sample=first))
            found.append(slices)
        return found

    def expect(self, step: int, steps: int) -> Wanted:
        """What these steps need is fetched, where that is not here. Does not wait."""
        return self._feed.expect(self._ids_ahead.of(step, steps))

    def close(self) -> None:
        """End the reading thread; harmless when there is none. The loader can be used again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Ids:
    """Ids of one rank's samples, of many steps at once: one by one they would take most of the time."""

    def __init__(self, feed: Feed, global_samples: int, share: tuple[int, int]) -> None:
        self._feed = feed
        self._global_samples = global_samples
        self._share = share
        self._known: tuple[int, Numbers] = (0, np.empty((0, 0), dtype=np.uint64))  # first step, ids [steps, share]

    def of(self, step: int, steps: int) -> Numbers:
        """In their order."""
        start, stop = self._share
        first, known = self._known
        if not first <= step <= step + steps <= first + len(known):
            at_once = max(steps, IDS_AT_ONCE // max(1, stop - start))
            firsts = np.arange(step, step + at_once, dtype=np.uint64) * np.uint64(self._global_samples)
            numbers = np.add.outer(firsts, np.arange(start, stop, dtype=np.uint64))
            first, known = self._known = step, self._feed.ids(numbers.ravel()).reshape(numbers.shape)
        return known[step - first : step - first + steps].ravel()


class _Reader:
    """A daemon thread that reads steps in sequence, ahead of `take`, which raises what it raises.

    It reads many in one go: woken for each, it would find cold caches and take the interpreter from the step.
    """

    def __init__(self, loader: Loader, start: int, ahead: int, fetched: Ahead) -> None:
        self.next_step = start
        self._fetched = fetched
        self._loader = loader
        self._ahead = ahead
        self._ready: queue.SimpleQueue[list[Slice] | Exception] = queue.SimpleQueue()
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(start,), name="loader", daemon=True)
        self._thread.start()

    def take(self) -> list[Slice]:
        left_s = self._loader.wait_s
        while True:
            wait_s = min(_READ_WAIT_S, left_s)
            try:
                item = self._ready.get(timeout=wait_s)
                break
            except queue.Empty:
                why, left_s = self._fetched.waits_for, left_s - wait_s
                if not why and wait_s == _READ_WAIT_S:
                    raise DataError(
                        f"step {self.next_step} was not read within {_READ_WAIT_S:.0f} s; "
                        "is the storage of the prepared corpus reachable?"
                    ) from None
                told = f"step {self.next_step} waits for its data: {why or 'it is being read'}"
                if left_s <= 0:
                    raise StorageUnavailable(f"{told}; {self._loader.wait_s:.0f} s have passed") from None
                log.warning(told)
        self._fetched.taken()
        if isinstance(item, Exception):
            self.next_step = -1  # the thread has ended: a retry reads anew
            raise item
        self.next_step += 1
        if self._ready.qsize() <= self._ahead // 2:
            self._wanted.set()
        return item

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        self._thread.join(timeout=_CLOSE_WAIT_S)

    def _run(self, step: int) -> None:
        count = 1  # the first one soon
        while not self._closed:
            try:
                count = self._fetched.ready(step, min(count, self._loader.steps_at_once))
                for slices in self._loader.read(step, count):
                    self._ready.put(slices)
                    step += 1
            except Exception as error:
                if count > 1:
                    count = 1  # those before the one that can't be read
                    continue
                self._ready.put(error)  # for the caller of `take`, which raises it
                return
            self._wanted.clear()
            if (count := self._ahead - self._ready.qsize()) <= self._ahead // 2 and not self._closed:
                self._wanted.wait()
                count = self._ahead - self._ready.qsize()


def held_out_batches(
    corpus: Corpus, *, samples: int, micro_samples: int, seq_len: int, world: int, rank: int
) -> list[Slice]:
    """What `rank` evaluates of a fixed set of windows, evenly spaced over the corpus whatever the world.

    All ranks get the same number of batches of the same shape, since ZeRO-3 gathers in the forward pass: short ranks
    are padded with rows that have no targets. `samples` is cut to the windows there are.
    """
    check_windows(corpus, seq_len)
    windows = corpus.windows(seq_len)
    samples = min(samples, windows)
    chosen = np.arange(samples, dtype=np.uint64) * np.uint64(windows) // np.uint64(samples)
    batches = -(-samples // (world * micro_samples))
    rows = -(-samples // (world * batches))
    padding = np.full(world * batches * rows - samples, PADDING_ID, dtype=np.uint64)
    slices = np.concatenate([chosen, padding]).reshape(world, batches, rows)
    first = rank * batches * rows
    read = np.where(slices[rank] == PADDING_ID, np.uint64(0), slices[rank])  # padding's targets never count
    corpus.expect(read.ravel(), seq_len)
    return [
        Slice(rows=corpus.rows(read[number], seq_len), ids=ids, first_sample=first + number * rows)
        for number, ids in enumerate(slices[rank])
    ]
