"""Every way of ending `elastic train` leaves nothing behind, and the same command goes on to the twin's result."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic.cluster import twin
from elastic.cluster.run_logs import trainer_lines
from elastic.config import Config
from elastic.proof import verify_data
from elastic.report import entries_of
from tests.chaos.driving import Driving
from tests.process.running import small

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def test_each_ending_is_clean_and_the_same_command_goes_on(tmp_path: Path) -> None:
    config = small(tmp_path, run="ended", steps=200, hosts_min=2, local={"nodes": 1, "hosts_per_node": 2})
    durable = interrupted(config, tmp_path)
    with Driving(config, tmp_path, "killed") as killed:
        durable = driver_killed(killed, durable)
        finished(config, tmp_path, durable)
        killed.agents_ended()

    entries = entries_of(config.place())
    assert [entry["event"]["attempt"] for entry in entries if entry["event"]["kind"] == "RunStarted"] == [1, 2, 3]
    assert "200 steps of the committed lineage" in verify_data(config.place())[0]
    output = list(trainer_lines(config.place(), generation=None, rank=None, follow=False))
    assert output[0].endswith("ranks 0-1") and any("rank 0 of 2" in line for line in output[1:3]), output[:3]
    assert twin.differences(entries, twin.run_locally(twin.config_of(config, entries), say=lambda _: None)) == []


@pytest.mark.long
def test_terminated_while_it_starts_and_with_its_controller_killed(tmp_path: Path) -> None:
    config = small(tmp_path, run="ended", steps=200, hosts_min=2, local={"nodes": 1, "hosts_per_node": 2})
    with Driving(config, tmp_path, "terminated") as driving:
        driving.until("the head's raylet", lambda: driving.named("raylet/raylet") != 0)
        driving.send(signal.SIGTERM)
        assert driving.ended() == 130, driving.said
        assert not driving.entries and not driving.sessions()
    with Driving(config, tmp_path, "controller") as driving:
        driving.until("a checkpoint", lambda: bool(driving.commits))
        driving.send(signal.SIGKILL, driving.named("ElasticTrainController"))
        assert driving.ended() == 1, driving.said
        assert "the same command goes on from the last durable checkpoint" in driving.said
    with Driving(config, tmp_path, "again") as again:
        again.until("the start", lambda: bool(again.entries))
        assert again.entries[0]["event"]["durable"]["key"]["step"] == driving.commits[-1]
        assert again.ended() == 0, again.said


def interrupted(config: Config, path: Path) -> int:
    with Driving(config, path, "interrupted") as driving:
        driving.until("step 15", lambda: driving.step >= 15)
        driving.send(signal.SIGINT)
        assert driving.ended() == 130, driving.said
        assert driving.entries[-1]["phase"] == "stopped" and driving.commits[-1] == driving.step
        assert not driving.sessions()
        return driving.step


def driver_killed(driving: Driving, durable: int) -> int:
    driving.until("a checkpoint", lambda: bool(driving.commits))
    assert driving.entries[0]["event"]["durable"]["key"]["step"] == durable
    driving.send(signal.SIGKILL)
    assert driving.ended(agents_too=False) == -signal.SIGKILL
    assert len(driving.sessions()) == 1, "nobody was there to remove it; the next driver does"
    return driving.commits[-1]


def finished(config: Config, path: Path, durable: int) -> None:
    with Driving(config, path, "finished") as driving:
        driving.until("the start", lambda: bool(driving.entries))
        assert driving.entries[0]["event"]["durable"]["key"]["step"] == durable
        with Driving(config, path, "second") as second:
            assert second.ended() == 1 and "is already running: pid" in second.said, second.said
        assert driving.ended() == 0, driving.said
        assert "left when it was killed" in driving.said and not driving.sessions()
