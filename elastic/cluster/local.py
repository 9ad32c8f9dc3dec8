"""Hosts as subprocesses of this machine under made-up node names, without Ray: for process tests and twins.

`LocalCluster` is the driver's `Cluster` seam plus the hands of chaos. A host ends with the process that started it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from elastic.chaos.inject import family, send_signal
from elastic.cluster.host import HostSettings, run_host
from elastic.cluster.stream import Server
from elastic.config import Config
from elastic.events import HostGone, Order, Report
from elastic.plan import Endpoint
from elastic.telemetry.logs import host_log
from elastic.worker.template import die_with_parent

ADDRESS = "127.0.0.1"
STOP_TIMEOUT_S = 10.0


class LocalCluster:
    """`nodes` x `hosts_per_node` hosts, node names "n0", "n1", ...; each node is a failure domain.
    `log_dir` stands for the disks of the nodes; each host has a directory in it."""

    def __init__(self, config: Config, *, log_dir: Path) -> None:
        self._config = config
        self._log_dir = log_dir
        self._token = secrets.token_hex(16)
        self._server = Server(self._token, ADDRESS)
        self._hosts: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self, nodes: int, hosts_per_node: int) -> None:
        for node in range(nodes):
            for slot in range(hosts_per_node):
                self.spawn(f"n{node}", slot)

    def receive(self, timeout_s: float) -> list[Report | HostGone]:
        return self._server.receive(timeout_s)

    def send(self, host: str, order: Order) -> None:
        self._server.send(host, order)

    def drop(self, host: str) -> None:
        self._server.drop(host)

    def spawn(self, node: str, slot: int) -> int:
        """Start the host of one slot; returns its pid. The calling thread must outlive it (PR_SET_PDEATHSIG)."""
        log_dir = self._log_dir / f"{node}-{slot}"
        log_dir.mkdir(parents=True, exist_ok=True)
        settings = HostSettings(
            coordinator=self._server.endpoint,
            token=self._token,
            config=self._config,
            node=node,
            domain=node,
            slot=slot,
            address=ADDRESS,
            log_dir=log_dir,
        )
        settings_fd = os.memfd_create("elastic-host-settings")
        os.pwrite(settings_fd, json.dumps(_to_json(settings)).encode(), 0)
        with (log_dir / host_log(node, slot)).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "elastic.cluster.local", str(settings_fd), str(os.getpid())],
                pass_fds=[settings_fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        os.close(settings_fd)
        self._hosts[node, slot] = process
        return process.pid

    def pids(self, node: str) -> list[int]:
        """All processes of a node: its hosts and what descends from them."""
        hosts = [process.pid for (name, _), process in self._hosts.items() if name == node]
        return [pid for host in hosts for pid in family(host)]

    def kill_node(self, node: str) -> None:
        """SIGKILL to everything of the node, as a power loss would."""
        send_signal(self.pids(node), signal.SIGKILL)

    def freeze_node(self, node: str) -> None:
        """SIGSTOP to everything of the node: it goes silent, its connections stay."""
        send_signal(self.pids(node), signal.SIGSTOP)

    def thaw_node(self, node: str) -> None:
        send_signal(self.pids(node), signal.SIGCONT)

    def wait(self, timeout_s: float) -> dict[tuple[str, int], int]:
        """Exit codes by (node, slot), once all hosts have ended. TimeoutExpired: one has not."""
        return {slot: process.wait(timeout=timeout_s) for slot, process in self._hosts.items()}

    def close(self) -> None:
        """Kill what is left, and wait for it."""
        for process in self._hosts.values():
            if process.poll() is None:
                send_signal(family(process.pid), signal.SIGKILL)
        self.wait(STOP_TIMEOUT_S)
        self._server.close()


def _to_json(settings: HostSettings) -> dict[str, Any]:
    plain = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {
        **plain,
        "coordinator": asdict(settings.coordinator),
        "config": settings.config.model_dump(mode="json"),
        "log_dir": str(settings.log_dir),
    }


def _from_json(raw: dict[str, Any]) -> HostSettings:
    return HostSettings(
        **{
            **raw,
            "coordinator": Endpoint(**raw["coordinator"]),
            "config": Config.model_validate(raw["config"]),
            "log_dir": Path(raw["log_dir"]),
        }
    )


def main() -> None:
    """One host: `python -m elastic.cluster.local SETTINGS_FD PARENT_PID`."""
    settings_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s host %(levelname)s %(name)s: %(message)s")
    raw = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    os.close(settings_fd)
    logging.getLogger(__name__).info("the host ends: %s", run_host(_from_json(raw), stopped=lambda: False))


if __name__ == "__main__":
    main()
