"""What a trainer tells its host, as JSON lines on its own socket: marks of the start, step records, its end.

Times are CLOCK_MONOTONIC seconds, which host and trainer share.
"""

from __future__ import annotations

import json
import socket
import time
import traceback
from dataclasses import asdict
from typing import Any

from elastic.events import Exit, StepRecord, to_json

# A host that reads nothing for this long is frozen; its trainer ends rather than waits.
SEND_TIMEOUT_S = 60.0
DETAIL_LINES = 30
DETAIL_CHARS = 4000


class Probes:
    """The trainer's end of the socket."""

    def __init__(self, channel: socket.socket) -> None:
        channel.settimeout(SEND_TIMEOUT_S)
        self._channel = channel

    def warm(self) -> None:
        """The standby has run its throw-away step."""
        self._say({"warm": True})

    def mark(self, phase: str) -> None:
        """`phase` of the start has ended now."""
        self._say({"mark": phase, "at_s": time.monotonic()})

    def record(self, record: StepRecord) -> None:
        self._say({"record": to_json(record)})

    def ended(self, ended: Exit) -> None:
        self._say({"exit": asdict(ended)})

    def _say(self, message: dict[str, Any]) -> None:
        self._channel.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def tail(text: str) -> str:
    """The last lines of `text`, bounded."""
    return "\n".join(text.splitlines()[-DETAIL_LINES:])[-DETAIL_CHARS:]


def traceback_tail(error: BaseException) -> str:
    return tail("".join(traceback.format_exception(error)))
