"""From what broke to a stopped generation: losses, exits, incidents, the restart budget. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastic.config import Config
from elastic.controller import disk, generations
from elastic.controller.actions import EvictHost, StopGeneration
from elastic.controller.membership import node_of
from elastic.controller.state import ALIVE, Decision, Incident, Phase, RunState, headline
from elastic.events import Exit, Report
from elastic.plan import RestorePlan

STORAGE = "storage outage"  # of the place that the state is only left in: waited for, and counted by no budget

# The more telling failure replaces a symptom seen earlier in the same generation.
_TELLING = (
    "broken connection",
    "damaged snapshot",
    "damaged checkpoint",
    STORAGE,
    "start timeout",
    "drain timeout",
    "silent host",
    "lost host",
    "lost process",
    "user code",
)


def trainer_exited(state: RunState, report: Report, now_s: float, config: Config) -> Decision:
    """A member's trainer of this generation ended."""
    ended = report.trainer.exit
    assert ended is not None, report
    rank = state.members.index(report.host)
    if ended.kind in ("paused", "done"):
        return Decision(state=state, reason=f"rank {rank} {ended.kind} at step {ended.step}")
    if state.phase is Phase.STOPPING and ended.kind == "stopped":
        return Decision(state=state)
    if state.phase not in (*ALIVE, Phase.STOPPING):
        return Decision(state=state)
    if ended.damaged and disk.restored_from(state):
        forgotten = disk.forget(state, ended.detail)
        failed = fail_generation(forgotten.state, "damaged snapshot", (), rank, ended.detail, now_s, config)
        return replace(failed, reason=f"{forgotten.reason}; {failed.reason}")
    if ended.damaged and _restored_from(state, state.durable):
        given_up = _go_back(state, ended.detail)
        if given_up.state.durable is None:
            return generations.fail(given_up.state, "no checkpoint", given_up.reason, now_s)
        failed = fail_generation(given_up.state, "damaged checkpoint", (), rank, ended.detail, now_s, config)
        return replace(failed, reason=f"{given_up.reason}; {failed.reason}")
    named = {"user": "user code", "peer": "broken connection", "storage": STORAGE}
    failure = named.get(ended.kind, "lost process")
    if ended.blame and ended.blame in state.hosts and ended.blame not in state.silent:
        # Out until it reports again: the next generation looks for its shards elsewhere.
        blamed = host_silent(state, ended.blame, f"rank {rank} could not read from it", now_s, config)
        state = blamed.state
    return fail_generation(state, failure, (report.host,), rank, _story(rank, report.host, ended), now_s, config)


def _restored_from(state: RunState, checkpoint: RestorePlan | None) -> bool:
    """Is it what the present generation starts from? The second rank that finds the same damage tells nothing new."""
    restore = state.assignments[0].restore if state.assignments else None
    if restore is None or checkpoint is None or restore.key != checkpoint.key:
        return False
    return all(source.tier == "storage" for source in restore.sources)


def _go_back(state: RunState, why: str) -> Decision:
    """Nothing is used of a damaged checkpoint. Never from the seed instead: that would undo the run in silence."""
    assert state.durable is not None
    step = state.durable.key.step
    if not state.older:
        told = f"the checkpoint of step {step} is damaged, and there is no older one: {headline(why)}"
        return Decision(state=replace(state, durable=None), reason=told)
    first, *rest = state.older
    told = f"the checkpoint of step {step} is damaged, going back to that of step {first.key.step}: {headline(why)}"
    after = replace(state, durable=first, older=tuple(rest), damaged=(*state.damaged, state.durable))
    return Decision(state=after, reason=told)


def _story(rank: int, host: str, ended: Exit) -> str:
    how = f"signal {ended.signal}" if ended.signal else f"exit code {ended.code}"
    first = f"rank {rank} on {host} ended ({ended.kind}, {how}) after step {ended.step}"
    if ended.kind == "storage" and ended.detail:
        return f"{first}: {ended.detail}"  # one sentence, and all that anybody wants to know
    return f"{first}\n{ended.detail}" if ended.detail else first


def host_lost(state: RunState, host: str, failure: str, detail: str, now_s: float, config: Config) -> Decision:
    """Take `host` out for good; a generation that it was a member of ends."""
    after = replace(
        state,
        hosts={name: report for name, report in state.hosts.items() if name != host},
        silent=state.silent - {host},
        gone=state.gone | {host},
    )
    evict = EvictHost(host=host)
    reason = f"{host} lost: {detail}"
    left = _without(after, host, failure, reason, now_s, config)
    return Decision(state=left.state, actions=(evict, *left.actions), reason=left.reason)


def host_silent(state: RunState, host: str, detail: str, now_s: float, config: Config) -> Decision:
    """Go on without `host`, which may be dead or frozen. Its memory is not given up: if it is heard again, its
    trainer is of an older generation, is killed by the next order, and the host takes part again."""
    after = replace(state, silent=state.silent | {host})
    return _without(after, host, "silent host", f"{host} is silent: {detail}", now_s, config)


def is_source(state: RunState, host: str) -> bool:
    """Is `host` one that the present generation reads its state from?"""
    restore = state.assignments[0].restore if state.assignments else None
    return restore is not None and any(source.host == host for source in restore.sources)


def _without(state: RunState, host: str, failure: str, reason: str, now_s: float, config: Config) -> Decision:
    if state.phase is Phase.STARTING and host not in state.members and is_source(state, host):
        return fail_generation(state, failure, (host,), None, reason, now_s, config)
    if host not in state.members or state.phase is Phase.WAITING:
        return Decision(state=state, reason=reason)
    if state.phase is Phase.SAVING:
        # Its shard of the last step may not be in storage yet: run that step's generation again.
        again = replace(state, phase=Phase.WAITING, since_s=now_s, upload=None, assignments=())
        return Decision(state=again, reason=reason)
    rank = state.members.index(host)
    return fail_generation(state, failure, (host,), rank, f"rank {rank} on {reason}", now_s, config)


def fail_generation(
    state: RunState,
    failure: str,
    hosts: tuple[str, ...],
    rank: int | None,
    detail: str,
    now_s: float,
    config: Config,
) -> Decision:
    """Begin (or, while STOPPING, refine) the incident and stop the generation."""
    if state.phase is Phase.STOPPING and state.incident is not None:
        return Decision(
            state=replace(state, incident=_refined(state.incident, failure, hosts, rank, detail)),
            reason=headline(detail),
        )
    incident = Incident(
        number=state.incidents + 1,
        failure=failure,
        generation=state.generation,
        step=state.step,
        hosts=hosts,
        rank=rank,
        detail=detail,
        at_s=now_s if state.incident is None else state.incident.at_s,
    )
    progressed = state.highest_step > state.highest_at_failure
    stopping = replace(
        state,
        phase=Phase.STOPPING,
        since_s=now_s,
        incident=incident,
        incidents=incident.number,
        failures_without_progress=1 if progressed else state.failures_without_progress + 1,
        highest_at_failure=state.highest_step,
        draining="",
        drain_since_s=0.0,
        candidate_since_s=None,
    )
    return Decision(
        state=stopping,
        actions=(StopGeneration(generation=state.generation),),
        reason=f"incident {incident.number}, {failure}: {headline(detail)}",
    )


def _refined(incident: Incident, failure: str, hosts: tuple[str, ...], rank: int | None, detail: str) -> Incident:
    joined = tuple(dict.fromkeys(incident.hosts + hosts)) if failure != "broken connection" else incident.hosts
    if _TELLING.index(failure) <= _TELLING.index(incident.failure):
        return replace(incident, hosts=joined)
    return replace(incident, failure=failure, hosts=joined, rank=rank, detail=detail)


def conclude(state: RunState, now_s: float, config: Config) -> Decision:
    """The generation is gone. Name what was lost, then go on or give up."""
    incident = state.incident
    assert incident is not None and state.phase is Phase.STOPPING, state.phase
    if incident.failure in ("lost host", "silent host"):
        nodes = {node_of(state.hosts, host) for host in incident.hosts}
        if not any(report.node in nodes for report in state.present):
            incident = replace(incident, failure="lost node")
    state = replace(state, incident=incident)
    if incident.failure == STORAGE:
        state = replace(state, failures_without_progress=max(0, state.failures_without_progress - 1))
    if incident.failure == "user code":
        return generations.fail(state, "user code", incident.detail, now_s)
    if state.failures_without_progress > config.control.failures_without_progress_max:
        detail = (
            f"{state.failures_without_progress} failures in a row without a new step after step {state.highest_step}, "
            f"allowed are {config.control.failures_without_progress_max}; the last: {incident.detail}"
        )
        return generations.fail(state, "restart budget spent", detail, now_s)
    return Decision(
        state=replace(state, phase=Phase.WAITING, since_s=now_s),
        reason=f"generation {state.generation} is stopped ({incident.failure})",
    )
