"""The interval between checkpoints that nobody set: the optimum of what was measured, within limits, and said."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.controller.checkpoint_pace import LONGEST_S, Pace, interval, step_ended, upload_began, upload_ended


def measured(step_s: float, extra_s: float, upload_s: float) -> Pace:
    pace = Pace()
    for _ in range(10):
        pace = step_ended(pace, step_s, uploading=False)
    pace = upload_began(pace)
    for _ in range(4):
        pace = step_ended(pace, step_s + extra_s, uploading=True)
    return upload_ended(pace, upload_s)


def test_it_is_youngs_optimum() -> None:
    pace = measured(0.5, 0.25, 2.0)
    assert pace.cost_s == pytest.approx(1.0)
    steps, why = interval(pace, attempt_s=3600.0, incidents=1)
    assert steps == math.ceil(math.sqrt(2 * 1.0 * 3600.0) / 0.5)
    assert why == "every 170 steps (85 s): sqrt(2 x 1.00 s lost by one x 60 min between failures) = 85 s"


def test_more_failures_and_cheaper_uploads_bring_them_closer() -> None:
    rare = interval(measured(0.5, 0.25, 2.0), attempt_s=3600.0, incidents=0)[0]
    often = interval(measured(0.5, 0.25, 2.0), attempt_s=3600.0, incidents=20)[0]
    cheap = interval(measured(0.5, 0.0, 2.0), attempt_s=3600.0, incidents=0)[0]
    assert often < rare and cheap < rare


def test_before_the_first_it_is_a_minute_and_said() -> None:
    pace = step_ended(Pace(), 2.0, uploading=False)
    assert interval(pace, attempt_s=5.0, incidents=0) == (30, "every 30 steps (60 s) until one has shown what it costs")


def test_never_closer_than_two_uploads() -> None:
    steps, why = interval(measured(1.0, 0.0, 120.0), attempt_s=60.0, incidents=500)
    assert steps == 240 and "kept within two uploads (240 s)" in why


@given(
    step_s=st.floats(1e-4, 1e3), extra_s=st.floats(0, 1e3), upload_s=st.floats(1e-3, 1e4),
    attempt_s=st.floats(0, 1e7), incidents=st.integers(0, 10_000),
)  # fmt: skip
def test_always_at_least_one_step_and_at_most_half_an_hour(
    step_s: float, extra_s: float, upload_s: float, attempt_s: float, incidents: int
) -> None:
    steps, _ = interval(measured(step_s, extra_s, upload_s), attempt_s=attempt_s, incidents=incidents)
    assert 1 <= steps <= max(1.0, LONGEST_S / step_s + 1)
