"""`elastic ckpt`: what it prints and does, and one sentence with the right exit code for each mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic import cli, cli_ckpt, resume
from elastic.checkpoint import upkeep
from elastic.checkpoint.committer import Committer
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.pins import Pin, pin
from elastic.config import ConfigError
from elastic.config_sections import Checkpoint
from elastic.events import CheckpointCommitted
from elastic.storage.store import DirectoryStore, MemoryStore
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import ABOUT, commits, manifest, save, upload
from tests.checkpoint.test_log import outcome
from tests.runs import config_in

STATE = {"w": ("float32", np.arange(300_000, dtype=np.float32)), "b": ("bfloat16", np.arange(7, dtype=np.uint16))}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Checkpoints 10, 20, 30 of attempt 1; it went back to 20; 25 of attempt 2."""
    store = DirectoryStore(tmp_path)
    CommitLog(store).claim("a")
    commits(store, 10, 20, 30)
    CommitLog(store).claim("back", base=3)
    commits(store, 25, attempt=2)
    return tmp_path


def elastic(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["ckpt", *map(str, arguments)])
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    code, out, _ = elastic(capsys, *arguments, "--json")
    return {**json.loads(out), "code": code}


def steps(run: Path) -> list[int]:
    return [upkeep.manifest_of(entry).key.step for entry in CommitLog(DirectoryStore(run)).checkpoints()]


def flip(path: Path, at: int = 3) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


# ---------------------------------------------------------------- ls


def test_ls(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    elastic(capsys, "pin", run_dir, 30, "--why", "before the merge")
    flip(run_dir / "data/1-1-10/1.json")
    code, out, _ = elastic(capsys, "ls", run_dir)
    head, *lines = out.splitlines()
    assert code == 0 and head.split() == ["step", "entry", "attempt.generation", "mesh", "size", "age", "held-out"]
    assert re.fullmatch(
        r"10 +2 +1\.1 +dp_shard 2 +128 B +\d+ s +line; DAMAGED: data/1-1-10/1.json is not the .*", lines[0]
    )
    assert re.fullmatch(r"30 +4 +1\.1 .* aside: the run went back from it; pinned by .*: before the merge", lines[2])
    assert re.fullmatch(r"25 +6 +2\.2 .* line", lines[3]) and len(lines) == 4


def test_ls_for_programs(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    found = told(capsys, "ls", run_dir)["checkpoints"]
    assert [(row["number"], row["step"], row["line"]) for row in found] == [
        (2, 10, True), (3, 20, True), (4, 30, False), (6, 25, True),
    ]  # fmt: skip
    assert (found[0]["mesh"], found[0]["nbytes"], found[0]["pin"], found[0]["damage"]) == (
        {"dp_shard": 2},
        128,
        None,
        "",
    )


# ---------------------------------------------------------------- verify


def test_verify(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    assert elastic(capsys, "verify", run_dir)[:2] == (0, "step 25 (log entry 6): 128 bytes of 1 tensors verified\n")
    code, out, _ = elastic(capsys, "verify", run_dir, "--all")
    assert code == 0 and out.count("verified") == 4
    flip(run_dir / "data/1-1-20/1.bin")
    assert elastic(capsys, "verify", run_dir)[0] == 0, "the newest one is whole"
    code, out, _ = elastic(capsys, "verify", run_dir, "--step", 20)
    assert code == 1 and out.splitlines() == [
        "step 20 (log entry 3): damaged",
        "  data/1-1-20/1.bin: bytes 0 to 64 of rank 1's shard of step 20 of generation 1 fail their CRC "
        "(w[8:16]); use another copy or an older checkpoint",
    ]
    found = told(capsys, "verify", run_dir, "--all")
    assert found["code"] == 1 and [bool(one["damages"]) for one in found["checkpoints"]] == [False, True, False, False]


def test_verify_counts_a_damaged_log_entry(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    flip(run_dir / "log/00000006.json", at=40)
    code, out, _ = elastic(capsys, "verify", run_dir)
    assert code == 1 and "log: log entry log/00000006.json is skipped: " in out
    assert out.startswith("step 20 (log entry 3): 128 bytes")


class Living(MemoryStore):
    """A commit retires step 10 while it is looked at."""

    meanwhile: Any = None

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key.startswith("data/1-1-10/") and self.meanwhile:
            call, self.meanwhile = self.meanwhile, None
            call()
        return super().get(key, start, stop)


def test_what_a_live_run_retires_meanwhile_is_not_called_damaged() -> None:
    store = Living()
    CommitLog(store).claim("a")
    worker = Committer(store, CommitLog(store), 1, about=ABOUT, samples_per_step=24, keep=Checkpoint(keep=2))

    def commit(step: int) -> None:
        worker.submit(key(1, step), upload(store, key(1, step)), {})
        assert isinstance(outcome(worker), CheckpointCommitted)

    commit(10)
    commit(20)
    log = CommitLog(store)
    entry = upkeep.of_step(log, 10)
    store.meanwhile = lambda: commit(30)
    found = cli_ckpt._verified(store, log, entry)
    assert found["retired"] and found["damages"] == [] and worker.close()
    store.put("data/1-1-20/0.bin", b"cut")
    assert [row["step"] for row in cli_ckpt._rows(store, log, now_s=0.0) if row["damage"]] == [20]


# ---------------------------------------------------------------- rm, pin


def test_rm_refuses_what_the_run_needs(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    code, out, err = elastic(capsys, "rm", run_dir, 10, 25)
    assert (code, out) == (1, "") and "the checkpoint of step 25 is the newest that is whole" in err
    assert "nothing was removed" in err and steps(run_dir) == [10, 20, 30, 25]
    elastic(capsys, "pin", run_dir, 20)
    code, _, err = elastic(capsys, "rm", run_dir, 20, 10)
    assert code == 1 and "the checkpoint of step 20 is pinned; unpin it first" in err
    assert elastic(capsys, "unpin", run_dir, 20)[0] == 0
    code, out, _ = elastic(capsys, "rm", run_dir, 20, 10)
    assert code == 0 and out.splitlines() == [
        "removed the checkpoint of step 20 (log entry 3), 128 B",
        "removed the checkpoint of step 10 (log entry 2), 128 B",
    ]
    assert steps(run_dir) == [30, 25] and sorted(os.listdir(run_dir / "data")) == ["1-1-30", "2-2-25"]


def test_the_last_whole_one_is_not_removed_even_where_it_is_not_the_newest(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    for folder in ("1-1-20", "2-2-25"):
        (run_dir / "data" / folder / "0.bin").unlink()
    code, _, err = elastic(capsys, "rm", run_dir, 10)
    assert code == 1 and "the checkpoint of step 10 is the newest that is whole" in err
    assert elastic(capsys, "rm", run_dir, 20, 25, 30)[0] == 0 and steps(run_dir) == [10]


def test_a_live_driver_goes_on_after_rm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    CommitLog(store).claim("a")
    worker = Committer(store, CommitLog(store), 1, about=ABOUT, samples_per_step=24, keep=Checkpoint(keep=3))
    for step in (10, 20, 30, 40):
        if step == 30:
            assert elastic(capsys, "rm", tmp_path, 10)[0] == 0
        worker.submit(key(1, step), upload(store, key(1, step)), {})
        assert isinstance(outcome(worker), CheckpointCommitted)
    assert worker.close() and steps(tmp_path) == [20, 30, 40] and CommitLog(store).last().attempt == 1


class Going(MemoryStore):
    """A claim goes back to a checkpoint, or somebody pins it, while it is being removed."""

    meanwhile: Any = None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if b'"taken back"' in data and self.meanwhile:
            call, self.meanwhile = self.meanwhile, None
            call()
        return super().put_if_absent(key, data)


@pytest.mark.parametrize(
    ("meanwhile", "sentence"),
    [
        (lambda store: CommitLog(store).claim("back", base=2), "of step 10 is the newest that is whole"),
        (lambda store: pin(store, CommitLog(store), 2, Pin(who="a", why="", when_s=0.0)), "of step 10 is pinned"),
    ],
    ids=["go back to it", "pin it"],
)
def test_what_becomes_needed_while_it_is_removed_stays(meanwhile: Any, sentence: str) -> None:
    store = Going()
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    store.meanwhile = lambda: meanwhile(store)
    log = CommitLog(store)
    with pytest.raises(CheckpointError, match=sentence):
        upkeep.remove(store, log, [upkeep.of_step(log, 10)], "somebody")
    assert len(store.list("data/1-1-10/")) == 5 and 2 in [entry.number for entry in CommitLog(store).checkpoints()]


def test_pin_and_unpin(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    assert elastic(capsys, "pin", run_dir, 20)[:2] == (0, "step 20 (log entry 3) is pinned\n")
    assert elastic(capsys, "pin", run_dir, 20)[:2] == (0, "step 20 (log entry 3) was pinned already\n")
    code, _, err = elastic(capsys, "unpin", run_dir, 10)
    assert code == 2 and err == "elastic: no checkpoint of step 10 is pinned; those that are: 20\n"
    assert elastic(capsys, "unpin", run_dir, 20)[:2] == (0, "step 20 (log entry 3) is not pinned any more\n")


# ---------------------------------------------------------------- gc


def test_gc_deletes_what_nobody_can_commit(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    store = DirectoryStore(run_dir)
    upload(store, key(9, 90), attempt=1)  # of an attempt that is fenced
    upload(store, key(2, 24), attempt=2)  # older than what its attempt committed
    upload(store, key(3, 26), attempt=2)  # may be committed at any moment
    store.put("data/mine/x.bin", b"not ours")
    (run_dir / "data/.tmp-1-1-0-x").write_bytes(b"half")
    os.utime(run_dir / "data/.tmp-1-1-0-x", (1e9, 1e9))
    (run_dir / "data/.tmp-2-1-0-y").write_bytes(b"half, and still being written")
    before = sorted(os.listdir(run_dir / "data"))
    code, out, _ = elastic(capsys, "gc", run_dir, "--dry-run")
    assert code == 0 and out.startswith("would delete 8 objects, ") and "  data/.tmp-1-1-0-x (unfinished)\n" in out
    assert sorted(os.listdir(run_dir / "data")) == before
    found = told(capsys, "gc", run_dir)
    assert len(found["objects"]) == 8 and found["unfinished"] == ["data/.tmp-1-1-0-x"]
    left = ["1-1-10", "1-1-20", "1-1-30", "2-2-25", "2-3-26", "mine"]
    assert sorted(os.listdir(run_dir / "data")) == [".tmp-2-1-0-y", *left]
    assert elastic(capsys, "gc", run_dir)[1].startswith("deleted 0 objects, 0 B, and 0 unfinished uploads")
    assert elastic(capsys, "verify", run_dir, "--all")[0] == 0


def test_gc_while_the_newest_attempt_has_committed_nothing(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    store = DirectoryStore(run_dir)
    CommitLog(store).claim("third")
    upload(store, key(1, 1), attempt=3)
    upload(store, key(7, 70), attempt=2)
    assert sorted({name.split("/")[1] for name in told(capsys, "gc", run_dir)["objects"]}) == ["2-7-70"]


# ---------------------------------------------------------------- diff


def test_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, other = config_in(tmp_path, run="one"), config_in(tmp_path, run="other", seed=3, optimizer={"lr": 1.0})
    changed = {**STATE, "w": ("float32", STATE["w"][1].copy()), "new": ("int64", np.zeros((2, 3), dtype=np.int64))}
    changed["w"][1][[5, 290_000]] += [0.5, 4.0]
    for config, state, world, dim in ((one, STATE, 2, 0), (other, changed, 3, 0)):
        store = DirectoryStore(config.run_dir())
        resume.save_config(config, store, attempt=CommitLog(store).claim("a"))
        CommitLog(store).commit(1, save(store, key(1, 10), state, world=world, dim=dim))
        CommitLog(store).commit(1, save(store, key(1, 20), state, world=world, dim=dim))
    here, there = tmp_path / "one", tmp_path / "other"
    code, out, _ = elastic(capsys, "diff", here, 10, 20, "--values")
    assert code == 0 and out.splitlines() == [
        "step        10 -> 20",
        "samples     240 -> 480",
        "tensors     the same names, shapes and dtypes",
        "values      every bit is the same",
    ]
    code, out, _ = elastic(capsys, "diff", f"{here}@20", f"{there}@20", "--values")
    assert code == 0 and out.splitlines() == [
        "world       2 -> 3",
        "mesh        {'dp_shard': 2} -> {'dp_shard': 3}",
        "config      run one -> other",
        "config      seed 0 -> 3",
        "config      optimizer.lr 0.003 -> 1.0",
        "tensor      new not there -> int64[2, 3]",
        "values      w: 2 of 300,000 elements differ, by at most 4",
    ]
    found = told(capsys, "diff", f"{here}@10", f"{there}@20")
    assert found["tensors"] == [["new", "", "int64[2, 3]"]] and found["values"] is None


# ---------------------------------------------------------------- mistakes


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    for arguments, code, sentence in (
        (
            ("verify", run_dir, "--step", 7),
            2,
            "there is no checkpoint of step 7; those that exist are of steps 10, 20, 30, 25",
        ),
        (("rm", run_dir, 10, 7), 2, "there is no checkpoint of step 7"),
        (("pin", run_dir, 7), 2, "there is no checkpoint of step 7"),
        (("diff", run_dir, 10), 2, f"diff {run_dir} 10: wanted RUN STEP STEP, or RUN@STEP RUN@STEP"),
        (("diff", f"{run_dir}@10", f"{run_dir}@7"), 2, "there is no checkpoint of step 7"),
        (("ls", run_dir / "data"), 1, "holds no commit log; give a run's name, its directory or its storage's URL"),
        (("ls", run_dir / "nowhere"), 1, "holds no commit log"),
        (("gc", "nosuch://x/y"), 1, "storage nosuch://: "),
    ):
        got, out, err = elastic(capsys, *arguments)
        assert (got, out) == (code, "") and sentence in err and err.count("\n") == 1, arguments
    assert steps(run_dir) == [10, 20, 30, 25]


def test_a_run_is_found_by_its_name(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    store = DirectoryStore(tmp_path / "runs/mine")
    CommitLog(store).claim("a")
    monkeypatch.chdir(tmp_path)
    assert elastic(capsys, "ls", "mine")[:2] == (0, "no checkpoint\n")
    code, out, _ = elastic(capsys, "verify", "mine")
    assert (code, out) == (1, "no checkpoint\n"), "nothing was verified"


def test_the_group_needs_neither_torch_nor_ray(run_dir: Path) -> None:
    program = (
        "import sys; from elastic import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    for arguments in (("ls",), ("verify", "--all"), ("gc",)):
        command = [sys.executable, "-c", program, "ckpt", arguments[0], str(run_dir), *arguments[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_what_the_run_went_back_from_goes_off_the_line_and_takes_no_place() -> None:
    """Unless it is pinned: a pin keeps all that it names."""
    store = MemoryStore()
    CommitLog(store).claim("a")
    worker = Committer(store, CommitLog(store), 1, about=ABOUT, samples_per_step=24, keep=Checkpoint(keep=3))
    for step in (10, 20, 30, 40):
        worker.submit(key(1, step), upload(store, key(1, step)), {}, ["data/1-1-30/0.bin"] if step == 40 else ())
        assert isinstance(outcome(worker), CheckpointCommitted)
    assert worker.close()
    assert [entry.manifest.key.step for entry in CommitLog(store).line() if entry.manifest] == [40, 20, 10]
    assert not [name for name in store.list("data/") if name.startswith("data/1-1-30/")], "its bytes are garbage"


def test_the_last_good_one_stays_though_a_newer_one_is_there_in_full_size() -> None:
    store = MemoryStore()
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    whole = store.get("data/1-1-20/0.bin")
    store.put("data/1-1-20/0.bin", bytes([whole[0] ^ 1]) + whole[1:])
    log = CommitLog(store)
    with pytest.raises(CheckpointError, match=r"step 20, which would stay, is damaged: .*; nothing removed"):
        upkeep.remove(store, log, [upkeep.of_step(log, 10)], "me")
    assert len(CommitLog(store).line()) == 2
    store.put("data/1-1-20/0.bin", whole)
    upkeep.remove(store, log, [upkeep.of_step(log, 10)], "me")
    assert [entry.manifest.key.step for entry in CommitLog(store).line() if entry.manifest] == [20]


def test_two_checkpoints_of_one_step_are_told_apart_by_their_entry() -> None:
    store = MemoryStore()
    CommitLog(store).claim("a")
    commits(store, 10)
    CommitLog(store).commit(1, manifest(store, key(2, 10), 1))
    log = CommitLog(store)
    with pytest.raises(ConfigError, match=r"step 10 has 2 checkpoints, log entries 2, 3: .* entry:3"):
        upkeep.chosen(log, "10")
    assert upkeep.chosen(log, "entry:2").number == 2
    with pytest.raises(ConfigError, match="entry 9 is no checkpoint"):
        upkeep.chosen(log, "entry:9")
    with pytest.raises(ConfigError, match="'ten': wanted a step"):
        upkeep.chosen(log, "ten")
