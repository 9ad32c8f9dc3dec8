"""The ledger sums to wall time for any sequence of entries, and books steps where they belong."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic.telemetry import ledger

PHASES = ("waiting", "starting", "running", "stopping", "saving", "finished", "failed")


def entry(t: float, kind: str = "Tick", phase: str = "running", step: int = 0, **flags: Any) -> dict[str, Any]:
    event: dict[str, Any] = {"kind": kind}
    if kind == "StepCompleted":
        event["record"] = {"step": step}
    return {"t": t, "event": event, "phase": phase, "short": False, "incident": 0, "fresh": False, **flags}


entries = st.lists(
    st.builds(
        entry,
        st.floats(0, 1e9),
        st.sampled_from(("Tick", "StepCompleted", "CoordinatorRestarted", "HostGone")),
        st.sampled_from(PHASES),
        st.integers(1, 20),
        short=st.booleans(),
        incident=st.integers(0, 1),
        fresh=st.booleans(),
    ),
    max_size=40,
)


@given(entries)
def test_sums_exactly_to_wall_time(drawn: list[dict[str, Any]]) -> None:
    found = ledger.fold(drawn)
    assert sum(found.microseconds.values()) == found.wall_us
    assert all(value >= 0 for value in found.microseconds.values())
    assert set(found.microseconds) <= set(ledger.CATEGORIES)
    rounded = [round(e["t"] * 1_000_000) for e in drawn]
    assert found.wall_us == (max(rounded) - rounded[0] if rounded else 0)


def test_steps_are_productive_once_and_rework_after() -> None:
    found = ledger.fold(
        [
            entry(0.0, phase="starting", fresh=True),
            entry(4.0, "StepCompleted", step=1),
            entry(5.0, "StepCompleted", step=2),
            entry(5.5, "HostReported", phase="stopping", incident=1),
            entry(6.5, "HostReported", phase="starting", incident=1),
            entry(8.5, "StepCompleted", step=2),
            entry(9.0, "StepCompleted", step=3),
        ]
    )
    assert found.seconds() == {"starting": 4.0, "productive": 2.0, "recovery": 3.0}


def test_redone_steps_are_rework() -> None:
    found = ledger.fold([entry(0.0), entry(1.0, "StepCompleted", step=5), entry(3.0, "StepCompleted", step=4)])
    assert found.seconds() == {"productive": 1.0, "rework": 2.0} or found.seconds()["rework"] == 2.0
