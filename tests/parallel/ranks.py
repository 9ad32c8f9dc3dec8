"""Run a function on N real processes with a Gloo group, collect what they return, leave none behind."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "elastic.model.transformer"])


def run(world: int, target: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """What `target(rank, world, *args)` returned on each rank. AssertionError: one failed, or time ran out."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, "store"))
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank, args=(theirs, store, rank, world, target, args), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, deadline)
        finally:
            for process in processes:
                process.kill()
                process.join(timeout=10)


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"time ran out: ranks {sorted(results)} of {len(pipes)} are done"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failure, results[rank] = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            assert not failure, f"rank {rank} failed:\n{failure}"
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Any, store: str, rank: int, world: int, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )
        pipe.send(("", target(rank, world, *args)))
        dist.barrier()
    except Exception:
        pipe.send((traceback.format_exc(), None))
