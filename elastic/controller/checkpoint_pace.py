"""How many steps lie between durable checkpoints when nobody said: Young's and Daly's optimum from what was measured.

The interval that loses least is sqrt(2 x cost x time between failures) (Young 1974; Daly 2006 for its first order). The
cost is what training lost while a checkpoint was uploaded: the seconds that its steps took beyond the median step
without an upload. Every incident counts as a failure, though most are healed from memory: so rather too often than too
seldom. Pure.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

CLEAN_STEPS = 31  # that the median is taken over
FIRST_S = 60.0  # until the first upload has shown what one costs
LONGEST_S = 1800.0
COST_RATIO_MIN = 0.01  # of the upload's time: less can't be told from noise
FAILURE_S = 3600.0  # a failure an hour is assumed at first, and outweighed by what happens
SMOOTHING = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """clean_s: the newest steps without an upload. lost_s: of the upload that is running. upload_s, cost_s: smoothed,
    of those that ended; 0.0 before the first."""

    clean_s: tuple[float, ...] = ()
    lost_s: float = 0.0
    upload_s: float = 0.0
    cost_s: float = 0.0

    @property
    def step_s(self) -> float:
        return statistics.median(self.clean_s) if self.clean_s else 0.0


def step_ended(pace: Pace, seconds: float, *, uploading: bool) -> Pace:
    if uploading:
        return replace(pace, lost_s=pace.lost_s + max(0.0, seconds - pace.step_s)) if pace.clean_s else pace
    return replace(pace, clean_s=(*pace.clean_s, seconds)[-CLEAN_STEPS:])


def upload_began(pace: Pace) -> Pace:
    return replace(pace, lost_s=0.0)


def upload_ended(pace: Pace, seconds: float) -> Pace:
    cost_s = max(pace.lost_s, COST_RATIO_MIN * seconds)
    if pace.upload_s:
        seconds = pace.upload_s + SMOOTHING * (seconds - pace.upload_s)
        cost_s = pace.cost_s + SMOOTHING * (cost_s - pace.cost_s)
    return replace(pace, lost_s=0.0, upload_s=round(seconds, 6), cost_s=round(cost_s, 6))


def interval(pace: Pace, *, attempt_s: float, incidents: int) -> tuple[int, str]:
    """(steps from one checkpoint to the next, why). attempt_s: how long the attempt has run."""
    if not pace.clean_s or pace.step_s <= 0.0:
        return 1, "nothing is known yet"
    if not pace.upload_s:
        steps = max(1, math.ceil(FIRST_S / pace.step_s))
        return steps, f"every {steps} steps ({FIRST_S:.0f} s) until one has shown what it costs"
    failure_s = (attempt_s + FAILURE_S) / (incidents + 1)
    best_s = math.sqrt(2 * pace.cost_s * failure_s)
    chosen_s = min(max(best_s, 2 * pace.upload_s), LONGEST_S)
    steps = max(1, math.ceil(chosen_s / pace.step_s))
    formula = f"sqrt(2 x {pace.cost_s:.2f} s lost by one x {failure_s / 60:.0f} min between failures) = {best_s:.0f} s"
    limits = (
        "" if chosen_s == best_s else f", kept within two uploads ({2 * pace.upload_s:.0f} s) and {LONGEST_S:.0f} s"
    )
    return steps, f"every {steps} steps ({chosen_s:.0f} s): {formula}{limits}"
