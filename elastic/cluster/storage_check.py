"""Can this node use the run's storage? Asked in a thread: storage may take its time, and a host may not wait."""

from __future__ import annotations

import logging
import threading

from elastic.checkpoint.probe import probe
from elastic.config import ConfigError, Place
from elastic.resume import saved_config
from elastic.storage.errors import StorageError, StorageUnavailable
from elastic.storage.store import store_at

log = logging.getLogger(__name__)

TRY_S = 5.0


class StorageCheck:
    """Tries until it went well. `attempt`: whose configuration the driver has put there."""

    def __init__(self, place: Place, attempt: int, *, again_s: float) -> None:
        self._place, self._attempt, self._again_s = place.within(TRY_S), attempt, again_s
        self._found: dict[str, str] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._work, name="storage-check", daemon=True).start()

    def take(self) -> dict[str, str] | None:
        """The newest outcome, as facts of a `NodeCheck`; None where there is none that was not taken yet."""
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """No new try begins."""
        self._closed.set()

    def _work(self) -> None:
        while True:
            found = self._try()
            self._found = found
            if not any(found.values()) or self._closed.wait(self._again_s):
                return

    def _try(self) -> dict[str, str]:
        wrong = down = ""
        try:
            store = store_at(self._place)
            probe(store, self._place.url)
            if not saved_config(store, attempt=self._attempt):
                wrong = (
                    f"{self._place.url} does not hold what the driver wrote there: is it a directory of this node "
                    "alone? give `storage` a directory that all nodes share, or a URL"
                )
        except StorageUnavailable as error:
            down = str(error)
        except (StorageError, ConfigError) as error:
            wrong = str(error)
        except Exception as error:  # of whatever library is below: this node can't use it either
            log.exception("the check of storage failed")
            wrong = f"{self._place.url}: {type(error).__name__}: {error}"
        return {"storage_wrong": wrong, "storage_down": down}
