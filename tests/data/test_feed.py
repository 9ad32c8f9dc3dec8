"""What a run reads, from its configuration: sources by name, their order and their tokens, deletions, fingerprints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.config import Config, ConfigError
from elastic.data.feed import Feed, feed_of, fingerprint_of, mixture_of, open_corpora
from elastic.data.importing import import_tokens
from elastic.data.loader import Loader
from elastic.data.order import epoch_of, source_of, window_of
from elastic.data.prepare import prepare_for
from elastic.data.shards import Corpus, DataError
from elastic.plan import Plan

SEQ_LEN = 16


def corpus(fingerprint: str, fill: int, *, windows: int = 300, learned: bool = True) -> Corpus:
    tokens = windows * SEQ_LEN + 1
    masks = None
    if not learned:
        masks = Corpus(fingerprint="", vocab_size=2, values=[np.zeros(tokens, dtype=np.uint8)])
    values = [np.full(tokens, fill, dtype=np.uint16)]
    return Corpus(fingerprint=fingerprint, vocab_size=257, values=values, masks=masks)


def config(*sources: tuple[str, float], samples: int = 24, **data: Any) -> Config:
    found = [{"name": name, "weight": weight, "corpus": "imported"} for name, weight in sources]
    return Config.model_validate(
        {"model": {"seq_len": SEQ_LEN}, "batch": {"global_samples": samples}, "data": {"sources": found, **data}}
    )


def feed(*sources: tuple[str, float], **changes: Any) -> Feed:
    names = sorted(name for name, _ in sources)
    return feed_of(config(*sources, **changes), {name: corpus(f"of {name}", ord(name[0])) for name in names})


def windows_of(read: Feed, source: int, count: int = 20_000) -> list[int]:
    ids = read.run(0, count)
    return window_of(ids[source_of(ids) == source]).tolist()


def test_rows_come_from_the_source_that_the_id_names() -> None:
    read = feed(("web", 3), ("code", 1))
    ids = read.run(0, 5000)
    rows = read.read(ids)
    assert rows.learned is None and rows.tokens.shape == (5000, SEQ_LEN + 1)
    names = np.array([ord("c"), ord("w")])
    assert np.array_equal(rows.tokens, np.repeat(names[source_of(ids).astype(int)], SEQ_LEN + 1).reshape(5000, -1))
    assert read.used(4096) == (1024, 3072)


def test_each_source_has_epochs_of_its_own() -> None:
    ids = feed(("a", 9), ("b", 1)).run(0, 4096)
    for source, epochs in ((0, 4096 * 9 // 10 // 300), (1, 1)):
        its = ids[source_of(ids) == source]
        for epoch in range(epochs):
            assert np.array_equal(np.sort(window_of(its[epoch * 300 : (epoch + 1) * 300])), np.arange(300))
            assert set(epoch_of(its[epoch * 300 : (epoch + 1) * 300]).tolist()) == {epoch}


def test_another_source_or_weight_does_not_reseed_the_others() -> None:
    two, three = feed(("b", 1), ("c", 1)), feed(("b", 2), ("c", 1), ("a", 5))
    for before, after in ((0, 1), (1, 2)):
        first, second = windows_of(two, before), windows_of(three, after)
        shared = min(len(first), len(second))
        assert shared > 1000 and first[:shared] == second[:shared]
    assert windows_of(two, 0)[:50] != windows_of(two, 1)[:50], "nor do two sources share an order"


def test_weights_change_at_a_step_and_a_source_may_come_late() -> None:
    later = [{"from_step": 100, "weights": {"b": 1}}, {"from_step": 300, "weights": {"a": 1, "b": 1}}]
    read = feed(("a", 1), ("b", 0), weights=later)
    ids = read.run(0, 24 * 400)
    sources = source_of(ids)
    assert not sources[: 24 * 100].any() and sources[24 * 100 : 24 * 300].all()
    assert 0 < sources[24 * 300 :].mean() < 1
    for source in (0, 1):
        its = window_of(ids[sources == source])
        assert len(set(its[:300].tolist())) == 300, "it went on where it was"


def test_masks_of_one_source_leave_the_others_learned() -> None:
    corpora = {"a": corpus("a", 1), "b": corpus("b", 2, learned=False)}
    rows = feed_of(config(("a", 1), ("b", 1)), corpora)
    read = rows.read(rows.run(0, 100))
    assert read.learned is not None and np.array_equal(read.learned, (read.tokens == 1).astype(np.uint8))


@pytest.mark.parametrize("mixed", [False, True])
def test_skipped_samples_are_never_used_and_nothing_before_them_moves(mixed: bool) -> None:
    sources = (("a", 2.0), ("b", 1.0)) if mixed else ()
    corpora = {name: corpus(name, 1) for name, _ in sources} or {"": corpus("", 1)}
    plain = feed_of(config(*sources), corpora).run(0, 400)
    skip = [{"first": 240, "stop": 288, "why": "loss spike"}, {"first": 100, "stop": 101}]
    skipping = feed_of(config(*sources, skip=skip), corpora)
    got = skipping.run(0, 351)
    counts = np.bincount(source_of(got).astype(int), minlength=len(corpora))
    assert skipping.used(351) == tuple(counts.tolist())
    assert np.array_equal(got, np.concatenate([plain[:100], plain[101:240], plain[288:]]))


def test_loaders_of_any_world_read_the_same_mixed_steps() -> None:
    read = feed(("a", 2), ("b", 1), skip=[{"first": 30, "stop": 50}])
    plans = [
        Plan(world=1, shares=(24,), micro_batches=4),
        Plan(world=3, shares=(8, 8, 8), micro_batches=2),
        Plan(world=4, shares=(9, 5, 5, 5), micro_batches=1),
    ]
    for step in (0, 1, 7):
        for plan in plans:
            slices = [
                part
                for rank in range(plan.world)
                for part in Loader(read, global_samples=24, plan=plan, rank=rank).read(step)[0]
            ]
            ids = np.concatenate([part.ids for part in slices])
            assert np.array_equal(ids, read.run(24 * step, 24))
            assert np.array_equal(np.concatenate([part.rows.tokens for part in slices]), read.read(ids).tokens)


def prepared(tmp_path: Path, **data: Any) -> Config:
    for name in ("web", "code"):
        (tmp_path / name).mkdir(exist_ok=True)
        for number in range(12):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 50)
    sources = [{"name": name, "corpus": str(tmp_path / name)} for name in ("web", "code")]
    given = {"sources": sources, "suffixes": [".txt"], "held_out_every": 4, "prepared": str(tmp_path / "out"), **data}
    return Config.model_validate({"model": {"seq_len": SEQ_LEN}, "data": given})


def test_sources_are_prepared_each_by_itself(tmp_path: Path) -> None:
    wanted = prepared(tmp_path)
    manifests = prepare_for(wanted, progress=lambda line: None)
    assert manifests == [tmp_path / "out" / name / "manifest.json" for name in ("code", "web")]
    read = feed_of(wanted, open_corpora(wanted.data, "train"))
    assert set(source_of(read.run(0, 100)).tolist()) == {0, 1}
    fingerprint = fingerprint_of(wanted.data, SEQ_LEN)
    assert fingerprint == fingerprint_of(wanted.data.absolute(), SEQ_LEN)
    one = wanted.data.model_copy(update={"sources": wanted.data.sources[:1]})
    assert fingerprint_of(one, SEQ_LEN) != fingerprint


def test_sources_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    wanted = prepared(tmp_path)
    prepare_for(wanted, progress=lambda line: None)
    path = tmp_path / "out" / "web"
    np.save(tmp_path / "train.npy", np.arange(999, dtype=np.uint16))
    np.save(tmp_path / "held_out.npy", np.arange(99, dtype=np.uint16))
    import_tokens(str(tmp_path), tmp_path / "other", format="numpy", vocab_size=999, progress=lambda line: None)
    sources = [
        {"name": "web", "corpus": "imported", "prepared": str(path)},
        {"name": "x", "corpus": "imported", "prepared": str(tmp_path / "other")},
    ]
    mixed = Config.model_validate({"model": {"vocab_size": 999}, "data": {"sources": sources}})
    with pytest.raises(ConfigError, match="web and x don't fit together"):
        prepare_for(mixed, progress=lambda line: None)
    sets = ({"name": "x", "prepared": str(tmp_path / "other")},)
    evaluated = Config.model_validate({**wanted.model_dump(), "evaluation": {"sets": sets}})
    with pytest.raises(ConfigError, match=r"evaluation\.x don't fit together"):
        prepare_for(evaluated, progress=lambda line: None)


def test_bad_mixtures_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources, data\.weights: .* at least 1/4096"):
        mixture_of(config(("a", 1), ("b", 1e-5)))
    with pytest.raises(DataError, match="source b has 17 tokens"):
        feed_of(
            Config.model_validate({**config(("a", 1), ("b", 1)).model_dump(), "model": {"seq_len": 17}}),
            {"a": corpus("a", 1), "b": corpus("b", 1, windows=1)},
        )
    with pytest.raises(DataError, match="has 600 windows of seq_len 16, a step takes 601 samples"):
        feed(("a", 1), ("b", 1), samples=601)
    for bad, told in (
        ({"sources": [{"name": "a", "corpus": "x"}] * 2}, "each once"),
        ({"sources": [{"name": "a", "corpus": "x", "weight": 0}]}, "no weight above 0"),
        ({"sources": [{"name": "a", "corpus": "x"}], "weights": [{"from_step": 5, "weights": {"b": 1}}]}, "name 'b'"),
        ({"weights": [{"from_step": 5, "weights": {}}]}, "one above 0"),
        ({"skip": [{"first": 5, "stop": 5}]}, "stop 5 must be above first 5"),
    ):
        with pytest.raises(ValueError, match=told):
            Config.model_validate({"data": bad})
