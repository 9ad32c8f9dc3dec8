"""The half of bench/loader.py that reads from object storage: SeaweedFS on this machine, without a delay on the way.

`figures` starts the service. Each process that reads is a new one: `python -m bench.loader_s3 JSON`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from elastic.config_sections import Data, StorageOptions
from elastic.data.feed import Feed
from elastic.data.loader import Loader
from elastic.data.remote import Prepared, prepared_at
from elastic.data.shards import Corpus
from elastic.data.upload import upload
from elastic.plan import Plan
from tests.storage.servers import Seaweed, credentials

SEQ_LEN, ROWS = 1024, 32
REPEATS = 3
LIMIT_S = 300.0


def memory_mb() -> tuple[float, float]:
    """Resident now: all, and what no file backs. MB of 10^6 bytes."""
    status = Path("/proc/self/status").read_text()
    kib = {name: int(count) for name, count in re.findall(r"(VmRSS|RssAnon|RssShmem):\s+(\d+) kB", status)}
    return kib["VmRSS"] * 1.024e-3, (kib["RssAnon"] + kib["RssShmem"]) * 1.024e-3


def read(given: dict[str, Any]) -> dict[str, float]:
    """Steps of one rank, from a process that has imported what a trainer has. first_s: with the manifest and all that
    a client for S3 imports."""
    data = Data.model_validate(given["data"])
    before, own_before = memory_mb()
    asked_s = time.perf_counter()
    corpus = Corpus.open(prepared_at(data), "train")
    order = corpus.order(seed=0, seq_len=SEQ_LEN, lanes=ROWS)
    feed = Feed(seq_len=SEQ_LEN, corpora=(corpus,), orders=(order,))
    world, rank = given["world"], given["rank"]
    plan = Plan(world=world, shares=(ROWS // world,) * world, micro_batches=1)
    loader = Loader(feed, global_samples=ROWS, plan=plan, rank=rank)
    tokens, peak, own_peak = 0, before, own_before
    steps = given["steps"] or corpus.windows(SEQ_LEN) // ROWS
    for step in range(steps):
        tokens += loader.micro_batches(step)[0].rows.tokens[:, 1:].size
        if step == 0:
            began_s = time.perf_counter()
        if step % 64 == 0:
            now, own = memory_mb()
            peak, own_peak = max(peak, now), max(own_peak, own)
    took_s = time.perf_counter() - began_s
    loader.close()
    after_first = tokens * (steps - 1) / steps
    assert corpus.remote is not None
    counts = corpus.remote.pieces.counts
    return {
        "first_s": began_s - asked_s,
        "tokens_s": after_first / took_s,
        "used_bytes": tokens * corpus.dtype.itemsize,
        "fetched_bytes": counts.nbytes,
        "second_requests": counts.second_requests,
        "memory_mb": peak - before,
        "own_memory_mb": own_peak - own_before,
    }


def _reading(data: Data, *, rank: int = 0, world: int = 1, steps: int = 0) -> subprocess.Popen[str]:
    given = {"data": data.model_dump(mode="json"), "rank": rank, "world": world, "steps": steps}
    command = [sys.executable, "-m", "bench.loader_s3", json.dumps(given)]
    return subprocess.Popen(command, env={**os.environ, **credentials()}, stdout=subprocess.PIPE, text=True)


def _told(process: subprocess.Popen[str]) -> dict[str, float]:
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, "a process that reads has failed"
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def figures(prepared: Path, directory: Path) -> dict[str, float]:
    """first_batch_s3_s: a new process, its cache empty; median. The others: two ranks of a node read one epoch."""
    import s3fs

    os.environ.update(credentials())
    server = Seaweed(directory / "weed", volume_mb=1000)
    try:
        s3fs.S3FileSystem(endpoint_url=server.endpoint, skip_instance_cache=True).mkdir("corpora")
        options = StorageOptions(endpoint=server.endpoint, region="us-east-1")
        data = Data(prepared="s3://corpora/bench", prepared_options=options, cache=str(directory / "cache"))
        to = prepared_at(data)
        assert isinstance(to, Prepared)
        upload(prepared, to, progress=lambda line: None)
        firsts = []
        for _ in range(REPEATS):
            shutil.rmtree(directory / "cache", ignore_errors=True)
            firsts.append(_told(_reading(data, steps=1))["first_s"])
        shutil.rmtree(directory / "cache", ignore_errors=True)
        ranks = [_told(one) for one in [_reading(data, rank=rank, world=2) for rank in (0, 1)]]
        again = _told(_reading(data))
    finally:
        server.stop()
    used = sum(one["used_bytes"] for one in ranks)
    return {
        "first_batch_s3_s": statistics.median(firsts),
        "read_amplification": sum(one["fetched_bytes"] for one in ranks) / used,
        "second_requests": sum(one["second_requests"] for one in ranks),
        "memory_mb_per_rank": float(np.mean([one["memory_mb"] for one in ranks])),
        "own_memory_mb_per_rank": float(np.mean([one["own_memory_mb"] for one in ranks])),
        "s3_cold_tokens_per_s": sum(one["tokens_s"] for one in ranks),
        "s3_cached_tokens_per_s": again["tokens_s"],
    }


if __name__ == "__main__":
    print(json.dumps(read(json.loads(sys.argv[1]))))
