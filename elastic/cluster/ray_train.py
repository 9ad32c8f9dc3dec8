"""The public trainer: a run as a Ray Train run, with Ray Train's configs in and its Result out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.exceptions import RayActorError
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig, TrainingFailedError

from elastic.checkpoint.probe import check_storage
from elastic.cluster import coordinator, ray_host
from elastic.cluster.driver_lock import only_driver
from elastic.cluster.host_slots import HostLimits
from elastic.cluster.ray_private import in_place_trainer
from elastic.config import Config, ConfigError, Place
from elastic.data.prepare import prepare_for
from elastic.report import point_to
from elastic.resume import Resume, choose, settle
from elastic.storage.object_store import open_filesystem
from elastic.worker.task import name_of
from elastic.worker.task_check import check

GROUP_START_S = 60.0  # Ray Train tries to start a group for this long, then again
OUTCOME_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class ElasticTrainer:
    """Trains `task` on Ray as `config` says.

    task: a class or a function at the top level of a module or script (docs/own_model.md), or its name; without it,
    what `config.task` names. It is imported by its name wherever it runs, and tried once here, in another process.
    `scaling_config.num_workers` (int, or (min, max)) and `use_gpu` win over `hosts_min`, `hosts_max` and `use_gpu`
    of `config`; `run_config` over `run`, `storage` and `max_failures`. Without them they are made from `config`.
    `max_failures` counts what ends the worker group (user code that raises, too few hosts for `hosts_wait_s`); a
    lost trainer, host or node does not. `resume`: from what the run goes on, and which changes of its configuration
    are allowed. Needs `ray.init`, and to be called on the node that should coordinate.

    ConfigError, TaskError: one sentence on what can't be used, before anything starts.
    """

    def __init__(
        self,
        task: str | type | Callable[..., object] | None = None,
        config: Config | None = None,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        resume: Resume | None = None,
    ) -> None:
        if isinstance(task, Config):
            raise ConfigError("ElasticTrainer(task, config): the first argument is the task; give config=...")
        config = config or Config()
        if task is not None:
            config = config.model_copy(update={"task": name_of(task)})
        self.scaling_config = scaling_config or scaling_of(config)
        self.run_config = run_config or run_of(config)
        self.resume = resume or Resume()
        _check(self.scaling_config)
        self.config = merged(config, self.scaling_config, self.run_config)
        if config.sizes.shard_bytes is None:  # else it was checked, or is known
            self.config = check(self.config)

    def fit(self) -> Result:
        """Run to the end. Result.metrics: the newest figures (step, loss, held_out, ...); Result.checkpoint: the run's
        directory, or its prefix in object storage, with the newest durable checkpoint in its log; None where there is
        none.

        Raises `ray.train.TrainingFailedError` as every Ray trainer; its cause says what failed. ElasticError: the run
        is running already, Ray Train's controller died, storage can't be used, or `resume` does not fit what is there.
        """
        config = self.config
        prepare_for(config, progress=logger.info)
        with only_driver(config.run_dir()):
            check_storage(config.place(), logger.warning)
            point_to(config.place())
            resume = settle(config, self.resume, choose(config, self.resume))
            actor = coordinator.start(config, resume)
            try:
                return self._fit(actor)
            finally:
                if ray.is_initialized():  # else the driver has left the cluster, which ends its actors
                    ray.kill(actor)

    def _fit(self, actor: Any) -> Result:
        config = self.config
        trainer = in_place_trainer(
            ray_host.host,
            host_config={"config": config.model_dump(mode="json")},
            scaling_config=self.scaling_config,
            run_config=self.run_config,
            limits=HostLimits(below_min_s=config.control.hosts_wait_s),
            announce=partial(_announce, config.run),
        )
        try:
            result = trainer.fit()
        except TrainingFailedError as error:
            outcome = _outcome(actor, timeout_s=0.0)
            error.add_note(f"{outcome.get('failure')}: {outcome.get('detail')}")  # Ray Train cuts it short
            raise
        except RayActorError as error:
            raise coordinator.RunError(
                f"Ray Train's controller ended ({str(error).strip().splitlines()[0]}), and its hosts with it; "
                "the same command goes on from the last durable checkpoint"
            ) from error
        return _with_outcome(result, _outcome(actor, timeout_s=OUTCOME_TIMEOUT_S), config.place())


def _outcome(actor: Any, *, timeout_s: float) -> dict[str, Any]:
    return ray.get(actor.outcome.remote(timeout_s), timeout=timeout_s + OUTCOME_TIMEOUT_S) or {}


def _announce(run: str, group: str) -> None:
    """A worker group starts (called in Ray Train's controller): so does an attempt."""
    ray.get(coordinator.find(run).begin.remote(group), timeout=coordinator.CALL_TIMEOUT_S)


def scaling_of(config: Config) -> ScalingConfig:
    hosts = (config.hosts_min, config.hosts_max)
    return ScalingConfig(num_workers=hosts[0] if hosts[0] == hosts[1] else hosts, use_gpu=config.use_gpu)


def run_of(config: Config) -> RunConfig:
    starts = max(1, round(config.control.hosts_wait_s / GROUP_START_S))
    failure_config = FailureConfig(max_failures=config.max_failures, controller_failure_limit=starts - 1)
    return RunConfig(name=config.run, storage_path=str(_directory(config)), failure_config=failure_config)


def _directory(config: Config) -> Path:
    """What Ray Train keeps of its own, and what the driver works on, lies in a directory; only our store knows URLs."""
    return config.run_dir().parent.resolve()


def merged(config: Config, scaling: ScalingConfig, run: RunConfig) -> Config:
    """The configuration that hosts and coordinator get; checked again, with absolute paths."""
    is_elsewhere = config.place().url != str(config.run_dir()) and run.storage_path == str(_directory(config))
    changed = {
        "run": run.name,
        "storage": config.storage if is_elsewhere else run.storage_path,
        "directory": str(_directory(config)),
        "max_failures": run.failure_config.max_failures,
        "hosts_min": scaling.min_workers,
        "hosts_max": scaling.max_workers,
        "use_gpu": scaling.use_gpu,
    }
    sections = {"data": config.data.absolute(), "evaluation": config.evaluation.absolute()}
    return Config.model_validate({**config.model_dump(), **changed, **{k: v.model_dump() for k, v in sections.items()}})


def _check(scaling: ScalingConfig) -> None:
    if scaling.max_workers < 1 or scaling.min_workers < 1:
        raise ConfigError(f"num_workers {scaling.num_workers}: wanted at least 1, local mode is not supported")
    if scaling.use_tpu:
        raise ConfigError("use_tpu: hosts train with torch on CPUs or CUDA devices; leave it off")
    if scaling.placement_strategy != "PACK":
        raise ConfigError(
            f"placement_strategy {scaling.placement_strategy!r}: each host is placed by itself, so that it can be "
            "replaced by itself; leave it at 'PACK' and use label_selector to say where hosts may run"
        )


def _with_outcome(result: Result, outcome: dict[str, Any], place: Place) -> Result:
    checkpoint = checkpoint_of(result, place) if outcome.get("durable_step") else None
    return dataclasses.replace(result, metrics=outcome, checkpoint=checkpoint)


def checkpoint_of(result: Result, place: Place) -> Checkpoint:
    """Where the run's state is: Ray Train's own directory, or the storage that only we know."""
    if place.url == str(place.directory):
        return Checkpoint(result.path, filesystem=result.filesystem)
    filesystem, root = open_filesystem(place.url, place.options)
    return Checkpoint(root, filesystem=PyFileSystem(FSSpecHandler(filesystem)))
