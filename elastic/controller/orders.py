"""What each host should be doing: a pure function of the state. The driver sends it on change and as the lease."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.controller import disk
from elastic.controller.admission import neighbours
from elastic.controller.state import ALIVE, TERMINAL, Phase, RunState
from elastic.events import Order


def orders_for(state: RunState, hosts: Iterable[str]) -> dict[str, Order]:
    """The desired state of each, without `seq` and `steps_seen` (the driver's). Unknown hosts are new: no trainer."""
    ranks = {host: rank for rank, host in enumerate(state.members)}
    uploading = frozenset(state.upload_hosts) if state.upload is not None else frozenset()
    return {host: _order(state, host, ranks.get(host), uploads=host in uploading) for host in hosts}


def order_for(state: RunState, host: str) -> Order:
    return orders_for(state, [host])[host]


def _order(state: RunState, host: str, rank: int | None, *, uploads: bool) -> Order:
    if host in state.gone:
        return Order(host=host, seq=0, attempt=state.attempt, generation=state.generation, evicted=True)
    running = rank is not None and state.phase in ALIVE
    return Order(
        host=host,
        seq=0,
        attempt=state.attempt,
        generation=state.generation,
        running=running,
        assignment=state.assignments[rank] if running and rank is not None else None,
        drain=running and bool(state.draining),
        keep=state.keep,
        upload=state.upload if uploads else None,
        finish=state.phase in TERMINAL,
        neighbours=neighbours(state, host),
        disk=disk.order(state, is_member=rank is not None, is_finished=state.phase is Phase.FINISHED),
    )
