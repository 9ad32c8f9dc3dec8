"""Nodes that the cluster is about to take away: Ray drains them, after a spot notice or a SIGTERM of `ray start`.

Their hosts leave at the next step boundary, as if a person had drained them, and a checkpoint is made just in time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from elastic.config import ElasticError

POLL_S = 1.0
WHO = "Ray"

Order = Callable[[str, str, str, dict[str, str]], object]  # kind, who, why, given: as `Coordinator.request`

logger = logging.getLogger(__name__)


class Notices:
    """A thread for as long as the process lives."""

    def __init__(self, order: Order, draining: Callable[[], Mapping[str, int]], *, poll_s: float = POLL_S) -> None:
        """draining: end of each draining node by its name, in milliseconds since the epoch, 0: not known."""
        self._order, self._draining, self._poll_s = order, draining, poll_s
        self._taken: set[str] = set()
        threading.Thread(target=self._watch, name="notices", daemon=True).start()

    def _watch(self) -> None:
        told = ""
        while True:
            try:
                self.look()
                told = ""
            except Exception as error:  # whatever Ray raises while its head is away: the run goes on without notices
                if str(error) != told:
                    logger.warning("which nodes Ray drains can't be asked: %s", error)
                told = str(error)
            time.sleep(self._poll_s)

    def look(self) -> None:
        """Order what new notices ask for. A node that has no host of the run yet is looked at again."""
        notices = self._draining()
        self._taken &= notices.keys()  # one that comes back may be drained again
        for node in sorted(notices.keys() - self._taken):
            why = f"its end is announced{_at(notices[node])}"
            try:
                self._order("drain", WHO, why, {"node": node})
                self._order("checkpoint", WHO, f"node {node} leaves", {})
            except ElasticError as error:
                logger.debug("notice for node %s: %s", node, error)
                continue
            self._taken.add(node)


def _at(end_ms: int) -> str:
    return time.strftime(" for %H:%M:%S UTC", time.gmtime(end_ms / 1000)) if end_ms else ""
