"""What is fetched ahead: as far as the pace and the bytes allow; a loader over a URL gives the same and waits."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.config import Config
from elastic.config_sections import Batch, Data, Model
from elastic.data import loader as loaders
from elastic.data.ahead import AT_ONCE_MAX, STEPS_UNKNOWN, Ahead
from elastic.data.feed import feed_of, open_corpora
from elastic.data.fetch import Task, Wanted
from elastic.data.loader import Loader
from elastic.data.shards import read_manifest
from elastic.plan import Plan
from elastic.storage.errors import StorageUnavailable
from tests.data.behind import SEQ_LEN, Gets, corpus_in

SAMPLES = 6


@dataclass
class Place:
    """Stands for a `Remote`."""

    horizon: tuple[float, int] = (60.0, 100)


class Asked:
    def __init__(self, nbytes: int) -> None:
        self.steps: list[tuple[int, int]] = []
        self.tasks: list[Task] = []
        self._nbytes = nbytes

    def __call__(self, step: int, steps: int) -> Wanted:
        self.steps.append((step, steps))
        self.tasks.append(Task(step, self._nbytes, False))
        return Wanted(nbytes=self._nbytes * steps, tasks=(self.tasks[-1],))

    @property
    def end(self) -> int:
        return sum(self.steps[-1])


def test_without_anything_to_fetch_nothing_is_asked() -> None:
    asked = Asked(1)
    assert Ahead(asked, ()).ready(5, 64) == 64 and not asked.steps


def test_as_far_as_the_pace_says() -> None:
    now_s, asked = [0.0], Asked(0)
    ahead = Ahead(asked, [Place()], now_s=lambda: now_s[0])  # type: ignore[list-item]
    assert ahead.ready(10, 64) == 1 and asked.steps[0] == (10, 1) and asked.end == 10 + STEPS_UNKNOWN
    for _ in range(5):
        now_s[0] += 2.0
        ahead.taken()
    ahead.ready(11, 64)
    assert asked.end == 11 + 30 + 1
    before = len(asked.steps)
    ahead.ready(11, 64)
    assert len(asked.steps) == before


def test_as_many_bytes_as_are_allowed_and_those_that_are_here_first() -> None:
    asked = Asked(10)
    ahead = Ahead(asked, [Place(horizon=(60.0, 35))], now_s=lambda: 0.0)  # type: ignore[list-item]
    ahead.ready(0, 64)
    assert asked.steps == [(0, 1), (1, STEPS_UNKNOWN - 1)]  # the bound is looked at before each
    assert STEPS_UNKNOWN - 1 <= AT_ONCE_MAX
    for task in asked.tasks:
        task.state = "done"
    assert ahead.ready(0, 64) == STEPS_UNKNOWN and ahead.ready(0, 3) == 3
    assert ahead.ready(1, 64) == STEPS_UNKNOWN - 1 and len(asked.steps) == 2
    ahead.ready(STEPS_UNKNOWN, 64)
    assert asked.steps[2] == (STEPS_UNKNOWN, 1)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus_in(tmp_path_factory.mktemp("ahead"))


def loader_of(place: str | Path, cache: Path, world: int = 1, rank: int = 0) -> Loader:
    config = Config(
        seed=3,
        batch=Batch(global_samples=SAMPLES, micro_samples=2),
        model=Model(seq_len=SEQ_LEN, vocab_size=50_000),
        data=Data(prepared=str(place), cache=str(cache)),
    )
    feed = feed_of(config, open_corpora(config.data, "train"))
    plan = Plan(world=world, shares=(SAMPLES // world,) * world, micro_batches=1)
    return Loader(feed, global_samples=SAMPLES, plan=plan, rank=rank)


def test_the_same_micro_batches_as_from_the_directory(prepared: Path, tmp_path: Path) -> None:
    ours, theirs = loader_of(f"file://{prepared}", tmp_path / "cache"), loader_of(prepared, tmp_path / "none")
    try:
        for step in (*range(40), 900, 901):  # with a jump
            a, b = ours.micro_batches(step)[0], theirs.micro_batches(step)[0]
            assert (a.rows.tokens == b.rows.tokens).all() and (a.ids == b.ids).all()
    finally:
        ours.close()
        theirs.close()
    assert not (tmp_path / "none").exists()


def test_a_loader_waits_for_storage_and_says_for_what(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gets, is_up = Gets(monkeypatch), threading.Event()

    def down(key: str, start: int, data: bytes) -> bytes:
        if not is_up.is_set():
            raise StorageUnavailable("file://x: can't read: no answer")
        return data

    gets.rule = down
    monkeypatch.setattr(loaders, "_READ_WAIT_S", 0.2)
    ours = loader_of(f"file://{prepared}", tmp_path / "cache")
    threading.Timer(1.0, is_up.set).start()
    try:
        with caplog.at_level(logging.WARNING):
            found = ours.micro_batches(0)
    finally:
        ours.close()
    assert found[0].rows.tokens.shape == (SAMPLES, SEQ_LEN + 1)
    told = [record.getMessage() for record in caplog.records]
    assert any("step 0 waits for its data: the corpus at file://" in line and "no answer" in line for line in told)


def test_a_loader_that_waited_long_enough_says_so_and_can_be_asked_again(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets, is_up = Gets(monkeypatch), threading.Event()

    def down(key: str, start: int, data: bytes) -> bytes:
        if not is_up.is_set():
            raise StorageUnavailable("file://x: can't read: no answer")
        return data

    gets.rule = down
    ours = loader_of(f"file://{prepared}", tmp_path / "cache")
    ours.wait_s = 0.3
    try:
        with pytest.raises(StorageUnavailable, match=r"step 0 waits for its data: .* no answer; 0 s have passed"):
            ours.micro_batches(0)
        is_up.set()
        ours.wait_s = 60.0
        assert ours.micro_batches(0)[0].rows.tokens.shape == (SAMPLES, SEQ_LEN + 1)
    finally:
        ours.close()


def test_an_outage_is_not_felt_while_enough_was_read_ahead(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets, ours = Gets(monkeypatch), loader_of(f"file://{prepared}", tmp_path / "cache")
    total = sum(-(-shard.nbytes // (1 << 20)) for shard in read_manifest(prepared).splits["train"])

    def down(*given: Any) -> bytes:
        raise StorageUnavailable("down")

    try:
        for step in range(200):
            ours.micro_batches(step)
            if len(set(gets.pieces)) >= total:
                break
            time.sleep(0.01)
        gets.rule = down
        for later in range(step + 1, step + 100):
            ours.micro_batches(later)
    finally:
        ours.close()


def test_each_rank_fetches_its_own(prepared: Path, tmp_path: Path) -> None:
    loaders_ = [loader_of(f"file://{prepared}", tmp_path / "cache", world=2, rank=rank) for rank in (0, 1)]
    whole = loader_of(prepared, tmp_path / "none")
    try:
        for step in range(5):
            parts = [one.micro_batches(step)[0].rows.tokens for one in loaders_]
            assert (np.concatenate(parts) == whole.micro_batches(step)[0].rows.tokens).all()
    finally:
        for one in (*loaders_, whole):
            one.close()
