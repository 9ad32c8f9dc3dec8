"""Every mistake in a job file: one sentence with the place, the key, the value, what is allowed, a suggestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.config import Config, ConfigError, json_schema, load, resolve
from elastic.config_sentences import field_of, keys
from elastic.preflight import check_machine, config_lines, plan_lines
from elastic.resume import SAFE

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "jobs" / "quickstart.yaml"
GIB = 1 << 30


def told(path: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the refusal, without the file's directory."""
    job = path / "job.yaml"
    job.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(job, overrides)
    return str(caught.value).replace(f"{path}/", "").splitlines()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nstepz: 3", "job.yaml:2: unknown key stepz; did you mean steps?"),
        ("model:\n  layerz: 3", "job.yaml:2: unknown key model.layerz; did you mean model.layers?"),
        ("lr: 0.1", "job.yaml:1: unknown key lr; did you mean optimizer.lr?"),
        ("steps: many", 'job.yaml:1: steps is "many", wanted a whole number, at least 1; the default is 100'),
        ("steps: 0", "job.yaml:1: steps is 0, wanted a whole number, at least 1; the default is 100"),
        ("seed: true", "job.yaml:1: seed is true, wanted a whole number, at least 0; the default is 0"),
        (
            "run: 2024",
            'job.yaml:1: run is 2024, wanted text, that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$; quote it: "2024"',
        ),
        ("warm_standby: 7", "job.yaml:1: warm_standby is 7, wanted true or false; the default is true"),
        (
            "optimizer: {lr: .inf}",
            "job.yaml:1: optimizer.lr is Infinity, wanted a number, above 0; the default is 0.003",
        ),
        (
            "precision: float34",
            'job.yaml:1: precision is "float34", wanted float32 or float64 or bfloat16; did you mean float64?',
        ),
        ("\nmodel: [1, 2]", "job.yaml:2: model is [1, 2], wanted a section with keys such as vocab_size: ..."),
        ("model:", "job.yaml:1: model is null, wanted a section with keys such as vocab_size: ..."),
        ("schedule:\n- {step: 1}", "job.yaml:2: schedule.0.hosts is missing, wanted a whole number, at least 1"),
        ("steps: 1\nrun: x\nsteps: 2", "job.yaml:3: steps is given twice, first at job.yaml:1; delete one of them"),
        (
            "hosts_max: 2\nhosts_min: 3\nbatch: {global_samples: 3}",
            "job.yaml:2: hosts_min 3 is above hosts_max 2",
        ),
        (
            "hosts_max: 4\nbatch:\n  global_samples: 2",
            "job.yaml:3: batch.global_samples 2 is below hosts_max 4: each host needs at least one sample a step",
        ),
        ("model: {heads: 3}", "job.yaml:1: model.dim 128 must be heads (3) times an even head size"),
        (
            "storage: s3:/bucket/x",
            "job.yaml:1: storage 's3:/bucket/x' is neither a directory nor a URL; did you mean s3://bucket/x?",
        ),
        (
            "storage: s3://",
            "job.yaml:1: storage 's3://' names no place: wanted a directory, or a URL as s3://bucket/prefix",
        ),
        (
            "storage_options: {endpoint: 127.0.0.1:9}",
            "job.yaml:1: storage_options.endpoint '127.0.0.1:9' must begin with http:// or https://",
        ),
        ("- 1", "job.yaml holds a list, wanted keys with values, such as steps: 100"),
        ("steps: [", "job.yaml:1 is not YAML: expected the node content, but found '<stream end>'"),
        ("when: 2024-13-45", "job.yaml is not YAML: month must be in 1..12"),
    ],
)
def test_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in told(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stepz=3", "--set stepz=3: unknown key stepz; did you mean steps?"),
        ("modle.dim=3", "--set modle.dim=3: unknown key modle; did you mean model?"),
        ("model.dimm=3", "--set model.dimm=3: unknown key model.dimm; did you mean model.dim?"),
        ("model=3", "--set model=3: model is a section; set one of its keys, such as model.vocab_size=..."),
        ("model.dim.x=3", "--set model.dim.x=3: model.dim is the single value 64, not a section"),
        ("steps", "--set 'steps': wanted KEY=VALUE, for example steps=100"),
        ("steps=", "--set steps=: steps is null, wanted a whole number, at least 1; the default is 100"),
        ("run=[", "--set 'run=[': '[' is no YAML value; quote it, such as 'run=\"...\"'"),
    ],
)
def test_one_sentence_about_an_override(tmp_path: Path, override: str, sentence: str) -> None:
    assert any(line.startswith(sentence) for line in told(tmp_path, "model:\n  dim: 64", override))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    lines = told(tmp_path, "steps: many\nlr: 3\nmodel:\n  dimm: 3\n", "hosts_min=-1", "seed")
    assert [line.split(" is ")[0].split(";")[0] for line in lines] == [
        "--set 'seed': wanted KEY=VALUE, for example steps=100",
        "job.yaml:1: steps",
        "--set hosts_min=-1: hosts_min",
        "job.yaml:4: unknown key model.dimm",
        "job.yaml:2: unknown key lr",
    ]


def test_a_knot_of_aliases_ends(tmp_path: Path) -> None:
    assert "unknown key a" in told(tmp_path, "a: &a\n  b: *a")[0]


def test_values_are_what_people_write(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("run: x\noptimizer: {lr: 1e-3}\n")
    config = load(job, ("optimizer.eps=1e-9", "schedule=[{step: 0, hosts: 1}]", "optimizer.lr=2e-3"))
    assert (config.optimizer.lr, config.optimizer.eps, config.schedule[0].hosts) == (2e-3, 1e-9, 1)


def test_show_is_the_configuration_and_says_where_each_value_comes_from() -> None:
    config, text = resolve(QUICKSTART, ("steps=300", "optimizer.eps=1e-9"))
    lines = config_lines(config, text)
    assert Config.model_validate(yaml.safe_load("\n".join(lines))) == config
    assert Config.model_validate(yaml.safe_load("\n".join(config_lines(config)))) == config
    origin = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in lines}
    assert origin["steps"] == "--set steps=300" and origin["eps"] == "--set optimizer.eps=1e-9"
    assert origin["grad_clip"] == "default" and origin["seed"] == f"{QUICKSTART}:4"


def test_every_key_is_in_the_schema() -> None:
    def leaves(values: dict[str, Any]) -> int:
        return sum(leaves(value) if isinstance(value, dict) else 1 for value in values.values())

    assert len(list(keys(json_schema()))) == leaves(Config().model_dump(mode="json"))


def test_safe_keys_exist() -> None:
    for key in SAFE:
        assert field_of(json_schema(), tuple(key.split("."))) is not None, key


# ---------------------------------------------------------------- this machine


def refusal(*overrides: str, memory_bytes: int = 16 * GIB) -> str:
    with pytest.raises(ConfigError) as caught:
        check_machine(*resolve(QUICKSTART, overrides), memory_bytes=memory_bytes)
    return str(caught.value)


def test_more_hosts_than_this_machine_starts() -> None:
    check_machine(*resolve(QUICKSTART), memory_bytes=16 * GIB)
    assert refusal("hosts_max=5").startswith("--set hosts_max=5: hosts_max 5 is above the 4 hosts of this machine")


def test_more_memory_than_this_machine_has() -> None:
    big = ("model.dim=2048", "model.layers=16", "model.heads=16")
    check_machine(*resolve(QUICKSTART, big), memory_bytes=512 * GIB)
    assert "this machine has 1.0: raise hosts_min" in refusal(*big, memory_bytes=1 * GIB)
    check_machine(*resolve(QUICKSTART, (*big, "task=mine:Task")), memory_bytes=1 * GIB)
    tried = refusal("task=mine:Task", "sizes.shard_bytes=1000000000", memory_bytes=1 * GIB)
    assert tried.startswith("--set task=mine:Task: task needs 11.2 GiB for the snapshots of 4 hosts")


def test_the_plan_of_each_world() -> None:
    lines = plan_lines(load(QUICKSTART))
    assert "853,376 parameters" in lines[0] and len(lines) == 2 + 3
    assert [line.split()[:3] for line in lines[2:]] == [["2", "12", "2"], ["3", "8", "2"], ["4", "6", "1"]]
    many = plan_lines(load(QUICKSTART, ("hosts_max=600", "batch.global_samples=601")))
    assert len(many) == 2 + 16 and many[-1].split()[:4] == ["600", "1", "to", "2"]
