"""`elastic chaos`: run a job on local Ray nodes, break things, hold it against its twin, say how each recovery went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.chaos.faults import Fault
from elastic.chaos.inject import Injector
from elastic.clock import RealClock
from elastic.cluster import session, twin
from elastic.cluster.ray_nodes import LocalNodes
from elastic.config import Config
from elastic.proof import verify_data
from elastic.report import entries_of, recoveries, recovery_lines

DIFFERENCES_SHOWN = 5


def run(config: Config, faults: list[Fault], *, progress: session.Observer, say: Callable[[str], None]) -> bool:
    """True when the run finished, every fault was injected and the result equals the twin's, bit for bit."""
    clock = RealClock()
    injectors: list[Injector] = []

    def inject(entries: list[dict[str, Any]], nodes: LocalNodes | None) -> None:
        assert nodes is not None
        if not injectors:
            injectors.append(Injector(faults=sorted(faults, key=lambda f: f.step), nodes=nodes, now_s=clock.now_s))
        told = len(injectors[0].done)
        injectors[0].observe(entries)
        for done in injectors[0].done[told:]:
            say(f"fault {done.fault}: {done.what}")

    ended = session.run(config, address=None, observers=[progress, inject], say=say)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.error is not None or not injectors:
        say(f"the run did not finish: {ended.error}")
        return False
    entries = entries_of(config.place())
    found = recoveries(entries, [done.at_s for done in injectors[0].done])
    for line in recovery_lines(found):
        say(line)
    left = injectors[0].faults
    if left:
        say(f"not injected, the run ended before: {', '.join(map(str, left))}")
    for line in verify_data(config.place()):
        say(line)
    say("now its twin: the same job without faults, changing its world at the same steps by plan")
    return _equals_twin(config, entries, say) and not left


def _equals_twin(config: Config, entries: list[dict[str, Any]], say: Callable[[str], None]) -> bool:
    twin_config = twin.config_of(config, entries)
    say("its worlds: " + ", ".join(f"{change.hosts} from step {change.step}" for change in twin_config.schedule))
    found = twin.differences(entries, twin.run_locally(twin_config, say=say))
    for line in found[:DIFFERENCES_SHOWN]:
        say(line)
    verdict = "PASSED: every loss, gradient norm and sample digest equals the twin's, bit for bit"
    say(f"FAILED: {len(found)} differences from the twin" if found else verdict)
    return not found
