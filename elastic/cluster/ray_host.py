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
from elastic.config import Config
from elastic.controller.state import Phase
from elastic.plan import Endpoint

logger = logging.getLogger(__name__)

NODE_ID_DIGITS = 12
OUTCOME_TIMEOUT_S = 60.0


class RunFailed(coordinator.RunError):
    """The controller ended the run; the message is its failure and the first failing rank's last lines."""


def host(given: dict[str, Any]) -> dict[str, Any]:
    """Serve as one host until the run is over; returns its outcome (phase, step, loss, ...).

    `given`: "config", the run's configuration as plain values. RunFailed: the run failed, which Ray Train then
    counts against `max_failures`. A host that can't go on ends its process instead: it costs its slot, not the run.
    """
    settings = settings_of(Config.model_validate(given["config"]))
    try:
        why = run_host(settings, stopped=lambda: False)
    except HostError:
        logger.exception("this host can't go on, its process ends")
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
    node = context.get_node_id()[:NODE_ID_DIGITS]
    reached = ray.get(coordinator.find(config.run).endpoint.remote(), timeout=coordinator.CALL_TIMEOUT_S)
    return HostSettings(
        coordinator=Endpoint(address=reached["address"], port=reached["port"]),
        token=reached["token"],
        config=config,
        node=node,
        domain=node,
        slot=ray.train.get_context().get_world_rank(),
        address=ray.util.get_node_ip_address(),
        log_dir=config.run_dir() / "logs",
        prepared=Path(config.data.prepared),
    )
