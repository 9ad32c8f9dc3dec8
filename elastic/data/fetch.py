"""Who fetches the pieces of a corpus behind a URL: a few threads, a late piece twice, all again while storage is down.

The threads start when the first piece is wanted and end when none was wanted for a while.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from elastic.storage.errors import StorageUnavailable

THREADS = 8
SPARE_THREADS = 2  # which only send second requests
LATE_S_MIN, LATE_TIMES = 0.3, 2.0  # a request is late after so long, and so many times what 95 % of them take
LATE_S_FIRST = 2.0  # while that is not known
RECENT = 200
RECENT_MIN = 20
AGAIN_S = (0.2, 5.0)
BUSY_S = (0.005, 0.1)
SAY_EVERY_S = 30.0
IDLE_S = 30.0

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Task:
    """One piece that is wanted, by its code. pause_s: before it is tried again.
    waited_s: for another process that fetches it."""

    code: int
    nbytes: int
    is_urgent: bool
    state: Literal["queued", "running", "later", "done"] = "queued"
    requests: int = 0
    sent_s: float | None = None
    pause_s: float = 0.0
    waited_s: float = 0.0
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """What was asked for ahead. nbytes: how much of it nobody had asked for before."""

    nbytes: int = 0
    tasks: tuple[Task, ...] = ()

    @property
    def is_here(self) -> bool:
        return all(task.state == "done" for task in self.tasks)

    def joined(self, other: Wanted | None) -> Wanted:
        if other is None:
            return self
        return Wanted(nbytes=self.nbytes + other.nbytes, tasks=self.tasks + other.tasks)


@dataclass(slots=True, kw_only=True)
class Counts:
    """requests: sent for pieces, second_requests among them. nbytes: of their answers and of sidecars."""

    requests: int = 0
    second_requests: int = 0
    nbytes: int = 0
    wrong: int = 0


# Fetches the piece of a task, `sent()` when its request goes out; is_second: while another thread does. False: another
# process fetches it just now. StorageUnavailable: to be tried again.
Attempt = Callable[[Task, bool, Callable[[], None]], bool]


@dataclass(slots=True)
class Outage:
    """Since when storage does not answer, and what it said last; when it answered last."""

    since_s: float | None = None
    said_s: float = 0.0
    answered_s: float = 0.0
    why: str = ""


class Pool:
    """One process's threads. `what`: is fetched, in a log's words."""

    def __init__(self, attempt: Attempt, what: str) -> None:
        self._attempt = attempt
        self._what = what
        self._lock = threading.Lock()
        self._wanted, self._ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._tasks: dict[int, Task] = {}
        self._urgent: deque[Task] = deque()
        self._soon: deque[Task] = deque()
        self._later: list[tuple[float, int, Task]] = []
        self._running: dict[int, Task] = {}
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._order = itertools.count()
        self._threads = 0
        self._waiting = 0
        self._outage = Outage()

    def want(self, codes: Iterable[tuple[int, int]], *, urgent: bool) -> Wanted:
        """Pieces as (code, bytes). Those that are asked for already are not asked for again, but sooner if urgent."""
        tasks, nbytes = [], 0
        with self._lock:
            for code, size in codes:
                task = self._tasks.get(code)
                if task is None:
                    task = self._tasks[code] = Task(code, size, urgent)
                    (self._urgent if urgent else self._soon).append(task)
                    nbytes += size
                elif urgent and not task.is_urgent:
                    task.is_urgent = True
                    if task.state == "queued":
                        self._urgent.append(task)
                tasks.append(task)
            self._start(len(self._tasks))
            self._wanted.notify(len(tasks))
        return Wanted(nbytes=nbytes, tasks=tuple(tasks))

    def wait(self, wanted: Wanted) -> None:
        """Until all of it was fetched, however long storage is down. Raises what went wrong, as soon as it does."""
        with self._lock:
            self._waiting += 1
            try:
                left = wanted.tasks
                while left := tuple(task for task in left if task.state != "done" or task.error):
                    if wrong := next((task.error for task in left if task.error), None):
                        raise wrong
                    self._ended.wait(SAY_EVERY_S)
            finally:
                self._waiting -= 1

    @property
    def waits_for(self) -> str:
        """What keeps a reader waiting now; "": nobody waits."""
        with self._lock:
            if not self._waiting:
                return ""
            if self._outage.since_s is None:
                return f"{len(self._tasks)} pieces of {self._what} are being fetched"
            return f"{self._what}: {self._outage.why}"

    # ---------------------------------------------------------------- threads

    def _start(self, wanted: int) -> None:
        while self._threads < min(THREADS + SPARE_THREADS, wanted + SPARE_THREADS):
            self._threads += 1
            threading.Thread(target=self._work, name="fetch", daemon=True).start()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            task, is_second = found
            sent: list[float] = []

            def note(task: Task = task, is_second: bool = is_second, sent: list[float] = sent) -> None:
                sent.append(time.monotonic())
                if not is_second:
                    task.sent_s = sent[-1]

            try:
                is_done, error = self._attempt(task, is_second, note), None
            except Exception as raised:  # the thread goes on; who waits for the piece gets it
                is_done, error = False, raised
            self._finish(task, is_done, error, sent[-1] if sent else None)

    def _next(self) -> tuple[Task, bool] | None:
        """What this thread does next, True: as the second one. None: it is not needed any more."""
        idle_s = time.monotonic() + IDLE_S
        with self._lock:
            while True:
                now_s = time.monotonic()
                while self._later and self._later[0][0] <= now_s:
                    self._queue(heapq.heappop(self._later)[2])
                if len(self._running) < THREADS and (task := self._pop()) is not None:
                    task.state, task.requests, task.sent_s = "running", task.requests + 1, None
                    self._running[task.code] = task
                    return task, False
                late_s = self._late_s()
                alone = [task for task in self._running.values() if task.requests == 1 and task.sent_s is not None]
                for task in alone:
                    if task.sent_s is not None and now_s - task.sent_s >= late_s:
                        task.requests += 1
                        return task, True
                if now_s >= idle_s and not self._tasks:
                    self._threads -= 1
                    return None
                next_s = min(
                    [idle_s if now_s < idle_s else now_s + IDLE_S]
                    + [task.sent_s + late_s for task in alone if task.sent_s is not None]
                    + [at_s for at_s, *_ in self._later[:1]]
                    + ([now_s + LATE_S_MIN] if self._running else [])
                )
                self._wanted.wait(max(0.001, next_s - now_s))

    def _pop(self) -> Task | None:
        for queue in (self._urgent, self._soon):
            while queue:
                task = queue.popleft()
                if task.state == "queued":  # else it stood in both, and went already
                    return task
        return None

    def _queue(self, task: Task) -> None:
        task.state = "queued"
        (self._urgent if task.is_urgent else self._soon).appendleft(task)

    def _late_s(self) -> float:
        if len(self._recent_s) < RECENT_MIN:
            return LATE_S_FIRST
        return max(LATE_S_MIN, LATE_TIMES * sorted(self._recent_s)[int(0.95 * len(self._recent_s))])

    def _finish(self, task: Task, is_done: bool, error: Exception | None, sent_s: float | None) -> None:
        """sent_s: when its request went out, None: it sent none."""
        with self._lock:
            task.requests -= 1
            if is_done and sent_s is not None:
                self._recent_s.append(time.monotonic() - sent_s)
                self._answered()
            # One that was sent before the last answer tells nothing of now.
            if isinstance(error, StorageUnavailable) and (sent_s is None or sent_s >= self._outage.answered_s):
                self._not_answered(error)
            if task.state != "done":
                if is_done or (error is not None and not isinstance(error, StorageUnavailable) and not task.requests):
                    task.state, task.error = "done", error
                    del self._tasks[task.code]
                    self._running.pop(task.code, None)
                    self._ended.notify_all()
                elif not task.requests:
                    self._running.pop(task.code, None)
                    self._try_later(task, BUSY_S if error is None else AGAIN_S)
            self._wanted.notify()

    def _try_later(self, task: Task, limits_s: tuple[float, float]) -> None:
        task.state = "later"
        task.pause_s = min(limits_s[1], max(limits_s[0], 2 * task.pause_s))
        if limits_s is BUSY_S:
            task.waited_s += task.pause_s
        at_s = time.monotonic() + random.uniform(task.pause_s / 2, task.pause_s)
        heapq.heappush(self._later, (at_s, next(self._order), task))

    def _not_answered(self, error: StorageUnavailable) -> None:
        now_s, outage = time.monotonic(), self._outage
        outage.why = str(error)
        if outage.since_s is None:
            outage.since_s = outage.said_s = now_s
            log.warning("%s: storage does not answer, it is tried again without end: %s", self._what, error)
        elif now_s - outage.said_s >= SAY_EVERY_S:
            outage.said_s = now_s
            log.warning("%s: no answer for %.0f s: %s", self._what, now_s - outage.since_s, error)

    def _answered(self) -> None:
        outage = self._outage
        outage.answered_s = time.monotonic()
        if outage.since_s is None:
            return
        log.warning("%s: storage answers again, after %.0f s", self._what, time.monotonic() - outage.since_s)
        outage.since_s = None
        while self._later:
            self._queue(heapq.heappop(self._later)[2])
        self._wanted.notify_all()
