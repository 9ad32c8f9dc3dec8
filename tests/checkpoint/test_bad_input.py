"""Bad input, one named test each with its sentence: what a new attempt says of it, and what verification says."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic.checkpoint import pins
from elastic.checkpoint.arena import Arena
from elastic.checkpoint.committer import Committer
from elastic.checkpoint.errors import StateError
from elastic.checkpoint.log import CommitLog
from elastic.checkpoint.manifest import restore_plan
from elastic.checkpoint.restore import restore
from elastic.checkpoint.verify import damages
from elastic.config_sections import Checkpoint
from elastic.events import CheckpointCommitted, CommitFailed
from elastic.storage.errors import StorageError
from elastic.storage.store import DirectoryStore, MemoryStore, Store
from tests.checkpoint.hosts import TOKEN, key
from tests.checkpoint.stored import ABOUT, commits, save, upload
from tests.checkpoint.test_log import LIMIT_S, outcome

BIN, TABLE, INDEX, ENTRY = "data/1-1-20/1.bin", "data/1-1-20/1.json", "data/1-1-20/index.json", "log/00000003.json"


def flip(store: Store, name: str) -> None:
    raw = bytearray(store.get(name))
    raw[len(raw) // 2 - 30] ^= 1
    store.put(name, bytes(raw))


def cut(store: Store, name: str) -> None:
    store.put(name, store.get(name)[:-1])


def lose(store: Store, name: str) -> None:
    store.delete(name)


def pickled(store: Store, name: str) -> None:
    """Would leave a trace if anybody unpickled it."""
    store.put(name, pickle.dumps(Trap()))


class Trap:
    loaded = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "loaded", True)


DAMAGES: list[tuple[str, Callable[[Store, str], None], str, str, str]] = [
    ("a flipped bit in data", flip, BIN, "", f"{BIN}: bytes 0 to 64 of rank 1's shard of"),
    ("a flipped bit in a table", flip, TABLE, f"{TABLE} is not the one that was committed", f"{TABLE} is not the one"),
    ("a flipped bit in the index", flip, INDEX, f"{INDEX} is not the one that was", f"{INDEX} is not the one"),
    ("a flipped bit in the log entry", flip, ENTRY, f"{ENTRY} ", ENTRY),
    ("cut data", cut, BIN, f"{BIN} has 63 bytes, the manifest says 64", f"{BIN} ends after 63 bytes, the manifest"),
    ("a cut table", cut, TABLE, f"{TABLE} is not the one that was committed", f"{TABLE} is not the one"),
    ("a cut index", cut, INDEX, f"{INDEX} is not the one that was committed", f"{INDEX} is not the one"),
    ("a cut log entry", cut, ENTRY, f"{ENTRY} is no signed JSON object", f"{ENTRY} is no signed JSON object"),
    ("missing data", lose, BIN, f"{BIN} has no bytes, the manifest says 64", f"{BIN} does not exist"),
    ("a missing table", lose, TABLE, "1.json does not exist", "1.json does not exist"),
    ("a missing index", lose, INDEX, "index.json does not exist", "index.json does not exist"),
    ("a missing log entry", lose, ENTRY, f"log entry {ENTRY} is skipped: ", "does not exist"),
    ("a pickle for a table", pickled, TABLE, f"{TABLE} is not the one that was committed", f"{TABLE} is not the one"),
    ("a pickle for the index", pickled, INDEX, f"{INDEX} is not the one that was committed", f"{INDEX} is not the one"),
    ("a pickle for the log entry", pickled, ENTRY, f"{ENTRY} is no signed JSON object", f"{ENTRY} is no signed JSON"),
    ("a pickle for data", pickled, BIN, f"{BIN} has ", f"{BIN} ends after "),
]


@pytest.mark.parametrize(
    ("damage", "name", "newest", "verified"), [row[1:] for row in DAMAGES], ids=[row[0] for row in DAMAGES]
)
def test_damage(store: Store, damage: Callable[[Store, str], None], name: str, newest: str, verified: str) -> None:
    """A new attempt takes the older one, loudly; a flipped bit of the data it can see only when it reads them."""
    CommitLog(store).claim("a")
    commits(store, 10, 20)
    (_, whole) = CommitLog(store).checkpoints()
    CommitLog(store).claim("b")
    damage(store, name)
    said: list[str] = []
    found = CommitLog(store, said.append).newest()
    assert found is not None and whole.manifest is not None
    assert (found.key.step, len(said)) == ((10, 1) if newest else (20, 0)) and newest in "".join(said)
    told = said if name == ENTRY else list(damages(store, whole.manifest))
    assert told and verified in told[0] and not Trap.loaded


# ---------------------------------------------------------------- another model


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(own_bytes=64, received_bytes=64, received_buffers=0)
    yield made
    os.close(made.fd)


SAVED = {"model.w": ("float32", np.ones((4, 3), dtype=np.float32)), "model.b": ("int64", np.ones(5, dtype=np.int64))}
WAS = r"model.w was saved as float32\[4, 3\], this model has"
WEIGHT, BIAS = torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"model.w": WEIGHT, "model.c": BIAS}, "the snapshot of step 10 does not have model.c: it is of another model"),
        ({"model.w": WEIGHT}, "the snapshot of step 10 has model.b, which this task does not have or register"),
        ({"model.w": torch.zeros(4, 2), "model.b": BIAS}, rf"{WAS} float32\[4, 2\]"),
        ({"model.w": WEIGHT.double(), "model.b": BIAS}, rf"{WAS} float64\[4, 3\]"),
    ],
    ids=["another name", "a name less", "another shape", "another dtype"],
)
def test_a_checkpoint_of_another_model(arena: Arena, found: dict[str, torch.Tensor], sentence: str) -> None:
    store = MemoryStore()
    plan = restore_plan(save(store, key(1, 10), SAVED))
    with pytest.raises(StateError, match=sentence):
        restore(list(found.items()), plan, rank=0, world=1, arena=arena, store=store, token=TOKEN)


# ---------------------------------------------------------------- the place


def test_a_foreign_prefix_is_no_run_and_nothing_there_is_touched(store: Store) -> None:
    foreign = ["log/readme.txt", "log/1.json", "data/images/0.bin", "data/1-2/0.bin", "data/1-2-x/0.bin", "pins/me"]
    for name in foreign:
        store.put(name, b"mine")
    log = CommitLog(store)
    assert (log.claim("a"), log.newest(), pins.pinned(store)) == (1, None, set())
    worker = Committer(store, log, 1, about=ABOUT, samples_per_step=1, keep=Checkpoint(keep=2))
    for step in (10, 20, 30):
        worker.submit(key(1, step), upload(store, key(1, step)), {})
        assert isinstance(outcome(worker), CheckpointCommitted)
    assert worker.close() and all(store.get(name) == b"mine" for name in foreign)


def in_child(call: Callable[[], str]) -> str:
    """What `call` returns in a process of its own, which may give up its rights."""
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    child = context.Process(target=lambda: out.put(call()))
    child.start()
    found = str(out.get(timeout=LIMIT_S))
    child.join(LIMIT_S)
    return found


def refusal(call: Callable[[], object]) -> str:
    try:
        return f"not refused: {call()}"
    except StorageError as error:
        return str(error)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach."""
    made = Path(tempfile.mkdtemp(prefix="elastic-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_a_read_only_directory_can_be_read_and_verified_and_says_what_it_refuses(public: Path) -> None:
    store = DirectoryStore(public)
    CommitLog(store).claim("a")
    commits(store, 10)
    for folder in (public, *(path for path in public.rglob("*") if path.is_dir())):
        folder.chmod(0o555)

    def told() -> str:
        if os.getuid() == 0:
            os.setuid(65534)
        newest = CommitLog(store).newest()
        assert newest is not None and list(damages(store, newest)) == []
        return "\n".join(refusal(call) for call in (lambda: CommitLog(store).claim("b"), lambda: commits(store, 20)))

    claimed, uploaded = in_child(told).splitlines()
    for folder in (public, *(path for path in public.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    end = "Permission denied; check that the directory is writable and has room"
    assert claimed == f"can't write {public}/log/00000003.json: {end}"
    assert uploaded == f"can't write {public}/data/1-1-20/0.bin: {end}"


def test_a_limit_on_the_size_of_files_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    def told() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        return refusal(lambda: DirectoryStore(tmp_path).put("data/1-1-1/0.bin", b"x" * 11))

    assert in_child(told) == (
        f"can't write {tmp_path}/data/1-1-1/0.bin: {os.strerror(errno.EFBIG)}; "
        "check that the directory is writable and has room"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a small disk here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_fails_the_commit_and_the_next_one_catches_up(small_disk: Path) -> None:
    store = DirectoryStore(small_disk)
    CommitLog(store).claim("a")
    commits(store, 10)
    uploads = upload(store, key(1, 20))
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1024))
    worker = Committer(store, CommitLog(store), 1, about=ABOUT, samples_per_step=24, keep=Checkpoint(keep=2))
    worker.submit(key(1, 20), uploads, {})
    failed = outcome(worker)
    assert isinstance(failed, CommitFailed) and "No space left on device; check that the directory" in failed.reason
    newest = CommitLog(store).newest()
    assert newest is not None and newest.key.step == 10 and list(damages(store, newest)) == []
    filler.unlink()
    worker.submit(key(1, 20), uploads, {})
    assert isinstance(outcome(worker), CheckpointCommitted) and worker.close()
    newest = CommitLog(store).newest()
    assert newest is not None and newest.key.step == 20 and list(damages(store, newest)) == []
