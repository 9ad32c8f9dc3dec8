"""What a person meets at the command line: one clear sentence and the right exit code for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from elastic import cli
from elastic.chaos import faults
from elastic.config import ConfigError, load
from elastic.telemetry import journal
from tests.runs import Told, config_in

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "jobs" / "quickstart.yaml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0), capsys.readouterr().err


def test_unknown_key_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(capsys, "train", str(QUICKSTART), "--set", "stepz=3")
    assert code == 2 and told == "elastic: --set stepz=3: unknown key stepz; did you mean steps?\n"


def test_missing_file_and_bad_values(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(capsys, "train", "nowhere.yaml")
    assert code == 2 and "can't read nowhere.yaml" in told
    code, told = run(capsys, "train", str(QUICKSTART), "--set", "hosts_min=9")
    assert code == 2 and "hosts_min 9 is above hosts_max 4" in told
    code, told = run(capsys, "train", str(QUICKSTART), "--set", "batch.global_samples=2")
    assert code == 2 and "each host needs at least one sample" in told


def test_bad_faults(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(capsys, "chaos", str(QUICKSTART), "--fault", "explode@step=3")
    assert code == 2 and "allowed: kill-trainer" in told
    code, told = run(capsys, "chaos", str(QUICKSTART), "--fault", "kill-node@step=9999")
    assert code == 2 and "must come before the last" in told
    code, told = run(capsys, "chaos", str(QUICKSTART), "--fault", "kill-node")
    assert code == 2 and "needs a step" in told


def test_report_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, told = run(capsys, "report", str(tmp_path))
    assert code == 1 and "holds no journal" in told


def test_faults_are_parsed() -> None:
    assert faults.parse("kill-trainer@step=40,rank=1") == faults.Fault(kind="kill-trainer", step=40, rank=1)
    assert faults.parse("freeze-node@step=8,seconds=2.5").seconds == 2.5
    with pytest.raises(ConfigError, match="not step=N"):
        faults.parse("kill-node@when=3")


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_job_is_valid(job: Path) -> None:
    config = load(job)
    assert config.steps >= 200 and job.read_text().startswith("# ")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_config_show_check_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = shown(capsys, "config", "show", str(QUICKSTART), "--set", "steps=300", "--origin")
    assert yaml.safe_load(told)["steps"] == 300 and "# --set steps=300" in told and "# default" in told
    assert json.loads(shown(capsys, "config", "schema"))["properties"]["steps"]["minimum"] == 1
    here = f"storage={tmp_path}"
    assert shown(capsys, "config", "check", str(QUICKSTART), "--set", here) == (
        "OK: run quickstart: 853,376 parameters (float32), 220 steps on 2 to 4 hosts; "
        "starting run quickstart from the seed\n"
    )
    code, told = run(capsys, "config", "check", str(QUICKSTART), "--set", here, "--set", "hosts_max=5")
    assert code == 2 and "hosts_max 5 is above the 4 hosts of this machine" in told
    shown(capsys, "config", "check", str(QUICKSTART), "--set", here, "--set", "hosts_max=5", "--address", "auto")
    code, told = run(capsys, "config", "check", str(QUICKSTART), "--set", here, "--set", "data.corpus=/nowhere")
    assert code == 2 and "/nowhere is no directory" in told


def test_several_problems_are_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(capsys, "train", str(QUICKSTART), "--set", "stepz=3", "--set", "steps=x")
    assert code == 2 and [line.split()[0] for line in told.splitlines()] == ["elastic:"] * 2


def test_a_dry_run_needs_neither_torch_nor_ray_and_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; from elastic import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as ended: assert ended.code == 0\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    arguments = ["train", "--dry-run", str(QUICKSTART), "--set", f"storage={tmp_path / 'runs'}"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    *lines, last = done.stdout.splitlines()
    assert last == "[]", done.stderr
    assert "steps: 220" in lines and "not started: starting run quickstart from the seed" in lines
    assert any(line.split()[:3] == ["4", "6", "1"] for line in lines), "the plan for four hosts"
    assert not (tmp_path / "runs").exists()


def job(path: Path, told: Told) -> str:
    file = path / "job.yaml"
    file.write_text(yaml.safe_dump({**told.config.model_dump(mode="json"), "local": {"nodes": 1, "hosts_per_node": 1}}))
    return str(file)


def test_resume_is_decided_before_anything_starts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = Told(config_in(tmp_path))
    told.attempt()
    told.generation(1, 12)
    told.checkpoint(1, 1, 10)
    file, before = job(tmp_path, told), sorted(tmp_path.rglob("*"))
    for arguments, sentence in (
        (("--resume", "never"), "holds a run already"),
        (("--resume", "7"), "those that exist are of steps 10"),
        (("--resume", "another"), "holds a run already, so it can't begin from another"),
        (("--set", "seed=5"), "or give --allow-change seed"),
        (("--set", "steps=5", "--allow-change", "steps"), "steps 5 is below 10"),
    ):
        code, err = run(capsys, "train", file, *arguments)
        assert code == 2 and sentence in err, arguments
    out = shown(capsys, "train", file, "--dry-run", "--set", "seed=5", "--allow-change", "seed")
    assert "not started: resuming run r from the checkpoint of step 10 (log entry 2, attempt 1); step 12 was" in out
    assert out.rstrip().endswith("changed and allowed: seed 0 -> 5")
    assert sorted(tmp_path.rglob("*")) == before


@dataclass
class Ended:
    error: Exception | None = None
    interrupted: bool = False


@pytest.mark.parametrize(
    ("failure", "ended", "code"),
    [
        ("", Ended(), 0),
        ("user code", Ended(RuntimeError("x")), 4),
        ("not enough hosts", Ended(RuntimeError("x")), 3),
        ("restart budget spent", Ended(RuntimeError("x")), 5),
        ("fenced", Ended(RuntimeError("x")), 1),
        ("", Ended(RuntimeError("x")), 1),
        ("", Ended(interrupted=True), 130),
    ],
)
def test_exit_codes(tmp_path: Path, failure: str, ended: Ended, code: int) -> None:
    told = Told(config_in(tmp_path))
    told.attempt()
    if failure:
        last = {**journal.read_file(told.path)[-1], "actions": [{"kind": "FailRun", "failure": failure, "detail": "d"}]}
        with journal.open_for_append(told.path) as file:
            file.write(journal.encode({**last, "event": {"kind": "Tick"}}))
    assert cli._exit_code(told.config, ended) == code
