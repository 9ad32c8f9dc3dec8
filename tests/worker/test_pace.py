"""The snapshot interval follows what snapshots cost, and alike on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.pace import INTERVAL_MAX, Pace


def test_fixed_interval_falls_on_its_multiples_and_the_first_boundary() -> None:
    pace = Pace(first=7, fixed=5, cost_max=0.01)
    taken = []
    for step in range(8, 31):
        if pace.is_due(step):
            taken.append(step)
            pace.taken(step)
    assert taken == [8, 10, 15, 20, 25, 30]


def test_a_skipped_snapshot_stays_due() -> None:
    pace = Pace(first=0, fixed=5, cost_max=0.01)
    pace.taken(5)
    assert not pace.is_due(9) and pace.is_due(10) and pace.is_due(11)


def test_cheap_snapshots_are_taken_every_step_and_dear_ones_seldom() -> None:
    pace = Pace(first=0, fixed=None, cost_max=0.01)
    assert pace.interval == 1, "nothing is known yet"
    pace.learn(step_s=1.0, snapshot_s=0.009)
    assert pace.interval == 1
    for _ in range(9):
        pace.learn(step_s=1.0, snapshot_s=0.045)
    assert pace.interval == 5
    pace.learn(step_s=60.0, snapshot_s=0.0)
    assert pace.interval == 5, "one slow step does not count"


@given(st.lists(st.tuples(st.floats(0.001, 100), st.floats(0, 100)), max_size=40), st.floats(0.001, 0.5))
def test_interval_keeps_the_cost_within_its_share(learnt: list[tuple[float, float]], cost_max: float) -> None:
    pace, other = (Pace(first=0, fixed=None, cost_max=cost_max) for _ in range(2))
    for step_s, snapshot_s in learnt:
        pace.learn(step_s=step_s, snapshot_s=snapshot_s)
        other.learn(step_s=step_s, snapshot_s=snapshot_s)
    assert 1 <= pace.interval <= INTERVAL_MAX and pace.interval == other.interval
