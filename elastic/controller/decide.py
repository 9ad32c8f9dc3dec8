"""The controller: (state, event, now) -> (state, actions, reason). No clock, no Ray, no torch, no I/O.

An event first changes what is known (`_take_*`), then `_advance` moves the phase as far as the knowledge
allows. Everything is level-triggered: an event that tells nothing new changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic import events
from elastic.config import Config
from elastic.config_live import with_settings
from elastic.controller import admission, checkpoint_pace, disk, durability, generations, recovery, requests
from elastic.controller.actions import (
    Action,
    CommitCheckpoint,
    EvictHost,
    KeepSnapshot,
    UploadSnapshot,
    WriteSnapshot,
)
from elastic.controller.state import ALIVE, TERMINAL, Decision, Disk, Phase, RunState, check, released
from elastic.health import silence

GENERATIONS_TOLD_MAX = 64


def decide(state: RunState, event: events.Event, now_s: float, config: Config) -> Decision:
    """One event, one decision. Terminal states stay as they are."""
    if state.phase in TERMINAL:
        return Decision(state=state)
    taken = _TAKE[type(event)](state, event, now_s, effective(state, config))
    config = effective(taken.state, config)  # what the event has set counts from here on
    reviewed = admission.review(state, taken.state, now_s, config)
    advanced = _advance(durability.drop_if_lost(reviewed.state), now_s, config)
    decision = Decision(
        state=advanced.state,
        actions=taken.actions + reviewed.actions + advanced.actions,
        reason="; ".join(filter(None, (taken.reason, reviewed.reason, advanced.reason))),
    )
    check(decision.state, config)
    return decision


def effective(state: RunState, config: Config) -> Config:
    """`config` with what was set since the attempt began."""
    return with_settings(config, tuple(state.settings.items())) if state.settings else config


# ---------------------------------------------------------------- what an event tells


def _run_started(state: RunState, event: events.RunStarted, now_s: float, config: Config) -> Decision:
    step = min(event.durable.key.step, config.steps) if event.durable else 0
    began = replace(
        state,
        run=event.run,
        attempt=event.attempt,
        durable=event.durable,
        older=event.older,
        step=step,
        highest_step=step,
        generation=event.generation,
        since_s=now_s,
        began_s=now_s,
        durable_at_s=now_s,
        disk=Disk(folder=event.disk, line=event.line),
    )
    origin = event.origin or (f"from the checkpoint of step {step}" if event.durable else "from the seed")
    changed = f"; changed and allowed: {', '.join(event.changes)}" if event.changes else ""
    return Decision(state=began, reason=f"attempt {event.attempt} of {event.run} starts {origin}{changed}")


def _coordinator_restarted(state: RunState, event: events.CoordinatorRestarted, now_s: float, _: Config) -> Decision:
    return Decision(state=state, reason="the coordinator is back, state folded from its journal")


def _host_reported(state: RunState, event: events.HostReported, now_s: float, config: Config) -> Decision:
    report = event.report
    known = state.hosts.get(report.host)
    if report.host in state.gone:
        return Decision(state=state, reason=f"{report.host} was evicted, its report counts no more")
    if known is not None and known.seq >= report.seq:
        return Decision(state=state)
    after = replace(
        state,
        hosts={**state.hosts, report.host: report},
        silent=state.silent - {report.host},
        observed={what: would for what, would in state.observed.items() if what != report.host},
    )
    reason = f"{report.host} joined" if known is None else ""
    if report.host in state.silent:
        reason = f"{report.host} is heard again"
    if known is not None and report.ready and not known.ready:
        reason = f"{report.host} is ready"
    trainer = report.trainer
    ended = trainer.exit is not None and trainer.generation == state.generation and report.host in state.members
    if ended and (known is None or known.trainer != trainer):
        return recovery.trainer_exited(after, report, now_s, config)
    return Decision(state=after, reason=reason)


def _host_gone(state: RunState, event: events.HostGone, now_s: float, config: Config) -> Decision:
    if event.host not in state.hosts:
        return Decision(state=state)
    return recovery.host_lost(state, event.host, "lost host", event.reason, now_s, config)


def _host_silent(state: RunState, event: events.HostSilent, now_s: float, config: Config) -> Decision:
    if event.host not in state.hosts or event.host in state.silent:
        return Decision(state=state)
    member = event.host in state.members and state.phase in ALIVE
    source = state.phase is Phase.STARTING and recovery.is_source(state, event.host)
    lost, why = silence.verdict(
        silent_s=event.silent_s,
        stalled_s=event.stalled_s,
        limit_s=config.control.silence_s,
        takes_part=member or source,
    )
    if not lost or config.policies.evict == "off":
        return Decision(state=state)
    if config.policies.evict == "observe":
        return generations.observe(state, event.host, f"go on without {event.host} (policies.evict): {why}")
    return recovery.host_silent(state, event.host, why, now_s, config)


def _step_completed(state: RunState, event: events.StepCompleted, now_s: float, _: Config) -> Decision:
    record = event.record
    if record.step <= state.steps_told.get(record.generation, 0):
        return Decision(state=state)
    told = {**state.steps_told, record.generation: record.step}
    for old in sorted(told)[:-GENERATIONS_TOLD_MAX]:
        del told[old]
    after = replace(state, steps_told=told, highest_step=max(state.highest_step, record.step))
    if record.generation != state.generation or record.step <= state.step:
        return Decision(state=after)
    # Also while STOPPING or WAITING: a survivor tells steps that rank 0 completed and could not report.
    pace = checkpoint_pace.step_ended(state.pace, record.seconds, uploading=state.upload is not None)
    after = replace(after, step=record.step, pace=pace)
    if state.phase is not Phase.STARTING:
        return Decision(state=after)
    reason = f"generation {state.generation} completed step {record.step}"
    if state.incident is not None:
        reason += f": incident {state.incident.number} is over after {now_s - state.incident.at_s:.2f} s"
    return Decision(state=replace(after, phase=Phase.RUNNING, since_s=now_s, incident=None), reason=reason)


def _step_safe(state: RunState, event: events.StepSafe, now_s: float, config: Config) -> Decision:
    key = event.key
    if key.generation != state.generation or (state.safe is not None and key <= state.safe):
        return Decision(state=state)
    after, actions, reason = replace(state, safe=key), list[Action](), ""
    why = durability.why_due(state, key.step, now_s, config) if state.upload is None else None
    if why is not None:
        pace = checkpoint_pace.upload_began(state.pace)
        after = durability.began(replace(after, pace=pace), key, now_s)
        actions, reason = [UploadSnapshot(key=key)], f"checkpoint of step {key.step} is due{why}"
    if disk.is_due(state, key, now_s, config):
        after = disk.began(after, key, now_s)
        actions.append(WriteSnapshot(key=key))
    # The buffers that are copied from stay; the newer snapshot is protected by its age anyway.
    after = replace(after, keep=released(after))
    if after.keep == key:
        actions.insert(0, KeepSnapshot(key=key))
    return Decision(state=after, actions=tuple(actions), reason=reason)


def _upload_completed(state: RunState, event: events.UploadCompleted, _: float, __: Config) -> Decision:
    if event.key != state.upload:
        return Decision(state=state)
    without = tuple(plan.sources[0].object for plan in state.damaged)
    return Decision(state=state, actions=(CommitCheckpoint(key=event.key, without=without),))


def _checkpoint_committed(state: RunState, event: events.CheckpointCommitted, now_s: float, config: Config) -> Decision:
    return durability.committed(state, event, now_s, config)


def _commit_failed(state: RunState, event: events.CommitFailed, now_s: float, _: Config) -> Decision:
    if event.fenced_by:
        detail = f"attempt {event.fenced_by} has taken over this run; attempt {state.attempt} ends"
        return generations.fail(state, "fenced", detail, now_s)
    if event.key != state.upload:
        return Decision(state=state)  # of a generation that is over
    return durability.failed(state, event.reason, now_s)


def _disk_written(state: RunState, event: events.DiskWritten, now_s: float, _: Config) -> Decision:
    return disk.ended(state, event, now_s)


def _tick(state: RunState, _: events.Tick, __: float, ___: Config) -> Decision:
    return Decision(state=state)


_TAKE: dict[type[Any], Callable[[RunState, Any, float, Config], Decision]] = {
    events.RunStarted: _run_started,
    events.CoordinatorRestarted: _coordinator_restarted,
    events.HostReported: _host_reported,
    events.HostGone: _host_gone,
    events.HostSilent: _host_silent,
    events.StepCompleted: _step_completed,
    events.StepSafe: _step_safe,
    events.UploadCompleted: _upload_completed,
    events.CheckpointCommitted: _checkpoint_committed,
    events.CommitFailed: _commit_failed,
    events.DiskWritten: _disk_written,
    **dict.fromkeys(requests.KINDS, requests.take),
    events.Tick: _tick,
}


# ---------------------------------------------------------------- how far that leads


def _advance(state: RunState, now_s: float, config: Config) -> Decision:
    """Move the phase while it can move. Bounded: each turn leaves a phase, and only WAITING can follow another."""
    actions: tuple[Any, ...] = ()
    reasons: list[str] = []
    for _ in range(4):
        before = state
        decision = _PHASE.get(state.phase, _rest)(state, now_s, config)
        state = decision.state
        actions += decision.actions
        if decision.reason:
            reasons.append(decision.reason)
        if state.phase is before.phase:
            break
    return Decision(state=state, actions=actions, reason="; ".join(reasons))


def _rest(state: RunState, _: float, __: Config) -> Decision:
    return Decision(state=state)


def _starting(state: RunState, now_s: float, config: Config) -> Decision:
    if (paused := generations.all_paused(state)) is not None:
        return generations.paused(state, paused, now_s, config)
    limit_s = config.control.start_timeout_s
    if generations.reads_storage(state):
        limit_s += config.control.restore_timeout_s
    if now_s - state.since_s <= limit_s:
        return _drain_if_due(state, now_s, config)
    absent = tuple(h for h in state.members if state.hosts[h].trainer.generation < state.generation)
    detail = f"no step within {limit_s:.0f} s; not started: {', '.join(absent) or 'none'}"
    return recovery.fail_generation(state, "start timeout", absent, None, detail, now_s, config)


def _running(state: RunState, now_s: float, config: Config) -> Decision:
    if (paused := generations.all_paused(state)) is not None:
        return generations.paused(state, paused, now_s, config)
    for give_up_if_late in (durability.give_up_if_late, disk.give_up_if_late):
        late = give_up_if_late(state, now_s, config)
        if late.state is not state:
            return late
    return _drain_if_due(state, now_s, config)


def _drain_if_due(state: RunState, now_s: float, config: Config) -> Decision:
    """A planned change: let the trainers pause at the next boundary. One that does not come is a failure."""
    if state.draining or generations.any_paused(state):
        since_s = state.drain_since_s if state.drain_since_s else now_s
        if now_s - since_s > config.control.drain_timeout_s:
            late = tuple(h for h in state.members if state.hosts[h].trainer.phase != "exited")
            detail = f"not at a step boundary within {config.control.drain_timeout_s:.0f} s: {', '.join(late)}"
            return recovery.fail_generation(state, "drain timeout", late, None, detail, now_s, config)
        return Decision(state=state if state.drain_since_s else replace(state, drain_since_s=now_s))
    if why := generations.unwanted(state, config):
        return generations.drain(state, why, now_s)
    if state.phase is Phase.RUNNING:
        return generations.grow(state, now_s, config)
    return Decision(state=state)


def _stopping(state: RunState, now_s: float, config: Config) -> Decision:
    """Wait for each member's trainer to be reaped; a host that can't do it in time loses its place."""
    present = [report for report in state.present if report.host in state.members]
    unfinished = [report.host for report in present if not generations.is_stopped(state, report)]
    if unfinished and now_s - state.since_s <= config.control.stop_timeout_s:
        return Decision(state=state)
    evicted = replace(
        state,
        hosts={h: r for h, r in state.hosts.items() if h not in unfinished},
        gone=state.gone | frozenset(unfinished),
    )
    actions = tuple(EvictHost(host=host) for host in unfinished)
    reason = (
        f"evicted, not stopped in {config.control.stop_timeout_s:.0f} s: {', '.join(unfinished)}" if unfinished else ""
    )
    stopped = recovery.conclude(evicted, now_s, config)
    return Decision(
        state=stopped.state,
        actions=actions + stopped.actions,
        reason="; ".join(filter(None, (reason, stopped.reason))),
    )


_PHASE: dict[Phase, Callable[[RunState, float, Config], Decision]] = {
    Phase.WAITING: generations.start,
    Phase.STARTING: _starting,
    Phase.RUNNING: _running,
    Phase.STOPPING: _stopping,
    Phase.SAVING: generations.save,
}
