"""How fast text becomes tokens: `elastic data prepare` beside HF `datasets.map`, same tokenizer, one process each.

`python -m bench.prepare [--repeats N]`; needs `pip install -e ".[dev,bench]"`. Both read the same JSON lines (source
of Python's standard library, cut into documents of 4,000 characters), encode them with the same tokenizer.json, a BPE
of 32,000 trained here, through the same call of the tokenizers library (`encode_batch_fast`, the quicker one), and
leave uint16 tokens on disk. Rates are tokens for each second of CPU time of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.result import show
from elastic.config_sections import Data
from elastic.data.prepare import prepare
from elastic.data.shards import read_manifest

VOCAB_SIZE, DOCUMENT_CHARACTERS, TEXT_BYTES = 32_000, 4_000, 8_000_000
END = "<|endoftext|>"
GOALS = {"prepare_ratio": 1.5}


def write_input(directory: Path) -> tuple[Path, Path]:
    """A file of JSON lines and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts, nbytes = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        text = path.read_text(errors="replace")
        texts += [text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS)]
        nbytes += len(text)
        if nbytes > TEXT_BYTES:
            break
    lines = directory / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return lines, directory / "tokenizer.json"


def ours(lines: Path, tokenizer: Path, out: Path) -> int:
    data = Data(corpus=str(lines), tokenizer=str(tokenizer), prepared=str(out), end_of_document=END)
    prepare(data, progress=lambda line: None)
    return sum(shard.tokens for shards in read_manifest(out).splits.values() for shard in shards)


def hf_map(lines: Path, tokenizer: Path, out: Path) -> int:
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    made = Tokenizer.from_file(str(tokenizer))
    end = made.token_to_id(END)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [[*one.ids, end] for one in made.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    read = datasets.Dataset.from_json(str(lines), cache_dir=str(out / "cache"))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))})
    mapped = read.map(encode, batched=True, remove_columns=["text"], features=features)
    mapped.save_to_disk(str(out / "saved"))
    return sum(map(len, mapped["tokens"]))


def rate(call: Callable[[Path, Path, Path], int], lines: Path, tokenizer: Path, out: Path) -> float:
    """Tokens for each CPU second."""
    out.mkdir()
    began_s = time.process_time()
    tokens = call(lines, tokenizer, out)
    passed_s = time.process_time() - began_s
    shutil.rmtree(out)
    return tokens / passed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; medians of {given.repeats}", flush=True)
    with tempfile.TemporaryDirectory(prefix="elastic-prepare-") as name:
        lines, tokenizer = write_input(Path(name))
        found: dict[str, list[float]] = {"ours": [], "hf_map": []}
        for _ in range(given.repeats):
            for who, call in (("ours", ours), ("hf_map", hf_map)):
                found[who].append(rate(call, lines, tokenizer, Path(name) / who))
    pairs = [mine / theirs for mine, theirs in zip(found["ours"], found["hf_map"])]
    values = {
        "prepare_tokens_per_cpu_s": statistics.median(found["ours"]),
        "hf_map_tokens_per_cpu_s": statistics.median(found["hf_map"]),
        "prepare_ratio": statistics.median(pairs),
    }
    show("prepare", values, GOALS)


if __name__ == "__main__":
    main()
