"""What people order while a run goes on: each request becomes a wish in the state, which the phases then follow. Pure.

A wish says how things should be, not what to do, so it holds in any phase and through failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic import events
from elastic.config import Config, ElasticError
from elastic.config_live import with_settings
from elastic.controller.state import TERMINAL, Decision, Phase, RunState


class RequestError(ElasticError):
    """What was ordered can't be done; the message says why, and what can."""


def _stop(state: RunState, event: events.StopRequested, _: float) -> Decision:
    if state.stop_why:
        return Decision(state=state)
    why = f"{event.who}: {event.why}"
    return Decision(state=replace(state, stop_why=why), reason=f"stop requested by {why}")


def _pause(state: RunState, event: events.PauseRequested, _: float) -> Decision:
    if state.paused_by:
        return Decision(state=state)
    by = f"{event.who}: {event.why}"
    return Decision(state=replace(state, paused_by=by), reason=f"pause requested by {by}")


def _resume(state: RunState, event: events.ResumeRequested, now_s: float) -> Decision:
    if not state.paused_by:
        return Decision(state=state)
    since_s = now_s if state.phase is Phase.WAITING else state.since_s  # the limit for missing hosts begins now
    resumed = replace(state, paused_by="", since_s=since_s)
    return Decision(state=resumed, reason=f"resumed by {event.who}: {event.why}")


def _resize(state: RunState, event: events.ResizeRequested, _: float) -> Decision:
    sizes = [f"{count} {what}" for count, what in ((event.nodes, "nodes"), (event.hosts, "hosts")) if count]
    wanted = replace(state, nodes_wanted=event.nodes, hosts_wanted=event.hosts)
    if wanted == state:
        return Decision(state=state)
    size = " and ".join(sizes) if sizes else "the configured size"
    return Decision(state=wanted, reason=f"resize to {size} requested by {event.who}: {event.why}")


def _checkpoint(state: RunState, event: events.CheckpointRequested, _: float) -> Decision:
    if state.checkpoint_wanted:
        return Decision(state=state)
    reason = f"checkpoint of the next safe step requested by {event.who}: {event.why}"
    return Decision(state=replace(state, checkpoint_wanted=True), reason=reason)


def _set(state: RunState, event: events.SettingChanged, _: float) -> Decision:
    if state.settings.get(event.key) == event.value:
        return Decision(state=state)
    settings = {**state.settings, event.key: event.value}
    reason = f"{event.key} set to {event.value} by {event.who}: {event.why}"
    return Decision(state=replace(state, settings=settings), reason=reason)


def _quarantine(state: RunState, event: events.NodeQuarantined, _: float) -> Decision:
    if state.quarantined.get(event.node) == event.why:
        return Decision(state=state)
    quarantined = {**state.quarantined, event.node: event.why}
    return Decision(state=replace(state, quarantined=quarantined), reason=f"node {event.node} is out: {event.why}")


def _release(state: RunState, event: events.NodeReleased, _: float) -> Decision:
    if event.node not in state.quarantined:
        return Decision(state=state)
    left = {node: why for node, why in state.quarantined.items() if node != event.node}
    return Decision(state=replace(state, quarantined=left), reason=f"node {event.node} is released: {event.why}")


_TAKE: dict[type[Any], Callable[[RunState, Any, float], Decision]] = {
    events.StopRequested: _stop,
    events.PauseRequested: _pause,
    events.ResumeRequested: _resume,
    events.ResizeRequested: _resize,
    events.CheckpointRequested: _checkpoint,
    events.SettingChanged: _set,
    events.NodeQuarantined: _quarantine,
    events.NodeReleased: _release,
}
KINDS = tuple(_TAKE)


def take(state: RunState, event: events.Event, now_s: float, _: Config) -> Decision:
    return _TAKE[type(event)](state, event, now_s)


# ---------------------------------------------------------------- from words to events


def event_of(kind: str, given: Mapping[str, Any], who: str, why: str, state: RunState, config: Config) -> events.Event:
    """The event that orders `kind` with what is `given` (see _PLAIN, _BUILD). ElasticError: it can't be ordered."""
    if state.phase in TERMINAL:
        raise RequestError(f"run {state.run} has ended ({state.phase} at step {state.step}); nothing can be ordered")
    if kind in _PLAIN:
        return _PLAIN[kind](who=who, why=why)
    return _BUILD[kind](given, who, why, state, config)


def _resize_event(given: Mapping[str, Any], who: str, why: str, _: RunState, config: Config) -> events.ResizeRequested:
    nodes, hosts = given.get("nodes"), given.get("hosts")
    if config.schedule:
        raise RequestError("this run follows a schedule of sizes; it can't be resized by hand")
    if nodes is not None and nodes < 1:
        raise RequestError(f"{nodes} nodes: wanted at least 1; to hold the run, pause it")
    if hosts is not None and not config.hosts_min <= hosts <= config.hosts_max:
        raise RequestError(f"{hosts} hosts: allowed are hosts_min {config.hosts_min} to hosts_max {config.hosts_max}")
    return events.ResizeRequested(nodes=nodes, hosts=hosts, who=who, why=why)


def _setting_event(
    given: Mapping[str, Any], who: str, why: str, state: RunState, config: Config
) -> events.SettingChanged:
    key, value = given["key"], given["value"]
    with_settings(config, tuple({**state.settings, key: value}.items()))
    return events.SettingChanged(key=key, value=value, who=who, why=why)


def _node(name: str, state: RunState) -> str:
    """The node that `name` (its id, the beginning of it, or its address) means."""
    addresses = {report.node: report.mover.address for report in state.hosts.values()}
    known = {**dict.fromkeys(state.quarantined, ""), **addresses}
    found = [node for node, address in known.items() if name and (node.startswith(name) or address == name)]
    if len(found) == 1:
        return found[0]
    some = ", ".join(f"{node} ({address or 'absent'})" for node, address in sorted(known.items())) or "none yet"
    raise RequestError(f"{len(found) or 'no'} nodes of run {state.run} are called {name!r}; its nodes: {some}")


def _quarantine_event(verb: str) -> Callable[..., events.NodeQuarantined]:
    def build(given: Mapping[str, Any], who: str, why: str, state: RunState, _: Config) -> events.NodeQuarantined:
        return events.NodeQuarantined(node=_node(given["node"], state), why=f"{verb} by {who}: {why}")

    return build


def _release_event(given: Mapping[str, Any], who: str, why: str, state: RunState, _: Config) -> events.NodeReleased:
    node = _node(given["node"], state)
    if node not in state.quarantined:
        out = ", ".join(sorted(state.quarantined)) or "none"
        raise RequestError(f"node {node} takes part already; out are: {out}")
    return events.NodeReleased(node=node, why=f"{who}: {why}")


_PLAIN: dict[str, Callable[..., events.Event]] = {
    "stop": events.StopRequested,
    "pause": events.PauseRequested,
    "resume": events.ResumeRequested,
    "checkpoint": events.CheckpointRequested,
}
_BUILD: dict[str, Callable[[Mapping[str, Any], str, str, RunState, Config], events.Event]] = {
    "resize": _resize_event,  # nodes, hosts: int | None
    "set": _setting_event,  # key, value
    "drain": _quarantine_event("drained"),  # node
    "quarantine": _quarantine_event("quarantined"),  # node
    "release": _release_event,  # node
}
