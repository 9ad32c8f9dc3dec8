"""Best-fit packing: a partition of the documents into bins, the same each time, full enough, read at any place."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import Config, ConfigError, load
from elastic.config_sections import Data
from elastic.data import packed, plan_files
from elastic.data.feed import feed_of, fingerprint_of, open_corpora
from elastic.data.loader import Slice, held_out_batches
from elastic.data.packed import PackedCorpus
from elastic.data.packing import Plan, best_fit, packed_fingerprint, pieces_of, plan_of
from elastic.data.prepare import prepare_for
from elastic.data.shards import DataError, read_manifest
from elastic.data.verify import damages, described

DOCUMENTS = st.lists(st.integers(0, 40), min_size=1, max_size=60)
SEQ_LENS = st.integers(1, 24)


def offsets_of(documents: list[int]) -> np.ndarray:
    return np.cumsum([0, *documents], dtype=np.int64)


def by_loop(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing, in the plainest way: the room of each bin after each piece."""
    rooms: list[int] = []
    came: list[int] = []  # when each bin came to its room
    found = dict[int, int]()
    order = sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    for turn, at in enumerate(order):
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[at]]
        if fitting:
            chosen = min(fitting, key=lambda number: (rooms[number], -came[number]))
        else:
            chosen = len(rooms)
            rooms.append(capacity)
            came.append(turn)
        rooms[chosen] -= lengths[at]
        came[chosen] = turn
        found[at] = chosen
    return [found[at] for at in range(len(lengths))]


def first_fit(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in lengths:
        for number, room in enumerate(rooms):
            if room >= length:
                rooms[number] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


@settings(deadline=None, max_examples=300)
@given(documents=DOCUMENTS, seq_len=SEQ_LENS)
def test_every_token_but_a_documents_first_is_a_target_once(documents: list[int], seq_len: int) -> None:
    offsets = offsets_of(documents)
    starts, lengths = pieces_of(offsets, seq_len)
    targets = Counter(
        place for start, length in zip(starts.tolist(), lengths.tolist()) for place in range(start + 1, start + length)
    )
    firsts = set(offsets.tolist())
    assert targets == Counter(place for place in range(int(offsets[-1])) if place not in firsts)
    assert all(2 <= length <= seq_len + 1 for length in lengths.tolist())
    owner = np.repeat(np.arange(len(documents)), documents)
    assert all(len(set(owner[start : start + length])) == 1 for start, length in zip(starts, lengths))
    whole = [length for length in documents if 1 < length <= seq_len + 1]
    assert not Counter(whole) - Counter(lengths.tolist()), "what fits is not cut"


@settings(deadline=None, max_examples=300)
@given(documents=DOCUMENTS, seq_len=SEQ_LENS)
def test_each_piece_is_in_one_bin_and_no_bin_is_too_full(documents: list[int], seq_len: int) -> None:
    plan, again = (plan_of(offsets_of(documents), seq_len) for _ in range(2))
    pieces = sorted(zip(*(part.tolist() for part in pieces_of(offsets_of(documents), seq_len))))
    assert sorted(zip(plan.starts.tolist(), plan.lengths.tolist())) == pieces
    bins = [slice(int(a), int(b)) for a, b in zip(plan.firsts, plan.firsts[1:])]
    assert all(0 < plan.lengths[one].sum() <= seq_len + 1 for one in bins)
    assert all((np.diff(plan.starts[one]) > 0).all() for one in bins)
    assert (np.diff(plan.starts[plan.firsts[:-1]]) > 0).all(), "bins by their first pieces"
    assert plan.to_bytes(seq_len=seq_len, tokens=5) == again.to_bytes(seq_len=seq_len, tokens=5)


@settings(deadline=None, max_examples=300)
@given(lengths=st.lists(st.integers(1, 20), max_size=50), spare=st.integers(0, 5))
def test_it_is_best_fit_decreasing(lengths: list[int], spare: int) -> None:
    """So it needs at most 11/9 of the fewest bins and 6/9 of one, and of those of first-fit, which can't be fewer."""
    capacity = max(lengths, default=1) + spare
    which = best_fit(np.array(lengths, dtype=np.int64), capacity).tolist()
    assert which == by_loop(lengths, capacity)
    assert 9 * len(set(which)) <= 11 * first_fit(lengths, capacity) + 6


@pytest.mark.parametrize("mean", [10, 40, 150, 400])
def test_it_fills_better_than_first_fit(mean: int) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(mean), 0.8, 3000).astype(np.int64), 2, 513)
    bins = len(np.unique(best_fit(lengths, 513)))
    assert bins <= first_fit(lengths.tolist(), 513)
    assert lengths.sum() / (513 * bins) > 0.97 or mean == 400


def test_a_hundred_thousand_documents_take_about_a_second() -> None:
    documents = np.random.default_rng(0).lognormal(6, 1.2, 100_000).astype(np.int64) + 1
    began_s = time.process_time()
    plan = plan_of(offsets_of(documents.tolist()), 4096)
    assert time.process_time() - began_s < 3.0, "0.12 s on an idle core"
    assert plan.lengths.sum() / (plan.bins * 4097) > 0.99


def test_a_plan_that_is_not_what_was_written_is_refused() -> None:
    plan = plan_of(offsets_of([5, 9, 30, 2]), 8)
    content = plan.to_bytes(seq_len=8, tokens=46)
    values = np.frombuffer(content, dtype="<i8")
    read = Plan.of_values(values, seq_len=8, tokens=46)
    assert all(np.array_equal(getattr(read, name), getattr(plan, name)) for name in ("firsts", "starts", "lengths"))
    for at in range(len(values)):
        damaged = values.copy()
        damaged[at] ^= 1
        with pytest.raises(ValueError, match="damaged"):
            Plan.of_values(damaged, seq_len=8, tokens=46)
    for cut in (values[:0], values[:8], values[:-1]):
        with pytest.raises(ValueError, match="damaged"):
            Plan.of_values(cut, seq_len=8, tokens=46)
    with pytest.raises(ValueError, match=r"wanted \[\d+, 1, 16, 46\]"):
        Plan.of_values(values, seq_len=16, tokens=46)


# ---------------------------------------------------------------- a prepared corpus


def write_job(root: Path, **changes: object) -> Config:
    rows = [
        {"prompt": "ab" * (1 + number % 3), "completion": f"{number} " + "xyz" * (number * 7 % 23)}
        for number in range(300)
    ]
    (root / "in").mkdir(exist_ok=True)
    (root / "in" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "in" / "plain.jsonl").write_text("".join(json.dumps({"text": "w " * n}) + "\n" for n in range(1, 90)))
    (root / "in" / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:60]))
    data = {"corpus": str(root / "in"), "prepared": str(root / "out"), "shard_bytes": 2048, "packing": "best_fit"}
    return Config.model_validate(
        {"data": {**data, **changes}, "model": {"seq_len": 32}, "batch": {"global_samples": 8}}
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = write_job(tmp_path_factory.mktemp("packed"))
    prepare_for(config, progress=lambda line: None)
    return config


def stream_of(job: Config) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens, learned) of each document of the training split."""
    corpus = open_corpora(job.data, "train")[""]
    assert corpus.boundaries is not None and corpus.masks is not None
    found = []
    for shard in range(corpus.shards):
        offsets = corpus.boundaries.of_shard(shard).tolist()
        for start, stop in pairwise(offsets):
            values, mask = corpus.of_shard(shard)[start:stop], corpus.masks.of_shard(shard)[start:stop]
            found.append((tuple(values.tolist()), tuple(mask.tolist())))
    return found


def test_an_epoch_holds_each_target_once_and_no_document_reads_another(job: Config) -> None:
    """Each (token before, token, learned) of the documents, counted over one epoch's micro-batches."""
    feed = feed_of(job, open_corpora(job.data, "train"))
    windows = feed.orders[0].windows
    ids = feed.run(0, windows)
    slice_ = Slice(rows=feed.read(ids), ids=ids, first_sample=0)
    batch = slice_.to(torch.device("cpu"))
    rows = slice_.rows
    assert rows.documents is not None and rows.learned is not None and batch.documents is not None
    documents = stream_of(job)
    wanted = Counter((its[at], its[at + 1]) for its, mask in documents for at in range(len(its) - 1) if mask[at + 1])
    learned = batch.targets != -100
    assert Counter(zip(batch.tokens[learned].tolist(), batch.targets[learned].tolist())) == wanted
    assert slice_.targets == sum(wanted.values())
    pieces = {its[start : start + 33] for its, _ in documents for start in range(0, max(1, len(its) - 1), 32)}
    for tokens, numbers, mask in zip(rows.tokens, rows.documents, rows.learned):
        for number in range(int(numbers.max()) + 1):
            piece = tuple(tokens[numbers == number].tolist())
            assert piece in pieces or (number == numbers.max() and not any(piece)), piece
            if piece not in pieces:
                assert not mask[numbers == number].any(), "padding"
    starts = batch.positions == 0
    assert torch.equal(starts.flatten().nonzero().flatten().int(), batch.cu_seqlens[:-1])


def test_any_window_alone_and_in_any_order_is_the_same(job: Config) -> None:
    corpus = open_corpora(job.data, "train")[""]
    count = corpus.windows(32)
    every = corpus.rows(np.arange(count, dtype=np.uint64), 32)
    some = np.random.default_rng(0).permutation(count)[:40].astype(np.uint64)
    rows = corpus.rows(some, 32)
    for name in ("tokens", "learned", "documents"):
        assert np.array_equal(getattr(rows, name), getattr(every, name)[some.astype(np.int64)])
    assert np.array_equal(corpus.window(3, 32), every.tokens[3]) and rows.tokens.dtype == np.uint16
    assert len(corpus.rows(some[:0], 32).tokens) == 0
    with pytest.raises(IndexError, match=f"bin {count} of {count}"):
        corpus.rows(np.array([count], dtype=np.uint64), 32)


def test_the_order_knows_how_it_is_packed(job: Config) -> None:
    """And without packing it is what it always was."""
    plain = job.model_copy(update={"data": job.data.model_copy(update={"packing": "none", "documents": "joined"})})
    manifest = read_manifest(Path(job.data.prepared)).fingerprint
    assert (
        fingerprint_of(plain.data, 32)
        == manifest
        == feed_of(plain, open_corpora(plain.data, "train")).orders[0].fingerprint
    )
    packed_ = feed_of(job, open_corpora(job.data, "train")).orders[0]
    assert packed_.fingerprint == fingerprint_of(job.data, 32) == packed_fingerprint(manifest, 32)
    assert len({manifest, packed_fingerprint(manifest, 32), packed_fingerprint(manifest, 64)}) == 3


def test_held_out_rows_are_packed_too(job: Config) -> None:
    corpus = open_corpora(job.data, "held_out")[""]
    assert isinstance(corpus, PackedCorpus)
    slices = held_out_batches(corpus, samples=1000, micro_samples=5, seq_len=32, world=1, rank=0)
    assert sum(len(one.ids[one.ids != 2**64 - 1]) for one in slices) == corpus.windows(32)


def test_plans_are_made_once_and_told(job: Config) -> None:
    out, said = Path(job.data.prepared), list[str]()
    prepare_for(job, progress=said.append)
    assert said == []
    lines = [line for line in described(out, 0) if line.startswith("packed")]
    assert len(lines) == 2 and lines[0].startswith("packed      train for seq_len 32: ") and "% filled" in lines[0]
    other = job.model_copy(update={"model": job.model.model_copy(update={"seq_len": 64})})
    prepare_for(other, progress=said.append)
    assert len(said) == 2 and said[0].startswith(f"packed train of {out} for seq_len 64: ")
    assert not list(damages(out, read_manifest(out)))


def test_without_its_files_a_plan_is_computed(job: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    other = job.model_copy(update={"model": job.model.model_copy(update={"seq_len": 48})})
    computed = open_corpora(job.data, "train")[""]
    assert computed.windows(48) > 0
    monkeypatch.setattr(packed, "DOCUMENTS_MAX", 10)
    with pytest.raises(DataError, match=r"has no packing plan for seq_len 48.*elastic data prepare"):
        open_corpora(job.data, "train")[""].windows(48)
    prepare_for(other, progress=lambda line: None)
    read = open_corpora(job.data, "train")[""]
    every = np.arange(read.windows(48), dtype=np.uint64)
    assert np.array_equal(read.rows(every, 48).tokens, computed.rows(every, 48).tokens)


def test_a_damaged_or_missing_plan_is_found_and_made_again(tmp_path: Path) -> None:
    config = write_job(tmp_path)
    prepare_for(config, progress=lambda line: None)
    out = tmp_path / "out"
    path = next(out.glob("train-*.pack"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\7")
    corpus = open_corpora(config.data, "train")[""]
    every = np.arange(corpus.windows(32), dtype=np.uint64)
    with pytest.raises(
        DataError, match=r"can't read packing plan .*\.pack: it is cut or damaged; delete it, if it is there, and run"
    ):
        corpus.rows(every, 32)
    assert [line for line in damages(out, read_manifest(out)) if "packing plan" in line]
    path.unlink()
    prepare_for(config, progress=lambda line: None)
    assert path.read_bytes() == content
    open_corpora(config.data, "train")[""].rows(every, 32)


def test_plans_go_with_their_shards(tmp_path: Path) -> None:
    config = write_job(tmp_path)
    prepare_for(config, progress=lambda line: None)
    before = {path.name for path in (tmp_path / "out").glob("*.pack")}
    (tmp_path / "in" / "validation.jsonl").write_text('{"text": "other text"}\n' * 40)  # the last file
    prepare_for(config, progress=lambda line: None)
    after = {path.name for path in (tmp_path / "out").glob("*.pack")}
    assert before & after and before - after, "those of shards that stayed, and not the others"
    assert len(after) == sum(map(len, read_manifest(tmp_path / "out").splits.values()))


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_job(tmp_path)

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(plan_files, "replace_file", refuse)
    said: list[str] = []
    prepare_for(config, progress=said.append)
    assert len(said) == 3 and "(Read-only file system): each process packs train for itself" in said[1]
    assert open_corpora(config.data, "train")[""].windows(32) > 0
    monkeypatch.setattr(plan_files, "DOCUMENTS_MAX", 10)
    with pytest.raises(DataError, match=r"can't write into .*: Read-only file system"):
        prepare_for(config, progress=said.append)


def test_packing_implies_that_documents_are_apart() -> None:
    assert Data(packing="best_fit").documents == "apart" and Data().documents == "joined"
    assert Data.model_validate(Data(packing="best_fit").model_dump()).documents == "apart"
    with pytest.raises(ValueError, match="documents 'joined' does not go with packing 'best_fit'"):
        Data(packing="best_fit", documents="joined")


def test_a_wrong_mode_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("data: {packing: best_fit, documents: joined}\n")
    with pytest.raises(ConfigError, match=r"data: documents 'joined' does not go with packing|data\.documents"):
        load(tmp_path / "job.yaml")
    (tmp_path / "job.yaml").write_text("data: {documents: a_part}\n")
    with pytest.raises(ConfigError, match=r"data\.documents.*apart"):
        load(tmp_path / "job.yaml")


def test_sources_and_further_held_out_sets_are_planned_too(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        write_job(path)
    prepare_for(write_job(other, packing="none"), progress=lambda line: None)
    sources = [{"name": name, "corpus": str(one / "in")} for name in ("a", "b")]
    raw = {
        "data": {"sources": sources, "prepared": str(one / "out"), "packing": "best_fit"},
        "evaluation": {"sets": [{"name": "further", "prepared": str(other / "out")}]},
        "model": {"seq_len": 32},
    }
    config = Config.model_validate(raw)
    said: list[str] = []
    prepare_for(config, progress=said.append)
    places = [" ".join(line.split()[1:4:2]) for line in said if line.startswith("packed")]
    wanted = [f"{split} {one / 'out' / name}" for name in ("a", "b") for split in ("train", "held_out")]
    assert places == [*wanted, f"held_out {other / 'out'}"]
    feed = feed_of(config, open_corpora(config.data, "train"))
    rows = feed.read(feed.run(0, 20))
    assert rows.documents is not None and rows.learned is not None and rows.tokens.shape == (20, 33)
    assert len({order.fingerprint for order in feed.orders}) == 1, "the same text"
