"""Tokens that other software made -> a prepared corpus, by the same groups, shards and manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from elastic.config import ConfigError
from elastic.config_sections import Data
from elastic.data.inputs import Kind
from elastic.data.prepare import Say, Tokens, prepare
from elastic.data.shards import UsedTokenizer
from elastic.data.tokenizer import BYTES, open_file

Format = Literal["nanogpt-bin", "numpy", "parquet"]
FORMATS: tuple[Format, ...] = get_args(Format)
_KINDS: dict[Format, Kind] = {"nanogpt-bin": "nanogpt-bin", "numpy": "numpy", "parquet": "token-parquet"}


def import_tokens(
    source: str,
    directory: Path,
    *,
    format: Format,
    vocab_size: int,
    tokenizer: str = "",
    end_of_document: int | None = None,
    held_out_every: int = 20,
    shard_bytes: int = Data().shard_bytes,
    progress: Say,
) -> Path:
    """Make a prepared corpus in `directory` of the files under `source`; returns the path of its manifest.

    Documents are cut after each `end_of_document`, by default the tokenizer's own; where that is not known either
    there are none, and held-out pieces are 1,048,576 tokens. Rows of Parquet are documents as they are.
    ConfigError: the tokenizer does not fit `vocab_size`. DataError: a token is not below it, or a file is damaged.
    """
    if not 2 <= vocab_size <= 2**32:
        raise ConfigError(f"--vocab-size {vocab_size}: wanted 2 to {2**32}")
    used = UsedTokenizer(name="unknown", sha256="", vocab_size=vocab_size, end_of_document=end_of_document)
    if tokenizer:
        found = open_file(tokenizer, "" if end_of_document is None else end_of_document).used
        if found.vocab_size > vocab_size:
            raise ConfigError(
                f"--vocab-size {vocab_size} is below the {found.vocab_size} tokens of {tokenizer}; give at least those"
            )
        used = UsedTokenizer(
            name=found.name, sha256=found.sha256, vocab_size=vocab_size, end_of_document=found.end_of_document
        )
    if used.end_of_document is not None and not 0 <= used.end_of_document < vocab_size:
        raise ConfigError(f"--end-of-document {end_of_document}: wanted 0 to {vocab_size - 1}, a token's id")
    data = Data(
        corpus=source,
        prepared=str(directory),
        tokenizer=tokenizer or BYTES,
        held_out_every=held_out_every,
        shard_bytes=shard_bytes,
    )
    return prepare(data, progress=progress, tokens=Tokens(kind=_KINDS[format], used=used))
