"""How fast checkpoints are: ours beside torch's own (DCP) at its best, in one run, on one state, to one S3 server.

`python -m bench.checkpoint [--repeats N]`. A decoder transformer with AdamW (over 400 MB), sharded by FSDP2 over four
real processes with Gloo. Storage is SeaweedFS behind one proxy that delays each request by 25 ms and lets 80 MB/s
through each connection, for both sides. Figures are medians; ratios are of medians. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.result import show
from bench.slow_proxy import LATENCY_S, RATE_BYTES_S, SlowProxy
from tests.parallel.ranks import run
from tests.storage.servers import KEY, SECRET, Seaweed, credentials

SAVING, RESHARDED = 4, 3
LIMIT_S = 600.0
VOLUME_MB = 1024
PROBE_BYTES = 16 << 20
GOALS = {
    "stall_over_memcpy": 1.2, "stall_ratio": 3, "s3_save_ratio": 3, "s3_load_ratio": 2, "s3_reshard_ratio": 3,
    "read_amplification": 1.2, "plan_us_per_block": 20, "arena_restore_s": 1.0, "upload_slowdown_pct": 3,
}  # fmt: skip


def median(ranks: Sequence[dict[str, Any]], name: str) -> float:
    """Of a time that all ranks took together: rank 0's."""
    return statistics.median(ranks[0][name])


def worst(ranks: Sequence[dict[str, Any]], name: str) -> float:
    """Of a figure that each rank has for itself: the median of the ranks' medians."""
    return statistics.median(statistics.median(rank[name]) for rank in ranks)


def measure(setting: Any, proxy: SlowProxy) -> dict[str, float]:
    from bench import checkpoint_ranks as ranks

    began_s = time.monotonic()

    def phase(name: str, world: int, program: Any) -> list[Any]:
        found = run(world, program, setting, timeout_s=LIMIT_S)
        print(f"{name}: done after {time.monotonic() - began_s:.0f} s; of rank 0:", flush=True)
        for key, values in found[0].items():
            if isinstance(values, list):
                print(f"  {key:16} {', '.join(f'{value:.4g}' for value in values)}", flush=True)
        return found

    saving = phase("stalls, saves and loads of 4 ranks", SAVING, ranks.saving)
    resharding = phase("loads by 3 ranks of what 4 saved", RESHARDED, ranks.resharding)
    for process in (setting.server, proxy.pid):
        pin(process, sorted(os.sched_getaffinity(0))[1:])
    uploading = phase("1 rank that trains while its mover uploads", 1, ranks.uploading)

    state = float(sum(rank["nbytes"] for rank in saving))
    values = {
        "state_mb": state / 1e6,
        "memcpy_ms": 1e3 * worst(saving, "memcpy_s"),
        "stall_ms": 1e3 * worst(saving, "stall_s"),
        "dcp_stall_ms": 1e3 * worst(saving, "dcp_stall_s"),
        "s3_save_s": median(saving, "save_s"),
        "dcp_s3_save_s": median(saving, "dcp_save_s"),
        "s3_save_server_cpu_s": median(saving, "server_cpu_s"),
        "s3_load_s": median(saving, "load_s"),
        "dcp_s3_load_s": median(saving, "dcp_load_s"),
        "load_amplification": median(saving, "load_bytes") / state,
        "dcp_load_amplification": median(saving, "dcp_load_bytes") / state,
        "s3_reshard_s": median(resharding, "load_s"),
        "dcp_s3_reshard_s": median(resharding, "dcp_load_s"),
        "read_amplification": median(resharding, "load_bytes") / state,
        "dcp_read_amplification": median(resharding, "dcp_load_bytes") / state,
        "file_save_s": median(saving, "file_save_s"),
        "dcp_file_save_s": median(saving, "dcp_file_save_s"),
        "plan_table_us": 1e6 * worst(resharding, "table_s"),
        "plan_read_us": 1e6 * worst(resharding, "read_plan_s"),
        "arena_restore_s": median(saving, "arena_restore_s"),
        "step_ms": 1e3 * median(uploading, "step_s"),
        "upload_slowdown_pct": 100 * median(uploading, "slowdown"),
        "mover_cpu_s_per_gb": statistics.median(map(sum, zip(*(rank["mover_cpu_s"] for rank in saving))))
        / (state / 1e9),
    }
    values["plan_us_per_block"] = max(values["plan_table_us"], values["plan_read_us"])
    values["stall_over_memcpy"] = values["stall_ms"] / values["memcpy_ms"]
    values["stall_ratio"] = values["dcp_stall_ms"] / values["stall_ms"]
    for name in ("s3_save", "s3_load", "s3_reshard"):
        values[f"{name}_ratio"] = values[f"dcp_{name}_s"] / values[f"{name}_s"]
    # What a client that costs nothing would reach, where the server has the cores of this machine and no others.
    server_s = values["s3_save_server_cpu_s"] / (os.cpu_count() or 1)
    values["s3_save_ratio_here_max"] = values["dcp_s3_save_s"] / server_s
    return values


def pin(pid: int, cores: Sequence[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def check_proxy(endpoint: str) -> None:
    """That it limits: one object over one connection, and a request without a body."""
    import s3fs

    fs = s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=endpoint, skip_instance_cache=True)
    fs.pipe_file("bench-checkpoints/probe", bytes(PROBE_BYTES))
    began_s = time.perf_counter()
    fs.cat_file("bench-checkpoints/probe", start=0, end=PROBE_BYTES)
    rate = PROBE_BYTES / (time.perf_counter() - began_s - LATENCY_S)
    began_s = time.perf_counter()
    urllib.request.urlopen(f"{endpoint}/status").close()
    latency_s = time.perf_counter() - began_s
    print(
        f"proxy: {rate / 1e6:.0f} MB/s (at most {RATE_BYTES_S / 1e6:.0f}) on one connection, "
        f"{1e3 * latency_s:.0f} ms (at least {1e3 * LATENCY_S:.0f}) for a request"
    )
    assert rate <= 1.01 * RATE_BYTES_S and latency_s >= LATENCY_S, "the proxy does not limit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(credentials())
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {given.repeats}", flush=True)
    from bench.checkpoint_ranks import BUCKET, Setting

    with tempfile.TemporaryDirectory(prefix="elastic-checkpoint-") as directory:
        server = Seaweed(Path(directory, "weed"), volume_mb=VOLUME_MB)
        assert server.process is not None
        proxy = SlowProxy(server.endpoint)
        try:
            import s3fs

            s3fs.S3FileSystem(endpoint_url=server.endpoint, skip_instance_cache=True).mkdir(BUCKET)
            check_proxy(proxy.endpoint)
            setting = Setting(
                endpoint=proxy.endpoint, server=server.process.pid, directory=directory, repeats=given.repeats
            )
            values = measure(setting, proxy)
        finally:
            proxy.close()
            server.stop()
    print("upload_slowdown_pct: one trainer on a core of its own; mover, proxy and server share the other ones")
    show("checkpoint", values, GOALS)


if __name__ == "__main__":
    main()
