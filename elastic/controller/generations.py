"""The life of a generation that nothing breaks: form, start, drain for a planned change, pause, save, finish. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastic.config import Config
from elastic.controller import disk, durability, sources
from elastic.controller.actions import (
    DrainGeneration,
    FailRun,
    FinishRun,
    StartGeneration,
    StopGeneration,
    UploadSnapshot,
)
from elastic.controller.membership import (
    available,
    form,
    hosts_wanted,
    node_of,
    nodes_wanted,
    partners,
    pause_step,
)
from elastic.controller.state import Decision, Phase, RunState, headline
from elastic.events import Report
from elastic.plan import Assignment, Member, RestorePlan, SnapshotKey
from elastic.planner import search


def start(state: RunState, now_s: float, config: Config) -> Decision:
    """WAITING: form a membership, choose the newest state it can have, give each member its assignment."""
    if state.step == state.durable_step and (state.step >= config.steps or state.stop_why):
        return _end(state, now_s, config)
    if state.paused_by and not state.stop_why:
        return _hold(state, f"paused by {state.paused_by}", now_s, config)
    members, reason = form(state, config, now_s)
    if members is None:
        fewest = hosts_wanted(state, config)[0]
        enough = len(available(state, fewest)) >= fewest
        since_s = (state.enough_since_s or now_s) if enough else None
        if not enough and now_s - state.since_s > config.control.hosts_wait_s:
            waiting = replace(state, waiting_for=reason)
            return fail(waiting, "not enough hosts", f"{reason} for {config.control.hosts_wait_s:.0f} s", now_s)
        return _hold(replace(state, enough_since_s=since_s), reason, now_s, config)
    restore, tier = sources.choose(state.present, members, state.durable, lambda held: disk.is_usable(state, held))
    step = restore.key.step if restore else 0
    until_step = step if state.stop_why else pause_step(config, step)
    generation = state.generation + 1
    assignments = _assign(state, config, members, generation, restore, until_step)
    started = replace(
        state,
        phase=Phase.STARTING,
        since_s=now_s,
        generation=generation,
        assignments=assignments,
        step=step,
        highest_step=max(step, state.highest_step),
        safe=None,
        keep=restore.key if restore else None,
        disk=replace(state.disk, writing=None),
        draining="",
        drain_since_s=0.0,
        enough_since_s=None,
        candidate_since_s=None,
        waiting_for="",
        observed={},
    )
    action = StartGeneration(
        generation=generation,
        hosts=tuple(report.host for report in members),
        step=step,
        until_step=until_step,
        restore=restore.key if restore else None,
        tier=tier,
    )
    return Decision(
        state=started,
        actions=(action,),
        reason=f"generation {generation}: {reason}, from step {step} {_where(tier, state)}",
    )


def reads_storage(state: RunState) -> bool:
    """Does the present generation start from a checkpoint in storage, or from disks, which may take long?"""
    restore = state.assignments[0].restore if state.assignments else None
    return restore is not None and any(source.tier in ("disk", "storage") for source in restore.sources)


def _where(tier: str, state: RunState) -> str:
    if tier != "disk":
        return f"({tier})"
    last = f"is of step {state.durable_step}" if state.durable else "does not exist"
    return f"on the nodes' disks; the last durable checkpoint {last}"


def _hold(state: RunState, reason: str, now_s: float, config: Config) -> Decision:
    """Wait, and meanwhile make the state durable: the hosts that have it in memory may leave."""
    told = reason if reason != state.waiting_for else ""
    state = replace(state, waiting_for=reason)
    if state.upload is None and (state.step <= state.durable_step or not _all_hold(state)):
        return Decision(state=state, reason=told)
    saved = durability.save_newest(state, now_s, config)
    return replace(saved, reason="; ".join(filter(None, (told, saved.reason))))


def _all_hold(state: RunState) -> bool:
    """Whether each member of the last generation is here with its sealed shard of the newest step."""
    key = SnapshotKey(generation=state.generation, step=state.step)
    present = {report.host: report for report in state.present}
    return bool(state.members) and all(
        host in present
        and any(held.key == key and held.tier == "own" and held.sealed for held in present[host].holdings)
        for host in state.members
    )


def _assign(
    state: RunState,
    config: Config,
    chosen: tuple[Report, ...],
    generation: int,
    restore: RestorePlan | None,
    until_step: int,
) -> tuple[Assignment, ...]:
    members = tuple(Member(host=r.host, node=r.node, domain=r.domain, mover=r.mover, store=r.store) for r in chosen)
    plan = search.choose(config, len(members))
    keepers = partners(members, sources_max=config.snapshot.sources_max) if config.snapshot.partner else {}
    return tuple(
        Assignment(
            run=state.run,
            attempt=state.attempt,
            generation=generation,
            rank=rank,
            plan=plan,
            members=members,
            restore=restore,
            until_step=until_step,
            partner=members[keepers[rank]].mover if rank in keepers else None,
        )
        for rank in range(len(members))
    )


def drain(state: RunState, why: str, now_s: float) -> Decision:
    drained = replace(state, draining=why, drain_since_s=now_s)
    return Decision(
        state=drained,
        actions=(DrainGeneration(generation=state.generation),),
        reason=f"pause at the next step: {why}",
    )


def unwanted(state: RunState, config: Config) -> str:
    """Why the present generation should pause at the next step boundary; "" where it may go on."""
    if state.stop_why:
        return f"stop ({state.stop_why})"
    if state.paused_by:
        return f"pause ({state.paused_by})"
    nodes = {node_of(state.hosts, host) for host in state.members}
    if out := sorted(nodes & state.quarantined.keys()):
        return f"node {out[0]} is out: {state.quarantined[out[0]]}"
    if state.nodes_wanted is not None and len(nodes) > state.nodes_wanted:
        return f"resize to {state.nodes_wanted} nodes"
    if state.hosts_wanted is not None and not config.schedule and len(state.members) > state.hosts_wanted:
        return f"resize to {state.hosts_wanted} hosts"
    return ""


def observe(state: RunState, what: str, would: str) -> Decision:
    """A policy in observe mode: say once what would be done."""
    if what in state.observed:
        return Decision(state=state)
    return Decision(state=replace(state, observed={**state.observed, what: would}), reason=f"would {would}")


def grow(state: RunState, now_s: float, config: Config) -> Decision:
    """RUNNING: take in hosts that are ready, several at once, at a step boundary."""
    most = hosts_wanted(state, config)[1] if not config.schedule else len(state.members)
    is_ordered = state.nodes_wanted is not None or state.hosts_wanted is not None
    if len(state.members) >= most or (config.policies.resize == "off" and not is_ordered):
        return Decision(state=state)
    nodes = nodes_wanted(state)
    out = {*state.members, *state.refused, *state.held}
    free = [r for r in state.present if r.host not in out and r.node in nodes]
    able = [r for r in available(state) if r.host not in state.members]
    candidates = [r for r in able if r.warm or not config.warm_standby]
    if not candidates:
        return Decision(state=state if state.candidate_since_s is None else replace(state, candidate_since_s=None))
    since_s = now_s if state.candidate_since_s is None else state.candidate_since_s
    others_coming = len(candidates) < len(free) and len(state.members) + len(candidates) < most
    if others_coming and now_s - since_s < config.control.grow_wait_s:
        return Decision(state=replace(state, candidate_since_s=since_s))
    names = ", ".join(sorted(report.host for report in candidates))
    if config.policies.resize == "observe" and not is_ordered:
        return observe(state, "resize", f"take in {names} (policies.resize)")
    return drain(state, f"{names} can join", now_s)


def is_stopped(state: RunState, report: Report) -> bool:
    """No trainer of this host can still touch the arena."""
    trainer = report.trainer
    return trainer.phase in ("none", "exited") and trainer.generation <= state.generation


def _paused_step(state: RunState, host: str) -> int | None:
    report = state.hosts.get(host)
    if report is None or report.trainer.generation != state.generation or report.trainer.exit is None:
        return None
    ended = report.trainer.exit
    return ended.step if ended.kind in ("paused", "done") else None


def any_paused(state: RunState) -> bool:
    return any(_paused_step(state, host) is not None for host in state.members)


def all_paused(state: RunState) -> int | None:
    """The step at which every member paused, or None while one still runs."""
    steps = [_paused_step(state, host) for host in state.members]
    known = {step for step in steps if step is not None}
    if len(known) != 1 or None in steps:
        return None
    return known.pop()


def paused(state: RunState, step: int, now_s: float, config: Config) -> Decision:
    """All trainers ended by themselves at `step`: save at the run's end or on a stop, else the next generation."""
    at_pause = replace(
        state,
        step=step,
        highest_step=max(step, state.highest_step),
        since_s=now_s,
        draining="",
        drain_since_s=0.0,
        incident=None,
    )
    reason = f"generation {state.generation} paused at step {step}"
    if step < config.steps and not state.stop_why:
        return Decision(state=replace(at_pause, phase=Phase.WAITING), reason=reason)
    if step == state.durable_step:
        ended = _end(at_pause, now_s, config)
        return replace(ended, reason=f"{reason}; {ended.reason}")
    key = SnapshotKey(generation=state.generation, step=step)
    saving = durability.began(replace(at_pause, phase=Phase.SAVING, keep=key), key, now_s)
    return Decision(state=saving, actions=(UploadSnapshot(key=key),), reason=reason)


def save(state: RunState, now_s: float, config: Config) -> Decision:
    """SAVING: until the last step is committed, for a limited time."""
    if state.durable is not None and state.durable.key.step >= state.step:
        return _end(state, now_s, config)
    if now_s - state.since_s > config.control.upload_timeout_s:
        why = state.not_durable or f"the upload takes over {config.control.upload_timeout_s:.0f} s"
        detail = (
            f"step {state.step} is not durable: {why}; {durability.last(state, now_s)}; the same command goes on from "
            "there"
        )
        return fail(state, "checkpoint", detail, now_s)
    return durability.save_newest(state, now_s, config)


def _end(state: RunState, now_s: float, config: Config) -> Decision:
    phase = Phase.FINISHED if state.step >= config.steps else Phase.STOPPED
    ended = replace(state, phase=phase, since_s=now_s, upload=None)
    return Decision(state=ended, actions=(FinishRun(step=state.step),), reason=f"the run {phase} at step {state.step}")


def fail(state: RunState, failure: str, detail: str, now_s: float) -> Decision:
    failed = replace(state, phase=Phase.FAILED, since_s=now_s, failure=failure, detail=detail, upload=None)
    return Decision(
        state=failed,
        actions=(StopGeneration(generation=state.generation), FailRun(failure=failure, detail=detail)),
        reason=f"the run failed, {failure}: {headline(detail)}",
    )
