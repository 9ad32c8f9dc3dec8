"""One run on Ray from beginning to end, as the command line drives it: data, nodes, trainer, watching, stopping.

`fit` runs in a thread; the main thread owns the local nodes (Ray processes end with the thread that starts them)
and shows new journal entries to observers: the progress line, the fault injector.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import Result

from elastic.clock import RealClock
from elastic.cluster import coordinator, reach
from elastic.cluster.driver_lock import only_driver
from elastic.cluster.ladder import Ladder
from elastic.cluster.ray_core import signals_kept
from elastic.cluster.ray_nodes import LocalNodes
from elastic.cluster.ray_train import ElasticTrainer
from elastic.config import Config
from elastic.controller.state import TERMINAL
from elastic.data.prepare import prepare_for
from elastic.resume import Resume
from elastic.telemetry.journal import Follower

POLL_S = 0.05
STOP_TIMEOUT_S = 120.0
SAY_AGAIN_S = 5.0
HOSTS_END_S = 10.0  # hosts hear of the run's end within a heartbeat, Ray Train of theirs within a poll

Observer = Callable[[list[dict[str, Any]], LocalNodes | None], None]
Say = Callable[[str], None]


@dataclass(slots=True)
class Ended:
    """How `fit` ended: a Result, or what it raised. `interrupted`: asked to by a signal, with a checkpoint."""

    result: Result | None = None
    error: BaseException | None = None
    interrupted: bool = False


def run(
    config: Config,
    *,
    address: str | None,
    observers: Sequence[Observer],
    say: Say,
    first: str = "",
    resume: Resume | None = None,
) -> Ended:
    """Train `config` on the cluster at `address`, or on local nodes that are started and ended here. first: what to
    say once it is known that no other driver has the run.

    KeyboardInterrupt: a signal ended it at once (see `Ladder`), all that was started here has ended too.
    RunError: no cluster answers there.
    """
    if address and (why := reach.unreachable(address)):
        raise coordinator.RunError(
            f"the run can't start: {why}; start one, give --address of another, or leave --address out to train on "
            "this machine"
        )
    with Ladder() as ladder:
        with only_driver(config.run_dir()):
            pass  # refused now rather than after the nodes have started
        if first:
            say(first)
        try:
            prepare_for(config, progress=say)
            with _cluster(config, address, say) as nodes:
                return _run(ElasticTrainer(config=config, resume=resume), nodes, observers, say, ladder)
        except KeyboardInterrupt:
            say("ended at once; the same command goes on from the last durable checkpoint, if there is one")
            raise


def _run(
    trainer: ElasticTrainer, nodes: LocalNodes | None, observers: Sequence[Observer], say: Say, ladder: Ladder
) -> Ended:
    config = trainer.config
    say(f"training {config.steps} steps on {config.hosts_min} to {config.hosts_max} hosts")
    ended = Ended()
    thread = threading.Thread(target=_fit, args=(trainer, ended), name="fit", daemon=True)
    tail = Follower(config.run_dir() / "journal.jsonl", since_s=RealClock().now_s())
    thread.start()
    ladder.gentle = True
    stop: _Stop | None = None
    while thread.is_alive():
        thread.join(POLL_S)
        if nodes is not None:
            nodes.tend()
        entries = _show(tail, observers, nodes)
        if ladder.asked and stop is None:
            stop = _Stop(config.run, say, ladder)
            ended.interrupted = True
        if stop is not None:
            stop.watch(entries, time.monotonic())
    _show(tail, observers, nodes)
    return ended


def _show(tail: Follower, observers: Sequence[Observer], nodes: LocalNodes | None) -> list[dict[str, Any]]:
    entries = tail.read()
    for observe in observers:
        observe(entries, nodes)
    return entries


def _fit(trainer: ElasticTrainer, ended: Ended) -> None:
    try:
        ended.result = trainer.fit()
    except BaseException as error:  # handed to the main thread, which tells it
        ended.error = error


# ---------------------------------------------------------------- stopping


class _Stop:
    """A stop that was asked for, told to the coordinator; says what it waits for until `fit` returns."""

    def __init__(self, run: str, say: Say, ladder: Ladder) -> None:
        say("stopping at the next step, with a checkpoint (once more: at once, without one; a third time: kill)")
        self._say = say
        self._ladder = ladder
        self._said_s = time.monotonic()
        self._ended_s: float | None = None
        self._waits_for = "the coordinator"
        try:
            ask_to_stop(run, "interrupted")
        except KeyboardInterrupt:
            ladder.end()

    def watch(self, entries: list[dict[str, Any]], now_s: float) -> None:
        if entries:
            self._waits_for = _waits_for(entries[-1])
            if entries[-1]["phase"] in TERMINAL and self._ended_s is None:
                self._ended_s = now_s
        if self._ended_s is not None and now_s - self._ended_s > HOSTS_END_S:
            self._ladder.end()  # Ray Train still waits for hosts that do not come; what there was is saved
        if now_s - self._said_s >= SAY_AGAIN_S:
            self._said_s = now_s
            self._say(f"waiting for {self._waits_for}")


def _waits_for(entry: dict[str, Any]) -> str:
    return {
        "waiting": f"enough hosts to save step {entry['step']}",
        "starting": "the first step of this generation",
        "running": "the next step boundary",
        "stopping": "the trainers of a failed generation to end",
        "saving": f"the checkpoint of step {entry['step']}",
    }.get(entry["phase"], "the hosts to end")


def ask_to_stop(run: str, why: str) -> None:
    """Let the run end at a step boundary, with a checkpoint. KeyboardInterrupt: it has not begun."""
    try:
        actor = coordinator.find(run)
        ray.get(actor.request.remote("stop", "the driver", why), timeout=STOP_TIMEOUT_S)
    except (coordinator.RunError, ray.exceptions.RayError) as error:
        raise KeyboardInterrupt from error  # nothing to save yet


# ---------------------------------------------------------------- the cluster


def _cluster(config: Config, address: str | None, say: Say) -> AbstractContextManager[LocalNodes | None]:
    if address is None:
        say(f"starting {config.local.nodes} Ray nodes with {config.local.hosts_per_node} hosts each on this machine")
        return LocalNodes(nodes=config.local.nodes, hosts_per_node=config.local.hosts_per_node)
    return _connected(address)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """To a given cluster; at the end Ray ends all actors of this job that are left."""
    with signals_kept():
        ray.init(address=address, namespace=coordinator.NAMESPACE, log_to_driver=False, logging_level="warning")
    try:
        yield
    finally:
        ray.shutdown()
