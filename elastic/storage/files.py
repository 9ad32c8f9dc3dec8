"""Files of a local directory that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write aside, make it durable, then put it in place in one move. OSError: the disk refuses."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
