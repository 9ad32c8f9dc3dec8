"""Every private member of Ray that elastic relies on: an upgrade of Ray says in one sentence what it changed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from elastic.cluster import ray_core, ray_private

V2 = "ray.train.v2._internal"
EXECUTION = f"{V2}.execution"
GROUP = f"{EXECUTION}.worker_group.worker_group:WorkerGroup"
CONTROLLER = f"{EXECUTION}.controller.controller:TrainController"
WORKER = f"{EXECUTION}.worker_group.worker:RayTrainWorker"
POLICY = f"{EXECUTION}.scaling_policy.scaling_policy:ScalingPolicy"
CALLBACK = f"{EXECUTION}.callback:WorkerGroupCallback"
TRAINER = "ray.train.v2.api.data_parallel_trainer:DataParallelTrainer"
STATE = f"{V2}.callbacks.state_manager:StateManagerCallback"

# What is called or overridden -> the names of its parameters, in order.
SIGNATURES = {
    f"{GROUP}.__init__": "self, train_run_context, worker_group_context, callbacks",
    f"{GROUP}.create": "train_run_context, worker_group_context, callbacks",
    f"{GROUP}._start_impl": "self, worker_group_state_builder",
    f"{GROUP}.poll_status": "self, timeout",
    f"{GROUP}.get_workers": "self",
    f"{GROUP}.get_worker_group_context": "self",
    f"{GROUP}._assert_active": "self",
    f"{GROUP}._assert_inactive": "self",
    f"{GROUP}._clear_state": "self",
    f"{GROUP}._get_worker_runtime_env": "custom_runtime_env",
    f"{CONTROLLER}.__init__": "self, train_fn_ref, train_run_context, scaling_policy, failure_policy, callbacks, "
    "validation_config",
    f"{CONTROLLER}._step": "self",
    f"{CONTROLLER}._execute_resize_decision": "self, decision",
    f"{CONTROLLER}.get_state": "self",
    f"{CONTROLLER}.run": "self",
    f"{CONTROLLER}.get_result": "self",
    f"{WORKER}.get_metadata": "self",
    f"{WORKER}.poll_status": "self",
    f"{WORKER}.run_train_fn": "self, train_fn_ref",
    f"{WORKER}.init_train_context": "self, train_run_context, distributed_context, synchronization_actor, "
    "storage_context, worker_callbacks, controller_actor, dataset_shard_provider, checkpoint, has_validation_fn, "
    "current_report_index",
    f"{POLICY}.__init__": "self, scaling_config",
    f"{POLICY}.after_controller_start": "self, train_run_context",
    f"{POLICY}._get_num_workers_for_resource_request": "self",
    f"{POLICY}.make_decision_for_non_running_worker_group": "self",
    f"{POLICY}.make_decision_for_running_worker_group": "self, worker_group_state, worker_group_status",
    f"{CALLBACK}.on_worker_group_start": "self",
    f"{CALLBACK}.before_worker_group_start": "self, worker_group_context",
    f"{CALLBACK}.after_worker_group_start": "self, worker_group",
    f"{CALLBACK}.after_worker_group_training_start": "self, worker_group",
    f"{CALLBACK}.after_worker_group_poll_status": "self, worker_group_status",
    f"{TRAINER}.__init__": "self, train_loop_per_worker, train_loop_config, backend_config, scaling_config, "
    "run_config, datasets, dataset_config, resume_from_checkpoint, metadata, validation_config",
    f"{TRAINER}._create_default_callbacks": "self",
    f"{TRAINER}._initialize_and_run_controller": "self, controller_init_kwargs",
    f"{TRAINER}._register_sigint_handler": "self, controller",
    f"{STATE}.__init__": "self, datasets",
    f"{STATE}.after_worker_group_start": "self, worker_group",
    f"{V2}.state.state_manager:TrainStateManager.update_train_run_attempt_running": "self, run_id, attempt_id, workers",
    f"{EXECUTION}.worker_group.worker:Worker": "actor, metadata, resources, distributed_context, log_file_path, "
    "placement_group_bundle_index",
    f"{EXECUTION}.worker_group.worker:Worker.execute_async": "self, fn, fn_args, fn_kwargs",
    f"{EXECUTION}.worker_group.worker:ActorMetadata": "hostname, node_id, node_ip, pid, accelerator_ids",
    f"{EXECUTION}.worker_group.state:WorkerGroupState": "start_time, placement_group_handle, workers, sync_actor",
    f"{EXECUTION}.worker_group.state:WorkerGroupState.shutdown": "self",
    f"{EXECUTION}.worker_group.state:WorkerGroupContext": "run_attempt_id, train_fn_ref, num_workers, "
    "resources_per_worker, placement_strategy, label_selector, num_slices",
    f"{EXECUTION}.worker_group.poll:WorkerStatus": "running, error, training_report, return_value, preemption_info",
    f"{EXECUTION}.worker_group.poll:WorkerGroupPollStatus": "worker_statuses, worker_rank_to_replica_group_rank",
    f"{EXECUTION}.context:DistributedContext": "world_rank, world_size, local_rank, local_world_size, node_rank",
    f"{EXECUTION}.context:TrainRunContext": "run_config, train_loop_config, scaling_config, backend_config, "
    "dataset_config",
    f"{EXECUTION}.controller.state:SchedulingState": "scaling_decision",
    f"{EXECUTION}.scaling_policy:ResizeDecision": "num_workers, resources_per_worker",
    f"{EXECUTION}.scaling_policy:NoopDecision": "",
    f"{V2}.exceptions:WorkerGroupStartupTimeoutError": "num_workers",
    f"{V2}.exceptions:WorkerGroupStartupFailedError": None,
    f"{V2}.constants:get_env_vars_to_propagate": "",
    f"{V2}.util:bundle_to_remote_args": "bundle",
    f"{V2}.util:invoke_context_managers": "context_managers",
    f"{V2}.logging.logging:get_train_application_worker_log_path": "",
    f"{V2}.callbacks:DatasetsCallback": None,
    f"{V2}.callbacks:WorkingDirectorySetupCallback": None,
    f"{V2}.callbacks.placement_group_callback:PlacementGroupCleanerCallback": None,
    f"{V2}.callbacks.preemption_callback:PreemptionCallback": None,
    "ray.train.v2.api.config:ScalingConfig._label_selector_per_worker": "self, num_workers",
    "ray.train.v2.api.config:ScalingConfig._resources_per_worker_not_none": None,
    "ray.cluster_utils:Cluster.add_node": "self, wait, node_args",
    "ray.cluster_utils:Cluster.remove_node": "self, node, allow_graceful",
    "ray.cluster_utils:Cluster.shutdown": "self",
    "ray._private.utils:set_sigterm_handler": "sigterm_handler",
    "ray._private.state:GlobalState.get_draining_nodes": "self",
    "ray._private.services:canonicalize_bootstrap_address": "addr, temp_dir",
    "ray._common.utils:get_default_ray_temp_dir": "",
    "ray._private.node:Node.node_id": None,
}

# Attributes that instances get -> where their assignment stands.
ATTRIBUTES = {
    f"{GROUP}.__init__": (
        "_train_run_context",
        "_worker_group_context",
        "_storage_context",
        "_callbacks",
        "_worker_callbacks_to_propagate",
        "_worker_group_state",
        "_latest_poll_status",
        "_worker_group_start_timeout_s",
    ),
    f"{GROUP}.poll_status": ("_latest_poll_status",),
    f"{CONTROLLER}.__init__": (
        "_health_check_interval_s",
        "_worker_group_callbacks_to_propagate",
        "_train_run_context",
    ),
    f"{TRAINER}.__init__": ("scaling_config", "train_run_context"),
    f"{STATE}.after_controller_start": ("_state_manager", "_run_id"),
    "ray._private.node:Node.__init__": ("all_processes",),
}

# Class attributes that are overridden or read.
CLASS_ATTRIBUTES = (f"{GROUP}._worker_cls", f"{CONTROLLER}.worker_group_cls")

# What must still be written where, in so many words: behaviour that no signature shows.
BEHAVIOUR = {
    f"{CONTROLLER}._start_worker_group": "self.worker_group_cls.create(",
    f"{CONTROLLER}._poll_workers": "self._health_check_interval_s",
    f"{CONTROLLER}._shutdown_worker_group": "self._worker_group.shutdown()",
    f"{GROUP}._start": "self._start_impl(",
    f"{GROUP}.shutdown": "self._worker_group_state.shutdown()",
    f"{GROUP}.abort": "self._worker_group_state.shutdown()",
}


def find(path: str) -> object:
    """The object at "module:Name.member"; AssertionError says in one sentence what is gone."""
    module, _, name = path.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        raise AssertionError(f"Ray no longer has the module {module}, which elastic uses for {name}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise AssertionError(f"Ray no longer has {path}, which elastic uses")
        found = getattr(found, part)
    return found


def check_signature(path: str, wanted: str) -> None:
    got = ", ".join(inspect.signature(find(path)).parameters)  # type: ignore[arg-type]  # all are callable
    assert got == wanted, f"Ray changed {path}: its parameters are ({got}), elastic was written for ({wanted})"


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    wanted = SIGNATURES[path]
    if wanted is None:
        find(path)
    else:
        check_signature(path, wanted)


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_instance_attributes(path: str) -> None:
    source = inspect.getsource(find(path))  # type: ignore[arg-type]
    for name in ATTRIBUTES[path]:
        assert re.search(rf"self\.{name}\b[^=\n]*=", source), (
            f"Ray's {path} no longer sets self.{name}, which elastic uses"
        )


@pytest.mark.parametrize("path", CLASS_ATTRIBUTES)
def test_class_attribute(path: str) -> None:
    find(path)


@pytest.mark.parametrize("path", BEHAVIOUR)
def test_behaviour(path: str) -> None:
    source = inspect.getsource(find(path))  # type: ignore[arg-type]
    assert BEHAVIOUR[path] in source, f"Ray's {path} no longer contains {BEHAVIOUR[path]!r}, which elastic relies on"


def test_the_contract_names_all_that_is_used() -> None:
    """Each private import and each private attribute in ray_private.py stands above."""
    tree = ast.parse(inspect.getsource(ray_private))
    named = {path.split(":")[1].split(".")[-1] for path in (*SIGNATURES, *CLASS_ATTRIBUTES)}
    named |= {name for names in ATTRIBUTES.values() for name in names}
    named |= {path.split(":")[1].split(".")[0] for path in SIGNATURES}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray.train.v2")
        for alias in node.names
    }
    assert imported <= named, f"not in the contract: {sorted(imported - named)}"
    own = {name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for name in [node.name]}
    own |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in named
    }
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
    }
    assert used - own <= named, f"not in the contract: {sorted(used - own - named)}"


def test_private_modules_of_ray_are_imported_in_two_places() -> None:
    elastic = Path(inspect.getfile(ray_private)).parents[1]
    pattern = re.compile(r"^\s*(?:from|import) ray\.(?:\S*\._|_|train\.v2)", re.MULTILINE)
    users = {path.name for path in elastic.rglob("*.py") if pattern.search(path.read_text())}
    assert users == {"ray_core.py", "ray_private.py"}


def test_a_missing_member_is_told_in_one_sentence() -> None:
    with pytest.raises(AssertionError, match=r"Ray no longer has .*WorkerGroup\._vanished, which elastic uses"):
        find(f"{GROUP}._vanished")
    with pytest.raises(AssertionError, match=r"its parameters are \(self\), elastic was written for \(self, more\)"):
        check_signature(f"{GROUP}.get_workers", "self, more")


@pytest.mark.parametrize("version", ["2.59.3", "2.61.0", "3.60.0", "2.6"])
def test_another_minor_version_of_ray_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=rf"Ray {re.escape(version)} is installed.*pip install"):
        ray_core.check_version(version)
    ray_core.check_version("2.60.7")
