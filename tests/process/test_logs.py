"""What trainers print lies on their node's disk, and its tail in the run's storage, where `elastic logs` finds it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.cluster.run_logs import host_lines, trainer_lines
from elastic.controller.state import Phase
from elastic.report import ReportError
from tests.process.running import LIMIT_S, Running, small

pytestmark = pytest.mark.timeout(400)


def test_after_a_failure_the_first_failing_ranks_last_lines_come_first(tmp_path: Path) -> None:
    config = small(tmp_path, task="tests.process.broken:Broken")
    run_dir, logs = config.run_dir(), config.run_dir() / "logs"
    with pytest.raises(ReportError, match="holds no output yet"):
        list(trainer_lines(config.place(), generation=None, rank=None, follow=False))
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(lambda: run.driver.state.phase is Phase.FAILED)
        wait_for(lambda: b"broken" in shipped(logs, 0) and b"rank 1 of 2" in shipped(logs, 1))
        wait_for(lambda: any(" serves run small" in line for line in host_lines(config.place())))
        assert len(list((tmp_path / "logs").glob("n?-0/g1-r?.log"))) == 2, "the whole output is on the nodes' disks"
    os.rename(run.journal, run_dir / "journal.jsonl")

    lines = list(trainer_lines(config.place(), generation=None, rank=None, follow=True))
    assert lines[0].startswith("generation 1 ended: user code, rank 0 on n")
    last = lines.index("-- generation 1, ranks 0-1")
    assert lines[last - 1] == "  ArithmeticError: the fifth step is broken"
    firsts = {line[:8] for line in lines[last + 1 :] if " of 2: pid " in line}
    assert firsts == {"[rank 0]", "[rank 1]"}
    alone = list(trainer_lines(config.place(), generation=1, rank=1, follow=False))
    assert "rank 1 of 2" in alone[last + 1] and not any("rank 0 of 2" in line for line in alone[last:])
    with pytest.raises(ReportError, match="none of rank 7 in generation 1; got ranks 0-1"):
        list(trainer_lines(config.place(), generation=None, rank=7, follow=False))


def shipped(logs: Path, rank: int) -> bytes:
    path = logs / f"g1-r{rank}.log"
    return path.read_bytes() if path.exists() else b""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
