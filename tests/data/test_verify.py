"""Every damage of a prepared corpus is found and named: shard and bytes, or what contradicts the manifest."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from elastic.data.shards import Manifest, Shard, read_manifest
from elastic.data.verify import damages, described
from elastic.data.writer import Writer, digests
from tests.data.inputs import prepared_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name in ("train/a.txt", "train/b.txt", "val/c.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(rng.integers(97, 123, size=800_000, dtype=np.uint8).tobytes())
    return prepared_of(root, root / "out", suffixes=(".txt",), shard_bytes=8 << 20)


@pytest.fixture
def prepared(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "out")
    return tmp_path / "out"


def told(prepared: Path) -> list[str]:
    return list(damages(prepared, read_manifest(prepared)))


def first(prepared: Path) -> Shard:
    return read_manifest(prepared).splits["train"][0]


def test_what_was_written_is_whole(prepared: Path) -> None:
    assert told(prepared) == []


@pytest.mark.parametrize("at", [0, 100, 1 << 20, (3 << 20) - 1, -1])
def test_a_flipped_bit_is_found_in_its_mebibyte(prepared: Path, at: int) -> None:
    shard = first(prepared)
    path = prepared / shard.file
    content = bytearray(path.read_bytes())
    at %= len(content)
    content[at] ^= 1
    path.write_bytes(content)
    start = at >> 20 << 20
    damage, sha256 = told(prepared)
    assert damage.startswith(f"{path}: bytes {start} to {min(start + (1 << 20), shard.nbytes)} are damaged (CRC ")
    assert sha256.startswith(f"{path} has SHA-256 ")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("suffix", "damage", "sentence"),
    [
        (".arrow", _cut, "bytes, the manifest says"),
        (".arrow", _grow, "bytes, the manifest says"),
        (".arrow", Path.unlink, "No such file"),
        (".crc", _flip, "is not the one that was written"),
        (".crc", _cut, "is not the one that was written"),
        (".crc", Path.unlink, "No such file"),
    ],
)
def test_a_cut_or_missing_file_is_named(
    prepared: Path, suffix: str, damage: Callable[[Path], None], sentence: str
) -> None:
    path = (prepared / first(prepared).file).with_suffix(suffix)
    damage(path)
    (found,) = told(prepared)
    assert str(path) in found and sentence in found


def rewritten(prepared: Path, change: Callable[[Manifest, Shard], Manifest]) -> list[str]:
    """What is told where the manifest is another one, with a fingerprint that fits."""
    manifest = read_manifest(prepared)
    return list(damages(prepared, change(manifest, manifest.splits["train"][0])))


def with_shard(manifest: Manifest, shard: Shard) -> Manifest:
    return replace(manifest, splits={"train": (shard,)})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m, s: with_shard(m, replace(s, documents=7)), "2 documents and 1600002 tokens, the manifest says 7"),
        (lambda m, s: with_shard(m, replace(s, tokens=7)), "the manifest says 2 and 7"),
        (lambda m, s: with_shard(m, replace(s, values_offset=64)), "the manifest says 64 and"),
        (lambda m, s: with_shard(m, replace(s, offsets_offset=64)), "and 64"),
        (lambda m, s: with_shard(m, replace(s, mask_offset=64)), "has no loss mask"),
        (lambda m, s: with_shard(replace(m, dtype="uint32"), s), "holds large_list<item: uint16>, wanted large_list"),
        (
            lambda m, s: with_shard(replace(m, tokenizer=replace(m.tokenizer, vocab_size=256)), s),
            "has token 256, wanted less than the vocabulary of 256",
        ),
        (
            lambda m, s: with_shard(replace(m, tokenizer=replace(m.tokenizer, sha256="0" * 64)), s),
            "tokenizer.json: No such file",
        ),
    ],
)
def test_what_contradicts_the_manifest_is_named(
    prepared: Path, change: Callable[[Manifest, Shard], Manifest], sentence: str
) -> None:
    (found,) = rewritten(prepared, change)
    assert sentence in found


def test_what_is_no_arrow_file_or_another_one_is_named(prepared: Path, tmp_path: Path) -> None:
    """With checksums that fit, so only reading it can tell."""
    manifest = read_manifest(prepared)
    writer = Writer(directory=tmp_path, split="train", group=0, dtype="uint16", vocab_size=257, shard_bytes=1 << 20)
    writer.add(np.zeros(10, dtype=np.uint16))
    writer.flush()
    (good,) = writer.shards
    for content, sentence in ((b"no Arrow at all" * 10, "can't be read as Arrow"), (two_batches(), "2 record batches")):
        path = tmp_path / good.file
        path.write_bytes(content)
        found = digests(path)
        path.with_suffix(".crc").write_bytes(found.crcs)
        shard = replace(
            good,
            nbytes=found.nbytes,
            sha256=found.sha256,
            pieces_sha256=hashlib.sha256(found.crcs).hexdigest(),
        )
        (told_,) = damages(tmp_path, with_shard(manifest, shard))
        assert sentence in told_


def two_batches() -> bytes:
    batch = pa.record_batch([pa.array([[1]], pa.large_list(pa.uint16()))], names=["tokens"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
        file.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_inspect_tells_counts_and_first_documents(prepared: Path) -> None:
    lines = described(prepared, 1)
    assert lines[0] == f"fingerprint {json.loads((prepared / 'manifest.json').read_text())['fingerprint']}"
    assert lines[1] == "tokenizer   bytes, 257 tokens, end of document 256, uint16"
    assert lines[2].startswith("train       1,600,002 tokens, 2 documents, 1 shards, ")
    assert lines[3].startswith("held_out    800,001 tokens, 1 documents, 1 shards, ")
    assert lines[4].startswith("train 0, 800001 tokens: '") and lines[5].startswith("held_out 0, 800001 tokens: '")
    assert len(described(prepared, 0)) == 4 and len(described(prepared, 99)) == 7
