"""How often to snapshot: as often as it takes no more than a set share of the step time. Equal on every rank.

Each rank learns from the same sums, which come through the step word, so all come to the same interval without
another message: a snapshot is worth something only if every rank takes it.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

WINDOW = 9  # the newest steps and snapshots count: a model's step time drifts, an evaluation is an outlier
INTERVAL_MAX = 64  # steps that a failure may undo


class Pace:
    """`fixed`: so many steps apart, whatever it costs; None: adapt. `cost_max`: share of the step time."""

    def __init__(self, *, first: int, fixed: int | None, cost_max: float) -> None:
        self._fixed = fixed
        self._cost_max = cost_max
        self._next = first + 1  # the first boundary of a generation always
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._snapshots_s: deque[float] = deque(maxlen=WINDOW)

    def is_due(self, step: int) -> bool:
        """Whether the boundary after `step` completed steps is to have a snapshot; a skipped one stays due."""
        return step >= self._next

    def taken(self, step: int) -> None:
        """All ranks took the snapshot of `step`."""
        if self._fixed is not None:
            self._next = (step // self._fixed + 1) * self._fixed
        else:
            self._next = step + self.interval

    def learn(self, *, step_s: float, snapshot_s: float) -> None:
        """Means over the ranks: of the last step's time, and of what the snapshot before it took (0: none)."""
        if step_s > 0:
            self._steps_s.append(step_s)
        if snapshot_s > 0:
            self._snapshots_s.append(snapshot_s)

    @property
    def interval(self) -> int:
        if self._fixed is not None:
            return self._fixed
        if not self._steps_s or not self._snapshots_s:
            return 1
        share = median(self._snapshots_s) / median(self._steps_s)
        return min(max(1, math.ceil(share / self._cost_max)), INTERVAL_MAX)
