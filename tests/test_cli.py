"""What a person meets at the command line: one clear sentence and the right exit code for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic import cli
from elastic.chaos import faults
from elastic.config import ConfigError, load

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "jobs" / "quickstart.yaml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0), capsys.readouterr().err


def test_unknown_key_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, told = run(capsys, "train", str(QUICKSTART), "--set", "stepz=3")
    assert code == 2 and told.strip().endswith("unknown key stepz; did you mean steps?")


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
    assert code == 1 and "holds no journal.jsonl" in told


def test_faults_are_parsed() -> None:
    assert faults.parse("kill-trainer@step=40,rank=1") == faults.Fault(kind="kill-trainer", step=40, rank=1)
    assert faults.parse("freeze-node@step=8,seconds=2.5").seconds == 2.5
    with pytest.raises(ConfigError, match="not step=N"):
        faults.parse("kill-node@when=3")


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_job_is_valid(job: Path) -> None:
    config = load(job)
    assert config.steps >= 200 and job.read_text().startswith("# ")
