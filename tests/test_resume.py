"""From what a run goes on, why from nothing newer, and which changes of its configuration it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic import segments
from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog
from elastic.config import Config, ConfigError
from elastic.data.shards import Corpus
from elastic.proof import verify_data, verify_same
from elastic.report import ReportError, finished, summary_lines
from elastic.resume import Resume, Start, choose, exists, save_config, settle
from elastic.storage.store import store_at
from elastic.telemetry import journal, ledger
from elastic.worker.task import located
from tests.process.running import small
from tests.runs import Told, config_in


def asked(point: Any = "auto", *allowed: str) -> Resume:
    return Resume(point=str(point), allowed=allowed)


def refusal(config: Config, point: Any = "auto", *allowed: str) -> str:
    with pytest.raises(ConfigError) as caught:
        choose(config, asked(point, *allowed))
    return str(caught.value)


def changed(config: Config, **changes: Any) -> Config:
    """`config` with keys replaced; a section's by a mapping."""
    raw = config.model_dump(mode="json")
    for name, value in changes.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    return Config.model_validate(raw)


def trained(path: Path, **changes: Any) -> Told:
    """One attempt, killed at step 33 with checkpoints of 10, 20 and 30 (entries 2, 3, 4)."""
    run = Told(config_in(path, **changes))
    run.attempt()
    run.generation(1, 33)
    for step in (10, 20, 30):
        run.checkpoint(1, 1, step)
    return run


# ---------------------------------------------------------------- auto


def test_a_new_run_starts_from_the_seed(tmp_path: Path) -> None:
    assert choose(config_in(tmp_path), asked()) == Start(origin="from the seed")
    assert choose(config_in(tmp_path), asked("never")) == Start(origin="from the seed")


def test_it_says_from_what_and_why_from_nothing_newer(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert choose(run.config, asked()).origin == (
        "from the checkpoint of step 30 (log entry 4, attempt 1); step 33 was the last completed, its state was only "
        "in the memory of hosts that are gone"
    )
    run.store.delete("data/1-1-30/0.bin")
    origin = choose(run.config, asked()).origin
    assert origin.startswith(
        "from the checkpoint of step 20 (log entry 3, attempt 1); checkpoint 4 of step 30 is skipped"
    )


def test_without_a_checkpoint_it_starts_again(tmp_path: Path) -> None:
    run = Told(config_in(tmp_path))
    run.attempt()
    run.generation(1, 3)
    assert choose(run.config, asked()).origin == "from the seed; no earlier attempt committed a checkpoint"


# ---------------------------------------------------------------- a step of this run


def test_going_back_and_what_auto_says_afterwards(tmp_path: Path) -> None:
    run = trained(tmp_path)
    start = choose(run.config, asked(10))
    assert (start.base, start.step) == (2, 10)
    assert start.origin.endswith("its checkpoints of steps 20, 30 are given up, and deleted with the next one")
    CommitLog(run.store).claim("killed before it journaled anything", base=start.base)
    again = "from the checkpoint of step 10 (log entry 2, attempt 1)"
    left = "the run went back from its checkpoints of steps 20, 30"
    assert choose(run.config, asked()) == Start(origin=f"{again}; {left}", step=10)
    run.attempt()
    run.generation(2, 5)
    assert "step 15 was the last completed" in choose(run.config, asked()).origin
    assert choose(run.config, asked(30)).base == 4, "and forth again"


def test_a_step_without_checkpoint_is_refused_with_those_there_are(tmp_path: Path) -> None:
    run = trained(tmp_path)
    assert (
        "run r: there is no checkpoint of step 15; those that exist are of steps 10, 20, 30 (checkpoint.keep is 3)"
        in refusal(run.config, 15)
    )
    assert "those that exist are of steps none" in refusal(config_in(tmp_path, run="new"), 15)


def test_a_finished_run_that_went_back_is_not_finished(tmp_path: Path) -> None:
    run = trained(tmp_path)
    config = changed(run.config, steps=30)
    last = {**journal.read_file(run.path)[-1], "phase": "finished", "step": 30}
    with journal.open_for_append(run.path) as file:
        file.write(journal.encode(last))
    assert finished(config)
    CommitLog(run.store).claim("back", base=2)
    assert not finished(config)


def test_a_task_of_ones_own_is_the_same_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    asked_for = config_in(tmp_path, task="mine.py:Task")
    measured = changed(located(asked_for), sizes={"shard_bytes": 1000})
    run = Told(measured)
    run.attempt()
    run.generation(1, 33)
    run.checkpoint(1, 1, 30)
    monkeypatch.chdir("/")
    assert choose(located(changed(asked_for, task=str(tmp_path / "mine.py:Task"))), asked()).step == 30
    (tmp_path / "other.py").touch()
    assert "task is" in refusal(located(changed(asked_for, task=str(tmp_path / "other.py:Task"))))


# ---------------------------------------------------------------- never, another run


def test_never_refuses_a_run_that_exists(tmp_path: Path) -> None:
    run = trained(tmp_path)
    told = refusal(run.config, "never")
    assert "holds a run already, so only a new run can begin; give this one another name (--set run=NAME)" in told
    run.path.unlink()
    assert "holds a run already" in refusal(run.config, "never")


@pytest.mark.parametrize("name", ["r", "{path}/r", "file://{path}/r"], ids=["name", "directory", "URL"])
def test_another_runs_checkpoint_begins_a_new_run(tmp_path: Path, name: str) -> None:
    source = trained(tmp_path)
    config = changed(source.config, run="new", hosts_max=2, seed=5)
    point = asked(name.format(path=tmp_path), "seed")
    start = choose(config, point)
    assert start.step == 30 and start.origin.startswith("from step 30 of run r (") and not exists(config.place())
    left = settle(config, point, start)
    assert left == asked("auto", "seed"), "brought: what is left is to go on"
    again = choose(config, left)
    assert again.origin == "from the checkpoint of step 30 of run r (log entry 1, attempt 1)" and again.step == 30
    assert again.changes == ("seed 0 -> 5",), "told to the new run's journal"
    brought = CommitLog(store_at(config.place())).newest()
    assert brought is not None and (brought.samples, brought.key.step) == (720, 30)
    assert store_at(config.place()).get("data/1-1-30/1.bin") == source.store.get("data/1-1-30/1.bin")
    assert "holds a run already, so it can't begin from" in refusal(config, point.point)


def test_a_copy_cut_short_is_no_run_and_is_made_again(tmp_path: Path) -> None:
    source = trained(tmp_path)
    config = changed(source.config, run="new")
    store_at(config.place()).put("data/1-1-30/0.bin", b"half")
    settle(config, asked("r"), choose(config, asked("r")))
    assert choose(config, asked()).step == 30


def test_damage_is_not_copied(tmp_path: Path) -> None:
    source = trained(tmp_path)
    nbytes = len(source.store.get("data/1-1-30/1.bin"))
    source.store.put("data/1-1-30/1.bin", b"\xff" * nbytes)
    config = changed(source.config, run="new")
    with pytest.raises(CheckpointError, match="fail their CRC"):
        settle(config, asked("r"), choose(config, asked("r")))
    assert not exists(config.place())


def test_an_unknown_run_is_refused_with_those_there_are(tmp_path: Path) -> None:
    trained(tmp_path, run="quickstart")
    assert "wanted auto, never, a step, or a run's name, directory or URL; did you mean quickstart?" in refusal(
        config_in(tmp_path, run="new"), "quikstart"
    )
    assert f"runs in {tmp_path}: quickstart" in refusal(config_in(tmp_path, run="new"), "zebra")


# ---------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"seed": 1}, "seed", "seed is 1, the checkpoint of step 30 was trained with 0"),
        ({"steps": 200}, "steps", "steps is 200, the checkpoint of step 30 was trained with 100"),
        ({"batch": {"global_samples": 48}}, "batch.global_samples", "batch.global_samples is 48"),
        ({"data": {"corpus": "."}}, "data", "data.corpus is ., the checkpoint of step 30 was trained with stdlib"),
        ({"data": {"documents": "apart"}}, "data.documents", "data.documents is apart, the checkpoint of step 30"),
        ({"optimizer": {"lr": 0.1}}, "optimizer", "optimizer.lr is 0.1"),
        ({"model": {"dropout": 0.5}}, "model", "model.dropout is 0.5"),
        ({"precision": "bfloat16"}, "all", "precision is bfloat16"),
    ],
)
def test_what_is_computed_may_change_only_when_allowed(tmp_path: Path, changes: Any, key: str, said: str) -> None:
    config = changed(trained(tmp_path).config, **changes)
    told = refusal(config, "auto", "elsewhere")
    assert said in told and "keep it, name a new run (--set run=NAME), or give --allow-change " in told
    (change,) = choose(config, asked("auto", key)).changes
    assert " -> " in change and change.partition(" ")[0] in said


def test_how_it_is_computed_may_change(tmp_path: Path) -> None:
    config = changed(
        trained(tmp_path).config,
        hosts_max=4,
        max_failures=3,
        warm_standby=False,
        batch={"micro_samples": 1},
        control={"silence_s": 9.0},
        checkpoint={"keep": 5},
        snapshot={"partner": False},
        evaluation={"samples": 4},
        local={"nodes": 1},
        data={"prepared": "elsewhere"},
    )
    assert choose(config, asked()).changes == ()


def test_samples_may_be_skipped_later_only_after_what_was_used(tmp_path: Path) -> None:
    """Step 30 is at sample 720; the first list moved it to 725."""
    config = trained(tmp_path, data={"skip": [{"first": 10, "stop": 15}]}).config
    before = config.data.model_dump()["skip"]

    def skipping(*ranges: tuple[int, int]) -> Config:
        return changed(config, data={"skip": [{"first": first, "stop": stop, "why": ""} for first, stop in ranges]})

    assert before == skipping((10, 15)).data.model_dump()["skip"]
    (told,) = choose(skipping((10, 15), (725, 749)), asked()).changes
    assert told == "data.skip: 1 ranges were added"
    for wrong in (((10, 15), (724, 749)), ((725, 749),), (), ((725, 749), (10, 15))):
        assert "data.skip is " in refusal(skipping(*wrong))
        assert choose(skipping(*wrong), asked("auto", "data.skip")).step == 30
    assert "data.skip is " in refusal(skipping((10, 15), (481, 500))), "sample 485 is the first after step 20"
    assert choose(skipping((10, 15), (485, 500)), asked(20)).step == 20, "going back lets more be skipped"


def test_where_a_source_was_prepared_may_change_and_its_weight_not(tmp_path: Path) -> None:
    config = trained(tmp_path, data={"sources": [{"name": "a", "corpus": "x", "prepared": "here"}]}).config
    there = changed(config, data={"sources": [{"name": "a", "corpus": "x", "prepared": "there"}]})
    assert choose(there, asked()).changes == ()
    heavier = changed(config, data={"sources": [{"name": "a", "corpus": "x", "weight": 2}]})
    assert "data.sources is " in refusal(heavier)


def test_another_model_is_refused_even_when_allowed(tmp_path: Path) -> None:
    run = trained(tmp_path)
    told = refusal(changed(run.config, model={"dim": 64}), "auto", "all")
    assert told == (
        "the checkpoint of step 30 can't be read into another model (dim 128 -> 64, kv_heads * head size 64 -> 32); "
        "name a new run"
    )
    assert "bits 32 -> 64" in refusal(changed(run.config, precision="float64"), "auto", "all")
    assert "dim 128 -> 64" in refusal(changed(run.config, run="new", model={"dim": 64}), "r", "all")


def test_fewer_steps_than_are_done_is_refused(tmp_path: Path) -> None:
    told = refusal(changed(trained(tmp_path).config, steps=25), "auto", "steps")
    assert told == "steps 25 is below 30, where the run goes on; raise it, or --resume a STEP"


def test_every_refused_key_has_its_line_and_a_new_key_had_its_default(tmp_path: Path) -> None:
    run = trained(tmp_path)
    saved = (
        run.store.get("config.yaml").replace(b"  eps: 1.0e-08\n", b"").replace(b"seed: 0\n", b"seed: 7\nold_key: 1\n")
    )
    run.store.put("config.yaml", saved)
    lines = refusal(changed(run.config, optimizer={"lr": 0.1})).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["seed", "optimizer.lr"]


def test_a_run_without_checkpoint_may_change_freely(tmp_path: Path) -> None:
    run = Told(config_in(tmp_path))
    run.attempt()
    run.generation(1, 3)
    assert choose(changed(run.config, seed=7), asked()).step == 0


# ---------------------------------------------------------------- the account afterwards


def test_the_proof_holds_after_going_back_with_another_seed(tmp_path: Path) -> None:
    config = small(tmp_path, steps=100)
    corpus = Corpus.open(Path(config.data.prepared), "train")
    run = Told(config)
    run.attempt()
    run.generation(1, 33, corpus=corpus)
    for step in (10, 20, 30):
        run.checkpoint(1, 1, step)
    run.attempt(base=2, changes=("seed 0 -> 7",), config=changed(config, seed=7))
    run.generation(2, 4, corpus=corpus)
    lines = verify_data(config.place())
    assert lines[0].startswith("14 steps of the committed lineage, 168 samples")
    assert lines[1].startswith("23 further steps were undone, by failures or by going back")
    assert lines[2] == "attempt 2 changed seed 0 -> 7"
    entries = segments.entries(config.place())
    spent = ledger.fold(entries)
    assert spent.microseconds["unknown"] == 1_000_000, "between the attempts nobody looked"
    assert any("168 samples" in line for line in summary_lines(config.place()))


def test_two_runs_are_held_against_each_other(tmp_path: Path) -> None:
    config = small(tmp_path, steps=100)
    corpus = Corpus.open(Path(config.data.prepared), "train")
    skip = {"skip": [{"first": 100, "stop": 124}]}
    for name, changes in (("a", {}), ("b", {}), ("c", {"data": skip}), ("d", {"seed": 3})):
        run = Told(changed(config, run=name, **changes))
        run.attempt()
        run.generation(1, 20 if name == "b" else 9, corpus=corpus)
        assert verify_data(run.config.place())[0].startswith(f"{20 if name == 'b' else 9} steps")
    places = {name: changed(config, run=name).place() for name in "abcd"}
    assert verify_same(places["a"], places["b"]) == [
        f"steps 1 to 9 used the same samples as those of {places['b'].url}: 9 steps, one order"
    ]
    with pytest.raises(ReportError, match="step 9 used 12 samples with digest "):
        verify_same(places["a"], places["c"])
    with pytest.raises(ReportError, match="step 1 used 12 samples"):
        verify_same(places["d"], places["a"])


def test_a_step_that_used_what_was_skipped_fails_the_proof(tmp_path: Path) -> None:
    config = small(tmp_path, steps=100)
    corpus = Corpus.open(Path(config.data.prepared), "train")
    run = Told(config)
    run.attempt()
    run.generation(1, 9, corpus=corpus)
    skipping = changed(config, data={"skip": [{"first": 50, "stop": 51}]})
    save_config(skipping, run.store, attempt=1)
    with pytest.raises(ReportError, match="step 5 of generation 1 used 12 samples with digest"):
        verify_data(config.place())


def test_a_run_that_began_from_another_proves_its_own_steps(tmp_path: Path) -> None:
    config = small(tmp_path, steps=100)
    corpus = Corpus.open(Path(config.data.prepared), "train")
    source = Told(config)
    source.attempt()
    source.generation(1, 33, corpus=corpus)
    source.checkpoint(1, 1, 30)
    new = changed(config, run="new")
    settle(new, asked("small"), choose(new, asked("small")))
    run = Told(new)
    assert run.attempt() == 2
    run.generation(2, 4, corpus=corpus)
    lines = verify_data(new.place())
    assert lines[0].startswith("4 steps of the committed lineage, 48 samples")
    assert "the 30 steps before came with another run's checkpoint; their proof is there" in lines


def test_a_lost_journal_file_is_read_from_its_segments(tmp_path: Path) -> None:
    run = trained(tmp_path)
    segments.Sealer(run.path, run.store, attempt=1, every_s=3600.0).seal()
    before = summary_lines(run.config.place())
    run.path.unlink()
    assert summary_lines(run.config.place()) == before
    assert "step 33 was the last completed" in choose(run.config, asked()).origin
