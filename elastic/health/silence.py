"""Is a host that nothing is heard of lost? Progress is the best heartbeat: silence alone never says so. Pure."""

from __future__ import annotations


def verdict(*, silent_s: float, stalled_s: float, limit_s: float, takes_part: bool) -> tuple[bool, str]:
    """(whether to go on without the host, why or why not).

    silent_s: since its last report. stalled_s: since any member of the generation last showed progress.
    takes_part: the generation can't complete a step without it, so steps that go on prove it alive.
    """
    if silent_s <= limit_s:
        return False, f"heard {silent_s:.1f} s ago"
    if not takes_part:
        return True, f"nothing heard for {silent_s:.1f} s"
    if stalled_s <= limit_s:
        return False, f"nothing heard for {silent_s:.1f} s, but a step was completed {stalled_s:.1f} s ago"
    return True, f"nothing heard for {silent_s:.1f} s, no step for {stalled_s:.1f} s"
