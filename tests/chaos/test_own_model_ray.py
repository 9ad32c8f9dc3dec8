"""The script of docs/own_model.md on real Ray: a task from Python, found by hosts that know only its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.process.running import small
from tests.process.test_own_model_doc import write_code

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.mark.long
def test_the_script_trains_its_model(tmp_path: Path) -> None:
    write_code(tmp_path)
    job = small(tmp_path, steps=6, hosts_max=1).model_dump(mode="json", exclude={"task", "sizes"})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    ran = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    step, loss = ran.stdout.split()[-2:]
    assert int(step) == 6 and float(loss) > 0
