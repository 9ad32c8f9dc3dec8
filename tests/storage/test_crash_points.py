"""Power or process lost at any point of the protocol: what was committed is there and right, the rest is garbage that
the next commit collects, and a writer that was frozen meanwhile does no harm."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from queue import Queue
from random import Random

import numpy as np
import pytest
import torch

from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.manifest import restore_plan
from elastic.checkpoint.restore import restore
from elastic.config_sections import StorageOptions
from elastic.segments import FILE
from elastic.storage.object_store import PART_BYTES, ObjectStore
from elastic.storage.store import DirectoryStore, Store
from tests.checkpoint.layouts import nowhere
from tests.storage.crashes import Told, Writer, on_directory, on_objects, writer
from tests.storage.disk import Disk, watched
from tests.storage.gate import Gate, Moment, Strike
from tests.storage.protocol import LARGE_BYTES, attempt, expected, found_whole, garbage, unfinished_after_gc
from tests.storage.servers import Seaweed, credentials

STEPS = 3  # the last of them retires the first, and deletes its objects
SEED = 1
POINTS_ON_S3, POINTS_IN_PARTS, FROZEN_ON_S3 = 16, 5, 5  # of many more; tests.storage.crash_campaign takes others
LIMIT_S = 60.0

pytestmark = pytest.mark.timeout(600)  # of the machine at its busiest


def restores_as_told(store: Store, aside: Path, told: Told, before: Entry | None = None) -> list[Entry]:
    """All that counts is right in every byte. A restore gets the newest: the last that the writer was told of (before:
    the newest when it began), or the one that it was committing."""
    assert not told.failed
    entries = found_whole(store, aside)
    was_told = [step_of(before)] if before else []
    was_told = [(number, step) for number, step, _ in told.committed][-1:] or was_told
    assert [restored(store, entry) for entry in entries[-1:]] in (was_told, told.committing[-1:]), told
    return entries


def step_of(entry: Entry) -> tuple[int, int]:
    assert entry.manifest is not None
    return entry.attempt, entry.manifest.key.step


def restored(store: Store, entry: Entry) -> tuple[int, int]:
    """Attempt and step of what a trainer's own restore, into another layout, gets."""
    assert entry.manifest is not None
    wanted = expected(store, entry)
    found = {name: torch.from_numpy(np.zeros_like(values)) for name, values in wanted.items()}
    arena = nowhere()
    restore(list(found.items()), restore_plan(entry.manifest), rank=0, world=1, arena=arena, store=store, token="")
    os.close(arena.fd)
    assert all(np.array_equal(found[name].numpy(), values) for name, values in wanted.items())
    return step_of(entry)


def goes_on(store: DirectoryStore | ObjectStore, aside: Path, *, is_alone: bool = True) -> Told:
    """A new attempt starts from what is there, commits, and leaves no garbage. is_alone: nobody else is writing."""
    before = CommitLog(store).checkpoints()
    told = Told()
    attempt(store, aside, steps=1, tell=lambda *message: told.hear(message))
    after = found_whole(store, aside)
    assert [entry.number for entry in after[:-1]] == [entry.number for entry in before[-1:]]
    assert [(after[-1].attempt, after[-1].number)] == [(told.claimed, told.committed[0][2])]
    assert garbage(store) == set()
    if is_alone:
        assert unfinished_after_gc(store) == []
    return told


# ---------------------------------------------------------------- a directory


def run_on_directory(at: int | None, tmp: Path) -> Told:
    (tmp / "disk").mkdir(parents=True)
    with writer(on_directory, tmp / "disk", tmp / "aside", STEPS, at, signal.SIGKILL) as found:
        code = found.end()
    assert code == (0 if at is None else -signal.SIGKILL), found.told.ended
    return found.told


def check_directory(at: int, tmp: Path, seed: int = SEED) -> None:
    told = run_on_directory(at, tmp)
    assert told.disk.same(tmp / "disk"), "an operation is not modelled"
    store = DirectoryStore(tmp / "disk/run")
    restores_as_told(store, tmp / "read", told)
    for image, chance in enumerate((None, Random(f"{seed}-{at}"))):
        lost = DirectoryStore(tmp / f"image-{image}/run")
        told.disk.after_power_loss(tmp / f"image-{image}", chance)
        restores_as_told(lost, tmp / f"aside-{image}", told)
        if chance and at % 3 == seed % 3:  # the rest of the points in the campaign's other seeds
            with watched(tmp / f"image-{image}", lambda op: None):
                goes_on(lost, tmp / f"aside-{image}")
    with watched(tmp / "disk", told.disk.do):
        goes_on(store, tmp / "aside-on")
    # What the dead process left half done is not relied upon: all may be lost that the living one did not make durable.
    told.disk.after_power_loss(tmp / "late", None)
    late = found_whole(DirectoryStore(tmp / "late/run"), tmp / "aside-late")
    assert [entry.number for entry in late] == [entry.number for entry in CommitLog(store).checkpoints()]


def test_a_directory_at_every_point(tmp_path: Path) -> None:
    whole = run_on_directory(None, tmp_path / "whole")
    assert whole.ended == "done" and [step for _, step, _ in whole.committed] == [1, 2, 3]
    for at in range(whole.points):
        check_directory(at, tmp_path / str(at))
        shutil.rmtree(tmp_path / str(at))


def two_checkpoints(tmp: Path) -> Disk:
    disk = Disk()
    (tmp / "disk").mkdir(parents=True)
    with watched(tmp / "disk", disk.do):
        attempt(DirectoryStore(tmp / "disk/run"), tmp / "aside", steps=2, tell=lambda *message: None)
    return disk


def check_frozen_on_directory(at: int, tmp: Path) -> None:
    """The writer, frozen at a point, sleeps through another attempt's whole life."""
    disk, store = two_checkpoints(tmp), DirectoryStore(tmp / "disk/run")
    with writer(on_directory, tmp / "disk", tmp / "aside-frozen", 2, at, signal.SIGSTOP) as old:
        old.told.disk = disk
        while (message := old.hear()) != ("frozen",):
            assert message is not None, old.told.ended
        old.until_frozen()
        with watched(tmp / "disk", disk.do):
            new = goes_on(store, tmp / "aside-new", is_alone=False)
        before = found_whole(store, tmp / "aside-new")
        old.thaw()
        old.end()
    fenced_off(old.told, new, before, found_whole(store, tmp / "aside-new"))
    with watched(tmp / "disk", disk.do):
        goes_on(store, tmp / "aside-last")
    assert disk.same(tmp / "disk")


def fenced_off(old: Told, new: Told, before: list[Entry], after: list[Entry]) -> None:
    """The frozen one ended itself and changed nothing that counts; or it had claimed nothing yet, and came later."""
    if old.claimed < new.claimed:
        assert old.ended == "fenced" and after == before
    else:
        assert old.ended == "done" and old.found == [(new.claimed, new.committed[0][1])] and len(after) == 2


@pytest.mark.long
def test_a_writer_frozen_at_every_point_ends_itself(tmp_path: Path) -> None:
    for at in range(points_of_one_step(tmp_path / "whole")):
        check_frozen_on_directory(at, tmp_path / str(at))
        shutil.rmtree(tmp_path / str(at))


def points_of_one_step(tmp: Path) -> int:
    """Of an attempt that retires and deletes something."""
    disk = two_checkpoints(tmp)
    with writer(on_directory, tmp / "disk", tmp / "aside-whole", 1, None, signal.SIGKILL) as found:
        found.told.disk = disk
        assert found.end() == 0
    return found.told.points


# ---------------------------------------------------------------- an object store


class OnS3:
    """A run in the bucket: writers reach it through the gate, the test itself does not. Between two crashes it has two
    checkpoints and no garbage, so that what the next writer does is known beforehand."""

    def __init__(self, seaweed: Seaweed, gate: Gate, url: str, aside: Path, large_bytes: int = LARGE_BYTES) -> None:
        self._large_bytes = large_bytes
        self._seaweed, self._gate, self._url, self._aside = seaweed, gate, url, aside
        self.store = ObjectStore(url, StorageOptions(endpoint=seaweed.endpoint, region="us-east-1"))
        self._options = StorageOptions(endpoint=gate.endpoint, region="us-east-1", deadline_s=LIMIT_S)
        attempt(self.store, aside, steps=2, tell=lambda *message: None)
        self.requests = self._clean()

    def writer(self, steps: int = 1) -> AbstractContextManager[Writer]:
        """It knows the journal so far, as if it ran on the same head."""
        mine = Path(tempfile.mkdtemp(dir=self._aside.parent))
        shutil.copy(self._aside / FILE, mine / FILE)
        return writer(on_objects, self._url, self._options, credentials(), mine, steps, self._large_bytes)

    def _clean(self) -> list[str]:
        self._gate.set(None)
        with self.writer() as found:
            assert found.end() == 0, found.told.ended
        return self._gate.seen

    def points(self) -> list[tuple[int, Moment]]:
        """Every request, at all moments that may make a difference."""
        found: list[tuple[int, Moment]] = []
        for at, request in enumerate(self.requests):
            method, _, body = request.split(" ")
            found.append((at, "before"))
            if method not in ("GET", "HEAD"):
                found += [(at, "after"), (at, "held")]
            if body:
                found.append((at, "half"))
        return found

    def writes(self) -> list[int]:
        """Requests that change something."""
        return [at for at, request in enumerate(self.requests) if not request.startswith(("GET", "HEAD"))]

    def _strike(self, at: int, moment: Moment, act: Callable[[], None], **how: bool) -> None:
        kind = self.requests[at]
        before = self.requests[:at].count(kind)
        self._gate.set(Strike(kind=kind, before=before, moment=moment, act=act, **how))

    def crash(self, at: int, moment: Moment) -> None:
        pids: Queue[int] = Queue()
        newest = CommitLog(self.store).newest_entry()
        self._strike(at, moment, lambda: os.kill(pids.get(), signal.SIGKILL))
        with self.writer() as found:
            pids.put(found.pid)
            assert found.end() == -signal.SIGKILL, found.told.ended
        self._gate.wait_idle(LIMIT_S)
        restores_as_told(self.store, self._aside, found.told, newest)
        goes_on(self.store, self._aside)
        if moment == "held":
            before = found_whole(self.store, self._aside)
            self._gate.release()
            self._gate.wait_idle(LIMIT_S)
            assert found_whole(self.store, self._aside) == before
            goes_on(self.store, self._aside)

    def outlive(self, at: int, moment: Moment) -> None:
        """The service is killed, and started again on what it had written."""
        self._strike(at, moment, self._seaweed.stop, is_end=False)
        with self.writer(steps=2) as found:
            self._gate.wait_struck(LIMIT_S)
            self._seaweed.start()
            assert found.end() == 0, found.told.ended
        assert len(found.told.committed) == 2, found.told
        restores_as_told(self.store, self._aside, found.told)
        goes_on(self.store, self._aside)

    def freeze(self, at: int, moment: Moment) -> None:
        pids: Queue[int] = Queue()
        self._strike(at, moment, lambda: os.kill(pids.get(), signal.SIGSTOP), is_end=False, answers=True)
        with self.writer(steps=2) as old:
            pids.put(old.pid)
            self._gate.wait_struck(LIMIT_S)
            old.until_frozen()
            new = goes_on(self.store, self._aside, is_alone=False)
            before = found_whole(self.store, self._aside)
            old.thaw()
            self._gate.release()
            old.end()
        fenced_off(old.told, new, before, found_whole(self.store, self._aside))
        goes_on(self.store, self._aside)


@pytest.fixture
def gate(seaweed: Seaweed) -> Iterator[Gate]:
    found = Gate(seaweed.endpoint)
    yield found
    found.close()


@pytest.mark.long
def test_an_object_store_at_many_points(seaweed: Seaweed, gate: Gate, url: str, tmp_path: Path) -> None:
    on_s3 = OnS3(seaweed, gate, url, tmp_path / "aside")
    points = on_s3.points()
    decisive = {(at, moment) for at, moment in points if "PUT" in on_s3.requests[at] and "/log/" in on_s3.requests[at]}
    for at, moment in sorted(decisive | set(Random(SEED).sample(points, POINTS_ON_S3))):
        on_s3.crash(at, moment)


@pytest.mark.long
def test_an_upload_in_parts(seaweed: Seaweed, gate: Gate, url: str, tmp_path: Path) -> None:
    on_s3 = OnS3(seaweed, gate, url, tmp_path / "aside", large_bytes=2 * PART_BYTES)
    points = [(at, moment) for at, moment in on_s3.points() if "upload" in on_s3.requests[at]]
    for at, moment in sorted(Random(SEED).sample(points, POINTS_IN_PARTS)):
        on_s3.crash(at, moment)


@pytest.mark.long
def test_a_writer_frozen_at_a_request_ends_itself(seaweed: Seaweed, gate: Gate, url: str, tmp_path: Path) -> None:
    on_s3, chance = OnS3(seaweed, gate, url, tmp_path / "aside"), Random(SEED)
    for at in chance.sample(on_s3.writes(), FROZEN_ON_S3):
        on_s3.freeze(at, chance.choice(("before", "after")))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_service_dies_at_a_commit(seaweed: Seaweed, gate: Gate, url: str, tmp_path: Path, moment: Moment) -> None:
    on_s3 = OnS3(seaweed, gate, url, tmp_path / "aside")
    puts = [at for at, request in enumerate(on_s3.requests) if "PUT" in request and "/log/" in request]
    on_s3.outlive(puts[-1], moment)
