"""The peer in the checkpoint benchmark: torch.distributed.checkpoint 2.13, at its best.

Its state dict is flat and made once, its plans are cached, its stager keeps its buffers, every figure is of a second
or later save. On S3 it gets the same client settings as we have, and those of its own settings that prove fastest.
`async_save` saves in a thread, and each rank stages alone, so that no background work is in that figure; to stage into
shared memory, as its process needs it, took longer.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from elastic.checkpoint.save import Entry

warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")

MB = 1 << 20
FILE_THREADS = 4
# What is tried once, to go on with the fastest: (threads, s3fs's block) and (s3fs's block, its kind of cache). The
# first ones are the defaults.
S3_SAVES = ((1, 50 * MB), (2, 8 * MB), (4, 8 * MB))
S3_LOADS = ((50 * MB, "readahead"), (50 * MB, "all"), (8 * MB, "blockcache"))


def save_s3(entries: Sequence[Entry], url: str, endpoint: str, settings: tuple[int, int]) -> None:
    threads, block = settings
    # sync_files: of no use on S3, where it calls sync() for the whole machine.
    writer = FsspecWriter(url, sync_files=False, thread_count=threads, **_s3(endpoint, default_block_size=block))
    dcp.save(dict(entries), storage_writer=writer, planner=_planner())


def load_s3(entries: Sequence[Entry], url: str, endpoint: str, settings: tuple[int, str]) -> None:
    block, cache = settings
    reader = FsspecReader(url, **_s3(endpoint, default_block_size=block, default_cache_type=cache))
    dcp.load(dict(entries), storage_reader=reader)


def save_files(entries: Sequence[Entry], folder: Path) -> None:
    dcp.save(dict(entries), storage_writer=_file_writer(folder), planner=_planner())


class AsyncSaves:
    """`async_save` again and again into `folder`, with the stager that keeps its buffers."""

    def __init__(self, entries: Sequence[Entry], folder: Path, kind: str = "thread", shared: bool = False) -> None:
        self._state = dict(entries)
        self._folder = folder
        self._kind = AsyncCheckpointerType(kind)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        self._group = dist.new_group(backend="gloo")  # its thread's collectives are not to meet the trainer's
        self._saved: Any = None

    def start(self) -> float:
        """How long the trainer stood still, in seconds."""
        writer = _file_writer(self._folder)
        began_s = time.perf_counter()
        self._saved = dcp.async_save(
            self._state,
            storage_writer=writer,
            planner=_planner(),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        return time.perf_counter() - began_s

    def wait(self) -> None:
        self._saved.result()
        self._saved = None

    def close(self) -> None:
        self._stager.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _file_writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, thread_count=FILE_THREADS)


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(enable_plan_caching=True)


def _s3(endpoint: str, **kwargs: Any) -> dict[str, Any]:
    """The same client settings as ours."""
    return {
        "endpoint_url": endpoint,
        "config_kwargs": {
            "max_pool_connections": 32,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"payload_signing_enabled": False},
        },
        **kwargs,
    }
