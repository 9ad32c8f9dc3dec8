"""What movers and trainers say to a mover over TCP, and the trainer's blocking side of it.

A frame is a big-endian uint32 length and that many bytes of JSON; raw bytes follow where the frame says so.
The first frame is {"hello": token}. Then requests, one at a time:

    {"describe": [generation, step], "rank": r}                 -> header (shard.py), then its facts
    {"read": [generation, step], "rank": r, "spans": [[a, b]]}  -> {"nbytes": n}, n bytes, until the spans are filled
    {"echo": n}, n bytes                                        -> {"nbytes": n}, then the same bytes
    {"push": header}    -> {"busy": why} or {"have": true} or {"go": true}; after go: facts, data -> {"done": true}
    {"push": header, "whole": true}, facts, data   (a small shard) -> {"busy": why} or {"have": true} or {"done": true}

With "object": name (of the shard's data in storage, or, with "disk": true, on the disk of its node) a mover that does
not hold the shard fetches it, and keeps it for others who ask (read_through.py). Meanwhile it says {"wait": true} now
and then: storage is slow, the mover is not dead.

{"error": sentence} answers what can't be done; with "storage": true because storage gave no answer, with "damaged":
true because what lies there is not what was written.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic.checkpoint.errors import CheckpointError, Damaged
from elastic.checkpoint.shard import Shard, facts_nbytes, of_header
from elastic.plan import Endpoint, SnapshotKey
from elastic.storage.errors import StorageError, StorageUnavailable

LENGTH = struct.Struct(">I")
FRAME_BYTES_MAX = 16 << 20
FACTS_BYTES_MAX = 256 << 20
SOCKET_BYTES = 4 << 20
ECHO_BYTES_MAX = 4 << 20


def frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def frame_length(raw: bytes | bytearray, limit: int = FRAME_BYTES_MAX) -> int:
    (length,) = LENGTH.unpack(raw)
    if length > limit:
        raise CheckpointError(f"a peer announced a frame of {length} bytes, at most {limit} are allowed")
    return int(length)


def parse(raw: bytes | bytearray) -> dict[str, Any]:
    """CheckpointError: not a JSON object, or one that tells an error; StorageUnavailable, Damaged: tells of that."""
    try:
        message = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"a peer sent a frame that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise CheckpointError(f"a peer sent {type(message).__name__}, wanted a JSON object")
    if "error" in message:
        told = StorageUnavailable if message.get("storage") else Damaged if message.get("damaged") else CheckpointError
        raise told(str(message["error"]))
    return message


def tune(sock: socket.socket) -> None:
    """No delay for small frames, large buffers for data, and a dead peer is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)


class MoverClient:
    """A trainer's connection to one mover. CheckpointError: unreachable, silent for `timeout_s`, or refused.

    Where `stored` names the shard's object in storage (or on its disk), the mover may fetch it; StorageUnavailable: it
    got no answer; Damaged: it found other bytes than were written, or none.
    """

    def __init__(self, endpoint: Endpoint, *, token: str, timeout_s: float) -> None:
        self._where = f"mover at {endpoint.address}:{endpoint.port}"
        self._timeout_s = timeout_s
        try:
            self._sock = socket.create_connection((endpoint.address, endpoint.port), timeout_s)
        except OSError as error:
            raise CheckpointError(f"{self._where} can't be reached: {error}; is its host gone?") from error
        tune(self._sock)
        self._send({"hello": token})

    def describe(self, key: SnapshotKey, rank: int, *, stored: str = "", disk: bool = False) -> Shard:
        self._send({"describe": [key.generation, key.step], "rank": rank, "object": stored, "disk": disk})
        header = self._frame()
        facts = np.empty(min(facts_nbytes(header), FACTS_BYTES_MAX), dtype=np.uint8)
        self._fill(facts)
        return of_header(header, facts.tobytes())

    def read(
        self,
        key: SnapshotKey,
        rank: int,
        spans: Sequence[tuple[int, int]],
        into: npt.NDArray[np.uint8],
        *,
        stored: str = "",
        disk: bool = False,
    ) -> None:
        """Fills `into[start:stop]` for each span. Nothing is verified here: the caller has the CRCs."""
        what = {"rank": rank, "spans": list(spans), "object": stored, "disk": disk}
        self._send({"read": [key.generation, key.step], **what})
        announced, left = 0, sum(stop - start for start, stop in spans)
        for start, stop in spans:
            while start < stop:
                if not announced:
                    announced = self._frame().get("nbytes", 0)
                    if not 0 < announced <= left:
                        raise CheckpointError(f"{self._where} sends {announced} bytes, wanted are at most {left}")
                    left -= announced
                piece = into[start : min(stop, start + announced)]
                self._fill(piece)
                start, announced = start + len(piece), announced - len(piece)

    def __enter__(self) -> MoverClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._sock.sendall(frame(message))
        except OSError as error:
            raise CheckpointError(f"{self._where} broke off: {error}") from error

    def _frame(self) -> dict[str, Any]:
        """The next that is more than a sign of life."""
        while "wait" in (message := self._next()):
            pass
        return message

    def _next(self) -> dict[str, Any]:
        head = np.empty(LENGTH.size, dtype=np.uint8)
        self._fill(head)
        body = np.empty(frame_length(head.tobytes()), dtype=np.uint8)
        self._fill(body)
        try:
            return parse(body.tobytes())
        except StorageUnavailable:
            raise
        except StorageError as error:
            raise (Damaged if isinstance(error, Damaged) else CheckpointError)(f"{self._where}: {error}") from error

    def _fill(self, into: npt.NDArray[np.uint8]) -> None:
        view = into.data
        try:
            while view:
                got = self._sock.recv_into(view)
                if not got:
                    raise CheckpointError(f"{self._where} closed the connection with {len(view)} bytes to come")
                view = view[got:]
        except TimeoutError as error:
            raise CheckpointError(f"{self._where} was silent for {self._timeout_s} s") from error
        except OSError as error:
            raise CheckpointError(f"{self._where} broke off: {error}") from error
