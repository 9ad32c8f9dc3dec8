"""What can't be prepared is one sentence that names the place, and nothing half-written is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.config import ConfigError, ElasticError
from elastic.data.groups import Group, GroupDone
from elastic.data.prepare import prepare
from elastic.data.shards import DataError
from tests.data.inputs import (
    as_jsonl,
    data_of,
    quiet,
    rows,
    texts,
    write_jsonl,
    write_jsonl_gz,
    write_jsonl_zst,
    write_parquet,
)


def refused(corpus: Path, out: Path, **changes: Any) -> str:
    """The sentence; there is no manifest, and no file that no finished group names."""
    with pytest.raises(ElasticError) as told:
        prepare(data_of(corpus, out, **changes), progress=quiet)
    assert "\n" not in str(told.value)
    assert not (out / "manifest.json").exists() and not list(out.rglob("*.tmp"))
    if not list(out.glob("parts/*.json")):
        assert not list(out.glob("*.arrow")) and not list(out.glob("*.crc"))
    return str(told.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"text": "a', "is no JSON"),
        (b'{"text": "\xff"}', "is no JSON"),
        (b"[1, 2]", "is a list, wanted an object"),
        (b'{"body": "a", "id": 1}', "has no field 'text', only body, id; set data.text_field"),
        (b'{"text": 17}', "text is 17, wanted a text"),
        (b'{"text": null}', "text is null, wanted a text"),
        (b'{"prompt": "a", "completion": ["b"]}', 'completion is ["b"], wanted a text'),
        (b"[" * 200_000, "is no JSON"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [1024, 1 << 20])
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, told: str, shard_bytes: int) -> None:
    """Also where the file is cut, and nobody knew how many lines were before."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_jsonl(rows(70)) + b"\n" + line + b"\n" + as_jsonl(rows(9)))
    sentence = refused(path, tmp_path / "out", shard_bytes=shard_bytes)
    assert sentence.startswith(f"{path} line 72") and told in sentence


def test_a_bad_line_in_a_compressed_file_is_named(tmp_path: Path) -> None:
    write_jsonl_gz(tmp_path / "a.jsonl.gz", [*rows(4), {"body": "x"}])
    assert f"{tmp_path}/a.jsonl.gz line 5 has no field 'text'" in refused(tmp_path, tmp_path / "out")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def _nonsense(path: Path) -> None:
    path.write_bytes(b"this is something else entirely, and long enough to be looked at")


@pytest.mark.parametrize(
    ("write", "damage"),
    [
        # Of these only gzip has a checksum; where a flipped byte lies in a text, nothing in the file tells.
        (write_jsonl_gz, _flip),
        *(
            (write, damage)
            for write in (write_jsonl_gz, write_jsonl_zst, write_parquet)
            for damage in (_cut, _nonsense)
        ),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, write: Callable[[Path, Any], None], damage: Callable[[Path], None]
) -> None:
    path = tmp_path / f"a.{write.__name__.removeprefix('write_').replace('_', '.')}"
    write(path, [{"text": os.urandom(400).hex()} for _ in range(50)])
    damage(path)
    assert str(path) in refused(path, tmp_path / "out")


def test_an_empty_file_of_records_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(20))
    (tmp_path / "b.jsonl").touch()
    assert f"{tmp_path}/b.jsonl is empty; delete it" in refused(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz", "b.parquet"])
def test_a_file_without_rows_is_named(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(20))
    if name == "b.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    elif name == "b.jsonl":
        (tmp_path / name).write_bytes(b"\n\n")
    else:
        write_jsonl_gz(tmp_path / name, [])
    assert f"{tmp_path}/{name} has no rows; delete it" in refused(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"body": ["a"]}, "has no column 'text', only body; set data.text_field"),
        ({"text": [1]}, "column text holds int64, wanted text"),
        ({"text": ["a", None]}, "row 1: text is null, wanted a text"),
    ],
)
def test_a_parquet_file_of_something_else_is_named(tmp_path: Path, table: dict[str, Any], told: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert told in refused(tmp_path / "a.parquet", tmp_path / "out")


@pytest.mark.parametrize("name", ["a.docx", "a.jsonl.bz2"])
def test_an_unsupported_suffix_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert "has an unsupported suffix; wanted one of .py" in refused(tmp_path / name, tmp_path / "out")
    told = refused(tmp_path / name, tmp_path / "out", suffixes=(Path(name).suffix,))
    assert "has an unsupported suffix" in told or "no text" in told


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """It is changed between listing and reading, where another writer would most often be noticed."""
    write_jsonl(tmp_path / "a.jsonl", rows(200))

    def run_groups(function: Callable[[Group], GroupDone], groups: list[Group]) -> Any:
        for number, group in enumerate(groups):
            if number == 3:
                with (tmp_path / "a.jsonl").open("ab") as file:
                    file.write(as_jsonl(rows(1)))
            yield function(group)

    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read: it had \d+ bytes, now it has \d+"):
        prepare(data_of(tmp_path / "a.jsonl", tmp_path / "out"), progress=quiet, run_groups=run_groups)
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.py").write_text("x" * 1000)

    def run_groups(function: Callable[[Group], GroupDone], groups: list[Group]) -> Any:
        (tmp_path / "3.py").unlink()
        return map(function, groups)

    with pytest.raises(DataError, match=r"can't read .*3\.py: No such file"):
        prepare(data_of(tmp_path, tmp_path / "out"), progress=quiet, run_groups=run_groups)


AS_NOBODY = """
import os, sys
from pathlib import Path
from elastic.config import ElasticError
from elastic.data.prepare import prepare
from tests.data.inputs import data_of, quiet
import elastic.data.pool
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    prepare(data_of(sys.argv[1], Path(sys.argv[2])), progress=quiet)
except ElasticError as error:
    print(error)
"""


@pytest.mark.parametrize("what", ["file", "directory", "output"])
def test_missing_permission_is_said(tmp_path: Path, what: str) -> None:
    """Root may do everything, so this is tried as nobody."""
    for folder in [*list(tmp_path.parents)[:2], tmp_path]:
        folder.chmod(0o755)
    inside, out = tmp_path / "in", tmp_path / "out"
    (inside / "deep").mkdir(parents=True)
    out.mkdir()
    out.chmod(0o777)
    for number, text in enumerate(texts(20)):
        (inside / "deep" / f"{number}.py").write_text(text)
    forbidden = {"file": inside / "deep/3.py", "directory": inside / "deep", "output": out}[what]
    forbidden.chmod(0o555 if what == "output" else 0)
    ran = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(inside), str(out)], capture_output=True, text=True, timeout=60
    )
    forbidden.chmod(0o755)
    assert ran.returncode == 0, ran.stderr
    assert str(forbidden) in ran.stdout and "Permission denied" in ran.stdout and len(ran.stdout.splitlines()) == 1


def test_a_full_disk_is_said_and_what_is_done_is_kept(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the kernel refuses a write in the same place."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 100}] * 10 + [{"text": "y" * 20_000}] * 3)
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from elastic.config import ElasticError\n"
        "from elastic.data.prepare import prepare\n"
        "from tests.data.inputs import data_of, quiet\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try: prepare(data_of(sys.argv[1], Path(sys.argv[2]), shard_bytes=1024), progress=quiet)\n"
        "except ElasticError as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.startswith(f"can't write into {tmp_path}/out: File too large; make room"), ran.stderr
    assert list((tmp_path / "out/parts").glob("*.json")) and not list((tmp_path / "out").rglob("*.tmp"))
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_failure_leaves_the_corpus_of_before(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(100))
    directory = prepare(data_of(tmp_path / "a.jsonl", tmp_path / "out"), progress=quiet).parent
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(rows(150)) + b"no JSON")
    with pytest.raises(DataError, match="line 151 is no JSON"):
        prepare(data_of(tmp_path / "a.jsonl", tmp_path / "out"), progress=quiet)
    for name, content in before.items():
        assert (directory / name).read_bytes() == content


def test_nothing_for_one_side_is_said(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", rows(3))
    with pytest.raises(ConfigError, match="fell into the held_out split: 1 files"):
        prepare(data_of(tmp_path / "a.jsonl", tmp_path / "out", held_out_every=1000), progress=quiet)
