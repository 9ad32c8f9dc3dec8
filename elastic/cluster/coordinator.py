"""The coordinator: a named Ray actor on the driver's node that runs the controller's driver loop in one thread.

Crash-only: Ray restarts it in place, it listens on the port it had, folds its journal and goes on. Methods are
called by the host function (endpoint, outcome), by Ray Train's controller (begin) and by people (status, stop).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic import events
from elastic.checkpoint.committer import Committer
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import restore_plan
from elastic.clock import RealClock
from elastic.cluster import ray_core
from elastic.cluster.notices import Notices
from elastic.cluster.stream import Server
from elastic.config import Config, ElasticError
from elastic.controller import requests
from elastic.controller.driver import Driver, replay
from elastic.controller.state import TERMINAL, Phase, RunState
from elastic.data.feed import fingerprint_of
from elastic.events import Order, Report
from elastic.plan import RestorePlan
from elastic.resume import Resume, about, choose, disk_folder, disk_line, save_config
from elastic.segments import FILE, Sealer, recover
from elastic.storage.store import Store, store_at
from elastic.telemetry import journal

logger = logging.getLogger(__name__)

NAMESPACE = "elastic"
MEMORY = "coordinator.json"  # in the run's directory
NODE_ID_DIGITS = 12  # of Ray's, that name a node here
CALL_TIMEOUT_S = 60.0
IDLE_S = 0.5
RECENT_STEPS = 20
GENERATIONS_LOST_MAX = 100  # begun after the last segment that reached storage: their numbers are not used again
NAME_FREE_S, NAME_POLL_S = 20.0, 0.2


class RunError(ElasticError):
    """The run can't go on, or its coordinator can't be reached."""


class _Memory:
    """What a restarted coordinator must know before it can read its journal; one small file, replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, token: str) -> dict[str, Any]:
        """What was written for this token: another one is another submission of the run."""
        return self._values if self._values.get("token") == token else {}

    def write(self, **values: Any) -> None:
        self._values = {**self._values, **values}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".tmp")
        aside.touch(mode=0o600)  # the token is in it
        aside.write_text(json.dumps(self._values))
        os.replace(aside, self._path)


class Progress:
    """The journal as the driver writes it, with the newest step records kept for `summary`."""

    def __init__(self, path: Path) -> None:
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self._held_out: float | None = None
        for entry in journal.read_file(path):
            self._note(entry)
        self._file = journal.open_for_append(path)

    def write(self, line: bytes) -> None:
        self._file.write(line)
        entry = journal.decode(line)
        assert entry is not None, line
        self._note(entry)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def summary(self) -> dict[str, Any]:
        """loss and held_out in nats per token, tokens_s of the newest steps of one generation."""
        if not self._recent:
            return {"loss": None, "held_out": self._held_out, "tokens_s": None}
        newest = self._recent[-1]
        same = [record for record in self._recent if record["generation"] == newest["generation"]]
        seconds = sum(record["seconds"] for record in same)
        tokens_s = sum(record["tokens"] for record in same) / seconds if seconds else None
        return {"loss": newest["loss"], "held_out": self._held_out, "tokens_s": tokens_s}

    def _note(self, entry: dict[str, Any]) -> None:
        event = entry["event"]
        if event["kind"] == "StepCompleted":
            self._recent.append(event["record"])
            if event["record"]["held_out"] is not None:
                self._held_out = event["record"]["held_out"]


class Coordinator:
    """One per run. All state belongs to the loop's thread; methods hand it calls and wait for the answers."""

    def __init__(self, config: Config, token: str, asked: Resume, ray_address: str) -> None:
        self._config, self._asked = config, asked
        self._token = token
        self._memory = _Memory(config.run_dir() / MEMORY)
        before = self._memory.of(token)
        self._clock = RealClock()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._driver: Driver | None = None
        self._progress: Progress | None = None
        self._commits: Committer | None = None
        self._sealer: Sealer | None = None
        self._ended: Future[dict[str, Any]] = Future()
        address = ray.util.get_node_ip_address()
        self._server = Server(token, address, before.get("port", 0))
        self._group: str = before.get("group", "")
        self._memory.write(token=token, port=self._server.endpoint.port, group=self._group, ray_address=ray_address)
        if self._group:
            self._resume()
        threading.Thread(target=self._serve, name="driver", daemon=True).start()
        if ray.is_initialized():
            Notices(self.request, _draining_nodes)

    # ------------------------------------------------------------ called from outside

    def endpoint(self) -> dict[str, Any]:
        """Where hosts report: address, port and the token to show there."""
        endpoint = self._server.endpoint
        return {"address": endpoint.address, "port": endpoint.port, "token": self._token}

    def begin(self, group: str) -> int:
        """Start an attempt for the worker group `group`, once; returns the attempt's number."""
        return int(self._call(lambda: self._begin(group)))

    def status(self) -> dict[str, Any]:
        """Phase, step, loss, tokens_s, world, generation, hosts (node, pids, ...), own pid: plain JSON values."""
        return dict(self._call(self._status))

    def request(self, kind: str, who: str, why: str, given: dict[str, Any] | None = None) -> str:
        """Order what `requests.event_of` knows; returns what was decided. ElasticError: it can't be."""
        return str(self._call(lambda: self._request(kind, who, why, given or {})))

    def outcome(self, timeout_s: float) -> dict[str, Any] | None:
        """How the attempt ended (see `_outcome`), None while it has not within `timeout_s`."""
        try:
            return self._ended.result(timeout_s)
        except TimeoutError:
            return None

    def _call(self, function: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        self._calls.put((function, answer))
        self._server.wake()
        return answer.result(CALL_TIMEOUT_S)

    # ------------------------------------------------------------ the loop's thread

    def _serve(self) -> None:
        while True:
            try:
                while not self._calls.empty():
                    self._answer(*self._calls.get())
                self._turn()
            except Exception:
                # Without its loop the run would hang: tell everyone, with the reason.
                logger.exception("the driver loop failed")
                self._end({"phase": str(Phase.FAILED), "failure": "coordinator", "detail": traceback.format_exc()})

    def _answer(self, function: Callable[[], Any], answer: Future[Any]) -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    def _turn(self) -> None:
        if self._ended.done():
            self._dismiss()
        elif self._driver is None:
            self._server.receive(IDLE_S)
        elif self._driver.turn(self._config.control.heartbeat_s / 2):
            self._end(self._outcome(self._driver.state))

    def _end(self, outcome: dict[str, Any]) -> None:
        if not self._ended.done():
            if self._sealer is not None:
                self._sealer.close()  # whoever hears of the end may kill this process at once
            self._ended.set_result(outcome)

    def _dismiss(self) -> None:
        """Tell whoever still reports that the run is over."""
        state = self._driver.state if self._driver else RunState()
        for message in self._server.receive(IDLE_S):
            if isinstance(message, Report):
                seq = round(self._clock.now_s() * 1_000_000)
                order = Order(
                    host=message.host, seq=seq, attempt=state.attempt, generation=state.generation, finish=True
                )
                self._server.send(message.host, order)

    # ------------------------------------------------------------ attempts

    def _begin(self, group: str) -> int:
        if self._group == group and self._driver is not None:
            return self._driver.state.attempt
        # A further group of the same submission goes on from what the first one reached.
        start = choose(self._config, replace(self._asked, point="auto") if self._group else self._asked)
        assert not start.other, start
        store = store_at(self._config.place())
        log = CommitLog(store)
        attempt = log.claim(f"{socket.gethostname()}:{os.getpid()}", base=start.base)
        durable = self._durable(log)
        used = self._generations_used(store)
        save_config(self._config, store, attempt=attempt)
        driver = self._drive(attempt, RunState())
        driver.take(
            events.RunStarted(
                run=self._config.run,
                attempt=attempt,
                generation=max(used, durable[0].key.generation if durable else 0),
                durable=durable[0] if durable else None,
                older=tuple(durable[1:]),
                origin=start.origin,
                changes=start.changes,
                disk=disk_folder(self._config, store),
                line=disk_line(self._config, log),
            )
        )
        save_config(self._config, store)  # from here on what the next attempt is compared with
        self._group = group
        self._memory.write(group=group)
        return attempt

    def _generations_used(self, store: Store) -> int:
        """The highest number that an earlier attempt may have used."""
        lost = GENERATIONS_LOST_MAX if recover(self._journal, store) else 0
        return max((entry["generation"] + lost for entry in journal.read_file(self._journal)), default=0)

    def _fingerprint(self) -> str:
        return fingerprint_of(self._config.data, self._config.model.seq_len)

    def _durable(self, log: CommitLog) -> list[RestorePlan]:
        """The checkpoint to start from, and those before it, newest first."""
        line = [entry.manifest for entry in log.line() if entry.manifest]
        newest, fingerprint = log.newest(), self._fingerprint()
        if newest is not None and newest.about.fingerprint != fingerprint and not self._asked.allows("data.corpus"):
            raise RunError(
                f"the checkpoint of step {newest.key.step} was trained on data {newest.about.fingerprint[:12]}, "
                f"{self._config.data.prepared} holds {fingerprint[:12]}; give this run another name, or that data, "
                "or --allow-change data"
            )
        return [restore_plan(manifest) for manifest in line[line.index(newest) :]] if newest else []

    def _resume(self) -> None:
        """This process replaces one that died: the same attempt goes on."""
        state = replay(journal.read_file(self._journal), self._config)
        driver = self._drive(state.attempt, state)
        if state.phase in TERMINAL:
            self._end(self._outcome(state))
        else:
            driver.take(events.CoordinatorRestarted())

    def _drive(self, attempt: int, state: RunState) -> Driver:
        self._ended = Future()
        for previous in (self._commits, self._sealer, self._progress):
            if previous is not None:
                previous.close()
        store = store_at(self._config.place())
        self._progress = Progress(self._journal)
        self._sealer = Sealer(self._journal, store, attempt=attempt)
        self._commits = Committer(
            store,
            CommitLog(store),
            attempt,
            about=about(self._config, self._fingerprint()),
            samples_per_step=self._config.batch.global_samples,
            keep=self._config.checkpoint,
            before_commit=self._sealer.seal,
        )
        log = cast("IO[bytes]", self._progress)
        self._driver = Driver(self._config, self._server, self._commits, log, self._clock, state)
        return self._driver

    @property
    def _journal(self) -> Path:
        return self._config.run_dir() / FILE

    def _request(self, kind: str, who: str, why: str, given: dict[str, Any]) -> str:
        if self._driver is None:
            raise RunError("the run has not started yet; end its driver to stop it")
        event = requests.event_of(kind, given, who, why, self._driver.state, self._config)
        return self._driver.take(event) or f"nothing to change: {kind} is in force already"

    def _status(self) -> dict[str, Any]:
        if self._driver is None or self._progress is None:
            return {"run": self._config.run, "phase": "starting", "steps": self._config.steps, "hosts": {}}
        return {**self._driver.status(), **self._progress.summary(), "pid": os.getpid()}

    def _outcome(self, state: RunState) -> dict[str, Any]:
        """Plain JSON values: phase, failure, detail, attempt, step, durable_step, and the newest loss figures."""
        assert self._progress is not None
        return {
            "phase": str(state.phase),
            "failure": state.failure,
            "detail": state.detail,
            "attempt": state.attempt,
            "step": state.step,
            "durable_step": state.durable_step,
            "generation": state.generation,
            "incidents": state.incidents,
            **self._progress.summary(),
        }


# ---------------------------------------------------------------- from the driver's and the hosts' side


def start(config: Config, asked: Resume | None = None, *, name_free_s: float = NAME_FREE_S) -> Any:
    """Start the coordinator of `config.run` on this node, which goes on as `asked`; returns its actor handle.

    RunError: a run of this name is running in this cluster, and still after `name_free_s`: Ray needs some time to
    end the actors of a driver that was killed.
    """
    # num_cpus=0 lands anywhere unless pinned: also on the node that is killed next.
    context = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    actor_class = ray.remote(Coordinator).options(
        name=actor_name(config.run),
        namespace=NAMESPACE,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=8,
        max_concurrency=64,
        scheduling_strategy=here,
    )
    deadline_s = time.monotonic() + name_free_s
    while True:
        try:
            return actor_class.remote(config, secrets.token_hex(16), asked or Resume(), context.gcs_address)
        except ValueError as error:
            if time.monotonic() < deadline_s:
                time.sleep(NAME_POLL_S)
                continue
            raise RunError(
                f"run {config.run} is already running in this cluster; stop it, or give this one another name (run: "
                "...)"
            ) from error


def _draining_nodes() -> dict[str, int]:
    return {node[:NODE_ID_DIGITS]: end_ms for node, end_ms in ray_core.draining_nodes().items()}


def find(run: str) -> Any:
    """The coordinator's actor handle, from anywhere in the cluster. RunError: no such run is running."""
    try:
        return ray.get_actor(actor_name(run), namespace=NAMESPACE)
    except ValueError as error:
        raise RunError(f"no run {run} is running in this cluster") from error


def actor_name(run: str) -> str:
    return f"coordinator-{run}"
