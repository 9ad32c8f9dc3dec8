"""A host's check of its node before it takes part, from four places: what is free is measured here, the device by a
fork of the template, the network by the mover, storage by a thread. No torch, no waiting but in `wait_for_room`.

Facts only: the controller judges them, with the same limits (elastic.health.admission).
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elastic.cluster import memory
from elastic.cluster.children import Mover
from elastic.cluster.storage_check import StorageCheck
from elastic.cluster.stream import Client
from elastic.config import Config
from elastic.events import NodeCheck, Report
from elastic.health.admission import fits, shortages
from elastic.plan import Member
from elastic.planner.memory import reserved_bytes

log = logging.getLogger(__name__)

TRY_EARLY_S = 1.0


class HostCheck:
    """The facts of one incarnation as they come. `changed`: there is news for the coordinator."""

    def __init__(self, config: Config, *, node: str, log_dir: Path) -> None:
        self._config = config
        self._limits = config.admission
        self._node = node
        self._log_dir = log_dir
        self._facts = NodeCheck(memory_wanted_bytes=reserved_bytes(config))
        self._device_known = self._link_known = self._storage_known = False
        self._storage: StorageCheck | None = None
        self._try_s = self._storage_late_s = 0.0
        self.changed = False
        self._measure_room()

    @property
    def done(self) -> bool:
        known = self._device_known and self._link_known and self._storage_known
        return known or not self._limits.enabled

    @property
    def told(self) -> NodeCheck | None:
        """The facts to report; None as long as they are not complete."""
        return self._facts if self._limits.enabled and self.done else None

    @property
    def wants_device(self) -> bool:
        """Whether a template is to examine the device: once, not again after it died."""
        return self._limits.enabled and not self._device_known

    @property
    def fits(self) -> bool:
        """Whether the device does what it should; a standby on one that does not would only die."""
        known = self._device_known and fits(self._facts, use_gpu=self._config.use_gpu)
        return known or not self._limits.enabled

    def close(self) -> None:
        if self._storage is not None:
            self._storage.close()

    # ---------------------------------------------------------------- device, network, storage

    def hear_device(self, found: dict[str, Any]) -> None:
        self._facts = replace(self._facts, **found)
        self._device_known = self.changed = True

    def hear_link(self, found: dict[str, Any]) -> None:
        self._facts = replace(self._facts, **found)
        # Before the device is known nothing waits for this, and a neighbour's mover may be about to start.
        self._link_known = self._device_known or bool(self._facts.link_to)
        self._try_s = time.monotonic() + (self._limits.again_s if self._link_known else TRY_EARLY_S)
        self.changed = True

    def try_network(self, mover: Mover | None, neighbours: tuple[Member, ...]) -> None:
        """Let the mover exchange bytes with one of them; again from time to time while none has answered."""
        now_s = time.monotonic()
        if not self._limits.enabled or self._facts.link_to or mover is None or now_s < self._try_s:
            return
        if not self._device_known and all(member.node == self._node for member in neighbours):
            return  # there is time: hosts of other nodes may be about to join
        if not neighbours:
            if not self._link_known:
                self._link_known = self.changed = True  # alone: the next host will try this one
            return
        limit_s = self._limits.link_timeout_s
        self._try_s = now_s + limit_s * (len(neighbours) + 1)  # by then it has answered, or has died
        places = [{"host": member.host, **asdict(member.mover)} for member in neighbours]
        mover.lines.write({"try": places, "limit_s": limit_s})

    def try_storage(self, attempt: int) -> None:
        """Begin to ask, or hear what came of it. One that does not answer in time is no reason to wait for it."""
        if not self._limits.enabled:
            return
        now_s, limit_s = time.monotonic(), self._limits.storage_timeout_s
        if self._storage is None:
            self._storage = StorageCheck(self._config.place(), attempt, again_s=self._limits.again_s)
            self._storage_late_s = now_s + limit_s
        found = self._storage.take()
        if found is None and not self._storage_known and now_s >= self._storage_late_s:
            found = {"storage_wrong": "", "storage_down": f"no answer within {limit_s:.0f} s"}
        if found is not None:
            self.hear_storage(found)

    def hear_storage(self, found: dict[str, Any]) -> None:
        if found["storage_down"] and self._facts.storage_down:
            return  # as before; how often it was tried is no news
        self._facts = replace(self._facts, **found)
        self._storage_known = self.changed = True

    # ---------------------------------------------------------------- room

    def wait_for_room(self, client: Client, bare: Report, stopped: Callable[[], bool]) -> tuple[Report, str]:
        """Until the node has the memory and disk that the run needs: tell what is short, and measure again.

        `bare`: a report to add the check to. Returns (`bare` as it was sent last, "" or why the host is to end).
        """
        again_s = time.monotonic() + self._limits.again_s
        while self._limits.enabled and self.short:
            if stopped():
                return bare, "stopped"
            for order in client.receive():
                if order.host == bare.host and (order.finish or order.evicted):
                    return bare, "finished" if order.finish else "evicted"
            bare = replace(bare, seq=bare.seq + 1, check=self._facts, sent_s=time.time())
            client.send(bare)
            _wait(client, self._config.control.heartbeat_s)
            if time.monotonic() >= again_s:
                again_s = time.monotonic() + self._limits.again_s
                self._measure_room()
        return bare, ""

    @property
    def short(self) -> bool:
        return bool(self._facts.failed or shortages(self._facts, self._limits))

    def no_room(self, why: str) -> None:
        """The arena could not be reserved although it looked as if it could."""
        self._facts = replace(self._facts, failed=why)

    def _measure_room(self) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(self._log_dir)
        found = replace(
            self._facts,
            memory_free_bytes=memory.free_bytes(),
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            failed="",
        )
        # While it is short, figures that change a little are no news.
        if not self._facts.memory_free_bytes or not shortages(found, self._limits):
            self._facts = found


def _wait(client: Client, limit_s: float) -> None:
    poller = select.poll()
    if client.fileno() >= 0:
        poller.register(client.fileno(), select.POLLIN | (select.POLLOUT if client.writing else 0))
    poller.poll(1000 * min(limit_s, client.wait_s()))
