"""Turns complete uploads into checkpoints, one at a time, off the controller's thread; then tidies up.

What a commit retires is written into its own manifest, so nothing that a reader may choose is ever deleted:
first the commit, then the deletion, and a deletion that was cut short is done by the next commit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from elastic.checkpoint.errors import CheckpointError, Fenced
from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.manifest import About, build, restore_plan
from elastic.checkpoint.store import Store
from elastic.events import CheckpointCommitted, CommitFailed, Uploaded
from elastic.plan import SnapshotKey

Job = tuple[SnapshotKey, tuple[Uploaded, ...]]
Result = CheckpointCommitted | CommitFailed

JOBS_MAX = 8


class Committer:
    """A worker thread with a bounded queue. `log` is its own: nobody else may use that instance.

    about: what is written into every manifest. samples_per_step: what one step adds to the data position. keep:
    checkpoints kept, the newest of the run's line.
    before_commit: makes durable what a checkpoint must not be ahead of; what it raises fails the commit.
    """

    def __init__(
        self,
        store: Store,
        log: CommitLog,
        attempt: int,
        *,
        about: About,
        samples_per_step: int,
        keep: int,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        assert keep >= 1, keep
        self._store, self._log, self._attempt = store, log, attempt
        self._about, self._samples_per_step = about, samples_per_step
        self._keep, self._before_commit = keep, before_commit
        self._jobs: queue.Queue[Job | None] = queue.Queue(JOBS_MAX)
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def submit(self, key: SnapshotKey, uploads: tuple[Uploaded, ...]) -> None:
        """Never waits; the outcome comes through `results`."""
        try:
            self._jobs.put_nowait((key, uploads))
        except queue.Full:
            reason = f"{JOBS_MAX} commits are waiting already; storage is slow"
            self._results.put(CommitFailed(key=key, reason=reason))

    def results(self) -> list[Result]:
        """What ended since the last call. Never waits."""
        found = []
        while not self._results.empty():
            found.append(self._results.get_nowait())
        return found

    def close(self, timeout_s: float = 10.0) -> bool:
        """Ends after the commits that are queued; False where they take longer than that."""
        try:
            self._jobs.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, uploads = job
            try:
                self._results.put(self._commit(key, uploads))
            except Fenced as error:
                self._results.put(CommitFailed(key=key, reason=str(error), fenced_by=error.by_attempt))
            except Exception as error:  # the thread must live: the run goes on without this checkpoint
                self._results.put(CommitFailed(key=key, reason=f"{type(error).__name__}: {error}"))

    def _commit(self, key: SnapshotKey, uploads: tuple[Uploaded, ...]) -> Result:
        for entry in self._log.checkpoints():
            if entry.manifest and (entry.attempt, entry.manifest.key) == (self._attempt, key):
                return CheckpointCommitted(key=key, number=entry.number, restore=restore_plan(entry.manifest))
        manifest = build(
            self._store,
            uploads,
            about=self._about,
            attempt=self._attempt,
            key=key,
            samples=key.step * self._samples_per_step,
        )
        self._before_commit()
        number = self._log.commit(self._attempt, manifest, self._kept)
        committed = CheckpointCommitted(key=key, number=number, restore=restore_plan(manifest))
        self._tidy(key)
        return committed

    def _kept(self, line: Sequence[Entry], aside: Sequence[Entry]) -> list[int]:
        """Beside the new one: the newest of the run's line. What the run went back from is given up."""
        return [entry.number for entry in line[: self._keep - 1]]

    def _tidy(self, committed: SnapshotKey) -> None:
        """Deletes older data that no checkpoint names any more: of those that do not count, and of uploads that were
        never committed. A failure leaves it to the next commit."""
        try:
            named = {name for entry in self._log.checkpoints() if entry.manifest for name in entry.manifest.objects()}
            for name in self._store.list("data/"):
                if name not in named and self._is_older(name, committed):
                    self._store.delete(name)
        except CheckpointError as error:
            self._log.complain(f"old checkpoint data stays for now: {error}")

    def _is_older(self, name: str, committed: SnapshotKey) -> bool:
        try:
            attempt, generation, step = map(int, name.split("/")[1].split("-"))
        except (ValueError, IndexError):
            return False  # not ours: never touched
        return (attempt, generation, step) < (self._attempt, committed.generation, committed.step)
