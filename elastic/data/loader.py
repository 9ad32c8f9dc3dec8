"""(corpus, seed, step, plan, rank) -> the micro-batches of one rank, as tensors, read ahead of their use.

There is no state to save: a step's samples follow from its number. The one module of this room that imports
torch.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from elastic.data.order import sample_ids, window_of
from elastic.data.shards import Corpus, DataError
from elastic.model.shape import NO_TARGET
from elastic.plan import Plan

PADDING_ID = 2**64 - 1
_READ_WAIT_S = 120.0
_CLOSE_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward-backward slice.

    tokens, targets: int64 [rows, seq_len], targets are the tokens one later, -100 where nothing is predicted.
    ids: uint64 [rows], 2**64 - 1 for padding. first_sample: the global number of the first row's sample.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    ids: NDArray[np.uint64]
    first_sample: int


class Loader:
    """The training samples of one rank, step by step, at least one step ahead.

    The reading thread starts at the first use, not before: trainers are forked, and no thread survives that.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seed: int,
        global_samples: int,
        seq_len: int,
        plan: Plan,
        rank: int,
        ahead: tuple[int, int] = (2, 8),
    ) -> None:
        """DataError: the corpus has no window of `seq_len` tokens. `ahead`: reading begins again when no more than
        the first number of steps are ready, and goes on up to the second."""
        assert sum(plan.shares) == global_samples, (plan.shares, global_samples)
        self._corpus = corpus
        self._seed = seed
        self._global_samples = global_samples
        self._seq_len = seq_len
        self._windows = _windows(corpus, seq_len)
        self._share = plan.share_of(rank)
        self._micro_batches = plan.micro_batches
        self._ahead = ahead
        self._reader: _Reader | None = None

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """What this rank takes of samples [step * B, (step + 1) * B): `plan.micro_batches` slices.

        Steps in sequence come from the background; a jump reads anew from there. Raises what reading raised.
        """
        if self._reader is None or self._reader.next_step != step:
            self.close()
            self._reader = _Reader(self, step, self._ahead)
        return self._reader.take()

    def read(self, step: int) -> list[MicroBatch]:
        """The same, read now in this thread."""
        start, stop = self._share
        first = step * self._global_samples + start
        ids = sample_ids(
            fingerprint=self._corpus.fingerprint,
            seed=self._seed,
            windows=self._windows,
            start=first,
            count=stop - start,
        )
        batches = []
        for rows in np.array_split(ids, self._micro_batches):
            batches.append(_micro_batch(self._corpus, rows, self._seq_len, first_sample=first))
            first += len(rows)
        return batches

    def close(self) -> None:
        """End the reading thread; harmless when there is none. The loader can be used again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Reader:
    """A daemon thread that reads steps in sequence, ahead of `take`, which raises what it raises.

    It reads several in one go: woken for each, it would find cold caches and take the interpreter from the step.
    """

    def __init__(self, loader: Loader, start: int, ahead: tuple[int, int]) -> None:
        self.next_step = start
        self._loader = loader
        self._low, self._high = ahead
        self._ready: queue.SimpleQueue[list[MicroBatch] | Exception] = queue.SimpleQueue()
        self._wanted = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(start,), name="loader", daemon=True)
        self._thread.start()

    def take(self) -> list[MicroBatch]:
        try:
            item = self._ready.get(timeout=_READ_WAIT_S)
        except queue.Empty:
            raise DataError(
                f"step {self.next_step} was not read within {_READ_WAIT_S:.0f} s; "
                "is the storage of the prepared corpus reachable?"
            ) from None
        if isinstance(item, Exception):
            self.next_step = -1  # the thread has ended: a retry reads anew
            raise item
        self.next_step += 1
        if self._ready.qsize() <= self._low:
            self._wanted.set()
        return item

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        self._thread.join(timeout=_CLOSE_WAIT_S)

    def _run(self, step: int) -> None:
        while not self._closed:
            try:
                self._ready.put(self._loader.read(step))
            except Exception as error:  # handed to the caller of `take`, which raises it
                self._ready.put(error)
                return
            step += 1
            self._wanted.clear()
            if self._ready.qsize() >= self._high and not self._closed:
                self._wanted.wait()


def held_out_batches(
    corpus: Corpus, *, samples: int, micro_samples: int, seq_len: int, world: int, rank: int
) -> list[MicroBatch]:
    """What `rank` evaluates of a fixed set of windows, evenly spaced over the corpus whatever the world.

    All ranks get the same number of batches of the same shape, since ZeRO-3 gathers in the forward pass:
    short ranks are padded with rows whose targets are all -100. `samples` is cut to the windows there are.
    """
    windows = _windows(corpus, seq_len)
    samples = min(samples, windows)
    chosen = np.arange(samples, dtype=np.uint64) * np.uint64(windows) // np.uint64(samples)
    batches = -(-samples // (world * micro_samples))
    rows = -(-samples // (world * batches))
    padding = np.full(world * batches * rows - samples, PADDING_ID, dtype=np.uint64)
    slices = np.concatenate([chosen, padding]).reshape(world, batches, rows)
    first = rank * batches * rows
    return [
        _micro_batch(corpus, ids, seq_len, first_sample=first + number * rows)
        for number, ids in enumerate(slices[rank])
    ]


def _windows(corpus: Corpus, seq_len: int) -> int:
    windows = corpus.windows(seq_len)
    if not windows:
        raise DataError(
            f"the corpus has {corpus.tokens} tokens, one window of seq_len {seq_len} needs {seq_len + 1}; "
            "give it more text or make model.seq_len smaller"
        )
    return windows


def _micro_batch(corpus: Corpus, ids: NDArray[np.uint64], seq_len: int, *, first_sample: int) -> MicroBatch:
    # numpy does the copies: torch's could start a second pool of compute threads for this thread.
    tokens = np.zeros((len(ids), seq_len), dtype=np.int64)
    targets = np.full((len(ids), seq_len), NO_TARGET, dtype=np.int64)
    for row, (number, window_number) in enumerate(zip(ids.tolist(), window_of(ids).tolist())):
        if number != PADDING_ID:
            window = corpus.window(window_number, seq_len)
            tokens[row], targets[row] = window[:-1], window[1:]
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        ids=ids,
        first_sample=first_sample,
    )
