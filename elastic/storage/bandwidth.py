"""A limit on what one process sends to storage, for any number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Bandwidth:
    """At most `bytes_s` bytes a second, without bursts; 0: no limit."""

    def __init__(
        self,
        bytes_s: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s = bytes_s
        self._now_s, self._sleep = now_s, sleep
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Returns when all that was taken before has had its time: then these may go."""
        if not self._bytes_s:
            return
        with self._lock:
            now_s = self._now_s()
            starts_s = max(now_s, self._free_s)
            self._free_s = starts_s + nbytes / self._bytes_s
        if starts_s > now_s:
            self._sleep(starts_s - now_s)
