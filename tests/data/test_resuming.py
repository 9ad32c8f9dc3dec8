"""Any number of workers and any kill give the same bytes; what was done is not done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from elastic.data.pool import run_groups
from elastic.data.prepare import prepare
from elastic.data.shards import DataError, read_manifest
from elastic.data.verify import damages
from tests.data.inputs import as_jsonl, contents, data_of, quiet, rows, write_jsonl, write_parquet

PREPARE = """
import sys
from functools import partial
from pathlib import Path
from elastic.data.pool import run_groups
from elastic.data.prepare import prepare
from tests.data.inputs import data_of, quiet
workers = partial(run_groups, workers=int(sys.argv[3]), small_bytes=0)
prepare(data_of(sys.argv[1], Path(sys.argv[2]), shard_bytes=2048), progress=quiet, run_groups=workers)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of lines, Parquet and text: about 100 groups."""
    root = tmp_path_factory.mktemp("corpus")
    for number in range(4):
        write_jsonl(root / f"{number}.jsonl", rows(250, 250 * number))
        write_parquet(root / f"{number}.parquet", rows(30, 1000 + 30 * number))
    for number in range(40):
        (root / f"{number}.py").write_bytes(as_jsonl(rows(number % 9 + 1)))
    return root


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    return prepare(data_of(corpus, out, shard_bytes=2048), progress=quiet).parent


def test_workers_do_not_change_a_byte(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    data = data_of(corpus, tmp_path / "out", shard_bytes=2048)
    many = prepare(data, progress=quiet, run_groups=partial(run_groups, workers=2, small_bytes=0)).parent
    assert contents(many) == contents(undisturbed)


def records(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "parts").glob("*.json")}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_where_it_was(corpus: Path, undisturbed: Path, tmp_path: Path, workers: int) -> None:
    """Killed twice, at once gone on with; children of the killed one may live for a moment and do no harm."""
    out = tmp_path / "out"
    before: dict[str, int] = {}
    left: list[int] = []
    for more in (12, 24):
        process = subprocess.Popen([sys.executable, "-c", PREPARE, str(corpus), str(out), str(workers)])
        deadline_s = time.monotonic() + 60
        while len(records(out)) < more:
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.005)
        left += children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "manifest.json").exists()
        found = records(out)
        assert before.items() <= found.items(), "what was done is not done again"
        before = found
    lines: list[str] = []
    prepare(data_of(corpus, out, shard_bytes=2048), progress=lines.append)
    assert contents(out) == contents(undisturbed)
    if workers == 1:  # else a child may have ended its group after we looked
        assert before.items() <= records(out).items()
        assert lines[0] == f"{len(before)} of {len(records(out))} groups are there already"
    assert len(left) == 2 * (workers if workers > 1 else 0)
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < deadline_s, "children end with their parent"
        time.sleep(0.05)
    assert not list(out.rglob("*.tmp")) and not list(damages(out, read_manifest(out)))


def test_only_changed_groups_are_made_again(corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    for number in range(30):
        (root / f"{number:02d}.py").write_bytes(b"x" * 1500)
    (root / "29.py").write_bytes(b"y" * 1500)
    data = data_of(root, tmp_path / "out", shard_bytes=2048)
    prepare(data, progress=quiet)
    before = records(tmp_path / "out")
    (root / "29.py").write_bytes(b"z" * 1501)
    prepare(data, progress=quiet)
    after = records(tmp_path / "out")
    assert [name for name in before if before[name] != after[name]] == ["00029.json"]


def test_a_failure_in_a_worker_is_raised_and_ends_the_others(tmp_path: Path) -> None:
    for number in range(8):
        write_jsonl(tmp_path / f"{number}.jsonl", rows(200))
    (tmp_path / "5.jsonl").write_bytes(as_jsonl(rows(20)) + b"no JSON\n")
    data = data_of(tmp_path, tmp_path / "out", shard_bytes=2048)
    with pytest.raises(DataError, match=r"5\.jsonl line 21 is no JSON"):
        prepare(data, progress=quiet, run_groups=partial(run_groups, workers=2, small_bytes=0))
    assert not children(os.getpid())
    assert not (tmp_path / "out/manifest.json").exists() and not list((tmp_path / "out").rglob("*.tmp"))


def test_a_killed_worker_is_said(corpus: Path, tmp_path: Path) -> None:
    data = data_of(corpus, tmp_path / "out", shard_bytes=2048)

    def killing(function, groups):  # type: ignore[no-untyped-def]
        for number, done in enumerate(run_groups(function, groups, workers=2, small_bytes=0)):
            if number == 5:
                for pid in children(os.getpid()):
                    os.kill(pid, signal.SIGKILL)
            yield done

    with pytest.raises(DataError, match=r"a process that prepared data ended with -9 \(-9: killed, perhaps for memory"):
        prepare(data, progress=quiet, run_groups=killing)
    assert not children(os.getpid())
    assert len(records(tmp_path / "out")) >= 5


def children(pid: int) -> list[int]:
    """Processes of elastic.data.pool that `pid` started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and "elastic.data.pool" in (path / "cmdline").read_text():
                found.append(int(path.name))
        except OSError:
            continue  # it has ended
    return found
