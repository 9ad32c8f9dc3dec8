"""`elastic data`: a corpus before it is trained on. Arguments, and what is printed; `cli` is the entry."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.config import ConfigError, load
from elastic.config_sections import Data, StorageOptions

DONE, FAILED = 0, 1  # exit codes, see cli


def add(commands: Any, set_ray_environment: Callable[[], None]) -> None:
    """`set_ray_environment`: to be called before anything imports Ray."""
    text = "prepare, look at, verify and import what is trained on"
    inner = commands.add_parser("data", help=text, description=text).add_subparsers(required=True, metavar="COMMAND")
    text = "turn a job's corpus into shards of tokens; what an interrupted run did is kept"
    prepare = inner.add_parser("prepare", help=text, description=text)
    prepare.add_argument("job", type=Path, metavar="JOB.yaml")
    prepare.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="over the file"
    )
    prepare.add_argument("--address", help="a running Ray cluster that does it; without it, this machine's processors")
    prepare.set_defaults(command=lambda parsed: _prepare(parsed, set_ray_environment))
    inspect = _add(inner, "inspect", _inspect, "what a prepared corpus is: counts, tokenizer, first documents")
    inspect.add_argument("--documents", type=int, default=3, metavar="N", help="of each split; default: 3")
    _add(inner, "verify", _verify, "hold every byte against its checksum; exit 1 where one is damaged")
    _add_import(inner)
    text = "copy what is prepared to object storage; the URL is data.prepared of a job then"
    upload: argparse.ArgumentParser = inner.add_parser("upload", help=text, description=text)
    upload.add_argument("source", type=Path, metavar="DIR", help="what was prepared or imported")
    _add_place(upload, "URL")
    upload.set_defaults(command=_upload)


def _add(inner: Any, name: str, command: Callable[..., int], text: str) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = inner.add_parser(name, help=text, description=text)
    _add_place(sub, "DIR")
    sub.set_defaults(command=command)
    return sub


def _add_place(sub: argparse.ArgumentParser, metavar: str) -> None:
    sub.add_argument("place", metavar=metavar, help="data.prepared of a job: a directory, or a URL")
    sub.add_argument("--endpoint", metavar="URL", help="of its service (data.prepared_options.endpoint)")
    sub.add_argument("--region", help="of its bucket (data.prepared_options.region)")


def _place(parsed: argparse.Namespace) -> Any:
    """A directory's path, or what lies behind a URL."""
    from elastic.data.remote import prepared_at

    try:
        options = StorageOptions(endpoint=parsed.endpoint, region=parsed.region)
    except ValueError:
        raise ConfigError(f"--endpoint {parsed.endpoint}: wanted http:// or https:// before it") from None
    return prepared_at(Data(prepared=parsed.place, prepared_options=options))


def _add_import(inner: Any) -> None:
    text = "make a corpus of tokens from other software; train on it with data.corpus: imported"
    sub: argparse.ArgumentParser = inner.add_parser("import", help=text, description=text)
    sub.add_argument("source", metavar="SOURCE", help="a file, a directory or a URL")
    sub.add_argument("directory", type=Path, metavar="DIR", help="data.prepared of a job")
    sub.add_argument("--format", required=True, choices=("nanogpt-bin", "numpy", "parquet"))
    sub.add_argument("--vocab-size", required=True, type=int, metavar="N", help="every token is below it")
    sub.add_argument("--tokenizer", default="", metavar="FILE", help="the tokenizer.json that made them, if known")
    sub.add_argument("--end-of-document", type=int, metavar="ID", help="the token after each document, if known")
    sub.add_argument("--held-out-every", type=int, default=20, metavar="N", help="see data.held_out_every")
    sub.add_argument("--shard-bytes", type=int, metavar="BYTES", help="see data.shard_bytes")
    sub.set_defaults(command=_import)


def _prepare(parsed: argparse.Namespace, set_ray_environment: Callable[[], None]) -> int:
    from elastic.data.prepare import prepare_for

    config = load(parsed.job, tuple(parsed.overrides))
    if parsed.address is None:
        print(*prepare_for(config, progress=_say), sep="\n")
        return DONE
    set_ray_environment()
    from elastic.cluster import ray_data

    with ray_data.joined(parsed.address):
        print(*prepare_for(config, progress=_say, run_groups=ray_data.run_groups), sep="\n")
    return DONE


def _inspect(parsed: argparse.Namespace) -> int:
    from elastic.data.verify import described

    for line in described(_place(parsed), parsed.documents):
        _say(line)
    return DONE


def _verify(parsed: argparse.Namespace) -> int:
    from elastic.data.shards import read_manifest
    from elastic.data.upload import damages_behind
    from elastic.data.verify import damages

    place = _place(parsed)
    manifest = read_manifest(place)
    count = 0
    for line in damages(place, manifest) if isinstance(place, Path) else damages_behind(place, manifest):
        print(f"elastic: {line}", file=sys.stderr)
        count += 1
    shards = [shard for found in manifest.splits.values() for shard in found]
    if count:
        print(f"elastic: {count} damages; prepare or import the corpus again", file=sys.stderr)
        return FAILED
    nbytes, tokens = (sum(getattr(shard, name) for shard in shards) for name in ("nbytes", "tokens"))
    _say(f"OK: {len(shards)} shards, {nbytes:,} bytes, {tokens:,} tokens")
    return DONE


def _upload(parsed: argparse.Namespace) -> int:
    from elastic.data.upload import upload

    to = _place(parsed)
    if isinstance(to, Path):
        raise ConfigError(f"{to} is no URL; wanted one as s3://bucket/prefix (a directory can be copied)")
    print(upload(parsed.source, to, progress=_say))
    return DONE


def _import(parsed: argparse.Namespace) -> int:
    from elastic.data.importing import import_tokens

    given = {} if parsed.shard_bytes is None else {"shard_bytes": parsed.shard_bytes}
    print(
        import_tokens(
            parsed.source,
            parsed.directory,
            format=parsed.format,
            vocab_size=parsed.vocab_size,
            tokenizer=parsed.tokenizer,
            end_of_document=parsed.end_of_document,
            held_out_every=parsed.held_out_every,
            progress=_say,
            **given,
        )
    )
    return DONE


def _say(text: str) -> None:
    print(text, flush=True)
