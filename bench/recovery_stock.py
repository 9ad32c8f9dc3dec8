"""The peer in the recovery benchmark: stock Ray Train 2.60 elastic, with defaults and tuned, on the same nodes.

`measure_stock` starts 2 nodes x 2 workers, trains the same model with FSDP2 from a TorchTrainer with
num_workers=(2, 4), kills, and times until every rank of the new group has completed an optimizer step.
Each measurement has its own process, so that it leaves nothing in Ray's global state.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["trainer", "node"]

ROWS, SEQ_LEN = 2, 16  # of one rank's batch
# Reports are polled once per health check (2 s by default), more frequent ones would block the steps.
CHECKPOINT_STEPS = 100
TUNED_ENV = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5"}
RUN_TIMEOUT_S = 660.0
PHASE_TIMEOUT_S = 300.0


def measure_stock(kind: Kind, *, tuned: bool) -> float:
    """Seconds from SIGKILL of one worker ("trainer") or of a whole node ("node") to the next completed optimizer step
    on every rank. RuntimeError: it did not recover, with what it printed."""
    asked = json.dumps({"kind": kind, "tuned": tuned})
    command = [sys.executable, "-m", "bench.recovery_stock", asked]
    process = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith('{"recovery_s"')]
    if not lines:
        raise RuntimeError(
            f"stock Ray Train, {kind}, tuned={tuned}: exit {process.returncode}\n{process.stdout[-4000:]}"
        )
    return float(json.loads(lines[-1])["recovery_s"])


@dataclass(frozen=True, slots=True)
class StepLine:
    """One rank's completed step, as its worker wrote it down."""

    at_s: float
    pid: int
    node: str
    rank: int
    world: int
    step: int


def read_steps(path: Path) -> list[StepLine]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [StepLine(float(t), int(p), n, int(r), int(w), int(s)) for t, p, n, r, w, s in map(str.split, lines)]


def recovered_at_s(steps: list[StepLine], old_pids: set[int], killed_s: float) -> float | None:
    """When the last rank of the first complete new group ended its first step; None while there is no such group."""
    first: dict[int, StepLine] = {}
    for line in steps:
        if line.at_s > killed_s and line.pid not in old_pids:
            first.setdefault(line.pid, line)
    for world in sorted({line.world for line in first.values()}):
        ranks = {line.rank: line.at_s for line in first.values() if line.world == world}
        if len(ranks) == world:
            return max(ranks.values())
    return None


# ---------------------------------------------------------------- in the measuring process


def main() -> None:
    asked = json.loads(sys.argv[1])
    from elastic.cluster.ray_nodes import HEALTH_CHECK, LocalNodes

    tuned = bool(asked["tuned"])
    os.environ.update(TUNED_ENV if tuned else {})
    directory = Path(tempfile.mkdtemp(prefix="elastic-stock-"))
    with LocalNodes(nodes=2, hosts_per_node=2, health_check=HEALTH_CHECK if tuned else {}) as nodes:
        threading.Thread(target=_fit, args=(directory,), daemon=True).start()
        steps = directory / "steps"
        running = _wait(lambda: _steady(read_steps(steps)), "four ranks past their second checkpoint")
        newest = {line.rank: line for line in running}
        victim = newest[max(newest)]
        killed_s = time.time()
        if asked["kind"] == "node":
            nodes.kill_node(victim.node)
        else:
            os.kill(victim.pid, signal.SIGKILL)
        old = {line.pid for line in running}
        at_s = _wait(lambda: recovered_at_s(read_steps(steps), old, killed_s), "a step on every rank of a new group")
        mine = [line.at_s for line in running if line.rank == 0][-CHECKPOINT_STEPS:]
        step_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(mine))
        # Before the cluster is taken from under the fit thread, on which Ray may end this process with an error.
        print(json.dumps({"recovery_s": at_s - killed_s, "clean_step_s": step_s, **asked}), flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)  # the fit thread waits for a cluster that is gone


def _wait(find: Any, what: str) -> Any:
    deadline_s = time.monotonic() + PHASE_TIMEOUT_S
    while not (found := find()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {PHASE_TIMEOUT_S} s")
        time.sleep(0.05)
    return found


def _steady(steps: list[StepLine]) -> list[StepLine]:
    """All lines, once four ranks run and are well past their second checkpoint."""
    ready = {line.rank for line in steps if line.world == 4 and line.step >= 2 * CHECKPOINT_STEPS + 20}
    return steps if len(ready) == 4 else []


def _fit(directory: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"steps": str(directory / "steps")},
        scaling_config=ScalingConfig(num_workers=(2, 4)),
        run_config=RunConfig(name="stock", storage_path=str(directory), failure_config=FailureConfig(max_failures=-1)),
    ).fit()


def train(given: dict[str, Any]) -> None:
    """One worker: the toy model under FSDP2 on random tokens, until it is killed."""
    import ray
    import ray.train
    import torch
    from torch.distributed.fsdp import fully_shard

    from bench.toy import VOCABULARY, build
    from elastic.model.transformer import loss_sum

    torch.manual_seed(0)
    model = build()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    node = ray.get_runtime_context().get_node_id()
    step = _load(model, optimizer)
    size = (ROWS, SEQ_LEN)
    with open(given["steps"], "a", buffering=1) as told:
        while True:
            tokens = torch.randint(0, VOCABULARY, size)
            loss = loss_sum(model(tokens), tokens) / tokens.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            told.write(f"{time.time()} {os.getpid()} {node} {rank} {world} {step}\n")
            if step % CHECKPOINT_STEPS == 0:
                _save(model, optimizer, step, rank)


def _save(model: Any, optimizer: Any, step: int, rank: int) -> None:
    import ray.train
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            torch.save({"model": weights, "optimizer": state, "step": step}, Path(directory) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def _load(model: Any, optimizer: Any) -> int:
    """Restore the newest reported checkpoint; returns its step, 0 without one."""
    import ray.train
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(Path(directory) / "state.pt", weights_only=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    return int(state["step"])


if __name__ == "__main__":
    main()
