"""One driver per run directory: a lock that the kernel drops when its holder ends, however that ends. No Ray."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.config import ElasticError

NAME = "driver.lock"

log = logging.getLogger(__name__)


@contextmanager
def only_driver(run_dir: Path) -> Iterator[None]:
    """Hold the run. ElasticError: another process does, here or on another node that shares the directory."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ElasticError(
                f"run {run_dir.name} is already running: {file.read().strip() or 'another driver'} holds "
                f"{run_dir / NAME}; stop that one, or give this one another name (run: ...)"
            ) from error
        except OSError as error:
            log.warning("%s can't be locked (%s): do not start this run a second time", run_dir / NAME, error.strerror)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def is_driven(run_dir: Path) -> bool:
    """Whether some driver holds the run now; False where the file system knows no locks."""
    try:
        with (run_dir / NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
