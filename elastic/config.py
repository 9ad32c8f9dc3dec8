"""What was asked: one YAML file, then `--set a.b=c`, checked once, frozen afterwards.

Nothing below `cli.py` reads an environment variable or changes a value after load. Sections: config_sections.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from elastic.config_sections import (
    NAME,
    Admission,
    Batch,
    Checkpoint,
    Control,
    Data,
    Evaluation,
    LocalCluster,
    Model,
    Optimizer,
    Policies,
    Resize,
    Section,
    Sizes,
    Snapshot,
    StorageOptions,
)
from elastic.config_sentences import field_of, sentences
from elastic.config_text import Text, override, read


class ElasticError(Exception):
    """Root of this project's exceptions: ConfigError, PlanError, CheckpointError, RunError."""


class ConfigError(ElasticError):
    """The configuration can't be used; one line for each problem: file, key, value and what is allowed."""


class TaskError(ElasticError):
    """The task's own code raised, or asks for what can't be; the message is one sentence that names the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run's files are. directory: of the driver's node, for what it works on. url: of what must outlive it; the
    same directory where that is local."""

    directory: Path
    url: str
    options: StorageOptions = field(default_factory=StorageOptions)

    @classmethod
    def of_directory(cls, directory: Path) -> Place:
        return cls(directory=directory, url=str(directory))

    def within(self, deadline_s: float) -> Place:
        """The same for somebody who waits: no request is tried again for longer than that."""
        options = self.options.model_copy(update={"deadline_s": min(deadline_s, self.options.deadline_s)})
        return replace(self, options=options)


BUILT_IN_TASK = "elastic.worker.pretrain:LanguageModel"


class Config(Section):
    """One run. `task`: "module:Name" or "file.py:Name"; `task_path`: directories to import it from, before others.

    storage: a directory that all nodes share, or a URL (s3://bucket/prefix). directory: where the driver's node keeps
    what it works on (journal, lock) when `storage` is a URL.
    """

    run: str = Field("run", pattern=NAME)
    task: str = BUILT_IN_TASK
    task_path: tuple[str, ...] = ()
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    storage: str = "runs"
    storage_options: StorageOptions = StorageOptions()
    directory: str = "runs"
    hosts_min: int = Field(1, ge=1)
    hosts_max: int = Field(1, ge=1)
    use_gpu: bool = False
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    warm_standby: bool = True
    max_failures: int = Field(0, ge=-1)
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    batch: Batch = Batch()
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    snapshot: Snapshot = Snapshot()
    checkpoint: Checkpoint = Checkpoint()
    control: Control = Control()
    policies: Policies = Policies()
    admission: Admission = Admission()
    local: LocalCluster = LocalCluster()
    sizes: Sizes = Sizes()
    schedule: tuple[Resize, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Config:
        problems = []
        if self.hosts_min > self.hosts_max:
            problems.append(f"hosts_min {self.hosts_min} is above hosts_max {self.hosts_max}")
        if self.batch.global_samples < self.hosts_max:
            problems.append(
                f"batch.global_samples {self.batch.global_samples} is below hosts_max {self.hosts_max}: "
                "each host needs at least one sample a step"
            )
        scheme, _, rest = self.storage.partition(":/")
        if scheme.isalnum() and scheme != self.storage and not rest.strip("/"):
            problems.append(
                f"storage {self.storage!r} names no place: wanted a directory, or a URL as s3://bucket/prefix"
            )
        elif scheme.isalnum() and rest and not rest.startswith("/"):
            problems.append(
                f"storage {self.storage!r} is neither a directory nor a URL; did you mean {scheme}://{rest}?"
            )
        sets = [*self.data.parts(), *(one.name for one in self.evaluation.sets)]
        if twice := sorted({name for name in sets if sets.count(name) > 1}):
            problems.append(f"evaluation.sets has {twice[0]!r} twice, or beside a source of that name")
        places = [one.prepared for one in self.data.parts().values()] + [one.prepared for one in self.evaluation.sets]
        if self.data.packing == "best_fit" and (urls := [place for place in places if "://" in place]):
            problems.append(
                f"data.packing best_fit can't read {urls[0]}: its plans and documents must lie in a directory; copy "
                "the corpus to one that all nodes see, or leave packing out"
            )
        steps = [change.step for change in self.schedule]
        if steps != sorted(set(steps)):
            problems.append(f"schedule has steps {steps}, they must rise")
        problems += [
            f"schedule asks for {change.hosts} hosts at step {change.step}, "
            f"allowed are {self.hosts_min} to {self.hosts_max}"
            for change in self.schedule
            if not self.hosts_min <= change.hosts <= self.hosts_max
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def is_built_in(self) -> bool:
        """Whether the task is the built-in one; of another the sizes are not known before it is built."""
        return self.task == BUILT_IN_TASK

    def place(self) -> Place:
        local = self.storage.removeprefix("file://")
        if "://" in local:
            url = f"{self.storage.rstrip('/')}/{self.run}"
            return Place(directory=Path(self.directory) / self.run, url=url, options=self.storage_options)
        return Place.of_directory(Path(local) / self.run)

    def run_dir(self) -> Path:
        """Where the driver's node keeps what it works on."""
        return self.place().directory


# ---------------------------------------------------------------- reading


def load(path: Path | str, overrides: tuple[str, ...] = ()) -> Config:
    """Read `path`, apply `key=value` overrides (values are YAML), check everything; ConfigError says what is wrong."""
    return resolve(path, overrides)[0]


def resolve(path: Path | str, overrides: tuple[str, ...] = ()) -> tuple[Config, Text]:
    """As `load`, with the origin of each key that was given."""
    try:
        text = read(Path(path).read_text(), str(path))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"can't read {path}: {reason}; give the path of a job file") from error
    for argument in overrides:
        key = argument.partition("=")[0]
        inside = (field_of(json_schema(), tuple(key.split("."))) or {}).get("properties")
        if inside:
            first = next(iter(inside))
            text.problems.append(
                f"--set {argument}: {key} is a section; set one of its keys, such as {key}.{first}=..."
            )
        else:
            override(text, argument)
    return _checked(text), text


def parse(raw: dict[str, Any], *, source: str) -> Config:
    return _checked(Text(name=source, values=raw))


def _checked(text: Text) -> Config:
    try:
        config = Config.model_validate(text.values)
    except ValidationError as error:
        text.problems += [line for item in error.errors() for line in sentences(json_schema(), text, item)]
    if text.problems:
        raise ConfigError("\n".join(dict.fromkeys(text.problems)))
    return config


@cache
def json_schema() -> dict[str, Any]:
    """The JSON schema of a job file."""
    return Config.model_json_schema()
