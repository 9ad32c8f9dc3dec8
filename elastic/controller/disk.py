"""The tier between memory and storage: which safe snapshot goes to the nodes' disks next, which may be used. Pure.

One at a time: while one is written the newer ones are passed over, so a slow disk makes them rarer and nothing waits.
Buffers are held by it as by an upload.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.config import Config
from elastic.controller import durability
from elastic.controller.state import Decision, RunState, headline, released
from elastic.events import DiskWritten, Holding
from elastic.plan import DiskOrder, SnapshotKey

KEPT = 2  # whole snapshots: should one prove damaged there is another


def is_due(state: RunState, key: SnapshotKey, now_s: float, config: Config) -> bool:
    """Whether the safe `key` goes to the disks."""
    disk = state.disk
    if not disk.folder or disk.writing is not None or key.step >= config.steps:
        return False
    if not durability.may_try(disk.failures, disk.since_s, now_s):
        return False
    apart = key.step - disk.kept[-1].step if disk.kept else 0
    return not 0 < apart < config.snapshot.disk_interval_steps  # below 0: of a generation that went back


def began(state: RunState, key: SnapshotKey, now_s: float) -> RunState:
    return replace(state, disk=replace(state.disk, writing=key, since_s=now_s))


def limit_s(config: Config) -> float:
    """Of one write. A trainer that pauses may need the buffer."""
    return config.control.drain_timeout_s / 2


def give_up_if_late(state: RunState, now_s: float, config: Config) -> Decision:
    key, limit = state.disk.writing, limit_s(config)
    if key is None or now_s - state.disk.since_s <= limit:
        return Decision(state=state)
    why = f"it took over {limit:.0f} s (half of control.drain_timeout_s)"
    return ended(state, DiskWritten(key=key, failed=why), now_s)


def ended(state: RunState, event: DiskWritten, now_s: float) -> Decision:
    """The present write. A failure is said once, until one is whole again."""
    disk = state.disk
    if event.key != disk.writing:
        return Decision(state=state)
    if event.failed:
        told = f"step {event.key.step} is not on the nodes' disks: {event.failed}; training goes on, it is tried again"
        after = replace(disk, writing=None, since_s=now_s, failures=disk.failures + 1)
        told = "" if disk.failures else told
    else:
        told = f"step {event.key.step} is on the nodes' disks again" if disk.failures else ""
        after = replace(disk, writing=None, since_s=now_s, failures=0, kept=(*disk.kept, event.key)[-KEPT:])
    state = replace(state, disk=after)
    return Decision(state=replace(state, keep=released(state)), reason=told)


def order(state: RunState, *, is_member: bool, is_finished: bool) -> DiskOrder | None:
    """For one host. Only members write, and look again: what others tell would change with every snapshot."""
    disk = state.disk
    if not disk.folder:
        return None
    base = DiskOrder(folder=disk.folder, attempt=state.attempt, remove=is_finished)
    keep = disk.kept if len(disk.kept) == KEPT else ()
    return replace(base, write=disk.writing, keep=keep) if is_member else base


def is_usable(state: RunState, held: Holding) -> bool:
    """Of this attempt all that is not damaged: it was safe when it was written. Of earlier ones what `line` holds."""
    key = held.key
    if not state.disk.folder or key in state.disk.unusable:
        return False
    return held.attempt == state.attempt or any(
        (stretch.attempt, stretch.generation) == (held.attempt, key.generation)
        and stretch.first <= key.step <= stretch.last
        for stretch in state.disk.line
    )


def restored_from(state: RunState) -> bool:
    """Does the present generation start from a disk that nobody has complained of yet?"""
    restore = state.assignments[0].restore if state.assignments else None
    if restore is None or restore.key in state.disk.unusable:
        return False
    return any(source.tier == "disk" for source in restore.sources)


def forget(state: RunState, why: str) -> Decision:
    """What the present generation was to start from is damaged: it is not taken from disk again."""
    restore = state.assignments[0].restore
    assert restore is not None
    disk = replace(state.disk, unusable=state.disk.unusable | {restore.key})
    told = f"step {restore.key.step} on the nodes' disks is damaged, looking for an older state: {headline(why)}"
    return Decision(state=replace(state, disk=disk), reason=told)
