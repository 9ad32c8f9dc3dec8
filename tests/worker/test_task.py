"""A task's name: from text and objects, in files, modules and scripts; each mistake is one sentence, in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import elastic.worker.loop  # noqa: F401  # for the forks
from elastic.config import Config, ConfigError, TaskError
from elastic.worker import task, task_check
from elastic.worker.task_check import check

MODEL = """
from torch import nn
import torch.nn.functional as F

class Task:
    def model(self):
        return nn.Sequential(nn.Embedding(257, 8), nn.Linear(8, 257))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten(), reduction="sum")

    def flops_per_token(self, config):
        return 12345
"""


class Here:
    class Inner:
        pass


def job(file: Path, name: str = "Task", **changes: Any) -> Config:
    return Config.model_validate({"task": f"{file}:{name}", "hosts_max": 2, "model": {"seq_len": 8}, **changes})


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "written.py"
    file.write_text(text)
    return file


def _forked(command: list[str], timeout: float, **_: Any) -> subprocess.CompletedProcess[bytes]:
    """What `command` does, in a fork of this process, which has imported torch already."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                sys.argv = command[2:]
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                signal.alarm(int(timeout))
                task_check.main()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), output.read())


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that start scripts start the real process, which needs seconds to import torch."""
    monkeypatch.setattr(task_check.subprocess, "run", _forked)


def test_objects_are_named_by_their_module() -> None:
    assert task.name_of(Here) == f"{__name__}:Here"
    assert task.name_of(Here.Inner) == f"{__name__}:Here.Inner"
    assert task.name_of(written) == f"{__name__}:written"
    assert task.name_of("any:Text") == "any:Text"
    assert task.load(task.name_of(Here.Inner)) is Here.Inner


def test_what_no_trainer_can_import_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(ConfigError, match="lambda or defined inside a function"):
        task.name_of(local)
    with pytest.raises(ConfigError, match="lambda or defined inside a function"):
        task.name_of(lambda ctx: None)
    with pytest.raises(ConfigError, match="is Here: wanted a class or a function"):
        task.name_of(Here())
    hidden = type("Here", (), {"__module__": __name__, "__qualname__": "Here"})
    with pytest.raises(ConfigError, match="another object of that name"):
        task.name_of(hidden)


def test_a_path_is_made_absolute_and_its_directory_searched_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, MODEL)
    monkeypatch.chdir(tmp_path)
    found = task.located(Config(task="written.py:Task", task_path=("src",)))
    assert found.task == f"{tmp_path}/written.py:Task"
    assert found.task_path[:2] == (str(tmp_path), str(tmp_path / "src"))
    assert task.located(found).task_path == found.task_path
    with pytest.raises(ConfigError, match=r"there is no file .*/writen\.py; did you mean written\.py\?"):
        task.located(Config(task="writen.py:Task"))
    with pytest.raises(ConfigError, match="wanted module:Name"):
        task.located(Config(task="written"))


def test_a_script_names_and_starts_its_own_task(tmp_path: Path) -> None:
    """It is imported under another name by the process that tries it, so its last lines do not run again."""
    script = """
from elastic.config import Config
from elastic.worker.task_check import check
from elastic.worker.task import name_of

if __name__ == "__main__":
    checked = check(Config(task=name_of(Task), hosts_max=2))
    print(checked.task, checked.sizes.shard_bytes)
"""
    file = written(tmp_path, MODEL + script)
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    name, nbytes = ran.stdout.split()
    assert name == f"{file}:Task" and int(nbytes) > 0


def test_a_script_without_a_guard_does_not_start_itself_again(tmp_path: Path) -> None:
    script = """
from elastic.config import Config
from elastic.worker.task_check import check
check(Config(task=__file__ + ":Task"))
"""
    file = written(tmp_path, MODEL + script)
    with pytest.raises(TaskError, match='if __name__ == "__main__"'):
        check(job(file))


@pytest.mark.usefixtures("forks")
def test_sizes_are_measured(tmp_path: Path) -> None:
    checked = check(job(written(tmp_path, MODEL)))
    parameters = 257 * 8 + 8 * 257 + 257
    assert checked.sizes.flops_per_token == 12345
    assert checked.sizes.shard_bytes is not None
    assert 3 * 4 * parameters <= checked.sizes.shard_bytes <= 3 * 4 * parameters + 64 * 4 * 3
    half = check(job(written(tmp_path, MODEL), hosts_min=2))
    assert half.sizes.shard_bytes is not None and half.sizes.shard_bytes < 0.6 * checked.sizes.shard_bytes


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("text", "name", "kind", "sentence"),
    [
        (MODEL, "Tusk", ConfigError, r"has no Tusk; did you mean Task\?"),
        ("import no_such_thing\n" + MODEL, "Task", TaskError, r"ModuleNotFoundError: .*no_such_thing.* line 1"),
        ("1 / 0\n", "Task", TaskError, r"importing it raised ZeroDivisionError: .*written\.py, line 1"),
        ("import sys; sys.exit(3)\n", "Task", TaskError, "importing it raised SystemExit"),
        ("class Task:\n    def model(self): ...\n", "Task", ConfigError, r"has no loss: wanted model\(\) and loss"),
        ("from torch import nn\nTask = nn.Linear\n", "Task", ConfigError, "is a module: wanted a class whose model"),
        ("Task = 3\n", "Task", ConfigError, "is int, wanted a class or a function"),
        ("def train(ctx):\n    raise KeyError('x')\n", "train", TaskError, r"raised KeyError: 'x' .*line 2"),
        ("def train(ctx):\n    pass\n", "train", TaskError, r"returned after step 0 of 100; it must run the loop"),
        ("import os\ndef train(ctx):\n    os._exit(7)\n", "train", TaskError, "status 7"),
        (
            MODEL.replace("nn.Linear(8, 257)", "nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Linear(8, 257)"),
            "Task",
            TaskError,
            "BatchNorm1d: its running statistics would differ",
        ),
        (
            MODEL.replace("return nn.Seq", "with __import__('torch').device('meta'): return nn.Seq"),
            "Task",
            TaskError,
            r"give it values with initialise\(model, seed\)",
        ),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    tmp_path: Path, text: str, name: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as raised:
        check(job(written(tmp_path, text), name))
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "starts"),
    [
        ({}, [0, 8]),
        ({"documents": "apart"}, [0, 2, 8]),
        ({"packing": "best_fit"}, [0, 2, 8]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("forks")
def test_a_rehearsal_has_documents_where_the_run_has(tmp_path: Path, data: dict[str, str], starts: list[int]) -> None:
    """The task says what it was given, by an error."""
    says = MODEL.replace(
        "return F.cross", "raise ValueError([batch.documents is None, batch.cu_seqlens.tolist()]); return F.cross"
    )
    config = job(written(tmp_path, says), data=data, batch={"micro_samples": 2, "global_samples": 4})
    with pytest.raises(TaskError, match=re.escape(f"{[not data, starts]}")):
        check(config)


@pytest.mark.usefixtures("forks")
def test_modules_are_found_as_dotted_names(tmp_path: Path) -> None:
    package = tmp_path / "src" / "mine"
    package.mkdir(parents=True)
    (package / "models.py").write_text(MODEL)
    config = Config(task="mine.models:Task", task_path=(str(tmp_path / "src"),), hosts_max=2)
    assert check(config).sizes.shard_bytes
    with pytest.raises(ConfigError, match=r"no module mine\.modls"):
        check(config.model_copy(update={"task": "mine.modls:Task"}))
