"""A corpus -> token shards and, last, the manifest.

The result is a function of the input alone: files in the order of their relative paths, cut into groups, each group's
shards named by their content. The files of an older manifest stay until the new one is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastic.config import Config, ConfigError
from elastic.config_sections import Data
from elastic.data.feed import directory_of, feed_of, mixture_of, open_corpora, read_manifests
from elastic.data.groups import (
    HOW_READ,
    PARTS,
    Group,
    GroupDone,
    Recipe,
    RunGroups,
    cut,
    files_of,
    finished,
    is_whole,
    prepare_group,
    recorded,
)
from elastic.data.inputs import Kind, SourceFile, list_files, listing_sha256
from elastic.data.plan_files import SUFFIX, make_plans, shard_of
from elastic.data.pool import run_groups
from elastic.data.remote import prepared_at
from elastic.data.shards import (
    MANIFEST,
    SCHEMA,
    SPLITS,
    TOKENIZER_COPY,
    DataError,
    Manifest,
    Shard,
    Split,
    UsedTokenizer,
    check_sizes,
    dtype_of,
    read_manifest,
)
from elastic.data.tokenizer import BYTES, open_tokenizer, read_file, sha256_of
from elastic.data.writer import unwritable
from elastic.storage.files import replace_file, sync_directory

IMPORTED = "imported"
# Beside the manifest: what it was made from, with times. A hint for a quick second run, no part of the data.
_INPUT = "input.json"
_LOCK_WAIT_S = 600.0
_SAY_EVERY_S = 1.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Of an import: files that hold tokens already."""

    kind: Kind
    used: UsedTokenizer


def prepare_for(config: Config, *, progress: Say, run_groups: RunGroups = run_groups) -> list[Path | str]:
    """As `prepare`, for a run: each of its sources (one behind a URL must be there), and the plans of its bins.
    ConfigError also where the built-in model's vocabulary is smaller than the corpus's, or where what is mixed or
    evaluated does not fit together. DataError also where it is less than a step takes."""
    manifests = _prepare_parts(config, progress, run_groups)
    if config.data.packing == "best_fit":
        for place, split in _places(config):
            make_plans(place, split, config.model.seq_len, progress=progress)
    feed_of(config, open_corpora(config.data, "train"))
    return manifests


def _places(config: Config) -> Iterator[tuple[Path, Split]]:
    """All that the run reads."""
    for part in config.data.parts().values():
        yield from ((directory_of(part.prepared), split) for split in SPLITS)
    for one in config.evaluation.sets:
        yield directory_of(one.prepared), "held_out"


def _prepare_parts(config: Config, progress: Say, run_groups: RunGroups) -> list[Path | str]:
    mixture_of(config)
    vocab_size = config.model.vocab_size if config.is_built_in else None
    manifests = [
        _uploaded(part, vocab_size)
        if "://" in part.prepared
        else prepare(part, progress=progress, run_groups=run_groups, model_vocab_size=vocab_size)
        for part in config.data.parts().values()
    ]
    read_manifests(config.data, config.evaluation.sets)
    return manifests


def check_input(config: Config) -> None:
    """What can be known without preparing. ConfigError, DataError: it would be refused."""
    parts = config.data.parts().values()
    if all("://" in part.prepared for part in parts) or any(part.corpus == IMPORTED for part in parts):
        _prepare_parts(config, lambda line: None, run_groups)
        if config.data.packing == "none":  # else how many samples there are is known only when they are planned
            feed_of(config, open_corpora(config.data, "train"))
        return
    mixture_of(config)
    vocab_size = config.model.vocab_size if config.is_built_in else None
    for part in parts:
        if "://" in part.prepared:
            _uploaded(part, vocab_size)
        else:
            list_files(part)
    _check_vocabulary(open_tokenizer(config.data).used, vocab_size)


def prepare(
    data: Data,
    *,
    progress: Say,
    run_groups: RunGroups = run_groups,
    model_vocab_size: int | None = None,
    tokens: Tokens | None = None,
) -> Path:
    """Make `data.prepared` of the corpus of `data` and return the path of its manifest.

    Does nothing when the same settings and files (names, sizes, times) were prepared there before, and of each group
    of files only what is not there yet; safe to call from several processes at once. ConfigError: the corpus is
    missing, empty, or too small to be split, or `model_vocab_size` is less than its vocabulary. DataError: a file
    can't be read or written; then there is no manifest, or the one from before.
    """
    if "://" in data.prepared:
        raise ConfigError(
            f"data.prepared {data.prepared}: wanted a directory; prepare it there, then `elastic data upload` it"
        )
    directory = Path(data.prepared)
    if data.corpus == IMPORTED:
        manifest = read_manifest(directory)
        _check_whole(directory, manifest)
        _check_vocabulary(manifest.tokenizer, model_vocab_size)
        return directory / MANIFEST
    files = list_files(data, tokens.kind if tokens else None)
    wanted = _describe_input(data, files, tokens)
    if not _is_prepared(directory, wanted):
        used = tokens.used if tokens else open_tokenizer(data).used
        _check_vocabulary(used, model_vocab_size)
        recipe = _recipe(data, used, tokens)
        _make_directory(directory)
        with _lock(directory, progress):
            if not _is_prepared(directory, wanted):
                _refuse_to_replace_an_import(directory, tokens)
                try:
                    _prepare(recipe, files, wanted, run_groups, progress)
                except Exception:
                    _delete_unfinished(directory)
                    raise
    _check_vocabulary(read_manifest(directory).tokenizer, model_vocab_size)
    return directory / MANIFEST


def _uploaded(data: Data, model_vocab_size: int | None) -> str:
    """As `prepare`, of what is there already, whatever it was made of."""
    _check_vocabulary(read_manifest(prepared_at(data)).tokenizer, model_vocab_size)
    return f"{data.prepared.rstrip('/')}/{MANIFEST}"


def _recipe(data: Data, used: UsedTokenizer, tokens: Tokens | None) -> Recipe:
    """With whole paths: who does a group may have another working directory."""
    if data.tokenizer != BYTES:
        data = data.model_copy(update={"tokenizer": str(Path(data.tokenizer).absolute())})
    directory = str(Path(data.prepared).absolute())
    return Recipe(data=data, directory=directory, used=used, tokens=tokens.kind if tokens else None)


def _prepare(
    recipe: Recipe, files: list[SourceFile], wanted: dict[str, object], run_groups: RunGroups, progress: Say
) -> None:
    data, directory = recipe.data, Path(recipe.directory)
    groups = cut(recipe, files)
    done = _done(recipe, groups, run_groups, progress)
    shards: dict[str, tuple[Shard, ...]] = {
        split: tuple(shard for one in done for shard in one.splits[split]) for split in SPLITS
    }
    for split, found in shards.items():
        if not found:
            raise ConfigError(
                f"nothing of {data.corpus} fell into the {split} split: {len(files)} files with "
                f"data.held_out_every {data.held_out_every}; give more files or a smaller number"
            )
    source = hashlib.sha256("".join(f"{one.source}\n" for one in done).encode()).hexdigest()
    manifest = Manifest(tokenizer=recipe.used, dtype=dtype_of(recipe.used.vocab_size), source=source, splits=shards)
    try:
        if data.tokenizer != BYTES:
            replace_file(directory / TOKENIZER_COPY, read_file(data.tokenizer))
        sync_directory(directory)
        replace_file(directory / MANIFEST, manifest.to_json().encode())
        replace_file(directory / _INPUT, json.dumps(wanted).encode())
        sync_directory(directory)
        _delete_leftovers(directory, manifest, groups, keep_tokenizer=data.tokenizer != BYTES)
    except OSError as error:
        raise unwritable(directory, error) from error
    documents = sum(shard.documents for found in shards.values() for shard in found)
    tokens = sum(one.tokens for one in done)
    progress(f"prepared {len(files)} files, {documents:,} documents, {tokens:,} tokens, in {data.prepared}")


def _done(recipe: Recipe, groups: list[Group], run_groups: RunGroups, progress: Say) -> list[GroupDone]:
    """Each group, in order: as an earlier run left it, or made now. Says how far it is, at most every second."""
    found = {group.number: done for group in groups if (done := finished(Path(recipe.directory), group))}
    left = [group for group in groups if group.number not in found]
    if found and left:
        progress(f"{len(found)} of {len(groups)} groups are there already")
    began_s = said_s = time.monotonic()
    tokens, nbytes, nbytes_all = 0, 0, sum(group.nbytes for group in left)
    sizes = {group.number: group.nbytes for group in left}
    for done in run_groups(partial(prepare_group, recipe), left):
        found[done.number] = done
        tokens += done.tokens
        nbytes += sizes[done.number]
        now_s = time.monotonic()
        if now_s - said_s >= _SAY_EVERY_S and len(found) < len(groups):
            said_s, passed_s = now_s, now_s - began_s
            left_s = round(passed_s * (nbytes_all - nbytes) / max(1, nbytes))
            progress(
                f"prepared {len(found)} of {len(groups)} groups, {tokens:,} tokens, {tokens / passed_s:,.0f} tokens/s, "
                f"about {left_s // 60}:{left_s % 60:02d} left"
            )
    return [found[group.number] for group in groups]


def _check_vocabulary(used: UsedTokenizer, model_vocab_size: int | None) -> None:
    if model_vocab_size is not None and model_vocab_size < used.vocab_size:
        raise ConfigError(
            f"model.vocab_size {model_vocab_size} is below the {used.vocab_size} tokens of the corpus's tokenizer "
            f"({used.name}); set model.vocab_size to at least {used.vocab_size}"
        )


def _describe_input(data: Data, files: list[SourceFile], tokens: Tokens | None) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "settings": data.model_dump(mode="json", exclude={"prepared", "corpus_options", *HOW_READ}),
        "files": listing_sha256(files),
        "tokenizer": tokens.used.sha256 if tokens else sha256_of(data.tokenizer),
        "tokens": [tokens.kind, tokens.used.vocab_size, tokens.used.end_of_document] if tokens else None,
    }


def _is_prepared(directory: Path, wanted: dict[str, object]) -> bool:
    """Whether `directory` holds what `wanted` describes, judged by names, sizes and times only."""
    try:
        if json.loads((directory / _INPUT).read_bytes()) != wanted:
            return False
        _check_whole(directory, read_manifest(directory))
    except (OSError, ValueError, DataError):
        return False  # nothing there, or damaged: both mean that it is to be prepared
    return True


def _check_whole(directory: Path, manifest: Manifest) -> None:
    for shards in manifest.splits.values():
        check_sizes(directory, shards)
        for shard in shards:
            if not is_whole(directory, shard):
                raise DataError(f"{directory / shard.sidecar} is missing or cut; prepare or import it again")


def _refuse_to_replace_an_import(directory: Path, tokens: Tokens | None) -> None:
    try:
        is_import = json.loads((directory / _INPUT).read_bytes()).get("tokens") is not None
    except (OSError, ValueError, AttributeError):
        return
    if is_import and tokens is None:
        raise ConfigError(
            f"{directory} holds an imported corpus; set data.corpus to '{IMPORTED}' to train on it, or data.prepared "
            "to another directory"
        )


def _make_directory(directory: Path) -> None:
    try:
        (directory / PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from error


def _delete_leftovers(directory: Path, manifest: Manifest, groups: list[Group], *, keep_tokenizer: bool) -> None:
    """Remove what the manifest does not name, and what interrupted runs left aside."""
    named = _named_by(manifest) | {f"{group.number:05d}.json" for group in groups}
    _delete_but(directory, named | ({TOKENIZER_COPY} if keep_tokenizer else set()), (f"{PARTS}/*", TOKENIZER_COPY))


def _delete_unfinished(directory: Path) -> None:
    """After a failure: what neither the manifest of before nor a finished group names."""
    named = recorded(directory)
    with suppress(DataError):  # there may have been nothing before
        named |= _named_by(read_manifest(directory))
    with suppress(OSError):  # what made it fail may forbid this too
        _delete_but(directory, named)


def _named_by(manifest: Manifest) -> set[str]:
    return {name for shards in manifest.splits.values() for shard in shards for name in files_of(shard)}


def _delete_but(directory: Path, named: set[str], further: tuple[str, ...] = ()) -> None:
    patterns = ("*-*.arrow", "*-*.crc", f"*-*{SUFFIX}", "*.tmp", f"{PARTS}/*.tmp", *further)
    for path in [path for pattern in patterns for path in directory.glob(pattern)]:
        name = shard_of(path.name) if path.suffix == SUFFIX else path.name
        if name not in named:
            path.unlink(missing_ok=True)


@contextmanager
def _lock(directory: Path, progress: Say) -> Iterator[None]:
    """One process prepares, others wait for it; the kernel drops the lock of one that dies."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    try:
        file = os.open(directory / ".lock", os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(directory, error) from error
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DataError(
                        f"another process has been preparing {directory} for {_LOCK_WAIT_S:.0f} s; "
                        "end it, or set data.prepared to another directory"
                    ) from None
                progress(f"waiting for another process that prepares {directory}")
                time.sleep(1.0)
        yield
    finally:
        os.close(file)
