"""Memory is the machine's, or what a control group of either version leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cluster import memory

MIB = 1 << 20


def test_it_is_that_of_this_machine() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < memory.free_bytes() <= memory.total_bytes() <= total


@pytest.mark.parametrize(
    ("limit", "use", "reclaimable"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_group_with_a_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, use: str, reclaimable: str
) -> None:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    (tmp_path / limit).write_text(f"{10 * MIB}\n")
    (tmp_path / use).write_text(f"{7 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\n{reclaimable} {2 * MIB}\n")
    if not any(line.split(":")[1] in ("", "memory") for line in Path("/proc/self/cgroup").read_text().splitlines()):
        pytest.skip("this process is in no control group for memory")
    if limit.endswith("in_bytes"):  # version 1 has a directory for each kind
        (tmp_path / "memory").symlink_to(tmp_path)
    assert memory.total_bytes() == 10 * MIB
    assert memory.free_bytes() == 5 * MIB


def test_a_group_without_a_limit_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory.total_bytes()
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_bytes() >= before
