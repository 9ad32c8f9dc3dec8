"""`elastic ckpt export` and `import` from arguments to what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastic.checkpoint.log import CommitLog
from elastic.cli import main
from elastic.storage.store import store_at
from tests.checkpoint.llamas import equal, job, read, trained


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *arguments])
    return int(ended.value.code or 0)


def test_out_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = job(tmp_path), str(tmp_path / "dcp")
    state = trained(config, world=1)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert command("export", str(config.run_dir()), "--format", "dcp", "--to", out, "--step", "3") == 0
    assert "exported step 3 of run r (log entry 2) as dcp: " in capsys.readouterr().out
    assert command("import", out, str(tmp_path / "job.yaml"), "--set", "run=new", "--step", "3") == 0
    assert "imported " in capsys.readouterr().out
    new = job(tmp_path, run="new")
    assert equal(read(new)[0], state)
    manifest = CommitLog(store_at(new.place())).newest()
    assert manifest is not None and manifest.key.step == 3


def test_what_does_not_fit_is_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = job(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (tmp_path / "empty").mkdir()
    assert command("import", str(tmp_path / "empty"), str(tmp_path / "job.yaml")) == 2
    told = f"elastic: {tmp_path}/empty has neither .safetensors files nor .metadata; it has nothing\n"
    assert capsys.readouterr().err == told
    assert command("export", str(config.run_dir()), "--format", "dcp", "--to", str(tmp_path / "out")) == 1
    assert "has no checkpoint; give the directory or URL of a run that has one" in capsys.readouterr().err
