"""The account of recoveries, drawn from journals of simulated disasters."""

from __future__ import annotations

from elastic.report import admission_lines, recoveries
from elastic.telemetry.lineage import lineage, schedule
from tests.sim.test_simulation import play


def test_phases_sum_to_the_recovery() -> None:
    broken = 0
    for seed in range(40):
        entries = play(seed).entries()
        found = recoveries(entries)
        for recovery in found:
            assert all(seconds >= 0 for seconds in recovery.phases.values()), recovery
            assert sum(recovery.phases.values()) >= recovery.first_step_s - 1e-6, recovery
            assert recovery.redone >= 0 and recovery.tier in ("memory", "storage", "the seed"), recovery
        starts = sum(action["kind"] == "StartGeneration" for entry in entries for action in entry["actions"])
        assert len(found) <= starts
        broken += bool(found)
        if broken == 4:
            return
    raise AssertionError("hardly any of these seeds breaks something")


def test_schedule_names_every_change_of_the_lineage() -> None:
    entries = play(4).entries()
    records = lineage(entries)
    changes = schedule(entries)
    assert changes[0][0] == 0
    for record in records:
        world = [hosts for step, hosts in changes if step < record["step"]][-1]
        assert world == record["world"], record


def test_refusals_and_rests_are_told() -> None:
    kinds = ("RefuseHost", "MarkHost", "RestNode")
    for seed in range(40):
        entries = play(seed).entries()
        told = [a for entry in entries for a in entry["actions"] if a["kind"] in kinds]
        if {action["kind"] for action in told} == set(kinds):
            break
    lines = admission_lines(entries)
    refused, marked, rested = (next(a for a in reversed(told) if a["kind"] == kind) for kind in kinds)
    assert f"{refused['host']} refused: {refused['why']}" in lines
    assert f"{marked['host']} marked: {marked['why']}" in lines
    assert f"{rested['node']} rested: it was lost {rested['losses']} times" in lines
