"""Time as an argument: the one place that reads the machine's clock, and the seam the simulation replaces."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the Unix epoch that never go backwards."""

    def now_s(self) -> float: ...


class RealClock:
    """Wall time read once, then advanced by the monotonic clock: an NTP step can't fire a timeout."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()
