"""Runs as they lie in storage, made without training: journal, commit log, checkpoints and saved configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic import events, resume, segments
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import restore_plan
from elastic.config import Config
from elastic.data.feed import feed_of
from elastic.data.order import digest
from elastic.data.shards import Corpus
from elastic.storage.store import store_at
from elastic.telemetry import journal
from tests.checkpoint.hosts import key
from tests.checkpoint.stored import manifest


class Told:
    """One run in `config.run_dir()`; `t` is the time of the next entry."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store = store_at(config.place())
        self.path = config.run_dir() / segments.FILE
        self.t = 100.0
        self._base: int | None = None

    def attempt(self, *, base: int | None = None, changes: tuple[str, ...] = (), config: Config | None = None) -> int:
        self.config = config or self.config
        log = CommitLog(self.store)
        attempt = log.claim("test", base=base)
        newest = log.newest()
        resume.save_config(self.config, self.store, attempt=attempt)
        resume.save_config(self.config, self.store)
        durable = restore_plan(newest) if newest else None
        self._base = durable.key.generation if durable else None
        self._step = durable.key.step if durable else 0
        event = events.RunStarted(run=self.config.run, attempt=attempt, generation=0, durable=durable, changes=changes)
        self._write(event, generation=0)
        return attempt

    def generation(self, number: int, steps: int, *, corpus: Corpus | None = None) -> None:
        """From where the attempt began, `steps` completed steps."""
        restore = {"generation": self._base, "step": self._step} if self._base is not None else None
        action = {
            "kind": "StartGeneration",
            "generation": number,
            "hosts": ["h"],
            "step": self._step,
            "restore": restore,
        }
        self._write(events.Tick(), generation=number, actions=[{**action, "until_step": 0, "tier": "the seed"}])
        for step in range(self._step + 1, self._step + steps + 1):
            self._write(events.StepCompleted(record=self._record(number, step, corpus)), generation=number, step=step)

    def checkpoint(self, attempt: int, generation: int, step: int) -> None:
        ready = manifest(self.store, key(generation, step), attempt)
        CommitLog(self.store).commit(attempt, ready)

    def _record(self, generation: int, step: int, corpus: Corpus | None) -> events.StepRecord:
        samples, ids = self.config.batch.global_samples, None
        if corpus is not None:
            ids = feed_of(self.config, {"": corpus}).run((step - 1) * samples, samples)
        return events.StepRecord(
            generation=generation, step=step, loss=1.0, tokens=1, samples=samples, grad_norm=1.0, lr=0.1, seconds=0.1,
            digest="0" if ids is None else f"{digest(ids):016x}",
        )  # fmt: skip

    def _write(self, event: Any, *, generation: int, step: int = 0, actions: list[Any] | None = None) -> None:
        self.t += 1.0
        entry = {
            "schema": journal.SCHEMA, "t": self.t, "event": events.to_json(event), "actions": actions or [],
            "reason": "", "phase": "running", "generation": generation, "step": step, "incident": None,
            "short": False, "fresh": True,
        }  # fmt: skip
        with journal.open_for_append(self.path) as file:
            file.write(journal.encode(entry))


def config_in(path: Path, **changes: Any) -> Config:
    return Config.model_validate({"run": "r", "storage": str(path), "steps": 100, **changes})
