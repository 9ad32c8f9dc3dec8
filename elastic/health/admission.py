"""May a host take part? Verdicts on what it found out about its node, against limits and the other nodes. Pure.

Refusals name what was found, what is wanted and what to change; marks only name what is odd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from statistics import median

from elastic.config_sections import Admission
from elastic.events import NodeCheck

_GB = 1e9
_FIGURES = {"gemm_gflops": "GFLOP/s", "copy_gbs": "GB/s copied", "link_mbs": "MB/s to a neighbour"}


def refusal(check: NodeCheck, limits: Admission, *, use_gpu: bool) -> str:
    """Why this host can't take part, whatever the others are like; "" if it can."""
    storage = [f"its storage: {check.storage_wrong}"] if check.storage_wrong else []
    return "; ".join(shortages(check, limits) or [*_faults(check, use_gpu), *storage])


def shortages(check: NodeCheck, limits: Admission) -> list[str]:
    """What the node lacks before anything of the run is started on it."""
    found = []
    wanted = check.memory_wanted_bytes + limits.memory_spare_bytes
    if check.memory_free_bytes < wanted:
        found.append(
            f"{check.memory_free_bytes / _GB:.1f} GB of memory are free, wanted {wanted / _GB:.1f} GB (snapshots and "
            f"training state {check.memory_wanted_bytes / _GB:.1f} GB, admission.memory_spare_bytes the rest); "
            "free some, raise its limit, or spread the model over more hosts (hosts_min)"
        )
    if check.disk_free_bytes < limits.disk_free_bytes_min:
        found.append(
            f"{check.disk_free_bytes / _GB:.2f} GB are free where its logs go, wanted "
            f"{limits.disk_free_bytes_min / _GB:.2f} GB (admission.disk_free_bytes_min); free some"
        )
    return found


def fits(check: NodeCheck, *, use_gpu: bool) -> bool:
    """Whether its device does what it should."""
    return not _faults(check, use_gpu)


def _faults(check: NodeCheck, use_gpu: bool) -> list[str]:
    if check.failed:
        return [check.failed]
    if use_gpu and not check.gpus:
        return ["no GPU is visible although use_gpu is set; mend its driver, or give the run nodes with GPUs"]
    found = []
    if check.gemm_wrong:
        found.append(f"{check.gemm_wrong} rows of a matrix product of known result are wrong: replace its device")
    if check.copy_wrong:
        found.append(f"{check.copy_wrong} numbers changed while they were copied: replace its memory or device")
    return found


def cut_off(checks: Mapping[str, NodeCheck], first: Collection[str]) -> dict[str, str]:
    """Hosts that reached no other one, with why.

    A failed exchange has two ends. Hosts in `first` (those that train) and those that reached somebody are believed;
    of two that only failed to reach each other, the first by name may go on.
    """
    order = sorted(checks, key=lambda host: (host not in first, not checks[host].link_to, host))
    passed: set[str] = set()
    refused = {}
    for host in order:
        check = checks[host]
        missed = (
            [] if check.link_to or host in first else [other for other in sorted(check.unreached) if other in passed]
        )
        if missed:
            refused[host] = f"it can't reach {missed[0]}: {check.unreached[missed[0]]}; see to its network"
        else:
            passed.add(host)
    return refused


def slow(checks: Mapping[str, NodeCheck], nodes: Mapping[str, str], ratio: float) -> dict[str, str]:
    """Hosts with a figure below `ratio` times the median of the other nodes (a node counts as the median of its
    hosts), with the figures. nodes: host -> node."""
    found: dict[str, list[str]] = defaultdict(list)
    for figure, unit in _FIGURES.items():
        by_node: dict[str, list[float]] = defaultdict(list)
        values = {host: value for host, check in checks.items() if (value := _figure(figure, check, host))}
        for host, value in values.items():
            by_node[nodes[host]].append(value)
        typical = {node: median(figures) for node, figures in by_node.items()}
        others = {node: _median_without(node, typical) for node in typical}
        for host, value in values.items():
            other = others[nodes[host]]
            if other and value < ratio * other:
                found[host].append(f"{value:.3g} {unit}, the other nodes {other:.3g}")
    return {host: f"slow: {', '.join(told)}" for host, told in found.items()}


def _figure(name: str, check: NodeCheck, host: str) -> float:
    """0.0: not measured. An exchange within one node says nothing about the network."""
    within = name == "link_mbs" and check.link_to.partition("/")[0] == host.partition("/")[0]
    return 0.0 if within else float(getattr(check, name))


def _median_without(node: str, typical: Mapping[str, float]) -> float | None:
    return median(rest) if (rest := [value for other, value in typical.items() if other != node]) else None


def oddities(check: NodeCheck, limits: Admission) -> Iterable[str]:
    """What somebody should look at although the host takes part."""
    if abs(check.clock_ahead_s) > limits.clock_offset_s_max:
        way = "ahead of" if check.clock_ahead_s > 0 else "behind"
        yield f"its clock is {abs(check.clock_ahead_s):.1f} s {way} the coordinator's"
    if check.link_to and check.unreached:
        yield f"it could not reach {', '.join(sorted(check.unreached))}"
    if check.storage_down:
        yield f"storage does not answer it: {check.storage_down}"


def rest_s(losses: int, limits: Admission) -> float:
    """How long a node that was lost so often rests: not the first time, then twice as long each time."""
    return 0.0 if losses < 2 else min(limits.rest_s * 2.0 ** min(losses - 2, 32), limits.rest_s_max)
