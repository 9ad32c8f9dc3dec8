"""A run over mixed sources, with skipped samples and several held-out sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from elastic.config import Config
from elastic.data.prepare import prepare_for
from tests.process.running import WORDS, Running, small

SKIP = [{"first": 60, "stop": 96, "why": "a loss spike"}]


def mixed(path: Path, **changes: Any) -> Config:
    """Web and code, 2 to 1 and from step 12 on 1 to 2; books are only evaluated."""
    path.mkdir(exist_ok=True)
    for name in ("web", "code", "books"):
        (path / name).mkdir()
        for number in range(16):
            (path / name / f"{number}.txt").write_text(f"{name} {number} {WORDS[number:]}" * (number % 5 + 2))
    shared = {"suffixes": [".txt"], "held_out_every": 4, "shard_bytes": 4096}
    base = small(path, **changes)
    books = {**shared, "corpus": str(path / "books"), "prepared": str(path / "out/books")}
    prepare_for(Config.model_validate({**base.model_dump(), "data": books}), progress=lambda line: None)
    sources = [
        {"name": "web", "corpus": str(path / "web"), "weight": 2},
        {"name": "code", "corpus": str(path / "code"), "weight": 1},
    ]
    weights = [{"from_step": 12, "weights": {"web": 1, "code": 2}}]
    data = {**shared, "prepared": str(path / "out"), "sources": sources, "weights": weights, "skip": SKIP}
    sets = [{"name": "books", "prepared": str(path / "out/books")}]
    evaluation = {"interval_steps": 5, "samples": 8, "sets": sets}
    config = Config.model_validate({**base.model_dump(), "data": data, "evaluation": evaluation})
    prepare_for(config, progress=lambda line: None)
    return config


def keep(run: Running) -> None:
    """Where the report's reader looks for it."""
    os.rename(run.journal, run.config.run_dir() / "journal.jsonl")
    (run.config.run_dir() / "config.yaml").write_text(run.config.model_dump_json())
