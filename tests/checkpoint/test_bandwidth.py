"""What is sent to storage keeps to its limit, whoever sends it."""

from __future__ import annotations

import os
from pathlib import Path

from elastic.storage.bandwidth import Bandwidth
from elastic.storage.store import PIECE_BYTES, DirectoryStore


class Time:
    """It passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.at_s += seconds


def limited(bytes_s: float) -> tuple[Bandwidth, Time]:
    time = Time()
    return Bandwidth(bytes_s, now_s=time.now_s, sleep=time.sleep), time


def test_each_waits_until_those_before_have_had_their_time() -> None:
    bandwidth, time = limited(1000)
    bandwidth.take(500)
    assert time.at_s == 100.0
    bandwidth.take(2000)
    assert time.at_s == 100.5
    time.at_s = 110.0  # nobody sent: that time is not saved up
    bandwidth.take(100)
    bandwidth.take(100)
    assert abs(time.at_s - 110.1) < 1e-9


def test_without_a_limit_nobody_waits() -> None:
    bandwidth, time = limited(0)
    for _ in range(100):
        bandwidth.take(1 << 40)
    assert time.at_s == 100.0


def test_a_directory_is_written_in_pieces(tmp_path: Path) -> None:
    bandwidth, time = limited(PIECE_BYTES)
    data = os.urandom(3 * PIECE_BYTES + 5)
    DirectoryStore(tmp_path, bandwidth).put("data/1/0.bin", memoryview(data))
    assert (tmp_path / "data/1/0.bin").read_bytes() == data
    assert time.at_s == 103.0, "the first piece waits for none"
