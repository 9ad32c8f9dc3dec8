"""`elastic ckpt export` and `elastic ckpt import`: checkpoints to and from other software."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from elastic.config import resolve


def add_parsers(commands: Any) -> None:
    """Adds both to the subcommands of `elastic ckpt`. Each sets `command`, which returns the exit code."""
    text = "write a checkpoint for other software: Hugging Face safetensors, or PyTorch's DCP"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument("run", metavar="RUN", help="the run's directory, such as runs/quickstart, or its storage's URL")
    export.add_argument("--format", required=True, choices=("safetensors", "dcp"))
    export.add_argument("--to", required=True, metavar="DIR|URL", help="must be empty, or not exist")
    export.add_argument("--step", type=int, help="default: the newest")
    export.add_argument(
        "--what", choices=("model", "all"), help="default: the model as safetensors, all (optimizer too) as dcp"
    )
    export.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="of exported weights; default: as saved"
    )
    export.add_argument("--file-bytes", type=int, metavar="BYTES", help="largest file, about; default: 5 GB")
    export.set_defaults(command=_export)
    text = "begin a run from weights (Hugging Face Llama) or a checkpoint (safetensors, DCP) of other software"
    import_ = commands.add_parser("import", help=text, description=text)
    import_.add_argument("source", metavar="FROM", help="a directory or URL")
    import_.add_argument("job", type=Path, metavar="JOB.yaml")
    import_.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="over the file"
    )
    import_.add_argument("--step", type=int, help="completed steps, for schedule and data; default: the optimizer's")
    import_.set_defaults(command=_import)


def _export(parsed: argparse.Namespace) -> int:
    from elastic.checkpoint.export import FILE_BYTES
    from elastic.interchange import export_run
    from elastic.report import place_of

    for line in export_run(
        place_of(parsed.run),
        to=parsed.to,
        format=parsed.format,
        step=parsed.step,
        what=parsed.what,
        dtype=parsed.dtype,
        file_bytes_max=parsed.file_bytes or FILE_BYTES,
    ):
        _say(line)
    return 0


def _import(parsed: argparse.Namespace) -> int:
    from elastic.interchange import import_run
    from elastic.worker.task import located

    config = located(resolve(parsed.job, tuple(parsed.overrides))[0])
    import_run(config, parsed.source, step=parsed.step, say=_say)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
