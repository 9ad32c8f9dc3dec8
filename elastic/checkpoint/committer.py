"""Turns complete uploads into checkpoints, one at a time, off the controller's thread; then tidies up.

What a commit retires is written into its own manifest, so nothing that a reader may choose is ever deleted:
first the commit, then the deletion, and a deletion that was cut short is done by the next commit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from elastic.checkpoint import garbage, retention
from elastic.checkpoint.errors import Fenced
from elastic.checkpoint.log import CommitLog, Entry
from elastic.checkpoint.manifest import About, Manifest, build, restore_plan
from elastic.checkpoint.pins import pinned
from elastic.config_sections import Checkpoint
from elastic.events import CheckpointCommitted, CommitFailed, Uploaded
from elastic.plan import SnapshotKey
from elastic.storage.errors import StorageError
from elastic.storage.store import Store

Job = tuple[SnapshotKey, tuple[Uploaded, ...], Mapping[str, float], frozenset[str]]
Result = CheckpointCommitted | CommitFailed

JOBS_MAX = 8


class Committer:
    """A worker thread with a bounded queue. `log` is its own: nobody else may use that instance.

    about: what is written into every manifest. samples_per_step: what one step adds to the data position. keep:
    which older checkpoints stay.
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
        keep: Checkpoint,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._log, self._attempt = store, log, attempt
        self._about, self._samples_per_step = about, samples_per_step
        self._keep, self._before_commit = keep, before_commit
        self._jobs: queue.Queue[Job | None] = queue.Queue(JOBS_MAX)
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def submit(
        self,
        key: SnapshotKey,
        uploads: tuple[Uploaded, ...],
        metrics: Mapping[str, float],
        without: Collection[str] = (),
    ) -> None:
        """Never waits; the outcome comes through `results`. metrics: of an evaluation at this very step. without: an
        object of each checkpoint that proved damaged: it does not count after this commit, unless it is pinned."""
        try:
            self._jobs.put_nowait((key, uploads, metrics, frozenset(without)))
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
            key = job[0]
            try:
                self._results.put(self._commit(*job))
            except Fenced as error:
                self._results.put(CommitFailed(key=key, reason=str(error), fenced_by=error.by_attempt))
            except Exception as error:  # the thread must live: the run goes on without this checkpoint
                self._results.put(CommitFailed(key=key, reason=f"{type(error).__name__}: {error}"))

    def _commit(
        self,
        key: SnapshotKey,
        uploads: tuple[Uploaded, ...],
        metrics: Mapping[str, float],
        without: frozenset[str],
    ) -> Result:
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
            metrics=metrics,
        )
        self._before_commit()
        sizes = self._store.list("data/")
        number = self._log.commit(self._attempt, manifest, lambda line, _: self._kept(line, manifest, sizes, without))
        committed = CheckpointCommitted(key=key, number=number, restore=restore_plan(manifest))
        self._tidy(key, sizes)
        return committed

    def _kept(
        self, line: Sequence[Entry], new: Manifest, sizes: Mapping[str, int], without: frozenset[str]
    ) -> set[int]:
        """The pins are listed anew whenever the log has grown (see pins.pin)."""
        sound = [entry for entry in line if entry.manifest and without.isdisjoint(entry.manifest.objects())]
        whole = retention.whole(sound, sizes)
        return retention.kept(sound, self._keep, new, pinned=pinned(self._store), whole=whole)

    def _tidy(self, committed: SnapshotKey, sizes: Mapping[str, int]) -> None:
        """Deletes what nothing names any more. A failure leaves it to the next commit."""
        try:
            unnamed = garbage.garbage(sizes, self._log, attempt=self._attempt, committed=committed)
            garbage.delete(self._store, unnamed)
        except StorageError as error:
            self._log.complain(f"old checkpoint data stays for now: {error}")
