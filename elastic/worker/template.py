"""The warm process from which a host's trainers are forked: `python -m elastic.worker.template FD`.

Executed by the host (never forked from it), one thread, no GPU context, no network. It has imported what a step
needs, found by rehearsal. On its control socket the host says {"fork": warm}; it answers with a pid, a pidfd and
the trainer's socket, and later tells each (pid, status) that it reaped. Once it tells what the device's check found.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
REHEARSAL_TIMEOUT_S = 300
RESTARTS_MAX = 8
_TASKS = Path("/proc/self/task")
_DESCRIPTORS = Path("/proc/self/fd")


def main() -> None:
    """The one argument is a descriptor of the settings (JSON in a memfd, so that it can be read again)."""
    settings_fd = int(sys.argv[1])
    settings = json.loads(os.pread(settings_fd, os.fstat(settings_fd).st_size, 0))
    die_with_parent(settings["parent_pid"])
    faulthandler.enable()
    # Before torch: thread pools would not survive the fork, and asking for a GPU must not open it.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(settings["threads"])
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    control = socket.socket(fileno=settings["control_fd"])
    left_out = sys.argv[2:]
    inheritance = _inherit(settings)
    names = _rehearsed(inheritance)
    check_fd = _check_device(inheritance) if settings["check"] else -1
    for name in names:
        if name not in left_out:
            _bring_in(name, left_out)
    gc.collect()
    gc.freeze()
    _serve(control, inheritance, left_out, check_fd)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent's forking thread ends; at once if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _inherit(settings: dict[str, Any]) -> Any:
    from elastic.config import Config
    from elastic.worker.loop import Inheritance
    from elastic.worker.task import extend_path

    config = Config.model_validate(settings["config"])
    extend_path(config)
    return Inheritance(
        config=config,
        log_dir=Path(settings["log_dir"]),
        threads=settings["threads"],
        token=settings["token"],
        arena_fd=settings["arena_fd"],
        store_fd=settings["store_fd"],
        wake_fd=settings["wake_fd"],
    )


# ---------------------------------------------------------------- rehearsal


def _rehearsed(inheritance: Any) -> list[str]:
    """Modules that one step needs beyond those imported: a throw-away fork runs a tiny one and tells.

    If the rehearsal fails, the trainers import by themselves, more slowly, and tell what is wrong.
    """
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _rehearse(inheritance, write_fd)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        _log(f"the rehearsal ended with status {status}; trainers will start more slowly")
    names: list[str] = json.loads(told) if told else []
    return names


def _rehearse(inheritance: Any, write_fd: int) -> NoReturn:
    from elastic.worker import loop

    signal.alarm(REHEARSAL_TIMEOUT_S)
    code = 1
    before = set(sys.modules)
    try:
        loop.rehearse(loop.smallest(inheritance.config))
        code = 0
    except Exception:  # told in the log; a trainer will meet the same error and report it
        traceback.print_exc()
    finally:
        found = [name for name in sys.modules if name not in before]
        os.write(write_fd, json.dumps(found).encode())
        sys.stderr.flush()
        os._exit(code)


def _check_device(inheritance: Any) -> int:
    """Examine the device in a throw-away fork, while modules are imported here. Returns where its result is read."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        try:
            from elastic.worker import device_check, loop

            signal.alarm(inheritance.config.admission.device_timeout_s)
            found = device_check.examine(loop.device_of(inheritance.config), inheritance.config.precision)
            os.write(write_fd, json.dumps(found).encode())
        except BaseException:  # a fork must never run on into its parent's code; without a result the host is refused
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(write_fd)
    return read_fd


def _bring_in(name: str, left_out: list[str]) -> None:
    """Import one module. If it starts a thread or opens a GPU, this process is unfit to fork: start over without."""
    with contextlib.suppress(Exception):  # names in sys.modules need not be importable by themselves
        importlib.import_module(name)
    unfit = _why_unfit()
    if not unfit:
        return
    _log(f"importing {name} {unfit}: left to the trainers, which start more slowly")
    if len(left_out) >= RESTARTS_MAX:
        _log(f"more than {RESTARTS_MAX} modules are unfit for a process that forks")
        sys.exit(1)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "elastic.worker.template", sys.argv[1], *left_out, name])


def _why_unfit() -> str:
    threads = len(list(_TASKS.iterdir()))
    if threads > 1:
        return f"started {threads - 1} thread(s)"
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone
            target = os.readlink(entry)
            if target.startswith("/dev/nvidia") and not target.startswith("/dev/nvidiactl"):
                return f"opened {target}"
    return ""


# ---------------------------------------------------------------- serving


def _serve(control: socket.socket, inheritance: Any, left_out: list[str], check_fd: int) -> None:
    """Fork on request, reap, tell. Ends when the host closes the control socket."""
    told_fd, tell_fd = os.pipe()
    os.set_blocking(tell_fd, False)
    os.set_blocking(told_fd, False)
    signal.set_wakeup_fd(tell_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _say(control, {"ready": True, "left_out": left_out})
    watched = [control.fileno(), told_fd, *([check_fd] if check_fd >= 0 else [])]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if check_fd in ready:
            watched.remove(check_fd)
            _tell_check(control, check_fd, inheritance.config.admission.device_timeout_s)
        if told_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(told_fd, 4096)
            _reap(control)
        if control.fileno() in ready:
            request = control.recv(65_536)
            if not request:
                return
            _fork(control, inheritance, warm=json.loads(request)["fork"])


def _tell_check(control: socket.socket, check_fd: int, limit_s: int) -> None:
    """It has ended, or is about to."""
    with open(check_fd, "rb") as pipe:
        told = pipe.read()
    none = f"the check of its device ended without a result, or not within {limit_s} s; see the host's log"
    _say(control, {"checked": json.loads(told) if told else {"failed": none}})
    _reap(control)  # it may have ended before there was a handler for that


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(control, {"reaped": pid, "status": status})


def _fork(control: socket.socket, inheritance: Any, *, warm: bool) -> None:
    """A trainer that leads its own process group and waits on its socket for a generation."""
    hosts_end, trainers_end = socket.socketpair()
    template_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_trainer(control, inheritance, hosts_end, trainers_end, template_pid, warm)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already, or did it itself
        os.setpgid(pid, pid)
    pidfd = os.pidfd_open(pid)  # before it can be reaped: the number can't belong to another process
    _say(control, {"forked": pid, "warm": warm}, [pidfd, hosts_end.fileno()])
    for fd in (pidfd, hosts_end.detach(), trainers_end.detach()):
        os.close(fd)


def _become_trainer(
    control: socket.socket,
    inheritance: Any,
    hosts_end: socket.socket,
    trainers_end: socket.socket,
    template_pid: int,
    warm: bool,
) -> NoReturn:
    from elastic.worker import loop

    code = 1
    try:
        die_with_parent(template_pid)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        hosts_end.close()
        code = loop.run(inheritance, trainers_end, warm=warm)
    except BaseException:  # a fork must never run on into its parent's code; the host sees the exit code and the log
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _say(control: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], fds or [])


def _log(line: str) -> None:
    print(f"template: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
