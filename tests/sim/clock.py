"""Virtual time: a heap of (time, sequence, callable). Hours cost milliseconds, and the order is the seed's."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self._now_s + max(delay_s, 0.0), next(self._sequence), call))

    def step(self, until_s: float) -> bool:
        """Run the next callable due by `until_s`; False (and time moved there) if there is none."""
        if not self._heap or self._heap[0][0] > until_s:
            self._now_s = until_s
            return False
        self._now_s, _, call = heapq.heappop(self._heap)
        call()
        return True
