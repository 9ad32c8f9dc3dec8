"""What stays: the rule alone by properties, and the committer with pins, damage, zombies and crashes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint import garbage, pins, retention
from elastic.checkpoint.committer import Committer
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.manifest import Manifest
from elastic.config_sections import Checkpoint
from elastic.events import CheckpointCommitted
from elastic.storage.store import DirectoryStore, MemoryStore, Store
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import ABOUT, commits, manifest, upload
from tests.checkpoint.test_log import outcome

WHY = pins.Pin(who="ann", why="good", when_s=1.0)

# ---------------------------------------------------------------- the rule


def of(step: int, loss: float | None) -> Manifest:
    return Manifest(
        about=ABOUT, attempt=1, key=key(1, step), world=1, mesh={}, samples=0,
        index_object=f"data/1-1-{step}/index.json", index_sha256="", shards=(),
        metrics={} if loss is None else {"held_out": loss},
    )  # fmt: skip


losses = st.one_of(st.none(), st.sampled_from([1.0, 2.0, 2.5, math.nan, math.inf]))


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[Entry], Manifest]:
    """A line, newest first, as the commits of a run leave it, and the next checkpoint."""
    steps = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=12)))
    made = [of(step, draw(losses)) for step in steps]
    line = [Entry(number=2 + 3 * at, attempt=1, manifest=one) for at, one in enumerate(made[:-1])]
    return line[::-1], made[-1]


rules = st.builds(
    Checkpoint, keep=st.integers(2, 5), keep_every_steps=st.sampled_from([0, 1, 7, 10]), keep_best=st.integers(0, 3)
)


@given(lines(), rules, st.data())
def test_the_rule(made: tuple[list[Entry], Manifest], rule: Checkpoint, data: st.DataObject) -> None:
    line, new = made
    numbers = [entry.number for entry in line]
    whole = data.draw(st.sets(st.sampled_from(numbers or [0])))
    pinned = data.draw(st.sets(st.integers(0, 40), max_size=3))
    kept = retention.kept(line, rule, new, pinned=pinned, whole=whole)
    good = [entry for entry in line if entry.number in whole]
    newest = [entry.number for entry in good[: rule.keep - 1]]
    assert {*newest, *pinned} <= kept and kept <= {*numbers, *pinned}
    for entry in good:
        step = retention._manifest(entry).key.step
        stretch = step // rule.keep_every_steps if rule.keep_every_steps else 0
        older = [other for other in good if retention._manifest(other).key.step < step]
        first = stretch > 0 and all(
            retention._manifest(other).key.step // rule.keep_every_steps != stretch for other in older
        )
        loss = retention._manifest(entry).metrics.get("held_out", math.nan)
        told = [retention._manifest(other).metrics.get("held_out", math.nan) for other in good]
        better = sum(other < loss for other in (*told, new.metrics.get("held_out", math.nan)))
        as_good = sum(other == loss for other in told)
        if first or (math.isfinite(loss) and better + as_good <= rule.keep_best):
            assert entry.number in kept
        elif entry.number not in newest and better >= rule.keep_best:
            assert entry.number not in kept - pinned
    damaged = set(numbers) - whole - pinned
    oldest = newest[-1] if len(newest) == rule.keep - 1 else 0
    assert {number for number in damaged if number > oldest} == kept & damaged, "as many whole ones as asked, not less"


@given(st.lists(st.tuples(st.integers(1, 9), losses), max_size=25), rules)
def test_what_went_never_comes_back_and_what_is_to_stay_stays(
    grown: list[tuple[int, float | None]], rule: Checkpoint
) -> None:
    """Folded over a run: the first of each stretch and the best so far are there at the end."""
    line: list[Entry] = []
    step, told = 0, list[Manifest]()
    for number, (more, loss) in enumerate(grown, 2):
        step += more
        new = of(step, loss)
        told.append(new)
        everything = {entry.number for entry in line}
        kept = retention.kept(line, rule, new, pinned=(), whole=everything)
        line = [Entry(number=number, attempt=1, manifest=new), *(entry for entry in line if entry.number in kept)]
    there = [retention._manifest(entry) for entry in line]
    assert there[: rule.keep] == told[::-1][: rule.keep]
    if rule.keep_every_steps:
        firsts = {one.key.step // rule.keep_every_steps: one for one in reversed(told)}
        assert all(one in there for stretch, one in firsts.items() if stretch)
    ranked = sorted(
        (one for one in told if math.isfinite(one.metrics.get("held_out", math.nan))),
        key=lambda one: (one.metrics["held_out"], one.key.step),
    )
    assert all(one in there for one in ranked[: rule.keep_best])


def test_numbers_are_compared_as_numbers(store: Store) -> None:
    """As text "99" comes after "200"."""
    CommitLog(store).claim("a")
    run = committer(store, 1)
    for step in (8, 9, 10, 99, 100, 200):
        run.commit(step)
    assert run.close() == ["1-1-100", "1-1-200"]
    newest = CommitLog(store).newest()
    assert newest is not None and newest.key.step == 200


# ---------------------------------------------------------------- the committer


class Run:
    """One attempt that commits."""

    def __init__(self, store: Store, attempt: int, rule: Checkpoint) -> None:
        self.store, self.attempt, self.said = store, attempt, list[str]()
        log = CommitLog(store, self.said.append)
        self.worker = Committer(store, log, attempt, about=ABOUT, samples_per_step=24, keep=rule)

    def commit(self, step: int, loss: float | None = None) -> int:
        uploads = upload(self.store, key(self.attempt, step), attempt=self.attempt)
        self.worker.submit(key(self.attempt, step), uploads, {} if loss is None else {"held_out": loss})
        result = outcome(self.worker)
        assert isinstance(result, CheckpointCommitted), result
        return result.number

    def close(self) -> list[str]:
        """The folders that are left."""
        assert self.worker.close()
        return folders(self.store)


def committer(store: Store, attempt: int, **rule: int) -> Run:
    return Run(store, attempt, Checkpoint(**{"keep": 2, **rule}))


def folders(store: Store) -> list[str]:
    return sorted({name.split("/")[1] for name in store.list("data/")})


def test_best_and_every_are_kept_beside_the_newest(store: Store) -> None:
    CommitLog(store).claim("a")
    run = committer(store, 1, keep_every_steps=20, keep_best=1)
    for step, loss in ((5, 3.0), (10, 1.0), (15, 2.0), (25, None), (30, 2.0), (45, 1.5), (50, None), (55, 4.0)):
        run.commit(step, loss)
    assert run.close() == ["1-1-10", "1-1-25", "1-1-45", "1-1-50", "1-1-55"]
    best = next(entry.manifest for entry in CommitLog(store).checkpoints() if entry.manifest)
    assert (best.key.step, best.metrics) == (10, {"held_out": 1.0})


def test_a_damaged_one_takes_no_whole_ones_place(store: Store) -> None:
    CommitLog(store).claim("a")
    run = committer(store, 1)
    run.commit(10)
    run.commit(20)
    store.put("data/1-1-20/1.bin", b"cut")
    run.commit(30)
    assert folders(store) == ["1-1-10", "1-1-20", "1-1-30"], "10 is the only other one that is whole"
    run.commit(40)
    assert run.close() == ["1-1-30", "1-1-40"]


def test_a_pin_holds_also_what_the_run_went_back_from(store: Store) -> None:
    CommitLog(store).claim("a")
    commits(store, 10, 20, 30)
    assert pins.pin(store, CommitLog(store), 4, WHY) and not pins.pin(store, CommitLog(store), 4, WHY)
    assert pins.read(store, 4) == WHY and pins.read(store, 3) is None
    CommitLog(store).claim("back", base=2)
    run = committer(store, 2)
    for step in (12, 14, 16):
        run.commit(step)
    assert folders(store) == ["1-1-30", "2-2-14", "2-2-16"]
    assert CommitLog(store).last().aside == (4,)
    pins.unpin(store, 4)
    run.commit(18)
    assert run.close() == ["2-2-16", "2-2-18"]


class Meddling(MemoryStore):
    """Calls `meanwhile` once, before the first `list` of `prefix`, or after it."""

    def __init__(self, prefix: str, *, after: bool) -> None:
        super().__init__()
        self.prefix, self.after, self.meanwhile = prefix, after, list[Callable[[], object]]()

    def list(self, prefix: str) -> dict[str, int]:
        calls = []
        if prefix == self.prefix:
            calls, self.meanwhile = self.meanwhile, []
        if not self.after:
            [call() for call in calls]
        found = super().list(prefix)
        if self.after:
            [call() for call in calls]
        return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pin_made_while_a_commit_retires_it_holds(after: bool) -> None:
    """The commit has decided without the pin; the pin's note takes its number, so it decides again."""
    store = Meddling("pins/", after=after)
    CommitLog(store).claim("a")
    run = committer(store, 1)
    number = run.commit(10)
    run.commit(20)
    store.meanwhile = [lambda: pins.pin(store, CommitLog(store), number, WHY)]
    run.commit(30)
    assert run.close() == ["1-1-10", "1-1-20", "1-1-30"]


def test_a_pin_that_comes_too_late_says_so(store: Store) -> None:
    CommitLog(store).claim("a")
    run = committer(store, 1)
    number = run.commit(10)
    run.commit(20)
    run.commit(30)
    with pytest.raises(CheckpointError, match="entry 2 was retired or removed meanwhile: it is gone"):
        pins.pin(store, CommitLog(store), number, WHY)
    assert pins.pinned(store) == set() and run.close() == ["1-1-20", "1-1-30"]


def test_a_damaged_pin_still_pins(store: Store) -> None:
    CommitLog(store).claim("a")
    run = committer(store, 1)
    store.put(f"pins/{run.commit(10):08d}.json", b"{")
    run.commit(20)
    run.commit(30)
    assert run.close() == ["1-1-10", "1-1-20", "1-1-30"]
    found = pins.read(store, 2)
    assert found is not None and "can't be read" in found.why


def test_a_fenced_attempt_that_still_tidies_deletes_nothing_of_the_newer_one() -> None:
    """The old attempt commits; before it deletes, the newer one claims, goes back, uploads and commits."""
    store = Meddling("log/", after=False)
    CommitLog(store).claim("old")
    old = committer(store, 1)
    old.commit(10)
    old.commit(20)

    def newer() -> None:
        assert CommitLog(store).claim("new", base=3) == 2
        commits(store, 22, attempt=2)
        upload(store, key(3, 24), attempt=2)  # under way

    tidy = garbage.garbage

    def meddled(*args: object, **kwargs: object) -> list[str]:
        store.meanwhile = [newer]
        return tidy(*args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "garbage", meddled)
        old.commit(30)
    assert old.close() == ["1-1-20", "1-1-30", "2-2-22", "2-3-24"], "only what had stopped counting went"
    assert [e.manifest.key.step for e in CommitLog(store).checkpoints() if e.manifest] == [20, 30, 22]


def test_what_a_zombie_still_uploads_goes_with_the_next_commit(store: Store) -> None:
    CommitLog(store).claim("old")
    old = committer(store, 1)
    old.commit(10)
    CommitLog(store).claim("new")
    late = upload(store, key(1, 99))
    old.worker.submit(key(1, 99), late, {})
    assert getattr(outcome(old.worker), "fenced_by", 0) == 2
    assert old.close() == ["1-1-10", "1-1-99"], "who is fenced deletes nothing"
    new = committer(store, 2)
    upload(store, key(5, 50), attempt=2)
    new.commit(12)
    assert new.close() == ["1-1-10", "2-2-12", "2-5-50"], "an upload that may still be committed stays"


def test_nothing_is_deleted_while_an_entry_that_counts_cannot_be_read(store: Store) -> None:
    CommitLog(store).claim("a")
    run = committer(store, 1)
    number = run.commit(10)
    assert pins.pin(store, CommitLog(store), number, WHY)
    run.commit(20)
    assert run.worker.close()
    store.put(f"log/{number:08d}.json", b"{")
    again = committer(store, 1)
    again.commit(30)
    again.commit(40)
    assert again.close() == ["1-1-10", "1-1-20", "1-1-30", "1-1-40"]
    assert any("no checkpoint data is deleted: log entries 2 count and can't be read" in line for line in again.said)


class Recording(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        super().delete(key)


def test_what_makes_the_rest_readable_is_deleted_first() -> None:
    store = Recording()
    CommitLog(store).claim("a")
    commits(store, 10)
    (entry,) = CommitLog(store).checkpoints()
    assert entry.manifest is not None
    garbage.delete(store, sorted(store.list("data/")))
    assert [name.split("/")[2] for name in store.deleted[:1]] == ["index.json"]
    assert {name.rpartition(".")[2] for name in store.deleted[1:3]} == {"json"}
    assert {name.rpartition(".")[2] for name in store.deleted[3:]} == {"bin"}
    assert sorted(store.deleted) == sorted(entry.manifest.objects())


class Failing(MemoryStore):
    """Deletes `left` objects, then dies as a killed process does: with nothing more done."""

    left = 1 << 30

    def delete(self, key: str) -> None:
        if self.left == 0:
            raise CheckpointError("killed")
        self.left -= 1
        super().delete(key)


@pytest.mark.parametrize("left", range(6))
def test_a_deletion_that_was_cut_short_is_ended_by_the_next_commit(left: int) -> None:
    store = Failing()
    CommitLog(store).claim("a")
    run = committer(store, 1)
    run.commit(10)
    run.commit(20)
    store.left = left
    run.commit(30)
    newest = CommitLog(store).newest()
    assert newest is not None and newest.key.step == 30
    store.left = 1 << 30
    run.commit(40)
    assert run.close() == ["1-1-30", "1-1-40"]


# ---------------------------------------------------------------- the log under races


def test_a_commit_that_slips_into_a_claim_is_not_lost() -> None:
    """Seen by the claim's second look at the log, not by its first: it is decided anew."""
    store = Meddling("log/", after=True)
    CommitLog(store).claim("old")
    commits(store, 10)
    store.meanwhile = [lambda: commits(store, 20)]
    assert CommitLog(store).claim("new") == 2
    assert [e.manifest.key.step for e in CommitLog(store).line() if e.manifest] == [20, 10]


def test_half_written_files_are_found_by_age(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("data/1-1-10/0.bin", b"x")
    half = tmp_path / "data/1-1-10/.tmp-1-2-3-1.bin"
    half.write_bytes(b"half")
    written_s = half.stat().st_mtime
    assert store.unfinished(written_s, delete=True) == []
    assert store.unfinished(written_s + 1, delete=False) == ["data/1-1-10/.tmp-1-2-3-1.bin"] and half.exists()
    assert store.unfinished(written_s + 1, delete=True) == ["data/1-1-10/.tmp-1-2-3-1.bin"] and not half.exists()
    assert store.list("") == {"data/1-1-10/0.bin": 1}


def test_an_entry_says_when_it_was_written(store: Store) -> None:
    CommitLog(store).claim("a")
    CommitLog(store).commit(1, replace(manifest(store, key(1, 10)), metrics={"held_out": 0.1}))
    claim, committed = CommitLog(store).entries()
    assert 0 < claim.written_s <= committed.written_s
