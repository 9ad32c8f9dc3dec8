"""Ships the tails of a host's logs from its node's disk to the run's storage: a thread that nobody waits for."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from elastic.storage.errors import StorageError
from elastic.storage.store import Store
from elastic.telemetry.logs import PREFIX, TAIL_BYTES, Tail

EVERY_S = 5.0
CLOSE_TIMEOUT_S = 5.0
TRAINER_LOGS_MAX = 64  # of one host; older ones are removed, here and in storage

log = logging.getLogger(__name__)


class LogTails:
    """Every `*.log` of `directory` that changed, every few seconds, and soon after `hurry`.

    A store that fails costs its tails and one line in the log, never the host.
    """

    def __init__(self, directory: Path, store: Store, node: str) -> None:
        self._directory = directory
        self._store = store
        self._node = node
        self._shipped: dict[Path, int] = {}
        self._failure = ""
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="log-tails", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Something ended: ship what it wrote now."""
        self._wake.set()

    def close(self) -> None:
        """Ship what is left, for a limited time."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            last = self._closing
            try:
                self._ship()
            except (OSError, StorageError) as error:
                if str(error) != self._failure:  # told once, not every few seconds
                    log.warning("tails of the logs are not shipped: %s", error)
                self._failure = str(error)
            if last:
                return

    def _ship(self) -> None:
        paths = sorted(self._directory.glob("*.log"))
        for path in paths:
            size = path.stat().st_size
            if size != self._shipped.get(path, 0):
                self._store.put(PREFIX + path.name, self._tail(path, size).to_object())
                self._shipped[path] = size
        trainers = sorted((path for path in paths if path.name.startswith("g")), key=lambda path: path.stat().st_mtime)
        for path in trainers[:-TRAINER_LOGS_MAX]:
            self._store.delete(PREFIX + path.name)
            path.unlink()

    def _tail(self, path: Path, size: int) -> Tail:
        begin = max(0, size - TAIL_BYTES)
        with path.open("rb") as file:
            file.seek(begin)
            return Tail(node=self._node, path=str(path), from_byte=begin, data=file.read(size - begin))
