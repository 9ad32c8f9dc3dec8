"""What can go wrong with saved state. Every message says what, got, wanted, what next."""

from __future__ import annotations

from elastic.storage.errors import StorageError


class CheckpointError(StorageError):
    """State could not be saved, found, verified or read; nothing that was read half is used."""


class StateError(CheckpointError):
    """The task's state is not what was saved, or can't be saved. No peer's fault, and a retry would meet it again."""


class Damaged(CheckpointError):
    """What lies in storage is not what was committed: missing, cut, or other bytes. Another copy, or an older one."""


class TooNew(CheckpointError):
    """A newer elastic wrote it: nothing older is taken in its place, what it says might be lost."""


class SourceFailed(CheckpointError):
    """A shard could not be read from another host's mover."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host


class Fenced(CheckpointError):
    """A newer attempt of this run has claimed the commit log: this one must end itself."""

    def __init__(self, by_attempt: int) -> None:
        super().__init__(f"attempt {by_attempt} of this run has claimed the commit log; this older attempt ends itself")
        self.by_attempt = by_attempt
