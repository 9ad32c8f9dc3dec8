"""Does a Ray cluster answer at an address? Ray itself would try for minutes, without a word."""

from __future__ import annotations

import socket

from elastic.cluster.ray_core import bootstrap_address

CONNECT_TIMEOUT_S = 3.0


def unreachable(address: str) -> str:
    """Why nothing answers at `address`, HOST:PORT or "auto", empty if something does. Other forms are left to Ray."""
    if "://" in address:
        return ""
    try:
        host, _, port = bootstrap_address(address).rpartition(":")
    except (ConnectionError, ValueError) as error:
        return str(error).rstrip(".")
    if not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return f"the Ray cluster at {host}:{port} does not answer ({getattr(error, 'strerror', None) or error})"
    return ""
