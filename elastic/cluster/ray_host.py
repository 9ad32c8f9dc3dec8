"""The function that Ray Train runs in each worker: finds the coordinator, becomes a host, ends with the run."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray
import ray.train

from elastic.cluster import coordinator
from elastic.cluster.host import HostError, HostSettings, run_host
from elastic.cluster.ray_private import node_log_dir
from elastic.config import Config
from elastic.controller.state import Phase
from elastic.plan import Endpoint
from elastic.telemetry.logs import host_log

logger = logging.getLogger(__name__)

OUTCOME_TIMEOUT_S = 60.0


class RunFailed(coordinator.RunError):
    """The controller ended the run; the message is its failure and the first failing rank's last lines."""


def host(given: dict[str, Any]) -> dict[str, Any]:
    """Serve as one host until the run is over; returns its outcome (phase, step, loss, ...).

    `given`: "config", the run's configuration as plain values. RunFailed: the run failed, which Ray Train then
    counts against `max_failures`. A host that can't go on ends its process instead: it costs its slot, not the run.
    """
    settings = settings_of(Config.model_validate(given["config"]))
    _log_to(settings.log_dir / host_log(settings.node, settings.slot))
    raylet = os.getppid()
    try:
        # Ray's own check takes a raylet that nobody reaped (no init in a container) for a living one.
        why = run_host(settings, stopped=lambda: os.getppid() != raylet)
    except HostError:
        logger.exception("this host can't go on, its process ends")
        os._exit(1)
    if why == "stopped":
        logger.warning("the raylet of this node ended, and this host with it")
        os._exit(1)
    actor = coordinator.find(settings.config.run)
    outcome = ray.get(actor.outcome.remote(OUTCOME_TIMEOUT_S / 2), timeout=OUTCOME_TIMEOUT_S)
    if outcome is None:
        raise RunFailed(f"the host ended ({why}) while the run goes on; its coordinator told it to, which is a bug")
    if outcome["phase"] == Phase.FAILED:
        raise RunFailed(f"{outcome['failure']}: {outcome['detail']}")
    return dict(outcome)


def settings_of(config: Config) -> HostSettings:
    context = ray.get_runtime_context()
    node = context.get_node_id()[: coordinator.NODE_ID_DIGITS]
    slot = ray.train.get_context().get_world_rank()
    reached = ray.get(coordinator.find(config.run).endpoint.remote(), timeout=coordinator.CALL_TIMEOUT_S)
    return HostSettings(
        coordinator=Endpoint(address=reached["address"], port=reached["port"]),
        token=reached["token"],
        config=config,
        node=node,
        domain=node,
        slot=slot,
        address=ray.util.get_node_ip_address(),
        log_dir=node_log_dir() / "elastic" / config.run / f"{node}-{slot}-{os.getpid()}",
    )


def _log_to(path: Path) -> None:
    """The host's own messages in one file with those of its template and mover."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s host %(levelname)s %(name)s: %(message)s"))
    elastic = logging.getLogger("elastic")
    elastic.addHandler(handler)
    elastic.setLevel(logging.INFO)
