"""One run on Ray from beginning to end, as the command line drives it: data, nodes, trainer, watching.

`fit` runs in a thread; the main thread owns the local nodes (Ray processes end with the thread that starts them)
and shows new journal entries to observers: the progress line, the fault injector.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import Result

from elastic.clock import RealClock
from elastic.cluster import coordinator
from elastic.cluster.ray_nodes import NAMESPACE, LocalNodes
from elastic.cluster.ray_train import ElasticTrainer
from elastic.config import Config
from elastic.data.prepare import prepare
from elastic.resume import Resume
from elastic.telemetry.journal import Tail

POLL_S = 0.05
STOP_TIMEOUT_S = 120.0

Observer = Callable[[list[dict[str, Any]], LocalNodes | None], None]


@dataclass(slots=True)
class Ended:
    """How `fit` ended: a Result, or what it raised. `interrupted`: by Ctrl-C, after a checkpoint."""

    result: Result | None = None
    error: BaseException | None = None
    interrupted: bool = False


def run(
    config: Config,
    *,
    address: str | None,
    observers: Sequence[Observer],
    say: Callable[[str], None],
    resume: Resume | None = None,
) -> Ended:
    """Train `config` on the cluster at `address`, or on local nodes that are started and ended here."""
    prepare(config.data, progress=say)
    with _cluster(config, address, say) as nodes:
        trainer = ElasticTrainer(config=config, resume=resume)
        say(f"training {config.steps} steps on {config.hosts_min} to {config.hosts_max} hosts")
        ended = Ended()
        thread = threading.Thread(target=_fit, args=(trainer, ended), name="fit", daemon=True)
        tail = Tail(trainer.config.run_dir() / "journal.jsonl", since_s=RealClock().now_s())
        thread.start()
        while thread.is_alive():
            try:
                thread.join(POLL_S)
                _show(tail, observers, nodes)
            except KeyboardInterrupt:
                if ended.interrupted:
                    raise
                ended.interrupted = True
                say("interrupted: stopping at the next step with a checkpoint (Ctrl-C again: at once)")
                ask_to_stop(config.run, "interrupted")
        _show(tail, observers, nodes)
    return ended


def _show(tail: Tail, observers: Sequence[Observer], nodes: LocalNodes | None) -> None:
    entries = tail.read()
    for observe in observers:
        observe(entries, nodes)


def _fit(trainer: ElasticTrainer, ended: Ended) -> None:
    try:
        ended.result = trainer.fit()
    except BaseException as error:  # handed to the main thread, which tells it
        ended.error = error


def ask_to_stop(run: str, why: str) -> None:
    """Let the run end at a step boundary, with a checkpoint. KeyboardInterrupt: it has not begun."""
    try:
        actor = coordinator.find(run)
        ray.get(actor.request.remote("stop", "the driver", why), timeout=STOP_TIMEOUT_S)
    except (coordinator.RunError, ray.exceptions.RayError) as error:
        raise KeyboardInterrupt from error  # nothing to save yet


def _cluster(
    config: Config, address: str | None, say: Callable[[str], None]
) -> AbstractContextManager[LocalNodes | None]:
    if address is None:
        say(f"starting {config.local.nodes} Ray nodes with {config.local.hosts_per_node} hosts each on this machine")
        return LocalNodes(nodes=config.local.nodes, hosts_per_node=config.local.hosts_per_node)
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    return nullcontext(None)
