"""Schema numbers of all that outlives a version of elastic: read, or refused with one sentence that names both."""

from __future__ import annotations


def refusal(name: str, got: object, reads: int) -> str:
    """Why `name`, which says that its schema is `got`, is not read by code that reads `reads`; "" where it is."""
    if got == reads:
        return ""
    if isinstance(got, int) and got > reads:
        return f"{name} has schema {got}, this elastic reads {reads}: a newer one wrote it; upgrade elastic"
    return f"{name} has schema {got!r}, this elastic reads {reads} and no older one; use the elastic that wrote it"
