"""Preparing text: deterministic, repeatable at no cost, readable by any Arrow tool, clear when it can't be done."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from elastic.config import ConfigError
from elastic.config_sections import Data
from elastic.data.inputs import list_files, split_of
from elastic.data.prepare import prepare
from elastic.data.shards import Shard, read_manifest


def write_corpus(root: Path, files: int = 60) -> Path:
    for number in range(files):
        path = root / f"part{number % 3}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {number}\n".encode() * (1 + number * 7 % 50))
    return root


def settings(tmp_path: Path, prepared: str = "prepared", **changes: object) -> Data:
    fields = {"corpus": str(tmp_path / "text"), "held_out_every": 4, "shard_bytes": 2048}
    return Data(**{**fields, "prepared": str(tmp_path / prepared), **changes})


def contents(directory: Path) -> dict[str, bytes]:
    """What is the same wherever it was made: all but records with times."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".arrow", ".crc")} | {
        "manifest.json": (directory / "manifest.json").read_bytes()
    }


def quiet(line: str) -> None:
    pass


def test_shards_hold_each_document_once(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    data = settings(tmp_path)
    manifest_path = prepare(data, progress=quiet)
    manifest = read_manifest(manifest_path.parent)
    assert manifest.dtype == "uint16" and manifest.tokenizer.name == "bytes"
    assert manifest_path.name == "manifest.json" and manifest.vocab_size == 257
    assert len(manifest.splits["train"]) > 1, "the corpus must span shards"
    for split, shards in manifest.splits.items():
        documents = []
        for shard in shards:
            content = (manifest_path.parent / shard.file).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard.sha256 and len(content) == shard.nbytes
            reader = pa.ipc.open_file(content)
            assert reader.num_record_batches == 1
            column = reader.get_batch(0).column("tokens")
            assert column.type == pa.large_list(pa.uint16()) and len(column) == shard.documents
            assert len(column.values) == shard.tokens
            assert shard.documents == 1 or 2 * shard.tokens + 8 * shard.documents <= data.shard_bytes
            values = np.frombuffer(content, "<u2", shard.tokens, shard.values_offset)
            assert np.array_equal(values, column.values.to_numpy())
            offsets = np.frombuffer(content, "<i8", shard.documents + 1, shard.offsets_offset)
            assert np.array_equal(offsets, column.offsets.to_numpy()) and shard.mask_offset is None
            check_sidecar(manifest_path.parent, shard, content)
            documents += [row.values.to_numpy() for row in column]
        names = [f for f in list_files(data) if f.split == split_of(f.name, data.held_out_every) == split]
        assert len(documents) == len(names)
        for document, file in zip(documents, names):
            assert document[-1] == 256 and bytes(document[:-1].astype(np.uint8)) == Path(file.path).read_bytes()


def check_sidecar(directory: Path, shard: Shard, content: bytes) -> None:
    crcs = (directory / shard.sidecar).read_bytes()
    assert hashlib.sha256(crcs).hexdigest() == shard.pieces_sha256
    wanted = [zlib.crc32(content[at : at + 2**20]) for at in range(0, len(content), 2**20)]
    assert np.frombuffer(crcs, "<u4").tolist() == wanted


def test_a_document_is_never_cut(tmp_path: Path) -> None:
    """What does not fit begins the next shard; what fits in none has one of its own."""
    text = tmp_path / "text"
    text.mkdir()
    for number, size in enumerate((300, 300, 5000, 300, 800)):
        (text / f"{number}.py").write_bytes(b"x" * size)
    (text / "validation").mkdir()
    (text / "validation/v.py").write_bytes(b"v")
    (text / "train.py").write_bytes(b"t" * 20)
    shards = read_manifest(prepare(settings(tmp_path, shard_bytes=2048), progress=quiet).parent).splits["train"]
    assert [(shard.documents, shard.tokens) for shard in shards] == [(2, 602), (1, 5001), (1, 301), (2, 822)]


def test_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    write_corpus(tmp_path / "elsewhere")
    first = prepare(settings(tmp_path, "a"), progress=quiet)
    second = prepare(settings(tmp_path, "b", corpus=str(tmp_path / "elsewhere")), progress=quiet)
    assert contents(first.parent) == contents(second.parent)


def test_second_time_does_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    data = settings(tmp_path)
    before = prepare(data, progress=quiet).stat()
    lines: list[str] = []
    after = prepare(data, progress=lines.append).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns) and not lines


@pytest.mark.parametrize("what", ["edit", "add", "remove", "settings"])
def test_a_changed_input_is_prepared_anew(tmp_path: Path, what: str) -> None:
    text = write_corpus(tmp_path / "text")
    data = settings(tmp_path)
    manifest = prepare(data, progress=quiet)
    before = read_manifest(manifest.parent)
    if what == "edit":
        (text / "part0/file0.py").write_text("changed")
    elif what == "add":
        (text / "new.py").write_text("new")
    elif what == "remove":
        (text / "part0/file0.py").unlink()
    else:
        data = settings(tmp_path, shard_bytes=4096)
    prepare(data, progress=quiet)
    after = read_manifest(manifest.parent)
    assert after.fingerprint != before.fingerprint
    named = {shard.file for shards in after.splits.values() for shard in shards}
    assert {path.name for path in manifest.parent.glob("*.arrow")} == named, "old shards are gone"


@pytest.mark.parametrize("damage", ["no shard", "short shard", "no sidecar", "no manifest", "torn manifest"])
def test_damage_is_repaired(tmp_path: Path, damage: str) -> None:
    write_corpus(tmp_path / "text")
    directory = prepare(settings(tmp_path), progress=quiet).parent
    before = contents(directory)
    shard = next(directory.glob("train-*.arrow"))
    manifest = directory / "manifest.json"
    if damage == "no shard":
        shard.unlink()
    elif damage == "short shard":
        os.truncate(shard, 100)
    elif damage == "no sidecar":
        shard.with_suffix(".crc").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        os.truncate(manifest, 100)
    prepare(settings(tmp_path), progress=quiet)
    assert contents(directory) == before


def test_what_an_interrupted_run_left_is_cleared(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    directory = tmp_path / "prepared"
    directory.mkdir()
    (directory / "train-00000-000000000000.arrow.tmp").write_bytes(b"half")
    (directory / "train-00007-000000000000.arrow").write_bytes(b"of another input")
    (directory / "train-00007-000000000000.crc").write_bytes(b"of another input")
    (directory / "parts").mkdir()
    (directory / "parts/00099.json").write_bytes(b"of another input")
    prepare(settings(tmp_path), progress=quiet)
    assert not list(directory.glob("*.tmp")) and not list(directory.glob("train-00007-*"))
    assert not (directory / "parts/00099.json").exists()


def test_several_processes_at_once(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=prepare, args=(settings(tmp_path),), kwargs={"progress": quiet}) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    alone = prepare(settings(tmp_path, "alone"), progress=quiet)
    assert contents(tmp_path / "prepared") == contents(alone.parent)


def test_the_split_of_a_file_depends_on_its_name_only() -> None:
    names = [f"package/module{number}.py" for number in range(4000)]
    held_out = [name for name in names if split_of(name, 20) == "held_out"]
    assert 140 < len(held_out) < 260, "one in 20"
    assert split_of("abc.py", 20) == split_of("abc.py", 20)


def test_only_text_of_the_corpus_is_taken(tmp_path: Path) -> None:
    text = write_corpus(tmp_path / "text", files=3)
    for name in ("site-packages/a.py", "__pycache__/b.py", "notes.md", "empty.py"):
        (text / name).parent.mkdir(exist_ok=True)
        (text / name).write_text("" if name == "empty.py" else "x")
    names = [file.name for file in list_files(settings(tmp_path))]
    assert names == ["part0/file0.py", "part1/file1.py", "part2/file2.py"]


def test_the_standard_library_is_a_corpus() -> None:
    files = list_files(Data())
    names = {file.name for file in files}
    assert {"dataclasses.py", "json/decoder.py"} <= names
    assert not any("site-packages" in name or "dist-packages" in name for name in names)
    assert sum(file.nbytes for file in files) > 5_000_000


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        (0, {}, "is no directory; give one"),
        (3, {"tokenizer": "nowhere.json"}, "data.tokenizer nowhere.json: No such file"),
        (3, {"end_of_document": "<eos>"}, "the bytes tokenizer has its own, 256"),
        (3, {"suffixes": (".txt",)}, r"no non-empty file ending in .txt"),
        (1, {"held_out_every": 1000}, "fell into the held_out split"),
    ],
)
def test_what_cannot_be_prepared_is_said(tmp_path: Path, files: int, changes: dict[str, object], message: str) -> None:
    if files:
        write_corpus(tmp_path / "text", files)
    with pytest.raises(ConfigError, match=message):
        prepare(settings(tmp_path, **changes), progress=quiet)
    assert not (tmp_path / "prepared" / "manifest.json").exists()


def test_shards_are_written_to_a_directory_only(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    with pytest.raises(ConfigError, match="wanted a directory; prepare it there, then `elastic data upload`"):
        prepare(Data(corpus=str(tmp_path / "text"), prepared="s3://bucket/prepared"), progress=quiet)


def test_the_manifest_names_no_place_and_no_time(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    text = prepare(settings(tmp_path), progress=quiet).read_text()
    assert str(tmp_path) not in text
    assert set(json.loads(text)) == {"fingerprint", "schema", "source", "splits", "tokenizer", "dtype"}
