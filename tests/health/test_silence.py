"""Silence is a verdict only where stopped steps back it, and never the weaker for being longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.health.silence import verdict

seconds = st.floats(0, 1000)


@given(seconds, seconds)
def test_a_member_is_lost_only_when_steps_have_stopped(silent_s: float, stalled_s: float) -> None:
    lost, why = verdict(silent_s=silent_s, stalled_s=stalled_s, limit_s=3.0, takes_part=True)
    assert lost == (silent_s > 3.0 and stalled_s > 3.0)
    assert why


@given(seconds, seconds, st.floats(0, 10), st.booleans())
def test_longer_silence_can_not_turn_the_verdict_off(
    silent_s: float, stalled_s: float, more_s: float, takes_part: bool
) -> None:
    before, _ = verdict(silent_s=silent_s, stalled_s=stalled_s, limit_s=3.0, takes_part=takes_part)
    after, _ = verdict(silent_s=silent_s + more_s, stalled_s=stalled_s, limit_s=3.0, takes_part=takes_part)
    assert after or not before
