"""The processes of one host, kept up: template, mover, a standby, and at most one trainer that trains.

`tend` is called at each turn and moves everything as far as it goes; nothing here waits. What the coordinator is
to hear lies in public attributes; `changed`: some of it must be told at once, `news`: some of it may wait a moment.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from elastic.checkpoint.mover import uploaded_of
from elastic.cluster.check import HostCheck
from elastic.cluster.children import HostError, Mover, Retry, Template, Trainer
from elastic.cluster.resources import Resources
from elastic.config import Config
from elastic.events import Exit, Holding, StepRecord, TrainerReport, Uploaded, UploadFailure, from_json, to_json
from elastic.plan import Assignment, DiskOrder, SnapshotKey
from elastic.telemetry.logs import last_lines, trainer_log

log = logging.getLogger(__name__)

SEAL_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 0.5
RECORDS_MAX = 10_000
UPLOADS_MAX = 8
DETAIL_BYTES = 4_000


class Crew:
    """`trainer` trains, or has died and was not yet told; `told` is how the newest one is reported."""

    def __init__(self, config: Config, resources: Resources, told_to_template: dict[str, Any], check: HostCheck):
        """`told_to_template`: config, log_dir, threads and token as JSON values."""
        self._config = config
        self._resources = resources
        self._told_to_template = told_to_template
        self.check = check
        self._retries = {what: Retry(what) for what in ("template", "mover", "standby")}
        self.template: Template | None = None
        self.mover: Mover | None = None
        self.standby: Trainer | None = None
        self.trainer: Trainer | None = None
        self.told = TrainerReport()
        self.records: deque[StepRecord] = deque(maxlen=RECORDS_MAX)
        self.uploads: deque[Uploaded] = deque(maxlen=UPLOADS_MAX)
        self.failures: dict[str, UploadFailure] = {}  # the newest, of "upload" and "disk"
        self.on_disk: tuple[Holding, ...] | None = None  # None: not known yet
        self._disk: tuple[str, DiskOrder] | None = None
        self.changed = True
        self.news = False
        self._assignment: Assignment | None = None

    @property
    def ready(self) -> bool:
        return self.template is not None and self.template.ready and self.mover is not None and self.mover.ready

    @property
    def warm(self) -> bool:
        return self.standby is not None and self.standby.warm

    def pids(self) -> dict[str, int]:
        named = {"template": self.template, "mover": self.mover, "trainer": self.trainer, "standby": self.standby}
        return {"host": os.getpid(), **{name: process.pid for name, process in named.items() if process is not None}}

    # ---------------------------------------------------------------- orders

    def start(self, assignment: Assignment, ordered_s: float) -> bool:
        """Give the assignment to the standby; False while there is none to take it (it is on its way)."""
        if self.trainer is not None or self.template is None or not self.ready:
            return False
        if self.standby is None:
            if not self.template.forking:
                self.template.fork(warm=False)
            return False
        self.trainer, self.standby = self.standby, None
        self.trainer.give(assignment, ordered_s)
        self._assignment = assignment
        self.records.clear()
        self._tell_mover()
        self._show("starting")
        return True

    def kill_trainer(self) -> None:
        """If it lives; `told` has its end once it is dead."""
        if self.trainer is not None:
            self.trainer.kill(time.monotonic())

    def upload(self, key: SnapshotKey) -> None:
        """Ask the mover for it; asking again is harmless."""
        if self.mover is not None:
            self.mover.lines.write({"upload": asdict(key)})

    def order_disk(self, order: DiskOrder) -> None:
        """What is to lie on the node's disk."""
        wanted = (f"{self._config.snapshot.disk}/{order.folder}", order)
        if wanted != self._disk:
            self._disk = wanted
            self._tell_disk()

    def _tell_disk(self) -> None:
        if self.mover is not None and self._disk is not None:
            self.mover.lines.write({"disk": self._disk[0], "order": to_json(self._disk[1])})

    # ---------------------------------------------------------------- the turn

    def watched(self) -> dict[int, bool]:
        """Descriptors to wait for before the next `tend`, each with whether for writing too.

        While there is news to be told in a moment, more of it from the mover can wait.
        """
        found: dict[int, bool] = {}
        if self.template is not None:
            found[self.template.control.fileno()] = found[self.template.pidfd] = False
        if self.mover is not None:
            found[self.mover.pidfd] = False
            if not self.news:
                found[self.mover.lines.sock.fileno()] = self.mover.lines.writing
        for trainer in (self.trainer, self.standby):
            if trainer is not None:
                if not self._can_wait(trainer):
                    found[trainer.lines.sock.fileno()] = trainer.lines.writing
                if trainer.dead_s is None:
                    found[trainer.pidfd] = False
        found.pop(-1, None)
        return found

    def next_s(self) -> float:
        """When `tend` has something to do by time alone."""
        times = [retry.at_s for retry in self._retries.values() if retry.at_s > time.monotonic()]
        if self.trainer is not None and self.trainer.dead_s is not None:
            times.append(self.trainer.dead_s + STATUS_TIMEOUT_S)
        return min(times, default=float("inf"))

    def _can_wait(self, trainer: Trainer) -> bool:
        """Whether it has nothing to say that is worth a wake-up: a record of another rank than 0 is told at its end,
        and that shows at the pidfd."""
        assignment = trainer.assignment
        return assignment is not None and assignment.rank > 0 and "first_step" in trainer.marks

    def tend(self, ready: Set[int]) -> None:
        """Read what was said, bury the dead, start what is missing. `ready`: which of `watched()` are.

        HostError: it can't be done.
        """
        now_s = time.monotonic()
        self._tend_template(ready, now_s)
        self._tend_mover(ready, now_s)
        self._tend_standby(ready, now_s)
        self._tend_trainer(ready, now_s)

    def close(self) -> None:
        """Kill all; the template's death is the trainers'."""
        for trainer in (self.trainer, self.standby):
            if trainer is not None:
                trainer.sweep()
                trainer.close()
        for process in (self.template, self.mover):
            if process is not None:
                process.end()
        if self._disk is not None and self._disk[1].remove:
            shutil.rmtree(self._disk[0], ignore_errors=True)

    # ---------------------------------------------------------------- template

    def _tend_template(self, ready: Set[int], now_s: float) -> None:
        if self.template is not None:
            if self.template.control.fileno() in ready:
                for message, fds in self.template.read():
                    self._hear_template(self.template, message, fds)
            if self.template.pidfd in ready:
                self._retries["template"].failed(self.template.end())
                self.template = None
                self.changed = True
        if self.template is None and now_s >= self._retries["template"].at_s:
            resources = self._resources
            named = {
                "arena_fd": resources.arena.fd,
                "store_fd": resources.store_listener.fileno(),
                "wake_fd": resources.wake_fd,
            }
            told = {**self._told_to_template, **named, "check": self.check.wants_device}
            self.template = Template(told, list(named.values()), resources.log_fd)
            self.changed = True

    def _hear_template(self, template: Template, message: dict[str, Any], fds: list[int]) -> None:
        if "ready" in message:
            template.ready = True
            self._retries["template"].succeeded()
            self.changed = True
        elif "forked" in message:
            template.forking = False
            self.standby = Trainer(message["forked"], fds[0], socket.socket(fileno=fds[1]))
            self.changed = True
        elif "checked" in message:
            self.check.hear_device(message["checked"])
        elif "reaped" in message:
            for trainer in (self.trainer, self.standby):
                if trainer is not None and trainer.pid == message["reaped"]:
                    trainer.status = message["status"]

    def _tend_standby(self, ready: Set[int], now_s: float) -> None:
        """One waits from the generation's first step on: forked earlier it would take cores from the recovery."""
        standby = self.standby
        if standby is not None:
            if any("warm" in message for message in standby.lines.read()):
                standby.warm = True
                self._retries["standby"].succeeded()
                self.changed = True
            if standby.pidfd in ready:
                standby.sweep()
                standby.close()
                self._retries["standby"].failed(f"pid {standby.pid}, status {standby.status}")
                self.standby = None
                self.changed = True
            return
        template = self.template
        wanted = (
            self._config.warm_standby
            and self.check.fits
            and (self.trainer is None or "first_step" in self.trainer.marks)
        )
        if (
            wanted
            and template is not None
            and template.ready
            and not template.forking
            and now_s >= self._retries["standby"].at_s
        ):
            # After one that died while warming up: a cold one, which gets as far as to tell what is wrong.
            template.fork(warm=self._retries["standby"].at_s == 0.0)

    # ---------------------------------------------------------------- mover

    def _tend_mover(self, ready: Set[int], now_s: float) -> None:
        if self.mover is not None:
            for message in self.mover.lines.read():
                self._hear_mover(self.mover, message)
            if self.mover.pidfd in ready:
                self._retries["mover"].failed(self.mover.end())
                self.mover = None
                self.changed = True
        if self.mover is None and now_s >= self._retries["mover"].at_s:
            resources = self._resources
            self.mover = Mover(
                arena_fd=resources.arena.fd,
                listen_fd=resources.mover_listener.fileno(),
                wake_fd=resources.wake_fd,
                place=self._config.place(),
                token=self._told_to_template["token"],
                log_fd=resources.log_fd,
            )
            self._tell_mover()
            self._tell_disk()
            self.changed = True

    def _tell_mover(self) -> None:
        """What it serves now; a new mover also learns that a trainer's end waits for its seal."""
        assignment = self._assignment
        if self.mover is None or assignment is None:
            return
        self.mover.lines.write(
            {
                "generation": assignment.generation,
                "rank": assignment.rank,
                "world": assignment.world,
                "attempt": assignment.attempt,
                "partner": asdict(assignment.partner) if assignment.partner is not None else None,
            }
        )
        if self.trainer is not None and self.trainer.sealing_s is not None:
            self.mover.lines.write({"seal": True})

    def _hear_mover(self, mover: Mover, message: dict[str, Any]) -> None:
        if "changed" in message:
            self.news = True
            return
        self.changed = True
        if "ready" in message:
            mover.ready = True
            self._retries["mover"].succeeded()
        elif "tried" in message:
            self.check.hear_link(message["tried"])
        elif "uploaded" in message:
            self.uploads.append(uploaded_of(message["uploaded"]))
        elif "on disk" in message:
            self.on_disk = tuple(from_json(raw) for raw in message["on disk"])
        elif "sealed" in message and self.trainer is not None and self.trainer.dead_s is not None:
            self._bury(self.trainer)
        elif "failed" in message:
            log.warning("mover: %s failed: %s", message["failed"], message["reason"])
            if message["key"]:
                before, key = self.failures.get(message["failed"]), SnapshotKey(**message["key"])
                failure = UploadFailure(key=key, reason=message["reason"], number=1 + (before.number if before else 0))
                self.failures[message["failed"]] = failure

    # ---------------------------------------------------------------- trainer

    def _tend_trainer(self, ready: Set[int], now_s: float) -> None:
        trainer = self.trainer
        if trainer is None:
            return
        for message in trainer.lines.read():
            self._hear_trainer(trainer, message)
        if trainer.dead_s is None and trainer.pidfd not in ready:
            limit_s = self._config.control.stop_timeout_s
            if trainer.killed_s is not None and now_s - trainer.killed_s > limit_s:
                raise HostError(f"trainer {trainer.pid} is not dead {limit_s:.0f} s after SIGKILL: its device may hang")
            return
        if trainer.dead_s is None:
            trainer.dead_s = now_s
            for message in trainer.lines.read():  # its last words, now that there can be no more
                self._hear_trainer(trainer, message)
            trainer.sweep()
            os.eventfd_write(self._resources.wake_fd, 1)  # it may have died between a snapshot and telling so
        waited_s = now_s - trainer.dead_s
        if trainer.told is not None and trainer.told.kind in ("paused", "done"):
            self._seal_then_bury(trainer, waited_s)
        elif trainer.status is not None or self.template is None or waited_s > STATUS_TIMEOUT_S:
            self._bury(trainer)

    def _seal_then_bury(self, trainer: Trainer, waited_s: float) -> None:
        """Others will read this host's shards as soon as the pause is told."""
        if trainer.sealing_s is None:
            trainer.sealing_s = trainer.dead_s
            if self.mover is not None:
                self.mover.lines.write({"seal": True})
        elif waited_s > SEAL_TIMEOUT_S:
            log.warning("the mover did not seal within %.0f s", SEAL_TIMEOUT_S)
            self._bury(trainer)

    def _hear_trainer(self, trainer: Trainer, message: dict[str, Any]) -> None:
        if "mark" in message:
            trainer.marks[message["mark"]] = round(message["at_s"] - trainer.ordered_s, 6)
            if "first_step" in trainer.marks:
                self._show("running")
        elif "record" in message:
            self.records.append(from_json(message["record"]))
            assert trainer.assignment is not None
            self.news |= trainer.assignment.rank == 0  # the others' are told at their end
        elif "exit" in message:
            trainer.told = Exit(**message["exit"])

    def _bury(self, trainer: Trainer) -> None:
        """Its end is told; its buffers may be reused from now on."""
        self.trainer = None
        trainer.close()
        self._show("exited", trainer, self._exit_of(trainer))

    def _show(self, phase: Any, trainer: Trainer | None = None, ended: Exit | None = None) -> None:
        trainer = trainer or self.trainer
        assert trainer is not None and trainer.assignment is not None
        generation = trainer.assignment.generation
        self.told = TrainerReport(
            phase=phase, generation=generation, pid=trainer.pid, marks=dict(trainer.marks), exit=ended
        )
        self.changed = True

    def _exit_of(self, trainer: Trainer) -> Exit:
        assert trainer.assignment is not None
        code = signal = None
        if trainer.status is not None:
            signal = os.WTERMSIG(trainer.status) if os.WIFSIGNALED(trainer.status) else None
            code = os.WEXITSTATUS(trainer.status) if os.WIFEXITED(trainer.status) else None
        if trainer.told is not None:
            return replace(trainer.told, code=code, signal=signal)
        generation = trainer.assignment.generation
        step = self.step_of(generation)
        if trainer.killed_s is not None:
            return Exit(kind="stopped", step=step, code=code, signal=signal)
        detail = _tail(Path(self._told_to_template["log_dir"]) / trainer_log(generation, trainer.assignment.rank))
        if self.template is None:
            detail = f"its template died with it\n{detail}".rstrip()
        return Exit(kind="lost", step=step, code=code, signal=signal, detail=detail)

    def step_of(self, generation: int) -> int:
        """Newest step that the trainer of `generation` has completed, by its progress mark; 0: none yet."""
        progress = self._resources.arena.board.progress
        return progress.step if progress.generation == generation else 0


def _tail(path: Path) -> str:
    """The last lines of a log; a trainer that died early may have none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - DETAIL_BYTES))
            return "\n".join(last_lines(file.read().decode(errors="replace")))
    except FileNotFoundError:
        return ""
