"""Who is in the next generation and, if none, why not; and which host keeps whose second copy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from elastic.config import Config
from elastic.controller.state import RunState
from elastic.events import Report
from elastic.plan import Member


def hosts_wanted(state: RunState, config: Config) -> tuple[int, int]:
    """(fewest, most) hosts for the next step. A schedule asks for an exact number: it makes the twin."""
    if not config.schedule:
        return config.hosts_min, state.hosts_wanted or config.hosts_max
    hosts = config.hosts_max
    for change in config.schedule:
        if change.step <= state.step:
            hosts = change.hosts
    return hosts, hosts


def nodes_wanted(state: RunState) -> frozenset[str]:
    """Nodes that may take part: not quarantined, and at most as many as wanted, those with members first."""
    members = Counter(node_of(state.hosts, host) for host in state.members)
    able = [r for r in state.present if r.node not in state.quarantined and r.host not in state.refused]
    hosts = Counter(report.node for report in able)
    chosen = sorted(hosts, key=lambda node: (-members[node], -hosts[node], node))
    return frozenset(chosen[: state.nodes_wanted])


def pause_step(config: Config, step: int) -> int:
    """The step at which a generation that starts at `step` pauses by itself."""
    return min((change.step for change in config.schedule if change.step > step), default=config.steps)


def available(state: RunState, fewest: int = 0) -> list[Report]:
    """Hosts that could train now, in a stable order: those that can start a trainer, on nodes that are wanted, and are
    not refused. Of those that are held only as many as it takes to be `fewest`: a bad host is better than none."""
    nodes = nodes_wanted(state)
    able = [
        report
        for report in state.present
        if report.ready
        and report.node in nodes
        and report.host not in state.refused
        and report.trainer.phase in ("none", "exited")
    ]
    able.sort(key=lambda report: (report.domain, report.node, report.slot, report.host))
    free = [report for report in able if report.host not in state.held]
    needed = {report.host for report in [r for r in able if r.host in state.held][: max(0, fewest - len(free))]}
    return [report for report in able if report.host not in state.held or report.host in needed]


def form(state: RunState, config: Config, now_s: float) -> tuple[tuple[Report, ...] | None, str]:
    """The members of the next generation by rank, or None; always with the reason."""
    fewest, most = hosts_wanted(state, config)
    able = available(state, fewest)
    if len(able) < fewest:
        return None, _shortage(state, len(able), fewest)
    waited_s = now_s - (now_s if state.enough_since_s is None else state.enough_since_s)
    if not state.members and len(able) < most and waited_s < config.control.start_wait_s:
        return (
            None,
            f"waiting: {len(able)} of {most} hosts ready, start with fewer in {config.control.start_wait_s:.0f} s",
        )
    chosen = _ranked(state.members, able, most)
    held = [
        f"; {r.host} takes part although {state.held[r.host]}: too few others" for r in chosen if r.host in state.held
    ]
    return chosen, f"{len(chosen)} of at most {most} hosts{''.join(held)}"


def _shortage(state: RunState, able: int, fewest: int) -> str:
    refused = [report.host for report in state.present if report.host in state.refused]
    counts = {
        "warming up": sum(not report.ready and report.host not in state.refused for report in state.present),
        "refused": len(refused),
        "quarantined": sum(report.node in state.quarantined for report in state.present),
        "silent": len(state.silent),
    }
    extra = "".join(f", {count} {what}" for what, count in counts.items() if count)
    why = f"; {refused[0]}: {state.refused[refused[0]]}" if refused else ""
    return f"waiting: {able} hosts ready{extra}, need {fewest}{why}"


def _ranked(before: Sequence[str], able: Sequence[Report], most: int) -> tuple[Report, ...]:
    """At most `most` hosts. Where the world size stays, survivors keep their ranks: they restore from their own
    arenas by a memory copy. Otherwise survivors first, then in order of node and slot."""
    by_host = {report.host: report for report in able}
    survivors = [by_host[host] for host in before if host in by_host]
    others = [report for report in able if report.host not in before]
    chosen = (survivors + others)[:most]
    if len(chosen) != len(before):
        return tuple(sorted(chosen, key=lambda r: (r.domain, r.node, r.slot, r.host)))
    fresh = iter(report for report in chosen if report.host not in before)
    kept = {report.host for report in chosen}
    return tuple(by_host[host] if host in kept else next(fresh) for host in before)


def partners(members: Sequence[Member], *, sources_max: int) -> dict[int, int]:
    """rank -> rank of the host that keeps its second copy; ranks without one are absent.

    Another failure domain where one has room (a host takes `sources_max` ranks), else another host of the
    same domain (a killed host is then still survivable). The largest domain chooses first: it has the fewest
    places to go.
    """
    size = Counter(member.domain for member in members)
    load: Counter[int] = Counter()
    chosen: dict[int, int] = {}
    order = sorted(range(len(members)), key=lambda rank: (-size[members[rank].domain], rank))
    for rank in order:
        # The distance makes equal nodes pair up as a permutation: 0-2, 1-3, 2-0, 3-1.
        places = [
            (members[other].domain == members[rank].domain, load[other], (other - rank) % len(members), other)
            for other in range(len(members))
            if other != rank and load[other] < sources_max
        ]
        if places:
            chosen[rank] = min(places)[-1]
            load[chosen[rank]] += 1
    return chosen


def node_of(hosts: Mapping[str, Report], host: str) -> str:
    return hosts[host].node if host in hosts else host.partition("/")[0]


def needed_nodes(state: RunState) -> frozenset[str]:
    """Nodes that must stay: they take part, upload a checkpoint, or may have the only copy of the state."""
    is_safe = state.safe is not None and state.safe.generation == state.generation
    if not state.members or (not is_safe and state.durable_step < state.step):
        return frozenset(report.node for report in state.hosts.values())
    uploading = state.upload_hosts if state.upload is not None else ()
    return frozenset(node_of(state.hosts, host) for host in (*state.members, *uploading))
