"""What each host should be doing: a pure function of the state. The driver sends it on change and as the lease."""

from __future__ import annotations

from elastic.controller.admission import neighbours
from elastic.controller.state import ALIVE, TERMINAL, RunState
from elastic.events import Order


def order_for(state: RunState, host: str) -> Order:
    """The desired state of `host`, without `seq` and `steps_seen` (the driver's). Unknown hosts are new: no trainer."""
    if host in state.gone:
        return Order(host=host, seq=0, attempt=state.attempt, generation=state.generation, evicted=True)
    members = state.members
    rank = members.index(host) if host in members else None
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
        upload=state.upload if rank is not None else None,
        finish=state.phase in TERMINAL,
        neighbours=neighbours(state, host),
    )
