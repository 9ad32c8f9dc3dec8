"""Whole runs whose storage is S3: a real server, real processes; what fails in between costs nothing but time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.verify import damages
from elastic.cluster import twin
from elastic.config import Config
from elastic.config_sections import Data, StorageOptions
from elastic.controller.recovery import STORAGE
from elastic.controller.state import Phase
from elastic.data.remote import Prepared, prepared_at
from elastic.data.upload import upload
from elastic.events import StopRequested
from elastic.report import durability_line
from elastic.storage.store import store_at
from elastic.telemetry import journal
from elastic.telemetry.lineage import lineage
from tests.process.running import Running, small
from tests.storage.servers import Proxy, Request, Seaweed, credentials

pytestmark = pytest.mark.timeout(400)

FAULTS = {3: "503 SlowDown", 4: "503 SlowDown", 8: "cut", 12: "lost", 16: "late", 17: "500 InternalError"}
EXPIRED = "400 ExpiredToken"


@pytest.fixture
def seaweed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)
    server = Seaweed(tmp_path / "weed")
    s3fs.S3FileSystem(endpoint_url=server.endpoint, skip_instance_cache=True).mkdir("runs")
    yield server
    server.stop()


def on_s3(path: Path, endpoint: str, **changes: Any) -> Config:
    options = {"endpoint": endpoint, "region": "us-east-1", "deadline_s": 2.0}
    return small(path, storage="s3://runs/tests", directory=str(path / "runs"), storage_options=options, **changes)


@pytest.mark.long
def test_a_run_is_stopped_and_goes_on_from_s3_with_another_number_of_hosts(tmp_path: Path, seaweed: Seaweed) -> None:
    control = {"start_wait_s": 5.0}  # the second time there are fewer hosts than may be
    config = on_s3(tmp_path, seaweed.endpoint, steps=40, hosts_max=3, control=control)
    with Running(config, tmp_path, nodes=3, hosts_per_node=1) as run:
        run.until(lambda: run.warm(3)() and run.step(5)())
        os.kill(run.pid(1, "trainer"), signal.SIGKILL)
        run.until(lambda: run.driver.state.durable_step >= 20)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        assert run.driver.state.step >= 20
        run.finish()
        restored = run.driver.state.durable
        assert restored is not None and {source.tier for source in restored.sources} == {"storage"}
        entries = journal.read_file(run.journal)
    newest = CommitLog(store_at(config.place())).newest()
    assert newest is not None and newest.key.step == 40 and newest.world == 2
    assert list(damages(store_at(config.place()), newest)) == []
    assert [record["step"] for record in lineage(entries)] == list(range(1, 41))
    assert twin.differences(entries, twin.run_locally(twin.config_of(config, entries), say=lambda _: None)) == []


def with_corpus_on_s3(base: Config, path: Path, endpoint: str) -> Config:
    options = StorageOptions(endpoint=endpoint, region="us-east-1", deadline_s=1.0)
    there = Data(prepared="s3://runs/corpus", prepared_options=options, cache=str(path / "cache"))
    place = prepared_at(there)
    assert isinstance(place, Prepared)
    upload(Path(base.data.prepared), place, progress=lambda line: None)
    return Config.model_validate({**base.model_dump(), "data": {**there.model_dump(), "corpus": base.data.corpus}})


@pytest.mark.long
def test_data_that_storage_keeps_back_spends_no_failure(tmp_path: Path, seaweed: Seaweed) -> None:
    """It is told as what it is before the collectives of the others end, again and again, until storage is back."""
    control = {"collective_timeout_s": 6.0, "failures_without_progress_max": 1, "start_timeout_s": 30.0}
    config = with_corpus_on_s3(small(tmp_path, steps=20, control=control), tmp_path, seaweed.endpoint)
    prepared_at(config.data).manifest_bytes()  # type: ignore[union-attr]  # this node knows the manifest
    seaweed.stop()
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(lambda: run.driver.state.incidents >= 3)
        assert run.driver.state.step == 0
        again = threading.Thread(target=seaweed.start)
        again.start()
        run.finish()
        again.join()
        entries = journal.read_file(run.journal)
    told = [entry["incident"] for entry in entries if entry["incident"]]
    assert {incident["failure"] for incident in told} <= {STORAGE, "broken connection"}
    assert any("step 0 waits for its data: the corpus at s3://runs/corpus" in entry["reason"] for entry in entries)
    assert [record["step"] for record in lineage(entries)] == list(range(1, 21))


def test_a_corpus_in_s3_trains_the_same_as_in_a_directory(tmp_path: Path, seaweed: Seaweed) -> None:
    base = small(tmp_path, steps=30)
    config = with_corpus_on_s3(base, tmp_path, seaweed.endpoint)
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(lambda: run.warm(2)() and run.step(5)())
        os.kill(run.pid(1, "trainer"), signal.SIGKILL)
        run.finish()
        entries = journal.read_file(run.journal)
    assert [record["step"] for record in lineage(entries)] == list(range(1, 31))
    assert twin.differences(entries, twin.run_locally(twin.config_of(base, entries), say=lambda _: None)) == []
    assert list((tmp_path / "cache").glob("*.bin"))


@pytest.mark.long
def test_training_goes_on_while_the_server_is_dead_and_catches_up(tmp_path: Path, seaweed: Seaweed) -> None:
    config = on_s3(tmp_path, seaweed.endpoint, steps=5000, checkpoint={"interval_steps": 5})
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.until(lambda: run.driver.state.durable_step >= 5 and run.warm(2)())
        seaweed.stop()
        run.until(lambda: run.driver.state.commit_failures >= 2)
        durable, step, generation = run.driver.state.durable_step, run.driver.state.step, run.driver.state.generation
        status = run.driver.status()
        assert "can't" in status["not_durable"] and status["durable_age_s"] > 0
        os.kill(run.pid(1, "trainer"), signal.SIGKILL)
        run.until(lambda: run.driver.state.generation > generation and run.step(step + 5)())
        assert run.driver.state.durable_step == durable
        again = threading.Thread(target=seaweed.start)
        again.start()  # the driver turns meanwhile, else hosts would miss it
        run.until(lambda: run.driver.state.durable_step > step)
        again.join()
        assert run.driver.state.not_durable == "" and run.driver.state.incidents == 1
        run.driver.take(StopRequested(who="test", why="seen enough"))
        run.until(lambda: run.driver.state.phase is Phase.STOPPED)
        entries = journal.read_file(run.journal)
    told = [entry["reason"] for entry in entries if entry["event"]["kind"] == "CommitFailed" and entry["reason"]]
    assert len(told) == 1 and f"training goes on, the last durable one is of step {durable}, " in told[0]
    assert any("storage takes checkpoints again, after" in entry["reason"] for entry in entries)
    assert "storage took none for" in durability_line(entries)
    newest = CommitLog(store_at(config.place())).newest()
    assert newest is not None and newest.key.step == run.driver.state.step
    assert list(damages(store_at(config.place()), newest)) == []


@pytest.mark.long
def test_a_run_that_ends_without_storage_says_which_step_is_durable(tmp_path: Path, seaweed: Seaweed) -> None:
    control = {"upload_timeout_s": 8.0, "start_wait_s": 60.0}
    config = on_s3(tmp_path, seaweed.endpoint, steps=30, hosts_max=1, control=control)
    with Running(config, tmp_path, nodes=1, hosts_per_node=1) as run:
        run.until(lambda: run.driver.state.durable_step >= 10)
        seaweed.stop()
        run.until(lambda: run.driver.state.phase is Phase.FAILED)
        state = run.driver.state
    assert state.failure == "checkpoint" and state.step == 30
    assert state.detail.startswith("step 30 is not durable: n0/0.") and "is the endpoint right" in state.detail
    assert f"the last durable one is of step {state.durable_step}, " in state.detail and state.durable_step < 30


@pytest.mark.long
def test_faults_of_single_requests_are_no_news(tmp_path: Path, seaweed: Seaweed) -> None:
    """Throttling, cut and late answers, lost ones, and credentials that expire for a while: a run does not notice."""
    broken: list[str] = []

    def rule(request: Request) -> str:
        found = EXPIRED if 60 <= request.number < 75 else FAULTS.get(request.number % 20, "")
        broken.append(found)
        return found

    proxy = Proxy(seaweed.endpoint)
    proxy.rule = rule
    config = on_s3(tmp_path, proxy.endpoint, steps=30, hosts_max=2, checkpoint={"interval_steps": 5})
    options = config.storage_options.model_copy(update={"deadline_s": 30.0})
    config = config.model_copy(update={"storage_options": options})
    with Running(config, tmp_path, nodes=2, hosts_per_node=1) as run:
        run.finish()
        assert run.driver.state.incidents == 0 and run.driver.state.refused == {}
    proxy.close()
    assert {*FAULTS.values(), EXPIRED} <= {*broken}
    store = store_at(on_s3(tmp_path, seaweed.endpoint).place())
    newest = CommitLog(store).newest()
    assert newest is not None and newest.key.step == 30 and list(damages(store, newest)) == []
