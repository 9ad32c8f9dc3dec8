"""Which snapshots on the nodes' disks a run may go on from: what its journal and its log say, never more."""

from __future__ import annotations

from pathlib import Path

from elastic import resume
from elastic.checkpoint.log import CommitLog
from elastic.config import Config
from elastic.plan import Stretch
from elastic.resume import Resume, choose, disk_folder
from tests.runs import Told, config_in


def with_disk(path: Path, **changes: object) -> Config:
    return config_in(path, snapshot={"disk": "/disk"}, **changes)


def line(run: Told) -> tuple[Stretch, ...]:
    return resume.disk_line(run.config, CommitLog(run.store))


def reached(path: Path, **changes: object) -> Told:
    """A checkpoint of step 10, then steps to 17."""
    run = Told(with_disk(path, **changes))
    attempt = run.attempt()
    run.generation(1, 17)
    run.checkpoint(attempt, 1, 10)
    return run


def test_what_was_recorded_beyond_the_newest_checkpoint(tmp_path: Path) -> None:
    run = reached(tmp_path)
    assert line(run) == (Stretch(attempt=1, generation=1, first=11, last=17),)
    said = choose(run.config, Resume()).origin
    assert said.endswith("or from a newer one, up to step 17, if the nodes' disks have it whole"), said
    run.attempt()
    assert line(run) == (Stretch(attempt=1, generation=1, first=11, last=17),), "nothing was done since"
    run.generation(2, 4)
    assert line(run) == (Stretch(attempt=2, generation=2, first=11, last=14),), "the first attempt's is undone"


def test_nothing_without_a_disk_or_a_checkpoint_nor_beyond_the_asked_steps(tmp_path: Path) -> None:
    run = reached(tmp_path)
    fewer = run.config.model_copy(update={"steps": 13})
    assert resume.disk_line(fewer, CommitLog(run.store)) == (Stretch(attempt=1, generation=1, first=11, last=13),)
    assert resume.disk_line(config_in(tmp_path), CommitLog(run.store)) == ()
    assert disk_folder(config_in(tmp_path), run.store) == ""
    bare = Told(with_disk(tmp_path, run="bare"))
    bare.attempt()
    bare.generation(1, 5)
    assert line(bare) == ()


def test_nothing_after_going_back(tmp_path: Path) -> None:
    run = reached(tmp_path)
    run.checkpoint(1, 1, 15)
    assert [stretch.first for stretch in line(run)] == [16]
    first = next(entry for entry in CommitLog(run.store).line() if entry.manifest and entry.manifest.key.step == 10)
    attempt = run.attempt(base=first.number)
    assert line(run) == (), "to step 10, not to 17 on a disk"
    run.generation(2, 3)
    assert line(run) == (Stretch(attempt=attempt, generation=2, first=11, last=13),)


def test_nothing_where_the_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    """Then the run goes back, as it would for somebody who asks for it."""
    run = reached(tmp_path)
    run.checkpoint(1, 1, 15)
    run.store.delete("data/1-1-15/0.bin")
    assert line(run) == ()
    run.attempt()
    assert line(run) == ()


def test_only_as_far_as_the_journal_reaches(tmp_path: Path) -> None:
    run = reached(tmp_path)
    lines = run.path.read_bytes().splitlines(keepends=True)
    run.path.write_bytes(b"".join(lines[:-3]))
    assert [stretch.last for stretch in line(run)] == [14]
    run.path.write_bytes(b"".join(lines[:-3] + lines[-2:]))
    assert [stretch.last for stretch in line(run)] == [14], "a gap"


def test_runs_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    runs = [reached(tmp_path / place) for place in ("a", "b")]
    folders = [disk_folder(run.config, run.store) for run in runs]
    assert folders[0] != folders[1] and all(folder.startswith("r-") for folder in folders)
    runs[0].attempt()
    assert disk_folder(runs[0].config, runs[0].store) == folders[0]
