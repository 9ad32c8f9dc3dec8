"""Everything private of Ray itself, below Ray Train, that this project uses. What `import ray` brings along anyway.

tests/cluster/test_ray_contract.py names each member, as those of Ray Train (ray_private.py).
"""

# ruff: noqa: E402  # the version is checked before anything private is imported

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

RAY_MINOR = "2.60"


def check_version(version: str) -> None:
    """ImportError unless `version` is of the minor version that this module was written for."""
    if version.split(".")[:2] != RAY_MINOR.split("."):
        raise ImportError(
            f"elastic extends private classes of Ray Train {RAY_MINOR}, but Ray {version} is installed; "
            f'install it with: pip install "ray[train]=={RAY_MINOR}.*"'
        )


check_version(ray.__version__)

from ray._common.utils import get_default_ray_temp_dir
from ray._private import services
from ray._private import utils as ray_utils
from ray._private.state import state


def draining_nodes() -> dict[str, int]:
    """Id of each node that Ray drains: when it will end, in milliseconds since the epoch, 0: not known."""
    return dict(state.get_draining_nodes())


def bootstrap_address(address: str) -> str:
    """HOST:PORT that `ray.init(address)` would go to. ConnectionError, ValueError: Ray knows none for `address`."""
    return str(services.canonicalize_bootstrap_address(address) or address)


@contextmanager
def signals_kept() -> Iterator[None]:
    """Where Ray starts or joins a cluster it puts a handler of its own on SIGTERM, which drains the node for 30 s and
    ends the process half cleaned up; in here it does not."""
    before = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda sigterm_handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = before


def sessions_of(pid: int | None) -> set[Path]:
    """Directories of the Ray sessions on this machine that process `pid` started, or that any did."""
    return set(Path(get_default_ray_temp_dir()).glob(f"session_2*_{pid or '*'}"))
