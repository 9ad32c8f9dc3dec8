"""Pins: small objects `pins/00000042.json`. The checkpoint of that log entry stays, whatever retention says, until
somebody takes the pin away."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from elastic.checkpoint.errors import CheckpointError
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.shard import check, sign
from elastic.storage.errors import ObjectMissing, StorageError
from elastic.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """who pinned it, why, and when in Unix time."""

    who: str
    why: str
    when_s: float


def pinned(store: Store) -> set[int]:
    """Numbers of what is pinned. The name alone counts: a damaged pin still pins."""
    digits = [name.removeprefix("pins/").removesuffix(".json") for name in store.list("pins/")]
    return {int(number) for number in digits if number.isdecimal()}


def read(store: Store, number: int) -> Pin | None:
    """None: not pinned, or nobody can say by whom."""
    try:
        body = check(store.get(_name(number)), name=_name(number))
        return Pin(who=str(body["who"]), why=str(body["why"]), when_s=float(body["when_s"]))
    except ObjectMissing:
        return None
    except (StorageError, KeyError, TypeError, ValueError) as error:
        return Pin(who="unknown", why=f"the pin can't be read: {error}", when_s=0.0)


def pin(store: Store, log: CommitLog, number: int, why: Pin) -> bool:
    """False: it was pinned already, and stays as it was. CheckpointError: the checkpoint was retired meanwhile.

    The object comes first, then a note in the log: a commit or a removal that did not see the object is older than the
    note, and then the note is refused.
    """
    new = store.put_if_absent(_name(number), sign(asdict(why)))
    if not log.note_pin(number, why.who):
        store.delete(_name(number))
        raise CheckpointError(f"the checkpoint of log entry {number} was retired or removed meanwhile: it is gone")
    return new


def unpin(store: Store, number: int) -> None:
    store.delete(_name(number))


def _name(number: int) -> str:
    return f"pins/{number:08d}.json"
