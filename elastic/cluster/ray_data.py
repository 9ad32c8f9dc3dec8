"""Preparing data on a Ray cluster: a task for each group. Inputs and `data.prepared` must be the same on every node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from elastic.cluster import reach
from elastic.cluster.ray_core import signals_kept
from elastic.config import ElasticError
from elastic.data.groups import Group, GroupDone
from elastic.data.shards import DataError

WAITING_FOR_EACH_CPU = 2
TRIES = 3  # of a group whose node is lost


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Connected to the cluster at `address`. DataError: none answers there."""
    if why := reach.unreachable(address):
        raise DataError(f"can't prepare on Ray: {why}; start one, or leave --address out to use this machine")
    with signals_kept():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


def run_groups(function: Callable[[Group], GroupDone], groups: Sequence[Group]) -> Iterator[GroupDone]:
    """What `function` gives for each, in whatever order they end, on the cluster that this process has joined.

    A task whose node is lost runs again elsewhere; what a group raises is raised here. At most WAITING_FOR_EACH_CPU
    tasks wait for each processor, so neither the driver nor Ray holds all of them.
    """
    task = ray.remote(num_cpus=1, max_retries=TRIES)(function_on)
    waiting = iter(groups)
    running: list[Any] = []
    try:
        while True:
            limit = WAITING_FOR_EACH_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
            while len(running) < limit and (group := next(waiting, None)) is not None:
                running.append(task.remote(function, group))
            if not running:
                return
            ended, running = ray.wait(running, num_returns=1)
            yield _result(ended[0])
    finally:
        for left in running:
            ray.cancel(left, force=True)


def function_on(function: Callable[[Group], GroupDone], group: Group) -> GroupDone:
    """The task."""
    return function(group)


def _result(reference: Any) -> GroupDone:
    try:
        result: GroupDone = ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, ElasticError):
            raise error.cause from None
        raise
    except RayError as error:
        raise DataError(
            f"Ray lost a group of the data {TRIES} times ({error}); run it again, the rest is kept"
        ) from error
    return result
