"""Everything private of Ray Train 2.60 that this project uses: one long-lived worker group in which hosts come and go.

Reached through `in_place_trainer` only. tests/cluster/test_ray_contract.py names each private member below
and says in one sentence which of them an upgrade of Ray changed.
"""

# ruff: noqa: E402  # the version is checked before anything private is imported

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from elastic.cluster.host_slots import HostLimits, HostSlots, Slot
from elastic.cluster.ray_core import check_version

check_version(ray.__version__)

from ray.train import BackendConfig, Result, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.state import SchedulingState
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState
from ray.train.v2._internal.logging.logging import get_train_application_worker_log_path
from ray.train.v2._internal.util import bundle_to_remote_args, invoke_context_managers
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

logger = logging.getLogger(__name__)

POLL_WAIT_S = 0.1  # what one poll of the group may hold up the controller's event loop


class TooFewHosts(Exception):
    """The group stayed below its minimum for longer than its limit."""


@dataclasses.dataclass(frozen=True)
class HostGroupState(WorkerGroupState):
    """Ray Train's group state; the slots own actors and placement groups, there is no synchronization actor."""

    def shutdown(self) -> None:
        self.placement_group_handle.shutdown()


class ElasticWorkerGroup(WorkerGroup):
    """A worker group that loses and gains workers while it runs. Each worker is a host."""

    def _start_impl(self, worker_group_state_builder: Any) -> None:
        """Return once the minimum of hosts runs; the others join later. Blocks: called in a thread."""
        self._assert_inactive()
        context = self._worker_group_context
        scaling = self._train_run_context.scaling_config
        self._limits = HostLimits(**self._train_run_context.train_loop_config["limits"])
        self._ranks = 0
        self._enough_s = time.monotonic()
        self._slots = HostSlots(
            self,
            count=scaling.max_workers,
            name=f"{placement_prefix(self._train_run_context.run_id)}{context.run_attempt_id[:8]}",
            resources=context.resources_per_worker,
            selectors=scaling._label_selector_per_worker(scaling.max_workers),
            limits=self._limits,
        )
        try:
            with invoke_context_managers([callback.on_worker_group_start for callback in self._callbacks]):
                for callback in self._callbacks:
                    callback.before_worker_group_start(context)
                self._wait_for_hosts(scaling.min_workers)
                self._worker_group_state = self._state(time.monotonic())
                for callback in self._callbacks:
                    callback.after_worker_group_start(self)
            for callback in self._callbacks:
                callback.after_worker_group_training_start(self)
        except BaseException as error:
            self._slots.shutdown()
            self._clear_state()
            if isinstance(error, RayActorError):
                raise WorkerGroupStartupFailedError(f"a host died while the group started: {error}") from error
            raise

    def _wait_for_hosts(self, wanted: int) -> None:
        deadline_s = time.monotonic() + self._worker_group_start_timeout_s
        while not self._slots.finishing and (len(self._slots.joined) < wanted or self._slots.starting):
            self._slots.turn(time.monotonic(), wait_s=POLL_WAIT_S)
            if time.monotonic() < deadline_s:
                continue
            if len(self._slots.joined) >= wanted:
                return
            if self._slots.last_loss:
                raise WorkerGroupStartupFailedError(
                    f"{len(self._slots.joined)} of at least {wanted} hosts started within "
                    f"{self._worker_group_start_timeout_s:.0f} s; the last that failed: {self._slots.last_loss}"
                )
            raise WorkerGroupStartupTimeoutError(num_workers=wanted)

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """Drop dead hosts, take in new ones, and tell the controller how those that are there are doing."""
        self._assert_active()
        now_s = time.monotonic()
        if self._slots.turn(now_s, wait_s=POLL_WAIT_S):
            self._worker_group_state = self._state(self._worker_group_state.start_time)
            self._show_hosts()
        joined = self._slots.joined
        status = WorkerGroupPollStatus(dict(enumerate(_status(slot) for slot in joined)))
        if len(joined) >= self._train_run_context.scaling_config.min_workers or status.finished:
            self._enough_s = now_s
        elif now_s - self._enough_s > self._limits.below_min_s:
            self._give_up(len(joined))
        if joined:  # Ray Train's own callbacks know no empty group
            for callback in self._callbacks:
                callback.after_worker_group_poll_status(status)
        self._latest_poll_status = status
        return status

    def _give_up(self, hosts: int) -> None:
        error = TooFewHosts(
            f"{hosts} hosts for {self._limits.below_min_s:.0f} s, wanted at least "
            f"{self._train_run_context.scaling_config.min_workers}; last loss: {self._slots.last_loss or 'none'}. "
            "Add nodes, or lower hosts_min"
        )
        self._latest_poll_status = WorkerGroupPollStatus({0: WorkerStatus(running=False, error=error)})
        raise WorkerGroupError(error_message=str(error), worker_failures={0: error})

    def _state(self, start_s: float) -> HostGroupState:
        return HostGroupState(start_s, self._slots, self._hosts(), None)

    def _hosts(self) -> list[Worker]:
        return [slot.worker for slot in self._slots.joined]

    def _show_hosts(self) -> None:
        for callback in self._callbacks:
            if isinstance(callback, HostsShown):
                callback.after_worker_group_start(self)

    # -------------------------------------------------------------- what HostSlots does to an actor

    def spawn(self, placement: PlacementGroup) -> Any:
        run_config = self._train_run_context.run_config
        actor_class = ray.remote(
            runtime_env=self._get_worker_runtime_env(custom_runtime_env=run_config.worker_runtime_env),
            **bundle_to_remote_args(self._worker_group_context.resources_per_worker),
        )(self._worker_cls)
        strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=0)
        return actor_class.options(scheduling_strategy=strategy).remote()

    def greet(self, actor: Any) -> list[Any]:
        return [actor.get_metadata.remote()]

    def start(self, actor: Any, greeting: Any) -> tuple[Worker, list[Any]]:
        """Start the host function. A rank is only a name here: what trains has its own ranks, per generation."""
        beside = sum(worker.metadata.node_id == greeting.node_id for worker in self._slots.workers)
        ranks = DistributedContext(
            world_rank=self._ranks,
            world_size=self._train_run_context.scaling_config.max_workers,
            local_rank=beside,
            local_world_size=beside + 1,
            node_rank=0,
        )
        self._ranks += 1
        worker = Worker(actor, greeting, self._worker_group_context.resources_per_worker, ranks)
        return worker, [
            actor.init_train_context.remote(
                train_run_context=self._train_run_context,
                distributed_context=ranks,
                synchronization_actor=None,
                storage_context=self._storage_context,
                worker_callbacks=self._worker_callbacks_to_propagate,
                controller_actor=ray.get_runtime_context().current_actor,
            ),
            actor.run_train_fn.remote(self._worker_group_context.train_fn_ref),
            worker.execute_async(get_train_application_worker_log_path),
        ]

    def poll(self, actor: Any) -> list[Any]:
        return [actor.poll_status.remote()]


def _status(slot: Slot) -> WorkerStatus:
    if slot.error is not None:
        return WorkerStatus(running=False, error=slot.error)
    return slot.answer or WorkerStatus(running=True)


class InPlaceScaling(ScalingPolicy):
    """Start the group as it is configured and never restart it for capacity: the group shrinks and grows itself.

    Ray Train's own elastic policy would restart all workers a minute after capacity changed. What an autoscaler
    should provide is told by the pending placement groups of empty slots, so nothing is requested beside them.
    """

    def after_controller_start(self, train_run_context: Any) -> None:
        pass

    def _get_num_workers_for_resource_request(self) -> int:
        raise NotImplementedError("no resources are requested beside the placement groups")

    def make_decision_for_non_running_worker_group(self) -> ResizeDecision:
        return ResizeDecision(
            num_workers=self.scaling_config.min_workers,
            resources_per_worker=self.scaling_config._resources_per_worker_not_none,
        )

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> NoopDecision:
        return NoopDecision()


class ElasticTrainController(TrainController):
    """Ray Train's controller on an elastic group: no group restart on preemption, no blocked event loop at start."""

    worker_group_cls = ElasticWorkerGroup

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._health_check_interval_s = self._train_run_context.train_loop_config["limits"]["poll_s"]
        callbacks: list[Any] = self._worker_group_callbacks_to_propagate
        callbacks[:] = [each for each in callbacks if not isinstance(each, PreemptionCallback)]

    async def _step(self) -> Any:
        state = self.get_state()
        if isinstance(state, SchedulingState):
            # Waits for capacity: in a thread, so that Ctrl-C (`abort`) gets through meanwhile.
            return await asyncio.to_thread(self._execute_resize_decision, state.scaling_decision)
        return await super()._step()


class HostsShown(StateManagerCallback):
    """Keeps Ray Train's state (dashboard, state API) at the hosts that are there now.

    The parent would ask worker 0 for framework versions and fail the run if it died meanwhile.
    """

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        self._state_manager.update_train_run_attempt_running(
            run_id=self._run_id,
            attempt_id=worker_group.get_worker_group_context().run_attempt_id,
            workers=worker_group.get_workers(),
        )


class _GroupStarting(WorkerGroupCallback):
    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        self._announce(worker_group_context.run_attempt_id)


class InPlaceTrainer(DataParallelTrainer):
    """Runs one host function per slot. No placement group outlives `fit`, however it ends."""

    def __init__(self, host: Callable[[dict[str, Any]], Any], *, announce: Callable[[str], None], **rest: Any):
        super().__init__(host, backend_config=BackendConfig(), **rest)
        self._announce = announce

    def fit(self) -> Result:
        try:
            return super().fit()
        finally:
            if ray.is_initialized():  # else each call would first join, or start, some cluster
                remove_placements(placement_prefix(self.train_run_context.run_id))

    def _create_default_callbacks(self) -> list[Any]:
        # The cleaner knows one placement group, the others set up what only a training function needs.
        unwanted = (PlacementGroupCleanerCallback, DatasetsCallback, WorkingDirectorySetupCallback)
        callbacks = [
            HostsShown(datasets={}) if isinstance(each, StateManagerCallback) else each
            for each in super()._create_default_callbacks()
            if not isinstance(each, unwanted)
        ]
        return [*callbacks, _GroupStarting(self._announce)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        arguments["scaling_policy"] = InPlaceScaling(self.scaling_config)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        controller = (
            ray.remote(ElasticTrainController)
            .options(
                num_cpus=0,
                scheduling_strategy=here,
                runtime_env={"env_vars": {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}},
            )
            .remote(**arguments)
        )
        if threading.current_thread() is threading.main_thread():
            self._register_sigint_handler(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


def node_log_dir() -> Path:
    """Where Ray keeps the logs of this node and session, on the node's disk. To be called in a worker."""
    return Path(get_train_application_worker_log_path()).parent.parent


def placement_prefix(run_id: str) -> str:
    return f"elastic-{run_id[:12]}-"


def remove_placements(prefix: str) -> None:
    """Remove what a controller that was killed left behind: Ray keeps its placement groups while the job lives."""
    for row in placement_group_table().values():
        if row["name"].startswith(prefix) and row["state"] != "REMOVED":
            ray.util.remove_placement_group(get_placement_group(row["name"]))


def in_place_trainer(
    host: Callable[[dict[str, Any]], Any],
    *,
    host_config: dict[str, Any],
    scaling_config: ScalingConfig,
    run_config: RunConfig,
    limits: HostLimits,
    announce: Callable[[str], None],
) -> DataParallelTrainer:
    """A Ray Train trainer that runs `host(host_config)` in each worker of one elastic group.

    `announce(attempt_id)` is called in the controller before each start of the group: once, and again for
    each failure that `run_config.failure_config` lets it retry. `fit()` returns the Result, or raises
    `ray.train.WorkerGroupError` when a host function raised or hosts were too few for too long.
    """
    return InPlaceTrainer(
        host,
        announce=announce,
        train_loop_config={**host_config, "limits": dataclasses.asdict(limits)},
        scaling_config=scaling_config,
        run_config=run_config,
    )
