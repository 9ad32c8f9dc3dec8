"""A task of one's own is tried before anything starts: imported, built, one step on made-up samples.

In a process of its own, so that the driver imports neither torch nor the task. It also tells how large a host's
arena must be. `python -m elastic.worker.task_check CONFIG_FD ANSWER_FD` is that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from elastic.config import Config, ConfigError, TaskError
from elastic.config_sections import Sizes
from elastic.worker import task

TIMEOUT_S = 300.0
OUTPUT_CHARS = 2_000


def check(config: Config, *, timeout_s: float = TIMEOUT_S) -> Config:
    """`config` with its task located and its sizes known. The built-in task needs no check: returned as it is.

    With `use_gpu` the task is built but takes no step, since this machine may have no GPU; where
    `sizes.shard_bytes` is given it is only imported. ConfigError: it can't be found; TaskError: it raised.
    """
    if task.importing:
        raise TaskError(
            f"{task.importing[-1]} starts a run while trainers import it; put what starts the run under "
            'if __name__ == "__main__":'
        )
    config = task.located(config)
    if config.is_built_in:
        return config
    answer = _ask(config, timeout_s)
    if "error" in answer:
        raise (ConfigError if answer["error"] == "config" else TaskError)(answer["text"])
    return config.model_copy(update={"sizes": Sizes.model_validate(answer["sizes"])})


def _ask(config: Config, timeout_s: float) -> dict[str, Any]:
    fds = [os.memfd_create(name) for name in ("elastic-check-config", "elastic-check-answer")]
    try:
        os.pwrite(fds[0], config.model_dump_json().encode(), 0)
        process = subprocess.run(
            [sys.executable, "-m", "elastic.worker.task_check", *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        told = os.pread(fds[1], os.fstat(fds[1]).st_size, 0)
    except subprocess.TimeoutExpired as error:
        raise TaskError(
            f"task {config.task!r} was not built, with one step, within {timeout_s:.0f} s on this machine; "
            "give sizes.shard_bytes if that is too much for it, then it is only imported here"
        ) from error
    finally:
        for fd in fds:
            os.close(fd)
    if told:
        return dict(json.loads(told))
    output = process.stdout.decode(errors="replace")[-OUTPUT_CHARS:]
    raise TaskError(f"task {config.task!r} ended the process that tried it (status {process.returncode}): {output}")


def main() -> None:
    config_fd, answer_fd = map(int, sys.argv[1:])
    config = Config.model_validate_json(os.pread(config_fd, os.fstat(config_fd).st_size, 0))
    os.environ["OMP_NUM_THREADS"] = "1"
    answer: dict[str, Any]
    try:
        answer = {"sizes": _sizes(config).model_dump()}
    except ConfigError as error:
        answer = {"error": "config", "text": str(error)}
    except TaskError as error:
        answer = {"error": "task", "text": str(error)}
    os.pwrite(answer_fd, json.dumps(answer).encode(), 0)


def _sizes(config: Config) -> Sizes:
    task.extend_path(config)
    found = task.load(config.task)
    from elastic.worker import declared, loop  # torch, only now: a wrong name is told at once

    few = config.batch.model_copy(update={"global_samples": config.hosts_max})
    try:
        declared.loop_of(found, config)
        if config.sizes.shard_bytes is not None:
            return config.sizes
        return loop.measure(
            config.model_copy(update={"batch": few, "use_gpu": False}), steps=0 if config.use_gpu else 1
        )
    except (ConfigError, TaskError):
        raise
    except Exception as error:
        raise TaskError(f"task {config.task!r}, tried on made-up samples, raised {task.story(error)}") from error


if __name__ == "__main__":
    main()
