"""What Ctrl-C and SIGTERM mean to `elastic train`: the first asks the run to stop, the second ends it, the third kills.

No Ray here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn

from elastic.chaos.inject import family, send_signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KILLS_AT = 3
EXIT_KILLED = 130


class Ladder:
    """A context manager for the main thread; the handlers that were there before come back at its end.

    While `gentle`, the first signal only sets `asked`. The next one, or the first while nothing could be saved,
    raises KeyboardInterrupt in the main thread, once: the clean-up after it is not broken off. The third is acted on
    in a thread of its own, for the main one may hang: SIGKILL for all descendants, then for this process.
    """

    def __init__(self) -> None:
        self.asked = False
        self.gentle = False
        self._ending = False
        self._before: dict[signal.Signals, Any] = {}
        self._before_fd = -1
        self._reader, self._writer = socket.socketpair()

    def __enter__(self) -> Ladder:
        self._writer.setblocking(False)
        # The kernel's handler writes here at once, also while the main thread is in C code.
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        threading.Thread(target=self._watch, name="ladder", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._writer.close()

    def end(self) -> NoReturn:
        """End now, as the second signal does."""
        self._ending = True
        raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._ending:
            return
        if self.gentle and not self.asked:
            self.asked = True
        else:
            self.end()

    def _watch(self) -> None:
        seen = 0
        while data := self._reader.recv(64):
            seen += sum(number in SIGNALS for number in data)
            if seen >= KILLS_AT:
                print("elastic: killed", file=sys.stderr, flush=True)
                send_signal(family(os.getpid())[1:], signal.SIGKILL)
                os._exit(EXIT_KILLED)
        self._reader.close()
