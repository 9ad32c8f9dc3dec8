"""What can go wrong with storage. Every message says what, got, wanted, what next."""

from __future__ import annotations

from elastic.config import ElasticError


class StorageError(ElasticError):
    """Storage refused, or does not hold what it should; another try would meet the same."""


class ObjectMissing(StorageError):
    """The store has no object of that name."""


class StorageUnavailable(StorageError):
    """Storage did not do what it could before and may do again: an outage, throttling, a full disk. No mistake of the
    configuration; what was refused is worth another try later."""
