"""Which hosts may take part, from their checks and from how often their nodes were lost. Pure.

`review` follows every event and changes `refused`, `held`, `marked` and `losses` of the state; membership obeys them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic.config import Config
from elastic.config_sections import Admission
from elastic.controller.actions import Action, AdmitHost, MarkHost, RefuseHost, RestNode
from elastic.controller.membership import node_of
from elastic.controller.state import TERMINAL, Decision, NodeLosses, Phase, RunState
from elastic.events import Report
from elastic.health import admission
from elastic.plan import Member

LOSSES_MAX = 1024  # nodes whose losses are remembered
NEIGHBOURS = 3


def review(before: RunState, after: RunState, now_s: float, config: Config) -> Decision:
    """What an event that led from `before` to `after` means for who may take part."""
    limits = config.admission
    if not limits.enabled or after.phase in TERMINAL:
        return Decision(state=after)
    lost = _lost_nodes(before, after)
    to_judge = _is_to_judge(before, after)
    if not (lost or to_judge or after.losses or after.held):
        return Decision(state=after)  # most events: a step is completed, a shard is safe
    losses, actions, reasons = _losses(lost, before, after, now_s, limits)
    # While a node rests, which of its hosts are new depends on more than their checks.
    resting = after.held or any(loss.until_s for loss in losses.values())
    changed = before.hosts is not after.hosts or before.assignments is not after.assignments
    if not (to_judge or (resting and changed)) and losses == after.losses == before.losses:
        return Decision(state=after)
    state = _judged(replace(after, losses=losses), config)
    for host, why in state.refused.items():
        if host not in after.refused:
            actions.append(RefuseHost(host=host, why=why))
            reasons.append(f"{host} is refused: {why}")
    for host in after.refused:
        if host in state.hosts and host not in state.refused:
            actions.append(AdmitHost(host=host))
            reasons.append(f"{host} is no longer refused")
    for host, why in state.marked.items():
        if host not in after.marked:
            actions.append(MarkHost(host=host, why=why))
            reasons.append(f"{host} is marked: {why}")
    return Decision(state=state, actions=tuple(actions), reason="; ".join(reasons))


def _is_to_judge(before: RunState, after: RunState) -> bool:
    """Whether a check came, changed or went, or what follows from them was set anew."""
    if before.settings != after.settings:
        return True
    if before.hosts is after.hosts:
        return False
    gone = any(report.check is not None and host not in after.hosts for host, report in before.hosts.items())
    return gone or any(
        report.check is not None and (host not in before.hosts or before.hosts[host].check != report.check)
        for host, report in after.hosts.items()
    )


def _judged(state: RunState, config: Config) -> RunState:
    limits = config.admission
    checks = {host: report.check for host, report in state.hosts.items() if report.check is not None}
    refused = {
        host: why for host, check in checks.items() if (why := admission.refusal(check, limits, use_gpu=config.use_gpu))
    }
    fit = {host: check for host, check in checks.items() if host not in refused}
    refused |= admission.cut_off(fit, frozenset(state.members))
    fit = {host: check for host, check in fit.items() if host not in refused}
    nodes = {host: report.node for host, report in state.hosts.items()}
    policy = config.policies.leave_out_slow
    slow = admission.slow(fit, nodes, limits.slow_ratio) if policy != "off" else {}
    held = dict(slow) if policy == "act" else {}
    for host, report in state.hosts.items():
        lost = state.losses.get(report.node)
        if lost is not None and lost.until_s and host not in state.members:
            held[host] = f"node {report.node} was lost {lost.count} times"
    odd = {host: [*admission.oddities(check, limits)] for host, check in fit.items()}
    marked = {host: "; ".join(told) for host in fit if (told := [*filter(None, [slow.get(host)]), *odd[host]])}
    return replace(state, refused=refused, held=held, marked=marked)


# ---------------------------------------------------------------- nodes that come and go


def _losses(
    lost_nodes: list[str], before: RunState, after: RunState, now_s: float, limits: Admission
) -> tuple[Mapping[str, NodeLosses], list[Action], list[str]]:
    losses, reasons = dict(after.losses), []
    actions: list[Action] = []
    taking_part = {node_of(after.hosts, h) for h in after.members if h in after.hosts and h not in after.silent}
    for node in lost_nodes:
        known = losses.pop(node, None)  # the newest is the last
        if known is not None and known.generation == before.generation:
            losses[node] = known
            continue
        stayed_s = now_s - known.joined_s if known is not None and known.joined_s is not None else 0.0
        count = 1 if known is None or stayed_s >= limits.forget_s else known.count + 1
        wait_s = admission.rest_s(count, limits)
        until_s = now_s + wait_s if wait_s else 0.0
        losses[node] = NodeLosses(count=count, generation=before.generation, until_s=until_s)
        if wait_s:
            actions.append(RestNode(node=node, losses=count, until_s=until_s))
            reasons.append(f"node {node} was lost {count} times, may join again in {wait_s:.0f} s")
    for node, lost in [*losses.items()]:
        if lost.until_s and now_s >= lost.until_s:
            losses[node] = lost = replace(lost, until_s=0.0)
            reasons.append(f"node {node} may join again")
        stays = node in taking_part and not lost.until_s  # hosts that survived the loss may have stayed all the time
        if stays != (lost.joined_s is not None):
            losses[node] = replace(lost, joined_s=now_s if stays else None)
        elif lost.joined_s is not None and now_s - lost.joined_s >= limits.forget_s:
            del losses[node]
            reasons.append(f"node {node} has stayed for {limits.forget_s:.0f} s, its losses are forgotten")
    for node in [*losses][:-LOSSES_MAX]:
        del losses[node]
    return losses, actions, reasons


def _lost_nodes(before: RunState, after: RunState) -> list[str]:
    """Nodes of members that this event took away; a trainer's death takes none."""
    if before.phase is Phase.WAITING or (before.hosts is after.hosts and before.silent == after.silent):
        return []
    lost = [
        host
        for host in before.members
        if host in before.hosts and host not in before.silent and (host not in after.hosts or host in after.silent)
    ]
    return sorted({node_of(before.hosts, host) for host in lost})


# ---------------------------------------------------------------- whom to try the network with


def neighbours(state: RunState, host: str) -> tuple[Member, ...]:
    """Other hosts that `host` may exchange bytes with, on other nodes where there are some; () when it needs none."""
    mine = state.hosts.get(host)
    if mine is None or not _needs_link(mine):
        return ()
    # Those that follow in the order of joining: a fleet that starts at once spreads its exchanges.
    reports = [*state.hosts.values()]
    at = [*state.hosts].index(host)
    others = [
        report
        for report in reports[at + 1 :] + reports[:at]
        if report.mover.port and report.host not in state.silent and report.host not in state.refused
    ]
    away = [report for report in others if report.node != mine.node]
    return tuple(
        Member(host=r.host, node=r.node, domain=r.domain, mover=r.mover, store=r.store)
        for r in (away or others)[:NEIGHBOURS]
    )


def _needs_link(report: Report) -> bool:
    check = report.check
    return not report.ready if check is None else not check.link_to and bool(check.unreached)
