"""Documents in a window, told apart: numbers, targets, positions, against a loop over tokens."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import Config
from elastic.config_sections import Data
from elastic.data.feed import Feed, feed_of, open_corpora
from elastic.data.loader import Slice, held_out_batches
from elastic.data.prepare import prepare
from elastic.data.rows import Rows
from elastic.data.shards import Corpus

SHARDS = st.lists(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(lambda lengths: sum(lengths) > 0),
    min_size=1,
    max_size=5,
)


def build_corpus(shards: list[list[int]], *, masked: bool = False) -> Corpus:
    """Tokens are the place in the stream, modulo 251; without `masked` all are learned, with it 2 of 3."""
    lengths = [sum(shard) for shard in shards]
    ends = np.cumsum([0, *lengths])
    values = [(np.arange(start, stop) % 251).astype(np.uint16) for start, stop in pairwise(ends)]
    masks = [(np.arange(start, stop) % 3 > 0).astype(np.uint8) for start, stop in pairwise(ends)]
    corpus = Corpus(
        fingerprint="f",
        vocab_size=257,
        values=values,
        masks=Corpus(fingerprint="", vocab_size=2, values=masks) if masked else None,
        documents=[np.cumsum([0, *shard], dtype=np.uint64) for shard in shards],
    )
    corpus.is_apart = True
    return corpus


@settings(deadline=None, max_examples=200)
@given(shards=SHARDS, seq_len=st.integers(1, 30), masked=st.booleans(), data=st.data())
def test_each_token_knows_its_document(
    shards: list[list[int]], seq_len: int, masked: bool, data: st.DataObject
) -> None:
    corpus = build_corpus(shards, masked=masked)
    count = corpus.windows(seq_len)
    if not count:
        return
    windows = data.draw(st.lists(st.integers(0, count - 1), max_size=9))
    rows = corpus.rows(np.array(windows, dtype=np.uint64), seq_len)
    owner = np.repeat(np.arange(sum(map(len, shards))), np.concatenate(shards))
    assert rows.documents is not None and rows.documents.dtype == np.uint16 and rows.learned is not None
    for row, window in enumerate(windows):
        start = window * seq_len
        its = owner[start : start + seq_len + 1]
        assert rows.documents[row].tolist() == [len(set(its[:at])) - 1 for at in range(1, seq_len + 2)]
        assert rows.tokens[row].tolist() == [place % 251 for place in range(start, start + seq_len + 1)]
        for at in range(1, seq_len + 1):
            wanted = its[at] == its[at - 1] and (not masked or (start + at) % 3 > 0)
            assert rows.learned[row, at] == wanted


def test_joined_is_as_before() -> None:
    corpus = build_corpus([[5, 9, 30]])
    apart = corpus.rows(np.arange(2, dtype=np.uint64), 16)
    corpus.is_apart = False
    joined = corpus.rows(np.arange(2, dtype=np.uint64), 16)
    assert joined.documents is None and joined.learned is None
    assert np.array_equal(joined.tokens, apart.tokens)


def test_a_micro_batch_offers_documents_positions_and_boundaries() -> None:
    corpus = build_corpus([[5, 9, 30], [1, 40]])
    ids = np.array([0, 1, 2**64 - 1], dtype=np.uint64)
    slice_ = Slice(rows=corpus.rows(np.array([0, 1, 0], dtype=np.uint64), 16), ids=ids, first_sample=0)
    batch = slice_.to(torch.device("cpu"))
    assert batch.documents is not None and batch.documents.dtype == torch.int32
    assert batch.documents.tolist() == [[0] * 5 + [1] * 9 + [2] * 2, [0] * 16, [0] * 5 + [1] * 9 + [2] * 2]
    assert batch.positions.tolist()[:2] == [[*range(5), *range(9), 0, 1], [*range(16)]]
    assert batch.cu_seqlens.tolist() == [0, 5, 14, 16, 32, 37, 46, 48]
    assert (batch.targets[0] == -100).nonzero().flatten().tolist() == [4, 13]
    assert batch.targets[0][:4].tolist() == [1, 2, 3, 4] and (batch.targets[2] == -100).all()
    assert slice_.targets == int((batch.targets != -100).sum()) == 14 + 16


def test_joined_rows_have_positions_and_boundaries_too() -> None:
    corpus = build_corpus([[5, 9, 30]])
    corpus.is_apart = False
    rows = corpus.rows(np.arange(2, dtype=np.uint64), 16)
    batch = Slice(rows=rows, ids=np.arange(2, dtype=np.uint64), first_sample=0).to(torch.device("cpu"))
    assert batch.documents is None
    assert batch.positions.tolist() == [[*range(16)]] * 2 and batch.cu_seqlens.tolist() == [0, 16, 32]


def test_mixed_sources_keep_their_documents() -> None:
    first, second = build_corpus([[5, 9, 30]]), build_corpus([[20, 20]])
    parts = {0: first.rows(np.array([0], dtype=np.uint64), 16), 1: second.rows(np.array([1, 0], dtype=np.uint64), 16)}
    rows = Rows.joined(parts, {0: np.array([1]), 1: np.array([2, 0])})
    assert rows.documents is not None and rows.documents[:, -1].tolist() == [0, 2, 1]
    assert rows.part(1, 2).documents is not None


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("corpus")
    rows = [{"prompt": "ab" * (1 + number % 3), "completion": "xyz" * (1 + number % 5)} for number in range(200)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:30]))
    data = Data(corpus=str(root), prepared=str(root / "prepared"), shard_bytes=1024, documents="apart")
    prepare(data, progress=lambda line: None)
    return Config.model_validate({"data": data.model_dump(), "model": {"seq_len": 32}})


def test_of_files_prompts_are_still_not_learned(prepared: Config) -> None:
    """A document ends with 256: its last input has no target, and no prompt is one."""
    feed = feed_of(prepared, open_corpora(prepared.data, "train"))
    assert isinstance(feed, Feed)
    ids = feed.run(0, 40)
    slice_ = Slice(rows=feed.read(ids), ids=ids, first_sample=0)
    batch = slice_.to(torch.device("cpu"))
    learned = batch.targets != -100
    assert slice_.targets == int(learned.sum()) > 0
    assert set(batch.targets[learned].tolist()) <= {ord("x"), ord("y"), ord("z"), 256}
    assert not learned[batch.tokens == 256].any()
    assert batch.documents is not None
    ends = (batch.tokens == 256)[:, :-1]
    assert torch.equal(batch.documents.diff(dim=1) == 1, ends), "a new number after each end"


def test_held_out_rows_are_read_the_same_way(prepared: Config) -> None:
    corpus = open_corpora(prepared.data, "held_out")[""]
    (slice_,) = held_out_batches(corpus, samples=4, micro_samples=4, seq_len=32, world=1, rank=0)
    assert slice_.rows.documents is not None and slice_.rows.documents.max() > 0
    assert slice_.targets == int((slice_.to(torch.device("cpu")).targets != -100).sum())


def test_the_mode_does_not_make_the_corpus_anew(prepared: Config) -> None:
    said: list[str] = []
    prepare(prepared.data.model_copy(update={"documents": "joined"}), progress=said.append)
    assert not said and Path(prepared.data.prepared, "manifest.json").exists()
