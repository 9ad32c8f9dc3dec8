"""Data on a Ray cluster: preparing with a task for each group, and Ray Data's rows as a prepared corpus.

Inputs and `data.prepared` must be the same on every node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import ray
from ray.exceptions import RayError, RayTaskError

from elastic.cluster import reach
from elastic.cluster.ray_core import signals_kept
from elastic.config import ElasticError
from elastic.config_sections import Data
from elastic.data.groups import Group, GroupDone
from elastic.data.importing import import_tokens
from elastic.data.prepare import Say
from elastic.data.shards import LOSS_MASK, DataError
from elastic.data.writer import unwritable

if TYPE_CHECKING:
    from ray.data import Dataset  # imports pandas: most of a second

WAITING_FOR_EACH_CPU = 2
ROWS_IN_FILE = 8192
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


def materialise(
    dataset: Dataset,
    directory: Path | str,
    *,
    vocab_size: int,
    column: str = "tokens",
    tokenizer: str = "",
    end_of_document: int | None = None,
    held_out_every: int = 20,
    shard_bytes: int = Data().shard_bytes,
    progress: Say = print,
) -> Path:
    """The rows of a `ray.data.Dataset`, each a document of tokens, as a prepared corpus; returns its manifest's path.

    Ray Data does what it is good at, reading and mapping; training then has the one order, and the position that
    survives kills and resizes, which a stream of blocks can't have. Rows are taken in the dataset's own order, whatever
    the blocks they come in, so the same rows give the same fingerprint. column: lists of integers; beside it a column
    `loss_mask` may hold a 0 for each token that is not learned. The rest: see `import_tokens`. On disk it needs twice
    the tokens' room while it works. DataError, ConfigError: as `import_tokens`, or there is no such column.
    """
    directory = Path(directory)
    aside = directory.with_name(f"{directory.name}.rows-{os.getpid()}")
    options = dataset.context.execution_options
    ordered, options.preserve_order = options.preserve_order, True
    try:
        aside.mkdir(parents=True)
        rows = _write_rows(dataset, column, aside, progress)
        if not rows:
            raise DataError("the dataset has no rows; is a filter too strict?")
        return import_tokens(
            str(aside),
            directory,
            format="parquet",
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            end_of_document=end_of_document,
            held_out_every=held_out_every,
            shard_bytes=shard_bytes,
            progress=progress,
        )
    except OSError as error:
        raise unwritable(directory.parent, error) from error
    finally:
        options.preserve_order = ordered
        shutil.rmtree(aside, ignore_errors=True)


def _write_rows(dataset: Dataset, column: str, aside: Path, progress: Say) -> int:
    """Files of ROWS_IN_FILE rows each, which do not depend on the blocks."""
    names = dataset.columns() or []
    if column not in names:
        raise DataError(f"the dataset has no column {column!r}, only {', '.join(names) or 'none'}; give column=")
    kept = [column, *([LOSS_MASK] if LOSS_MASK in names else [])]
    rows = 0
    batches = dataset.select_columns(kept).iter_batches(batch_size=ROWS_IN_FILE, batch_format="pyarrow")
    for number, table in enumerate(batches):
        pq.write_table(table.rename_columns(["tokens", *kept[1:]]), aside / f"{number:08d}.parquet")
        rows += table.num_rows
        progress(f"took {rows:,} rows of the dataset")
    return rows


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
