"""Every kind of input gives its documents, each once and in order, however it is cut; and goes to the right side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic.data.groups import Recipe, cut
from elastic.data.inputs import list_files
from elastic.data.shards import read_manifest
from elastic.data.tokenizer import BYTES_TOKENIZER
from elastic.data.verify import damages
from tests.data.inputs import (
    WRITERS,
    as_jsonl,
    as_texts,
    data_of,
    documents,
    prepared_of,
    rows,
    texts,
    write_jsonl,
)


@pytest.mark.parametrize("suffix", list(WRITERS))
@pytest.mark.parametrize("shard_bytes", [1024, 1 << 20])
def test_each_kind_gives_its_documents_in_order(tmp_path: Path, suffix: str, shard_bytes: int) -> None:
    """Small shards cut a file into many groups, within lines and row groups; large ones do not cut it."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        WRITERS[suffix](tmp_path / "in" / f"{number}{suffix}", rows(60, start=60 * number))
    prepared = prepared_of(tmp_path / "in", tmp_path / "out", shard_bytes=shard_bytes)
    sides = {split: as_texts(prepared, split) for split in ("train", "held_out")}
    assert sorted(sides["train"] + sides["held_out"]) == sorted(texts(120))
    for found in sides.values():
        assert found == [text for text in texts(120) if text in set(found)], "in their order"
    assert 10 < len(sides["held_out"]) < 60, "one in 4"
    assert not list(damages(prepared, read_manifest(prepared)))


def test_kinds_give_the_same_documents_the_same_side(tmp_path: Path) -> None:
    found = set()
    for suffix, write in WRITERS.items():
        write(tmp_path / f"one{suffix}", rows(50))
        prepared = prepared_of(tmp_path / f"one{suffix}", tmp_path / f"out{suffix}")
        found.add((*as_texts(prepared, "train"), "/", *as_texts(prepared, "held_out")))
    assert len(found) == 1


def test_a_file_of_lines_is_cut_at_every_byte_without_loss(tmp_path: Path) -> None:
    """Edges inside a line, at its first byte, at its end, and lines longer than a group."""
    lines = [{"text": "x" * size} for size in (0, 1, 3000, 5, 900, 901, 2, 1500, 1, 1, 4000, 7) for _ in range(3)]
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(lines) + b"\n\n" + json.dumps({"text": "no newline"}).encode())
    for shard_bytes in (1024, 1025, 1100, 1531, 2048):
        data = data_of(tmp_path / "a.jsonl", tmp_path / str(shard_bytes), shard_bytes=shard_bytes, held_out_every=2)
        recipe = Recipe(data=data, directory="", used=BYTES_TOKENIZER)
        assert len(cut(recipe, list_files(data))) > 10
        prepared = prepared_of(data.corpus, Path(data.prepared), shard_bytes=shard_bytes, held_out_every=2)
        found = as_texts(prepared, "train") + as_texts(prepared, "held_out")
        assert sorted(found) == sorted([line["text"] for line in lines if line["text"]] + ["no newline"])


def test_a_text_field_of_another_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"body": text, "text": 3} for text in texts(40)])
    prepared = prepared_of(tmp_path / "a.jsonl", tmp_path / "out", text_field="body")
    assert len(as_texts(prepared, "train") + as_texts(prepared, "held_out")) == 40


@pytest.mark.parametrize(
    "names",
    [
        ("train/a.jsonl", "train/b.jsonl", "validation/a.jsonl"),
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"),
        ("a.jsonl.gz", "b.jsonl.gz", "held_out.jsonl.gz"),
        ("train/a.txt", "train/test_b.txt", "val/c.txt"),
    ],
)
def test_names_say_the_side(tmp_path: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        suffix = name[name.index(".") :]
        if suffix == ".txt":
            path.write_text("".join(texts(20, 20 * number)))
        else:
            WRITERS[suffix](path, rows(20, 20 * number))
    prepared = prepared_of(tmp_path / "in", tmp_path / "out", suffixes=(".txt", *WRITERS))
    assert "".join(as_texts(prepared, "train")) == "".join(texts(40))
    assert "".join(as_texts(prepared, "held_out")) == "".join(texts(20, 40))


def test_a_text_file_called_test_alone_says_nothing(tmp_path: Path) -> None:
    """Source code is full of them."""
    for number in range(40):
        (tmp_path / f"test_{number}.py").write_text("x")
    sides = {file.split for file in list_files(data_of(tmp_path, tmp_path / "out"))}
    assert sides == {"train", "held_out"}


@pytest.mark.parametrize("suffix", list(WRITERS))
def test_only_completions_of_instructions_are_learned(tmp_path: Path, suffix: str) -> None:
    content = [{"prompt": f"question {number} é", "completion": f"answer {number} ö"} for number in range(80)]
    WRITERS[suffix](tmp_path / f"a{suffix}", content)
    prepared = prepared_of(tmp_path / f"a{suffix}", tmp_path / "out")
    count = 0
    for split in ("train", "held_out"):
        for tokens, mask in zip(documents(prepared, split), documents(prepared, split, "loss_mask")):
            text = tokens[:-1].astype(np.uint8).tobytes().decode()
            learned = tokens[mask == 1]
            assert learned[-1] == 256 and learned[:-1].astype(np.uint8).tobytes().decode().startswith("answer ")
            assert text[: text.index("answer")].encode() == tokens[mask == 0].astype(np.uint8).tobytes()
            count += 1
        for shard in read_manifest(prepared).splits[split]:
            content_bytes = (prepared / shard.file).read_bytes()
            assert shard.mask_offset is not None and set(
                content_bytes[shard.mask_offset : shard.mask_offset + shard.tokens]
            ) == {0, 1}
    assert count == 80 and not list(damages(prepared, read_manifest(prepared)))


def test_lone_surrogates_and_other_columns_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a \\ud800 b", "n": 1}\n')
    (tmp_path / "test.jsonl").write_text('\ufeff{"text": "c"}\n')
    prepared = prepared_of(tmp_path, tmp_path / "out")
    assert as_texts(prepared, "train") == ["a ? b"] and as_texts(prepared, "held_out") == ["c"]


def test_dictionaries_of_text_are_text(tmp_path: Path) -> None:
    column = pa.array(texts(30)).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    prepared = prepared_of(tmp_path / "a.parquet", tmp_path / "out")
    assert len(as_texts(prepared, "train") + as_texts(prepared, "held_out")) == 30


def test_memory_is_bounded_by_the_shard(tmp_path: Path) -> None:
    """A file of 32 MB in a process that may take 24 MB more than it has after its imports."""
    line = as_jsonl([{"text": "word " * 2000}])
    with (tmp_path / "a.jsonl").open("wb") as file:
        for number in range(3200):
            file.write(line.replace(b"word", b"%04d" % number, 1))
    told = run_python(
        "import resource, sys\n"
        "from elastic.data.prepare import prepare\n"
        "from tests.data.inputs import data_of, quiet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "prepare(data_of(sys.argv[1], sys.argv[2], shard_bytes=1 << 20), progress=quiet)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n",
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "out"),
    )
    assert int(told) < 24


def run_python(code: str, *arguments: Any) -> str:
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
