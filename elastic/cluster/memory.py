"""Memory of this machine as processes here may use it: its own, or less where a control group has a limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
# Of a control group's directory: its limit, its use, and in memory.stat what could be reclaimed; version 2, then 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def total_bytes() -> int:
    """What all processes together may use."""
    return min([_machine("MemTotal"), *(most for most, _ in _groups())])


def free_bytes() -> int:
    """What this process could still get."""
    return min([_machine("MemAvailable"), *(most - used for most, used in _groups())])


def _machine(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _groups() -> Iterator[tuple[int, int]]:
    """(limit, use that can't be reclaimed) in bytes of each group of this process that has a limit. Containers see
    their own group as the root."""
    folders = set()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        root = _GROUPS / controllers
        folders |= {root, root / group.lstrip("/")}
    for folder in sorted(folders):
        for limit, use, reclaimable in _FILES:
            if (folder / limit).is_file() and (most := (folder / limit).read_text().strip()).isdecimal():
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield int(most), int((folder / use).read_text()) - int(stat[reclaimable])
