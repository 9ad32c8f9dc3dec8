"""Micro-batches: the step's samples divided by the plan, read ahead, the same from any step and any world."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic.config_sections import Data
from elastic.data.feed import Feed, check_windows
from elastic.data.loader import PADDING_ID, Loader, Slice, held_out_batches
from elastic.data.order import Order, digest, window_of
from elastic.data.prepare import prepare
from elastic.data.shards import Corpus, DataError
from elastic.plan import Plan

SEQ_LEN = 16
GLOBAL_SAMPLES = 10


def build_corpus(tokens: int = 16 * 57 + 9) -> Corpus:
    values = np.random.default_rng(0).integers(257, size=tokens, dtype=np.uint16)
    return Corpus(fingerprint="f", vocab_size=257, values=[values[:400], values[400:]])


def build_loader(plan: Plan, rank: int, corpus: Corpus | None = None, **changes: int) -> Loader:
    fields = {"global_samples": GLOBAL_SAMPLES} | changes
    return Loader(build_feed(corpus or build_corpus(), lanes=fields["global_samples"]), **fields, plan=plan, rank=rank)


def build_feed(corpus: Corpus, *, seed: int = 7, lanes: int = GLOBAL_SAMPLES) -> Feed:
    order = corpus.order(seed=seed, seq_len=SEQ_LEN, lanes=lanes)
    return Feed(seq_len=SEQ_LEN, corpora=(corpus,), orders=(order,))


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.01)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> None:
    yield
    wait_until(lambda: not readers())


PLANS = [
    Plan(world=1, shares=(10,), micro_batches=1),
    Plan(world=1, shares=(10,), micro_batches=4),
    Plan(world=3, shares=(4, 3, 3), micro_batches=2),
    Plan(world=4, shares=(1, 2, 3, 4), micro_batches=1),
]


@pytest.mark.parametrize("plan", PLANS)
def test_any_plan_gives_the_steps_samples_in_order(plan: Plan) -> None:
    """Eight steps are more than one epoch of the 57 windows."""
    corpus = build_corpus()
    loaders = [build_loader(plan, rank, corpus) for rank in range(plan.world)]
    for step in range(8):
        batches = [batch for loader in loaders for batch in loader.micro_batches(step)]
        assert len(batches) == plan.world * plan.micro_batches
        expected = Order(fingerprint="f", seed=7, windows=57).run(step * GLOBAL_SAMPLES, GLOBAL_SAMPLES)
        assert np.array_equal(np.concatenate([batch.ids for batch in batches]), expected)
        assert sum(digest(batch.ids) for batch in batches) % 2**64 == digest(expected)
        first = step * GLOBAL_SAMPLES
        for batch in batches:
            assert batch.first_sample == first
            first += len(batch.ids)
            check_rows(corpus, batch)
    for loader in loaders:
        loader.close()


def check_rows(corpus: Corpus, slice_: Slice) -> None:
    assert slice_.rows.tokens.dtype == np.uint16, "narrow until it is on the device"
    batch = slice_.to(torch.device("cpu"))
    assert slice_.targets == batch.targets.numel()
    assert batch.tokens.shape == batch.targets.shape == (len(batch.ids), SEQ_LEN)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    for row, window_number in enumerate(window_of(batch.ids).tolist()):
        window = corpus.window(window_number, SEQ_LEN).astype(np.int64)
        assert batch.tokens[row].tolist() == window[:-1].tolist()
        assert batch.targets[row].tolist() == window[1:].tolist()


def test_slices_are_nearly_equal_and_never_empty() -> None:
    plan = Plan(world=2, shares=(7, 3), micro_batches=3)
    for rank, sizes in ((0, [3, 2, 2]), (1, [1, 1, 1])):
        assert [len(batch.ids) for batch in build_loader(plan, rank).read(0)[0]] == sizes


def test_a_step_is_the_same_in_sequence_and_after_a_jump() -> None:
    plan = PLANS[2]
    loader = build_loader(plan, 1)
    for step in (0, 1, 2, 9, 10, 3, 3):
        got, expected = loader.micro_batches(step), build_loader(plan, 1).read(step)[0]
        assert [batch.ids.tolist() for batch in got] == [batch.ids.tolist() for batch in expected]
    loader.close()
    assert loader.micro_batches(4)[0].first_sample == 44, "usable again"
    loader.close()


def test_the_thread_starts_with_the_first_use_and_ends_with_close() -> None:
    loader = build_loader(PLANS[0], 0)
    assert not readers()
    loader.micro_batches(0)
    assert len(readers()) == 1 and readers()[0].daemon
    loader.micro_batches(50)
    assert len(readers()) == 1, "the old thread ended before the new one began"
    loader.close()
    assert not readers()
    loader.close()


class Counting(Corpus):
    """A corpus that counts, and fails when told to, or at one window."""

    rows_read = 0
    broken: int | None = None

    def gather(self, indices: np.ndarray, seq_len: int) -> np.ndarray:
        if self.broken == -1 or self.broken in indices.tolist():
            raise OSError("the disk is gone")
        self.rows_read += len(indices)
        return super().gather(indices, seq_len)


def build_counting() -> Counting:
    return Counting(fingerprint="f", vocab_size=257, values=[np.zeros(1000, dtype=np.uint16)])


def test_reads_ahead_but_not_without_bound() -> None:
    """Eight steps of 10 samples x 17 tokens x 2 bytes."""
    corpus = build_counting()
    loader = build_loader(PLANS[0], 0, corpus, ahead_bytes=2720)

    def settled() -> int:
        """Steps read, once the thread sleeps."""
        threading.Event().wait(0.3)
        return corpus.rows_read // GLOBAL_SAMPLES

    loader.micro_batches(0)
    wait_until(lambda: corpus.rows_read >= 8 * GLOBAL_SAMPLES)
    first = settled()
    assert first in (8, 9), "eight are ready, counted before or after the first was taken"
    for step in range(1, 3):
        loader.micro_batches(step)
    assert settled() == first, "five or six are ready: it sleeps on"
    for step in range(3, 6):
        loader.micro_batches(step)
    wait_until(lambda: corpus.rows_read >= 12 * GLOBAL_SAMPLES)
    assert settled() <= 14
    loader.close()


def test_steps_before_one_that_cannot_be_read_are_delivered() -> None:
    """They are read several in one go, and only the damaged one fails."""
    corpus = build_counting()
    ids = window_of(Order(fingerprint="f", seed=7, windows=corpus.windows(SEQ_LEN)).run(0, 60))
    loader = build_loader(PLANS[0], 0, corpus)
    corpus.broken = next(int(window) for window in ids[50:] if window not in ids[:50])
    for step in range(5):
        assert loader.micro_batches(step)[0].first_sample == 10 * step
    with pytest.raises(OSError, match="the disk is gone"):
        loader.micro_batches(5)
    loader.close()


def test_a_failure_in_the_thread_reaches_the_caller() -> None:
    corpus = build_counting()
    corpus.broken = -1
    loader = build_loader(PLANS[0], 0, corpus)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.micro_batches(0)
    corpus.broken = None
    assert loader.micro_batches(0)[0].first_sample == 0, "a retry reads anew"
    loader.close()


def test_a_corpus_without_a_window_is_refused() -> None:
    small = build_corpus(tokens=401)
    with pytest.raises(DataError, match="source web has 401 tokens, one window of seq_len 401 needs 402"):
        check_windows(small, 401, "web")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("samples", [1, 5, 24, 1000])
def test_held_out_windows_are_the_same_for_each_world(world: int, samples: int) -> None:
    """And all ranks run equally many batches of one shape, or ZeRO-3 would hang."""
    corpus = build_corpus()
    ranks = [
        held_out_batches(corpus, samples=samples, micro_samples=3, seq_len=SEQ_LEN, world=world, rank=rank)
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert len({batch.rows.tokens.shape for batches in ranks for batch in batches}) == 1
    assert len(ranks[0][0].rows.tokens) <= 3
    real = []
    for slice_ in (slice_ for slices in ranks for slice_ in slices):
        batch = slice_.to(torch.device("cpu"))
        padding = batch.ids == PADDING_ID
        assert slice_.targets == (batch.targets != -100).sum()
        assert (batch.targets[torch.from_numpy(padding)] == -100).all()
        assert (batch.targets[torch.from_numpy(~padding)] >= 0).all()
        real += batch.ids[~padding].tolist()
    count = min(samples, 57)
    assert real == [number * 57 // count for number in range(count)]


def test_what_is_not_to_be_learned_is_no_target(tmp_path: Path) -> None:
    """A prompt is read and not predicted; a shard without instructions is learned whole."""
    (tmp_path / "in").mkdir()
    rows = [{"prompt": "ab" * (1 + number % 3), "completion": "xyz"} for number in range(200)]
    (tmp_path / "in" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "in" / "validation.txt").write_text("plain text " * 50)
    data = Data(corpus=str(tmp_path / "in"), suffixes=(".jsonl", ".txt"), prepared=str(tmp_path / "out"))
    prepare(data, progress=lambda line: None)
    corpus = Corpus.open(tmp_path / "out", "train")
    counted = 0
    loader = build_loader(PLANS[1], 0, corpus)
    for slices in loader.read(0, 6):
        for part in slices:
            batch = part.to(torch.device("cpu"))
            learned = batch.targets != -100
            assert part.targets == int(learned.sum()) and 0 < part.targets < learned.numel()
            counted += part.targets
            assert set(batch.targets[learned].tolist()) <= {ord("x"), ord("y"), ord("z"), 256}
            assert set(batch.targets[~learned].tolist()) == {-100}
            assert {ord("a"), ord("b")} <= set(batch.tokens.flatten().tolist()), "they are read"
    assert counted > 0
    assert Corpus.open(tmp_path / "out", "held_out").masks is None
