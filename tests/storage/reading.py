"""A process that reads its part of an epoch from object storage: `python -m tests.storage.reading JSON`.

It prints one JSON line: the digest of what it read, and what that took.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from elastic.config_sections import Data, StorageOptions
from elastic.data.remote import prepared_at
from elastic.data.shards import Corpus
from tests.data.behind import SEQ_LEN
from tests.storage.servers import credentials

WINDOWS_AT_ONCE = 64


def own_bytes() -> int:
    """Of memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("RssAnon", "RssShmem"))  # type: ignore[index]


def windows_of(corpus: Corpus, rank: int, world: int) -> np.ndarray:
    everything = np.random.default_rng(5).permutation(corpus.windows(SEQ_LEN)).astype(np.uint64)
    return everything[rank::world]


def digest_of(corpus: Corpus, windows: np.ndarray, pause_s: float = 0.0) -> str:
    found = hashlib.sha256()
    for start in range(0, len(windows), WINDOWS_AT_ONCE):
        found.update(corpus.gather(windows[start : start + WINDOWS_AT_ONCE], SEQ_LEN).tobytes())
        time.sleep(pause_s)
    return found.hexdigest()


def process(
    url: str, options: StorageOptions, cache: Path, *, rank: int = 0, world: int = 1, pause_s: float = 0.0
) -> subprocess.Popen[str]:
    """One that reads a part. Its log goes to stderr."""
    data = Data(prepared=url, prepared_options=options, cache=str(cache))
    given = {"data": data.model_dump(mode="json"), "rank": rank, "world": world, "pause_s": pause_s}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.reading", json.dumps(given)],
        env={**credentials(), "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(one: subprocess.Popen[str], limit_s: float) -> dict[str, Any]:
    out, err = one.communicate(timeout=limit_s)
    assert one.returncode == 0, err
    return {**json.loads(out.splitlines()[-1]), "log": err}


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    given = json.loads(sys.argv[1])
    corpus = Corpus.open(prepared_at(Data.model_validate(given["data"])), "train")
    windows = windows_of(corpus, given["rank"], given["world"])
    corpus.gather(windows[:1], SEQ_LEN)  # with all that is imported for it
    before = own_bytes()
    digest = digest_of(corpus, windows, given["pause_s"])
    assert corpus.remote is not None
    here = corpus.remote.pieces
    told = {"digest": digest, "nbytes": here.counts.nbytes, "requests": here.counts.requests, "streams": here.streams}
    print(json.dumps({**told, "own_bytes": own_bytes() - before, "second": here.counts.second_requests}), flush=True)


if __name__ == "__main__":
    main()
