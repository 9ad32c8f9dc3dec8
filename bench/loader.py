"""How fast training data comes: ours beside numpy memmap in torch's DataLoader, mosaicml-streaming and HF datasets.

`python -m bench.loader [--repeats N]`; the last two take part where they can be imported (`pip install -e '.[bench]'`;
mosaicml-streaming 0.13 wants older numpy and torch than ours, so it needs --no-deps and what it imports). The same 64
million uint16 tokens in windows of 1,024, shuffled, batches of 32, from a local disk with a warm page cache, by one
thread that does nothing else. Rates are medians over repeats that take turns. Then the same corpus from SeaweedFS, by
processes with an empty cache (bench/loader_s3.py). Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import loader_s3
from bench.result import show
from elastic.data.feed import Feed
from elastic.data.importing import import_tokens
from elastic.data.loader import Loader
from elastic.data.shards import MANIFEST, Corpus, Manifest, Shard, read_manifest
from elastic.plan import Plan

TOKENS, VOCAB_SIZE = 64_000_000, 50_257
SEQ_LEN, ROWS = 1024, 32
BATCHES = 400
STEP_SIZE = 640  # of a matrix product that takes some milliseconds of one core
SHARDS_MANY = 16_000
GOALS = {
    "tokens_per_s": 200e6, "best_peer_ratio": 3, "cpu_ms_per_batch": 0.2, "first_batch_warm_s": 0.5,
    "manifest_16000_s": 1.0, "read_amplification": 1.1,
}  # fmt: skip

Batches = Iterator[Any]
Open = Callable[[int], Batches]  # a seed -> batches of [ROWS, SEQ_LEN + 1] tokens, without end


# ---------------------------------------------------------------- who takes part


def ours(directory: Path, tokens: np.ndarray) -> Open:
    np.save(directory / "train.npy", tokens)
    np.save(directory / "held_out.npy", tokens[: 2 * SEQ_LEN])
    out = directory / "prepared"
    import_tokens(str(directory), out, format="numpy", vocab_size=VOCAB_SIZE, progress=lambda line: None)

    def batches(seed: int) -> Batches:
        corpus = Corpus.open(out, "train")
        plan = Plan(world=1, shares=(ROWS,), micro_batches=1)
        order = corpus.order(seed=seed, seq_len=SEQ_LEN, lanes=ROWS)
        feed = Feed(seq_len=SEQ_LEN, corpora=(corpus,), orders=(order,))
        loader = Loader(feed, global_samples=ROWS, plan=plan, rank=0)
        try:
            for step in itertools.count():
                yield loader.micro_batches(step)[0].rows.tokens
        finally:
            loader.close()

    return batches


def torch_memmap(directory: Path, tokens: np.ndarray) -> Open:
    """As nanoGPT's descendants do it, in windows: a map-style dataset, shuffled, copies of rows."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    tokens.tofile(directory / "tokens.bin")

    class Windows(Dataset[Any]):
        def __init__(self) -> None:
            self._values = np.memmap(directory / "tokens.bin", dtype=np.uint16, mode="r")

        def __len__(self) -> int:
            return (len(self._values) - 1) // SEQ_LEN

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(np.array(self._values[index * SEQ_LEN : (index + 1) * SEQ_LEN + 1]))

    def batches(seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(Windows(), batch_size=ROWS, shuffle=True, generator=generator, drop_last=True)
        while True:
            yield from loader

    return batches


def hf_datasets(directory: Path, tokens: np.ndarray) -> Open:
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(pa.array(_rows(tokens).ravel()), SEQ_LEN + 1)})
    datasets.Dataset(table).save_to_disk(str(directory / "hf"))

    def batches(seed: int) -> Batches:
        whole = datasets.load_from_disk(str(directory / "hf")).with_format("numpy")
        while True:
            for batch in whole.shuffle(seed=seed, keep_in_memory=True).iter(ROWS, drop_last_batch=True):
                yield batch["tokens"]

    return batches


def mosaic(directory: Path, tokens: np.ndarray) -> Open:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    with MDSWriter(out=str(directory / "mds"), columns={"tokens": f"ndarray:uint16:{SEQ_LEN + 1}"}) as out:
        for row in _rows(tokens):
            out.write({"tokens": row})

    def batches(seed: int) -> Batches:
        dataset = StreamingDataset(local=str(directory / "mds"), shuffle=True, shuffle_seed=seed, batch_size=ROWS)
        while True:
            for batch in DataLoader(dataset, batch_size=ROWS, drop_last=True):
                yield batch["tokens"]

    return batches


def _rows(tokens: np.ndarray) -> np.ndarray:
    """[windows, SEQ_LEN + 1], each with the first token of the next."""
    count = (len(tokens) - 1) // SEQ_LEN
    return np.lib.stride_tricks.as_strided(tokens, (count, SEQ_LEN + 1), (2 * SEQ_LEN, 2)).copy()


CANDIDATES = {
    "ours": ours, "torch_memmap": torch_memmap, "hf_datasets": hf_datasets, "mosaicml_streaming": mosaic,
}  # fmt: skip


# ---------------------------------------------------------------- figures


def measure(open_: Open, seed: int) -> dict[str, float]:
    """first_s: from nothing to the first batch. tokens_s and cpu_ms (all threads): of the batches after it, which the
    thread takes as quickly as it can. p99_ms: of one `next()` beside a trainer, which computes between two of them."""
    began_s = time.perf_counter()
    batches = open_(seed)
    first = next(batches)
    first_s = time.perf_counter() - began_s
    assert np.asarray(first).shape == (ROWS, SEQ_LEN + 1), np.asarray(first).shape
    waits: list[float] = []
    cpu_s, began_s = time.process_time(), time.perf_counter()
    while len(waits) < BATCHES and time.perf_counter() - began_s < 20.0:
        asked_s = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked_s)
    passed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    found = {
        "first_s": first_s,
        "tokens_s": len(waits) * ROWS * SEQ_LEN / passed_s,
        "cpu_ms": 1e3 * cpu_s / len(waits),
        "p99_ms": 1e3 * float(np.quantile(beside_a_trainer(batches), 0.99)),
    }
    batches.close()  # type: ignore[attr-defined]
    return found


def beside_a_trainer(batches: Batches) -> list[float]:
    """Seconds of each `next()`: between two of them some milliseconds of matrix products, with the GIL released."""
    matrix, waits = np.ones((STEP_SIZE, STEP_SIZE), dtype=np.float32), []
    for _ in range(BATCHES):
        asked_s = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked_s)
        matrix @ matrix
    return waits


def manifest_s(directory: Path) -> float:
    """To read a manifest of SHARDS_MANY shards."""
    read = read_manifest(directory / "ours" / "prepared")
    shard = read.splits["train"][0]
    fields = {name: getattr(shard, name) for name in Shard.__dataclass_fields__}
    names = [f"train-{number:05d}-00000-0123456789ab.arrow" for number in range(SHARDS_MANY)]
    many = tuple(Shard(**{**fields, "file": name}) for name in names)
    held_out = read.splits["held_out"]
    whole = Manifest(
        tokenizer=read.tokenizer, dtype=read.dtype, source=read.source, splits={"train": many, "held_out": held_out}
    )
    (directory / "many").mkdir()
    (directory / "many" / MANIFEST).write_text(whole.to_json())
    took = []
    for _ in range(5):
        began_s = time.perf_counter()
        assert len(read_manifest(directory / "many").splits["train"]) == SHARDS_MANY
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {given.repeats}", flush=True)
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=TOKENS, dtype=np.uint16)
    with tempfile.TemporaryDirectory(prefix="elastic-loader-") as name:
        directory, opened = Path(name), dict[str, Open]()
        for who, make in CANDIDATES.items():
            (directory / who).mkdir()
            try:
                opened[who] = make(directory / who, tokens)
            except ImportError as error:
                print(f"{who} is not measured: {error}", flush=True)
        found: dict[str, list[dict[str, float]]] = {who: [] for who in opened}
        for repeat in range(given.repeats):
            for who, open_ in opened.items():
                found[who].append(measure(open_, seed=repeat))
        medians = {
            who: {key: statistics.median(each[key] for each in rows) for key in rows[0]} for who, rows in found.items()
        }
        for who, row in medians.items():
            print(f"{who:20} " + "  ".join(f"{key} {value:,.3f}" for key, value in row.items()), flush=True)
        peers = {who: row for who, row in medians.items() if who != "ours"}
        best = max(peers, key=lambda who: peers[who]["tokens_s"])
        mine = medians["ours"]
        values = {
            "tokens_per_s": mine["tokens_s"],
            "best_peer_ratio": mine["tokens_s"] / peers[best]["tokens_s"],
            "cpu_ms_per_batch": mine["cpu_ms"],
            "p99_ms": mine["p99_ms"],
            "p99_ratio": mine["p99_ms"] / min(row["p99_ms"] for row in peers.values()),
            "first_batch_warm_s": mine["first_s"],
            "manifest_16000_s": manifest_s(directory),
            **loader_s3.figures(directory / "ours" / "prepared", directory),
            **{f"{who}_tokens_per_s": row["tokens_s"] for who, row in peers.items()},
            **{f"{who}_first_batch_s": row["first_s"] for who, row in peers.items()},
        }
    print(f"best peer: {best}")
    show("loader", values, GOALS)


if __name__ == "__main__":
    main()
