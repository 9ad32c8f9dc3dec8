"""The Ray nodes that `elastic train` starts on this machine: a head without hosts and worker nodes with slots.

Also the faults of nodes: kill (power loss with connection resets), freeze (silence), thaw. Call everything from
the main thread: the kernel ends a Ray process when the thread that started it ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.cluster_utils import Cluster

from elastic.cluster import ray_core
from elastic.cluster.coordinator import NAMESPACE
from elastic.config import ElasticError

# Ray's defaults find a killed node after 14 s and a silent one after 65 s. Too eager for a real cluster, where
# a busy raylet may miss checks for seconds.
HEALTH_CHECK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
# In the session directory, with the driver's node and pid: who starts nodes later removes it if that driver is dead.
DRIVER_MARK = "elastic-driver"
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; nothing large goes through it
SIGNAL_TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0


class LocalNodes:
    """A local cluster for one run, as a context manager; leaves no process and no session directory behind.

    The head has no CPU resource, so that hosts (one CPU each) land on the worker nodes. Nodes are named by
    their Ray node id. After an error (not Ctrl-C) the session directory with Ray's logs stays, and its path is
    printed; after a SIGKILL of this process the kernel ends the nodes, and the next LocalNodes removes it.
    """

    def __init__(
        self,
        *,
        nodes: int,
        hosts_per_node: int,
        dashboard: bool = False,
        health_check: Mapping[str, int] = HEALTH_CHECK,
    ) -> None:
        self._nodes = nodes
        self._hosts_per_node = hosts_per_node
        self._dashboard = dashboard
        self._health_check = dict(health_check)
        self._running: dict[str, Any] = {}
        self._cluster: Any = None
        self._before: tuple[set[int], set[Path]] = (set(), set())

    def __enter__(self) -> LocalNodes:
        _check_main_thread()
        self._before = (_children(), ray_core.sessions_of(os.getpid()))
        try:
            with ray_core.signals_kept():
                self._start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _start(self) -> None:
        self._cluster = Cluster()
        self._cluster.add_node(
            num_cpus=0,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=self._dashboard,
            include_log_monitor=False,
            no_monitor=True,
            _system_config=self._health_check,
        )
        for session in ray_core.sessions_of(os.getpid()) - self._before[1]:
            (session / DRIVER_MARK).write_text(f"{socket.gethostname()} {os.getpid()}")
        _remove_sessions_of_the_dead()
        for _ in range(self._nodes):
            self._add_node(wait=False)
        self._cluster.wait_for_nodes(timeout=START_TIMEOUT_S)
        ray.init(
            address=self._cluster.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="warning",
            configure_logging=False,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ray.shutdown()
        # All that this process started since, so also of a node whose start was interrupted.
        children, sessions = self._before
        _signal_trees(sorted(_children() - children), signal.SIGKILL)
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None
        for session in ray_core.sessions_of(os.getpid()) - sessions:
            if error is None or isinstance(error, KeyboardInterrupt):
                shutil.rmtree(session, ignore_errors=True)
            else:
                (session / DRIVER_MARK).unlink(missing_ok=True)
                print(f"Ray's logs: {session / 'logs'}", file=sys.stderr)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the worker nodes that were not killed, oldest first."""
        return tuple(self._running)

    def tend(self) -> None:
        """Reap nodes that something else killed: their workers take a zombie for a living raylet. Call it often.

        ElasticError: a process of the head ended, and with it the cluster.
        """
        for node in self._running.values():
            for info in _processes(node):
                info.process.poll()
        for name in ("gcs_server", "raylet"):
            for info in self._cluster.head_node.all_processes.get(name, ()):
                if info.process.poll() is not None:
                    raise ElasticError(
                        f"the {name} of the head (pid {info.process.pid}) ended with {info.process.returncode}, and "
                        "Ray with it; the same command goes on from the last durable checkpoint"
                    )

    def add_node(self) -> str:
        """Start one more worker node; returns its id once Ray knows it."""
        _check_main_thread()
        with ray_core.signals_kept():
            return self._add_node(wait=True)

    def _add_node(self, *, wait: bool) -> str:
        node = self._cluster.add_node(wait=wait, num_cpus=self._hosts_per_node, object_store_memory=OBJECT_STORE_BYTES)
        self._running[node.node_id] = node
        return str(node.node_id)

    def kill_node(self, node: str) -> None:
        """SIGKILL the raylet and everything under it, at once; reap the raylet, for its workers take a zombie
        for a living one."""
        ray_node = self._running.pop(self._id_of(node))
        _signal_trees(_roots(ray_node), signal.SIGKILL)
        self._cluster.remove_node(ray_node, allow_graceful=False)

    def freeze_node(self, node: str) -> None:
        """SIGSTOP everything on the node: connections stay open and silent, as after a power loss."""
        _signal_trees(_roots(self._running[self._id_of(node)]), signal.SIGSTOP)

    def thaw_node(self, node: str) -> None:
        _signal_trees(_roots(self._running[self._id_of(node)]), signal.SIGCONT)

    def _id_of(self, node: str) -> str:
        """The full id of a running node from the short one that hosts report."""
        found = [known for known in self._running if known.startswith(node)]
        if len(found) != 1:
            raise ElasticError(f"{len(found)} of the running nodes {', '.join(self._running)} are called {node}")
        return found[0]


def _remove_sessions_of_the_dead() -> None:
    for session in ray_core.sessions_of(None):
        try:
            name, _, pid = (session / DRIVER_MARK).read_text().partition(" ")
        except FileNotFoundError:
            continue  # not ours, or left on purpose
        # The name, because containers with one /tmp number their processes each by itself.
        if name == socket.gethostname() and not Path(f"/proc/{pid}").exists():
            print(f"removed {session}, which a driver left when it was killed", file=sys.stderr)
            shutil.rmtree(session, ignore_errors=True)


def _processes(node: Any) -> list[Any]:
    return [info for infos in node.all_processes.values() for info in infos]


def _roots(node: Any) -> list[int]:
    return [info.process.pid for info in _processes(node)]


def _children() -> set[int]:
    """Living children of this process."""
    return {pid for pid in _descendants([os.getpid()]) if _state_and_parent(pid)[1] == os.getpid()}


def _signal_trees(roots: list[int], number: signal.Signals) -> None:
    """Send `number` to `roots` and all their descendants. They are stopped first, until a look finds no new
    one: a process that still runs could fork past the signal."""
    stopped: set[int] = set()
    deadline_s = time.monotonic() + SIGNAL_TIMEOUT_S
    while found := _descendants(roots) - stopped:
        if number == signal.SIGCONT:
            stopped = found
            break
        for pid in found:
            _send(pid, signal.SIGSTOP)
        stopped |= found
        if time.monotonic() > deadline_s:
            raise ElasticError(f"processes under {roots} kept forking for {SIGNAL_TIMEOUT_S} s, could not stop them")
    if number != signal.SIGSTOP:
        for pid in stopped:
            _send(pid, number)
    if number == signal.SIGKILL:
        _wait_for_end(stopped, deadline_s)


def _wait_for_end(pids: set[int], deadline_s: float) -> None:
    while alive := {pid for pid in pids if _state_and_parent(pid)[0] not in ("", "Z")}:
        if time.monotonic() > deadline_s:
            raise ElasticError(f"processes {sorted(alive)} outlived SIGKILL for {SIGNAL_TIMEOUT_S} s")
        time.sleep(0.005)


def _descendants(roots: list[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        state, parent = _state_and_parent(int(entry.name))
        if state not in ("", "Z"):
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid for pid in roots if Path(f"/proc/{pid}").exists()]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def _state_and_parent(pid: int) -> tuple[str, int]:
    """The letter of its state and its parent's pid; ("", 0) once it is gone."""
    try:
        # pid (command) state ppid ...; the command may hold spaces and brackets
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return state, int(parent)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # ended between the look and the signal, which is all that was wanted


def _check_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ElasticError("Ray nodes end with the thread that starts them; start them from the main thread")
