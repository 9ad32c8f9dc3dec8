"""Faults and their schedule, from the command line. Pure: what to break and when, not how.

`KIND@step=N[,rank=R][,seconds=S]`: when step N is complete, break what rank R (default: the last) stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.config import ConfigError

KINDS = {
    "kill-trainer": "SIGKILL to one rank's trainer",
    "kill-template": "SIGKILL to the process that a host forks trainers from",
    "kill-mover": "SIGKILL to the process that moves a host's bytes",
    "kill-host": "SIGKILL to one host (a Ray Train worker)",
    "kill-node": "SIGKILL to a node's raylet and everything under it",
    "freeze-host": "SIGSTOP to one host and everything under it, for `seconds`",
    "freeze-node": "SIGSTOP to all processes of a node, for `seconds`",
    "add-node": "one more node joins",
}
FREEZE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: str
    step: int
    rank: int | None = None
    seconds: float = FREEZE_S

    def __str__(self) -> str:
        rank = "" if self.rank is None else f",rank={self.rank}"
        return f"{self.kind}@step={self.step}{rank}"


def parse(text: str) -> Fault:
    """ConfigError says what is wrong and what is allowed."""
    kind, _, rest = text.partition("@")
    if kind not in KINDS:
        raise ConfigError(f"--fault {text!r}: unknown kind {kind!r}, allowed: {', '.join(KINDS)}")
    given: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in ("step", "rank", "seconds") or not equals or not value.replace(".", "", 1).isdigit():
            raise ConfigError(f"--fault {text!r}: {part!r} is not step=N, rank=R or seconds=S")
        given[key] = float(value)
    if given.get("step", 0) < 1:
        raise ConfigError(f"--fault {text!r}: needs a step of at least 1, for example {kind}@step=40")
    rank = int(given["rank"]) if "rank" in given else None
    return Fault(kind=kind, step=int(given["step"]), rank=rank, seconds=given.get("seconds", FREEZE_S))


def check(faults: list[Fault], steps: int) -> None:
    for fault in faults:
        if fault.step >= steps:
            raise ConfigError(f"--fault {fault}: the run has {steps} steps, the fault must come before the last")
