"""A directory over HTTP, with ranges: storage that counts, in every process, what is fetched from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Web:
    """`fetched`: (object, bytes) of each answer. While `gate` is clear, requests for data wait; `waiting` is released
    once for each that does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fetched: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Semaphore(0)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def nbytes(self, ending: str = "") -> int:
        return sum(nbytes for name, nbytes in self.fetched if name.endswith(ending))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        web = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = web.root / self.path.lstrip("/")
                if self.path.endswith(".bin") and not web.gate.is_set():
                    web.waiting.release()
                    web.gate.wait()
                if not path.is_file():
                    self.send_error(404)
                    return
                whole = path.read_bytes()
                wanted = self.headers.get("Range")
                start, stop = 0, len(whole)
                if wanted is not None:
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, stop = int(first), min(int(last) + 1, len(whole)) if last else len(whole)
                self.send_response(200 if wanted is None else 206)
                self.send_header("Content-Length", str(stop - start))
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(whole)}")
                self.end_headers()
                web.fetched.append((self.path, stop - start))
                with suppress(BrokenPipeError, ConnectionResetError):  # the mover that asked was killed
                    self.wfile.write(whole[start:stop])

            def log_message(self, *_: Any) -> None:
                pass

        return Answer


@contextmanager
def web(root: Path) -> Iterator[Web]:
    found = Web(root)
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.gate.set()
        found.server.shutdown()
        thread.join()
        found.server.server_close()
