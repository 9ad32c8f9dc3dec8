"""The account of recoveries, drawn from journals of simulated disasters."""

from __future__ import annotations

import pytest

from elastic.report import recoveries
from elastic.telemetry.lineage import lineage, schedule
from tests.sim.test_simulation import play


@pytest.mark.parametrize("seed", [1, 4, 22])
def test_phases_sum_to_the_recovery(seed: int) -> None:
    entries = play(seed).entries()
    found = recoveries(entries)
    assert found, "these seeds break something"
    for recovery in found:
        assert all(seconds >= 0 for seconds in recovery.phases.values()), recovery
        assert sum(recovery.phases.values()) >= recovery.first_step_s - 1e-6, recovery
        assert recovery.redone >= 0 and recovery.tier in ("memory", "storage", "the seed"), recovery
    starts = sum(action["kind"] == "StartGeneration" for entry in entries for action in entry["actions"])
    assert len(found) <= starts


def test_schedule_names_every_change_of_the_lineage() -> None:
    entries = play(4).entries()
    records = lineage(entries)
    changes = schedule(entries)
    assert changes[0][0] == 0
    for record in records:
        world = [hosts for step, hosts in changes if step < record["step"]][-1]
        assert world == record["world"], record
