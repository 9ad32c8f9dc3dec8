"""How far ahead of training its data is fetched: as many steps as are taken in `data.ahead_s`, and no more bytes than
`data.ahead_bytes_max` that nothing has read yet. The pace is learnt from when steps are taken."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from elastic.data.fetch import Wanted
from elastic.data.remote import Remote

STEPS_UNKNOWN = 8  # ahead, while no pace is known
STEPS_MAX = 4096
AT_ONCE_MAX = 16  # steps that are asked for in one go
NEW_PART = 0.2  # how much of the pace the newest step is


class Ahead:
    """What a reader of `remotes` asks for before it reads it; nothing where there are none. `expect`: asks for so many
    steps from a step on. `taken` may be called by another thread."""

    def __init__(
        self,
        expect: Callable[[int, int], Wanted],
        remotes: Sequence[Remote],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expect = expect
        self._remotes = remotes
        self._now_s = now_s
        self._asked: deque[tuple[int, int, Wanted]] = deque()  # first step, how many, in order
        self._nbytes = 0
        self._step_s: float | None = None
        self._taken_s: float | None = None

    @property
    def waits_for(self) -> str:
        """What somebody waits for that reads one of the corpora, "": nothing."""
        return "; ".join(why for remote in self._remotes if (why := remote.pieces.pool.waits_for))

    def taken(self) -> None:
        """A step was taken now."""
        now_s, before_s = self._now_s(), self._taken_s
        self._taken_s = now_s
        if before_s is not None:
            took_s = now_s - before_s
            self._step_s = took_s if self._step_s is None else self._step_s + NEW_PART * (took_s - self._step_s)

    def ready(self, step: int, most: int) -> int:
        """How many steps from `step` on are best read now: those that are here, at least one. Asks for later ones."""
        if not self._remotes:
            return most
        while self._asked and sum(self._asked[0][:2]) <= step:
            self._nbytes -= self._asked.popleft()[2].nbytes
        self._ask(step)
        steps = 0
        for first, count, wanted in self._asked:
            if steps >= most or not wanted.is_here:
                break
            steps = first + count - step
        return min(most, max(1, steps))

    def _ask(self, step: int) -> None:
        horizons = [remote.horizon for remote in self._remotes]
        seconds, nbytes_max = max(pair[0] for pair in horizons), min(pair[1] for pair in horizons)
        steps = STEPS_UNKNOWN
        if self._step_s is not None:
            steps = min(STEPS_MAX, int(seconds / max(1e-3, self._step_s)) + 1)
        next_ = sum(self._asked[-1][:2]) if self._asked else step
        while next_ < step + steps and self._nbytes < nbytes_max:
            count = min(1 if next_ == step else AT_ONCE_MAX, step + steps - next_)
            wanted = self._expect(next_, count)
            self._asked.append((next_, count, wanted))
            self._nbytes += wanted.nbytes
            next_ += count
