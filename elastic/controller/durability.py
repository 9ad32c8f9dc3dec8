"""Making the newest step durable: when to try, what a failed try means, what a commit ends. Pure.

Training never waits for storage. A try that failed gives the buffers free at once, and the next one takes whatever
snapshot is then the newest, ever more rarely.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.config import Config
from elastic.controller import checkpoint_pace
from elastic.controller.actions import UploadSnapshot
from elastic.controller.state import ALIVE, Decision, RunState, released
from elastic.events import CheckpointCommitted
from elastic.plan import SnapshotKey

WAIT_S_MAX = 30.0
_DOUBLINGS_MAX = 10


def why_due(state: RunState, step: int, now_s: float, config: Config) -> str | None:
    """Why the safe `step` is to be made durable now ("" where the interval is given), None: it is not."""
    apart, why = interval(state, now_s, config)
    wanted = state.checkpoint_wanted or step - state.durable_step >= apart
    return why if wanted and step < config.steps and _may_try(state, now_s) else None


def interval(state: RunState, now_s: float, config: Config) -> tuple[int, str]:
    """Steps between checkpoints, and why where that was not given."""
    if config.checkpoint.interval_steps:
        return config.checkpoint.interval_steps, ""
    steps, why = checkpoint_pace.interval(state.pace, attempt_s=now_s - state.began_s, incidents=state.incidents)
    return steps, f", {why}"


def may_try(failures: int, since_s: float, now_s: float) -> bool:
    """After so many failures in a row, the last one at `since_s`: ever more rarely."""
    return not failures or now_s - since_s >= min(2.0 ** min(failures, _DOUBLINGS_MAX), WAIT_S_MAX)


def _may_try(state: RunState, now_s: float) -> bool:
    return may_try(state.commit_failures, state.upload_since_s, now_s)


def began(state: RunState, key: SnapshotKey, now_s: float) -> RunState:
    """The hosts of this generation upload their shards of `key`, whatever becomes of the generation."""
    return replace(state, upload=key, upload_hosts=state.members, upload_since_s=now_s, checkpoint_wanted=False)


def drop_if_lost(state: RunState) -> RunState:
    """An upload outlives its trainers and its generation, not the hosts that hold its shards."""
    if state.upload is None or all(host in state.hosts and host not in state.silent for host in state.upload_hosts):
        return state
    return replace(state, upload=None, checkpoint_wanted=True)


def save_newest(state: RunState, now_s: float, config: Config) -> Decision:
    """While no trainer runs: have the newest step uploaded; what failed or takes too long is tried again."""
    if state.upload is not None:
        return give_up_if_late(state, now_s, config)
    if not _may_try(state, now_s):
        return Decision(state=state)
    key = SnapshotKey(generation=state.generation, step=state.step)
    asked = began(state, key, now_s)
    return Decision(state=replace(asked, keep=key), actions=(UploadSnapshot(key=key),))


def give_up_if_late(state: RunState, now_s: float, config: Config) -> Decision:
    limit_s = config.control.upload_timeout_s
    if state.upload is None or now_s - state.upload_since_s <= limit_s:
        return Decision(state=state)
    return failed(state, f"it took over {limit_s:.0f} s (control.upload_timeout_s)", now_s)


def failed(state: RunState, why: str, now_s: float) -> Decision:
    """The present upload, or its commit, failed. Said once, until a checkpoint is durable again."""
    assert state.upload is not None
    after = replace(
        state,
        upload=None,
        upload_since_s=now_s,
        commit_failures=state.commit_failures + 1,
        checkpoint_wanted=True,
        not_durable=why,
        not_durable_since_s=state.not_durable_since_s if state.not_durable else now_s,
    )
    after = replace(after, keep=released(after))
    if state.not_durable:
        return Decision(state=after)
    goes_on = "training goes on, " if state.phase in ALIVE else ""
    told = f"checkpoint of step {state.upload.step} is not durable yet: {why}"
    return Decision(state=after, reason=f"{told}; it is tried again, {goes_on}{last(state, now_s)}")


def last(state: RunState, now_s: float) -> str:
    age_s = now_s - state.durable_at_s
    if state.durable is None:
        return f"no checkpoint is durable, the run began {age_s:.0f} s ago"
    return f"the last durable one is of step {state.durable_step}, {age_s:.0f} s ago"


def committed(state: RunState, event: CheckpointCommitted, now_s: float, config: Config) -> Decision:
    after = replace(state, durable_at_s=now_s, commit_failures=0, not_durable="")
    if event.key.step >= state.durable_step:
        older = (state.durable, *state.older) if state.durable else state.older
        after = replace(after, durable=event.restore, older=older[: config.checkpoint.keep - 1])
    if event.key == state.upload:
        pace = checkpoint_pace.upload_ended(state.pace, now_s - state.upload_since_s)
        after = replace(after, upload=None, pace=pace)
        after = replace(after, keep=released(after))
    told = f"checkpoint of step {event.key.step} is committed as entry {event.number}"
    if state.not_durable:
        told += f": storage takes checkpoints again, after {now_s - state.not_durable_since_s:.0f} s"
    return Decision(state=after, reason=told)
