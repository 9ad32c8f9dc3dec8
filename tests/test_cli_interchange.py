"""`elastic ckpt export` and `import` from arguments to what is printed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.store import store_at
from elastic.cli_interchange import add_parsers
from tests.checkpoint.llamas import equal, job, read, trained


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    parsed = parser.parse_args(arguments)
    return parsed.command(parsed)


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
