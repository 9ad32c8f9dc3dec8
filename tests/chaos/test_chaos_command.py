"""`elastic chaos` on real Ray nodes: a trainer, then a node killed, a node added; the result equals the twin's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.chaos import faults
from elastic.cluster import trial
from elastic.report import entries_of, recoveries
from elastic.telemetry.lineage import lineage
from tests.process.running import small

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def test_kills_on_ray_change_nothing_but_time(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 120, "hosts_min": 2, "hosts_max": 4, "local": {"nodes": 2, "hosts_per_node": 2}}
    config = small(tmp_path, run="killed", checkpoint={"interval_steps": 1000}, **changes)
    texts = ("kill-trainer@step=10,rank=1", "kill-node@step=25", "add-node@step=40", "kill-host@step=90,rank=0")
    chosen = [faults.parse(text) for text in texts]
    told: list[str] = []
    passed = trial.run(config, chosen, progress=lambda entries, nodes: None, say=told.append)
    story = "\n".join(told)
    assert passed, story
    found = recoveries(entries_of(config.place()))
    assert [r.failure for r in found][:2] == ["lost process", "lost node"], story
    assert all(recovery.tier == "memory" for recovery in found), story
    assert found[0].redone <= 1 and found[1].redone <= 2, story
    worlds = {record["world"] for record in lineage(entries_of(config.place()))}
    assert {2, 4} <= worlds, story
