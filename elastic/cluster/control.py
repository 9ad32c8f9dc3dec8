"""Orders to a live run and its status, from any process that reaches its Ray cluster."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from elastic.cluster import coordinator, reach
from elastic.cluster.coordinator import MEMORY, NAMESPACE, RunError
from elastic.config import ElasticError, Place
from elastic.report import ending, place_of

ANSWER_TIMEOUT_S = 30.0


def order(run: str, address: str | None, kind: str, why: str, given: dict[str, Any]) -> str:
    """Order `kind` (see `Coordinator.request`) as this user; returns what was decided. RunError: it can't be."""
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    with _coordinator(run, address) as actor:
        return str(_answer(actor.request.remote(kind, who, why, given)))


def status(run: str, address: str | None) -> dict[str, Any]:
    """What the run does now, as plain values. RunError: it is not running."""
    with _coordinator(run, address) as actor:
        return dict(_answer(actor.status.remote()))


@contextmanager
def _coordinator(run: str, address: str | None) -> Iterator[Any]:
    name = place_of(run).directory.name
    reached = address or _address_of(run)
    if address and (why := reach.unreachable(address)):
        raise RunError(f"run {name} can't be asked: {why}; give --address of a cluster that runs")
    try:
        ray.init(
            address=reached, namespace=NAMESPACE, log_to_driver=False, logging_level="error", configure_logging=False
        )
    except (ConnectionError, RuntimeError) as error:
        raise RunError(f"can't reach the Ray cluster at {reached}: {error}") from error
    try:
        yield coordinator.find(name)
    finally:
        ray.shutdown()


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=ANSWER_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ElasticError):
            raise RunError(str(error.cause)) from error
        raise
    except ray.exceptions.GetTimeoutError as error:
        raise RunError(f"the coordinator did not answer in {ANSWER_TIMEOUT_S:.0f} s; is its node busy?") from error
    except ray.exceptions.RayActorError as error:
        raise RunError(f"the coordinator ended meanwhile: {error}") from error


def _address_of(run: str) -> str:
    """The Ray address that the run's coordinator wrote into its directory; `run`: that directory, its name or URL."""
    found = [path for path in (place_of(run).directory, Path("runs", run)) if (path / MEMORY).exists()]
    if not found:
        raise RunError(
            f"no run {run} was started from here (looked for {Path(run, MEMORY)} and {Path('runs', run, MEMORY)}); "
            "give its directory, or its name with --address of its Ray cluster"
        )
    address = str(json.loads((found[0] / MEMORY).read_text())["ray_address"])
    if why := reach.unreachable(address):
        told = ending(Place.of_directory(found[0]))
        raise RunError(f"run {found[0]} is not running: {told} ({why}); its account: elastic report {found[0]}")
    return address


# ---------------------------------------------------------------- for a person


def status_lines(status: dict[str, Any]) -> list[str]:
    """`status` as a person reads it."""
    lines = [f"run         {status['run']}: {status['phase']}", *_figures(status)]
    for name, text in (
        ("waiting", status.get("waiting_for")),
        ("paused", status.get("paused_by")),
        ("storage", status.get("not_durable")),
        ("failed", ": ".join(filter(None, (status.get("failure"), status.get("detail"))))),
    ):
        if text:
            lines.append(f"{name:<11} {text}")
    wanted = [f"{status[f'{what}_wanted']} {what}" for what in ("nodes", "hosts") if status.get(f"{what}_wanted")]
    if wanted:
        lines.append(f"resized to  at most {' and '.join(wanted)}")
    lines += [f"set         {key} = {value}" for key, value in status.get("settings", {}).items()]
    lines += [f"would       {would}" for would in status.get("would", {}).values()]
    for node, why in status.get("quarantined", {}).items():
        needed = node in status["needed_nodes"]
        lines.append(f"node out    {node} ({why}); {'still needed' if needed else 'may be switched off'}")
    hosts = status.get("hosts", {})
    lines += [_host(name, host, status.get("members", [])) for name, host in sorted(hosts.items())]
    return lines


def _figures(status: dict[str, Any]) -> list[str]:
    if "step" not in status:
        return []
    loss = "" if status.get("loss") is None else f"  loss {status['loss']:.4f}"
    rate = "" if status.get("tokens_s") is None else f"  {status['tokens_s']:,.0f} tokens/s"
    safe = "none" if status["safe_step"] is None else status["safe_step"]
    durable = f"{status['durable_step']} ({status['durable_age_s']:.0f} s ago)" if status["durable_step"] else "none"
    return [
        f"step        {status['step']}/{status['steps']}{loss}{rate}  safe {safe}  durable {durable}",
        f"generation  {status['generation']} of attempt {status['attempt']}, world {status['world']}, "
        f"{status['incidents']} incidents",
    ]


def _host(name: str, host: dict[str, Any], members: list[str]) -> str:
    place = f"rank {members.index(name)}" if name in members else "no rank"
    able = "warm standby" if host["warm"] else "ready" if host["ready"] else "warming up"
    return f"host        {name}  {place}, trainer {host['trainer']} at step {host['step']}, {able}"
