"""Does a Ray cluster answer at an address? Ray itself would try for minutes, without a word."""

from __future__ import annotations

import socket

CONNECT_TIMEOUT_S = 3.0


def unreachable(address: str) -> str:
    """Why nothing answers at `address`, HOST:PORT, empty if something does. Other forms ("auto") are left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in host:
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return f"the Ray cluster at {host}:{port} does not answer ({getattr(error, 'strerror', None) or error})"
    return ""
