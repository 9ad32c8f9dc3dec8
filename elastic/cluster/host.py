"""The host: one device slot's long-lived actor. It starts and kills; it neither trains nor moves bytes.

One thread, one poll loop over the coordinator's stream and the crew's descriptors. Orders are the whole desired
state and reports the whole actual one, so each turn just closes the gap between them.
"""

from __future__ import annotations

import logging
import os
import select
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.cluster.check import HostCheck
from elastic.cluster.children import HostError
from elastic.cluster.crew import Crew
from elastic.cluster.log_tails import LogTails
from elastic.cluster.resources import Resources, reserve
from elastic.cluster.stream import Client
from elastic.config import Config
from elastic.events import Order, Report, StepRecord
from elastic.plan import Assignment, Endpoint, SnapshotKey
from elastic.planner.memory import received_buffers, shard_bytes
from elastic.storage.errors import StorageError
from elastic.storage.store import store_at
from elastic.telemetry.logs import host_log

__all__ = ["HostError", "HostSettings", "run_host"]

log = logging.getLogger(__name__)

RECORDS_PER_REPORT = 1_000
UPLOAD_AGAIN_S = 2.0
NEWS_WAIT_S = 0.008  # a step's record, seal and partner copy come within a few ms: one report for all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What a host is told when it starts. `address`: its own IP, on which peers reach its mover and its store.
    `log_dir`: a directory of its own on the disk of its node."""

    coordinator: Endpoint
    token: str
    config: Config
    node: str
    domain: str
    slot: int
    address: str
    log_dir: Path
    threads: int = 1


def run_host(settings: HostSettings, *, stopped: Callable[[], bool]) -> str:
    """Serve the run until the coordinator says that it is over, or `stopped()`. Returns why it ended.

    Blocks; the calling thread must live as long as the host: its death kills the children. HostError: it can't
    go on. SIGCHLD must have its default action.
    """
    settings.log_dir.mkdir(parents=True, exist_ok=True)
    client = Client(settings.coordinator.address, settings.coordinator.port, settings.token)
    tails = LogTails(settings.log_dir, store_at(settings.config.place()), settings.node)
    try:
        while True:
            # Unique also across processes: an evicted incarnation never comes back.
            name = f"{settings.node}/{settings.slot}.{os.getpid()}-{uuid.uuid4().hex[:6]}"
            log.info("host %s serves run %s, pid %d", name, settings.config.run, os.getpid())
            why = _run_incarnation(settings, name, client, tails, stopped)
            if why != "evicted":
                return why
            log.info("%s was evicted; it comes back as a new host", name)
    finally:
        client.close()
        tails.close()


def _run_incarnation(
    settings: HostSettings, name: str, client: Client, tails: LogTails, stopped: Callable[[], bool]
) -> str:
    config = settings.config
    told_to_template = {
        "config": config.model_dump(mode="json"),
        "log_dir": str(settings.log_dir),
        "threads": settings.threads,
        "token": settings.token,
    }
    check = HostCheck(config, node=settings.node, log_dir=settings.log_dir)
    reserved, bare, why = _reserve(settings, _bare_report(settings, name), client, check, stopped)
    if reserved is None:
        return why
    crew = Crew(config, reserved, told_to_template, check)
    try:
        return _Host(settings, bare, client, reserved, crew, tails).run(stopped)
    finally:
        crew.close()
        check.close()
        reserved.close()


def _reserve(
    settings: HostSettings, bare: Report, client: Client, check: HostCheck, stopped: Callable[[], bool]
) -> tuple[Resources | None, Report, str]:
    """(what the crew needs, the newest report), as soon as there is room; None: why the host is to end instead."""
    while True:
        bare, why = check.wait_for_room(client, bare, stopped)
        if why:
            return None, bare, why
        try:
            reserved = reserve(
                address=settings.address,
                log=settings.log_dir / host_log(settings.node, settings.slot),
                shard_bytes=shard_bytes(settings.config),
                received_buffers=received_buffers(settings.config),
            )
        except StorageError as error:
            if not settings.config.admission.enabled:
                raise
            check.no_room(str(error))
        else:
            return reserved, bare, ""


def _bare_report(settings: HostSettings, name: str) -> Report:
    """Of a host that has nothing yet."""
    nowhere = Endpoint(address=settings.address, port=0)
    return Report(
        host=name,
        seq=0,
        node=settings.node,
        domain=settings.domain,
        slot=settings.slot,
        ready=False,
        warm=False,
        mover=nowhere,
        store=nowhere,
        pids={"host": os.getpid()},
    )


class _Host:
    """One incarnation: what was ordered, what is the case, what was told."""

    def __init__(
        self, settings: HostSettings, bare: Report, client: Client, resources: Resources, crew: Crew, tails: LogTails
    ) -> None:
        """`bare`: the report before this one had anything to show."""
        self._settings = settings
        self._bare = bare
        self._client = client
        self._resources = resources
        self._crew = crew
        self._tails = tails
        self._order: Order | None = None
        self._assignment: Assignment | None = None
        self._ordered_s = 0.0
        self._heard_s = time.monotonic()
        self._started = 0
        self._upload: tuple[SnapshotKey | None, float] = (None, 0.0)
        self._connected = False
        self._seq = bare.seq
        self._reported_s = 0.0
        self._news_s: float | None = None
        self._poller, self._watched = select.poll(), dict[int, bool]()

    def run(self, stopped: Callable[[], bool]) -> str:
        ready: set[int] = set()
        while not stopped():
            self._crew.tend(ready)
            self._check_lease()
            for order in self._client.receive():
                self._take(order)
            if self._order is not None:
                if self._order.finish or self._order.evicted:
                    return "finished" if self._order.finish else "evicted"
                self._obey(self._order)
                self._crew.check.try_network(self._crew.mover, self._order.neighbours)
                self._crew.check.try_storage(self._order.attempt)
            self._report_if_due()
            ready = self._wait()
        return "stopped"

    # ---------------------------------------------------------------- orders

    def _take(self, order: Order) -> None:
        """The newest order counts; an assignment in an older one of the same generation is kept."""
        self._heard_s = time.monotonic()
        if order.host != self._bare.host or (self._order is not None and order.seq <= self._order.seq):
            return
        self._order = order
        if order.disk is not None and self._settings.config.snapshot.disk:
            self._crew.order_disk(order.disk)
        if order.assignment is not None and (
            self._assignment is None or self._assignment.generation != order.generation
        ):
            self._assignment, self._ordered_s = order.assignment, self._heard_s
        seen, records = order.steps_seen, self._crew.records
        while seen and records and records[0].generation == seen.generation and records[0].step <= seen.step:
            records.popleft()

    def _obey(self, order: Order) -> None:
        crew, board = self._crew, self._resources.arena.board
        training = crew.trainer.assignment if crew.trainer is not None else None
        if training is not None and (training.generation < order.generation or not order.running):
            crew.kill_trainer()
        if training is None or training.generation == order.generation:
            # Not earlier: under a newer generation's rule the old trainer could reuse what that one restores from.
            board.order(generation=order.generation, keep=order.keep)
        if order.drain:
            board.drain_generation = order.generation
        assignment = self._assignment
        if order.running and assignment is not None and self._started < assignment.generation == order.generation:
            self._start(assignment)
        self._ask_upload(order.upload)

    def _start(self, assignment: Assignment) -> None:
        if self._crew.start(assignment, self._ordered_s):
            self._started = assignment.generation

    def _ask_upload(self, key: SnapshotKey | None) -> None:
        """Again from time to time until it is done: a mover that died meanwhile has forgotten it."""
        now_s = time.monotonic()
        asked, at_s = self._upload
        done = any(upload.key == key for upload in self._crew.uploads)
        if key is None or done or (key == asked and now_s - at_s < UPLOAD_AGAIN_S):
            return
        self._upload = (key, now_s)
        self._crew.upload(key)

    def _check_lease(self) -> None:
        """A host that the coordinator may have given up must not go on training."""
        lease_s = self._settings.config.control.lease_s
        if self._crew.trainer is not None and time.monotonic() - self._heard_s > lease_s:
            log.warning("nothing heard from the coordinator for %.1f s: the trainer is killed", lease_s)
            self._crew.kill_trainer()

    # ---------------------------------------------------------------- reports

    def _report_if_due(self) -> None:
        now_s = time.monotonic()
        reconnected = self._client.connected and not self._connected
        self._connected = self._client.connected
        late = now_s - self._reported_s >= self._settings.config.control.heartbeat_s
        if self._crew.news and self._news_s is None:
            self._news_s = now_s
        due = self._news_s is not None and now_s - self._news_s >= NEWS_WAIT_S
        changed = self._crew.changed or self._crew.check.changed
        if self._connected and (changed or due or late or reconnected):
            if self._crew.changed and self._crew.told.phase == "exited":
                self._tails.hurry()
            self._crew.changed = self._crew.news = self._crew.check.changed = False
            self._news_s = None
            self._reported_s = now_s
            self._client.send(self._report())

    def _report(self) -> Report:
        crew, resources = self._crew, self._resources
        self._seq += 1
        return replace(
            self._bare,
            seq=self._seq,
            ready=crew.ready and crew.check.done and self._is_disk_known(),
            warm=crew.warm,
            mover=resources.endpoint(resources.mover_listener),
            store=resources.endpoint(resources.store_listener),
            trainer=crew.told,
            step=crew.step_of(crew.told.generation),
            holdings=(*resources.arena.holdings(), *(crew.on_disk or ())),
            steps=self._steps(),
            uploads=tuple(crew.uploads),
            upload_failure=crew.failures.get("upload"),
            disk_failure=crew.failures.get("disk"),
            skipped=resources.arena.board.skipped,
            pids=crew.pids(),
            check=crew.check.told,
            sent_s=time.time(),
        )

    def _is_disk_known(self) -> bool:
        """Before that a run would begin with less than it has."""
        if not self._settings.config.snapshot.disk:
            return True
        return self._order is not None and (self._order.disk is None or self._crew.on_disk is not None)

    def _steps(self) -> tuple[StepRecord, ...]:
        """Rank 0's records; the others' once a generation has ended: rank 0's host may be lost, and its own with it."""
        is_teller = self._assignment is not None and self._assignment.rank == 0
        if not is_teller and self._crew.told.phase != "exited":
            return ()
        return tuple(self._crew.records)[:RECORDS_PER_REPORT]

    # ---------------------------------------------------------------- waiting

    def _wait(self) -> set[int]:
        """Until a descriptor is ready or a timer runs out, at most a heartbeat. Returns those that are ready."""
        watched = self._crew.watched()
        if self._client.fileno() >= 0:
            watched[self._client.fileno()] = self._client.writing
        if watched != self._watched:
            self._poller, self._watched = select.poll(), watched
            for fd, writing in watched.items():
                self._poller.register(fd, select.POLLIN | (select.POLLOUT if writing else 0))
        now_s = time.monotonic()
        heartbeat_s = self._reported_s + self._settings.config.control.heartbeat_s - now_s
        if not self._client.connected:
            heartbeat_s = self._settings.config.control.heartbeat_s
        if self._news_s is not None:
            heartbeat_s = min(heartbeat_s, self._news_s + NEWS_WAIT_S - now_s)
        wait_s = min(heartbeat_s, self._client.wait_s(), self._crew.next_s() - now_s)
        return {fd for fd, _ in self._poller.poll(max(0.0, wait_s) * 1000 + 0.5)}
