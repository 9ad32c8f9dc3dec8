"""The sections of a configuration: what each key means, its default and what is allowed.

Every one is a frozen pydantic model, unknown keys are errors. A validator that compares keys begins its sentence with
the key that is wrong: the place where that was said is put before it.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise PydanticCustomError("number_type", "a truth value is no number")
        return value


class Model(Section):
    """Decoder transformer: sizes of the built-in language model."""

    vocab_size: int = Field(257, ge=2)
    dim: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    ffn_dim: int = Field(384, ge=8)
    seq_len: int = Field(256, ge=2)
    dropout: float = Field(0.0, ge=0, lt=1)
    tie_embeddings: bool = False
    rope_theta: float = Field(10_000.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Model:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} must be heads ({self.heads}) times an even head size")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self


class Optimizer(Section):
    """AdamW, linear warm-up, cosine decay to `lr * lr_min_ratio`, clipping by global norm."""

    lr: float = Field(3e-3, gt=0)
    lr_min_ratio: float = Field(0.1, ge=0, le=1)
    warmup_steps: int = Field(20, ge=0)
    weight_decay: float = Field(0.1, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    grad_clip: float = Field(1.0, gt=0)


class Batch(Section):
    """`global_samples` is the optimisation problem and never changes; `micro_samples` is what fits at once."""

    global_samples: int = Field(24, ge=1)
    micro_samples: int = Field(3, ge=1)


class StorageOptions(Section):
    """Of a store behind a URL. Credentials are never given here: they come from where its client looks for them (for
    S3 the environment, a profile, the machine's role), on each node.

    endpoint: of an S3-compatible service. checksums: the extra ones of the S3 client, which some services refuse;
    blocks have their own in any case. deadline_s: how long one request is tried again, before it counts as an outage.
    upload_mbs_max: MB (10^6 bytes) that each host may send a second, also to a directory; 0: no limit.
    """

    endpoint: str | None = None
    region: str | None = None
    checksums: Literal["when_required", "when_supported"] = "when_required"
    deadline_s: float = Field(20.0, gt=0)
    upload_mbs_max: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> StorageOptions:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.endpoint!r} must begin with http:// or https://")
        return self


def absolute(path: str) -> str:
    """A URL stays what it is."""
    return path if "://" in path else os.path.abspath(path)


class Source(Section):
    """One of several corpora. name: what its order depends on, with its content; not on the other sources.

    weight: its part of the samples, beside the others'. corpus, prepared: as in `data`; prepared is by default a
    directory of this name in `data.prepared`.
    """

    name: str = Field(pattern=NAME)
    weight: float = Field(1.0, ge=0)
    corpus: str
    prepared: str = ""


class Weights(Section):
    """From step `from_step` (completed steps) on the sources have these weights; those not named have none."""

    from_step: int = Field(ge=1)
    weights: dict[str, float]

    @field_validator("weights")
    @classmethod
    def _not_negative(cls, weights: dict[str, float]) -> dict[str, float]:
        if any(weight < 0 for weight in weights.values()) or not any(weights.values()):
            raise ValueError(f"{weights}: wanted weights of 0 or more, and one above 0")
        return weights


class SkippedSamples(Section):
    """Samples [first, stop) are deleted from the order; numbers are those of the order without any deletion."""

    first: int = Field(ge=0)
    stop: int = Field(ge=1)
    why: str = ""

    @model_validator(mode="after")
    def _check(self) -> SkippedSamples:
        if self.first >= self.stop:
            raise ValueError(f"stop {self.stop} must be above first {self.first}")
        return self


class Data(Section):
    """What is trained on, and how it becomes tokens (docs/data.md).

    corpus: a directory, one file or a URL (s3://bucket/prefix) of text, JSON lines or Parquet; `stdlib`: the source of
    the Python standard library; `imported`: what `elastic data import` put into `prepared`.
    suffixes: of the files that are taken; those that are neither JSON lines nor Parquet are text, one document each.
    text_field: of a JSON line or a Parquet row. tokenizer: `bytes`, or the path of a Hugging Face tokenizer.json.
    end_of_document: the token that ends each document; empty: the tokenizer's own.
    held_out_every: one document in so many is held out, where no file's path says validation, test or held_out.
    shard_bytes: of one file of tokens, about.
    prepared: a directory that all nodes see, or a URL to which `elastic data upload` copied one. prepared_options: of
    that URL. What is read from there is kept in `cache`, a directory on each node (empty: one of this user in /tmp), up
    to `cache_bytes_max` for all that run there; what the next `ahead_s` seconds need is fetched ahead, up to
    `ahead_bytes_max` of it for each rank.

    sources: several corpora, mixed, in place of `corpus`; the other keys are those of each. weights: later ones, by
    step. skip: samples that are never used; a range may be added to a run where it lies after what was used.

    documents: joined: attention reads over their boundaries; apart: not, positions begin anew in each, and the first
    token of one is not predicted from the last of another. packing: best_fit: a sample is a bin of whole documents,
    apart, with padding at its end.
    """

    corpus: str = "stdlib"
    corpus_options: StorageOptions = StorageOptions()
    suffixes: tuple[str, ...] = (".py", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
    text_field: str = "text"
    tokenizer: str = "bytes"
    end_of_document: str = ""
    prepared: str = "runs/data/stdlib"
    prepared_options: StorageOptions = StorageOptions()
    cache: str = Field("", pattern="^(/.*)?$")
    cache_bytes_max: int = Field(32 << 30, ge=1 << 20)
    ahead_s: float = Field(60.0, ge=0)
    ahead_bytes_max: int = Field(256 << 20, ge=1 << 20)
    held_out_every: int = Field(20, ge=2)
    shard_bytes: int = Field(128 << 20, ge=1024)
    documents: Literal["joined", "apart"] = "joined"
    packing: Literal["none", "best_fit"] = "none"
    sources: tuple[Source, ...] = ()
    weights: tuple[Weights, ...] = ()
    skip: tuple[SkippedSamples, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _packed_is_apart(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("packing") == "best_fit":
            return {"documents": "apart", **given}
        return given

    @model_validator(mode="after")
    def _check(self) -> Data:
        if self.packing == "best_fit" and self.documents != "apart":
            raise ValueError(
                f"documents {self.documents!r} does not go with packing 'best_fit', whose documents have nothing to do "
                "with each other; leave it out, or set it to 'apart'"
            )
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources have names {names}, wanted each once")
        if names and not any(source.weight for source in self.sources):
            raise ValueError("sources have no weight above 0")
        steps = [change.from_step for change in self.weights]
        if steps != sorted(set(steps)):
            raise ValueError(f"weights begin at steps {steps}, they must rise")
        for change in self.weights:
            if unknown := sorted(set(change.weights) - set(names)):
                raise ValueError(f"weights from step {change.from_step} name {unknown[0]!r}, sources are {names}")
        return self

    def absolute(self) -> Data:
        """The same in every process: with whole paths of what is prepared."""
        sources = tuple(
            source.model_copy(update={"prepared": absolute(source.prepared) if source.prepared else ""})
            for source in self.sources
        )
        return self.model_copy(update={"prepared": absolute(self.prepared), "sources": sources})

    def parts(self) -> dict[str, Data]:
        """Each source as if it were alone, by name, in the order of names; this under "" where there are none."""
        if not self.sources:
            return {"": self}
        alone: dict[str, Any] = {"sources": (), "weights": (), "skip": ()}
        found = {}
        for source in sorted(self.sources, key=lambda source: source.name):
            prepared = source.prepared or f"{self.prepared}/{source.name}"
            found[source.name] = self.model_copy(update={**alone, "corpus": source.corpus, "prepared": prepared})
        return found


class HeldOutSet(Section):
    """The held-out part of a corpus that is prepared."""

    name: str = Field(pattern=NAME)
    prepared: str


class Evaluation(Section):
    """Held-out loss over a fixed set of samples, every `interval_steps` and at the end.

    samples: of each set; the corpus, or each of its sources, is one. sets: further ones, which are told
    apart and not counted in.
    """

    interval_steps: int = Field(100, ge=1)
    samples: int = Field(48, ge=1)
    sets: tuple[HeldOutSet, ...] = ()

    def absolute(self) -> Evaluation:
        """As `Data.absolute`."""
        sets = tuple(one.model_copy(update={"prepared": absolute(one.prepared)}) for one in self.sets)
        return self.model_copy(update={"sets": sets})


class Snapshot(Section):
    """Copies in host memory, with a second copy in another failure domain.

    `interval_steps`: so many steps apart; 0: as often as they cost at most `cost_max` of the step time.
    `sources_max`: how many other ranks' shards one host can hold (two buffers each). 1 serves equal nodes;
    after the loss of hosts the remaining ones of the smaller node hold more.

    `disk`: a directory on each node's own disk, empty: none. Safe snapshots there outlive the loss of all memory.
    `disk_interval_steps`: at least so many steps apart; 0: as often as the disks keep up.
    """

    interval_steps: int = Field(0, ge=0)
    cost_max: float = Field(0.01, gt=0, le=1)
    partner: bool = True
    sources_max: int = Field(2, ge=1)
    disk: str = Field("", pattern="^(/.*)?$")
    disk_interval_steps: int = Field(0, ge=0)


class Checkpoint(Section):
    """Durable checkpoints in the run's storage.

    `interval_steps`: so many steps apart; 0: as the cost of one and the rate of failures ask for (docs/checkpoints.md).

    What stays beside the newest `keep`: of each `keep_every_steps` steps the first checkpoint (0: none), the
    `keep_best` of lowest held-out loss (of those whose very step was evaluated), and what is pinned (`elastic ckpt`).
    """

    interval_steps: int = Field(0, ge=0)
    keep: int = Field(3, ge=2)
    keep_every_steps: int = Field(0, ge=0)
    keep_best: int = Field(0, ge=0)


class Control(Section):
    """Limits of detection and recovery. Seconds unless the name says otherwise.

    start_timeout_s: from a generation's order to its first step; where it reads a checkpoint from storage,
    restore_timeout_s more.
    upload_timeout_s: a checkpoint that is not committed after so long is given up for a newer one; at the end of a run
    so long is waited for the last one.
    """

    heartbeat_s: float = Field(0.25, gt=0)
    silence_s: float = Field(3.0, gt=0)
    lease_s: float = Field(10.0, gt=0)
    start_wait_s: float = Field(60.0, ge=0)
    hosts_wait_s: float = Field(600.0, gt=0)
    start_timeout_s: float = Field(60.0, gt=0)
    restore_timeout_s: float = Field(1800.0, gt=0)
    stop_timeout_s: float = Field(5.0, gt=0)
    drain_timeout_s: float = Field(60.0, gt=0)
    upload_timeout_s: float = Field(600.0, gt=0)
    grow_wait_s: float = Field(5.0, ge=0)
    failures_without_progress_max: int = Field(8, ge=1)
    collective_timeout_s: float = Field(600.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Control:
        if self.silence_s < 4 * self.heartbeat_s:
            raise ValueError(
                f"silence_s {self.silence_s} must be at least 4 heartbeats ({4 * self.heartbeat_s}): "
                "a busy host may miss a few"
            )
        return self


Policy = Literal["off", "observe", "act"]


class Policies(Section):
    """What each automatic judgement may do. observe: it is journaled and shown what would be done, and why.

    evict: go on without a silent host. resize: take in hosts that appear. leave_out_slow: hosts whose check is slow
    (docs/node_check.md), while there are enough others. rebalance: unequal shares. roll_back: after a loss spike.
    quarantine: keep a suspected node out. What a person orders is done whatever stands here.
    """

    evict: Policy = "act"
    resize: Policy = "act"
    leave_out_slow: Policy = "observe"
    rebalance: Policy = "observe"
    roll_back: Policy = "observe"
    quarantine: Policy = "observe"


class Admission(Section):
    """What a node must show before its hosts take part (docs/node_check.md).

    Refused: less free memory than arena and trainer need and `memory_spare_bytes` beside, less than
    `disk_free_bytes_min` for logs, a wrong result of a product or a copy, no answer from the network, storage that
    can't be used from here (one that only does not answer for `storage_timeout_s` is marked). Slow: below
    `slow_ratio` times the median of the other nodes (`policies.leave_out_slow`). A host that can't be refused for good
    checks again every `again_s`.
    A node that is lost the second time rests for `rest_s` before its new hosts take part, then twice as long each time
    up to `rest_s_max`; after `forget_s` of membership its losses are forgotten.
    """

    enabled: bool = True
    memory_spare_bytes: int = Field(256 << 20, ge=0)
    disk_free_bytes_min: int = Field(256 << 20, ge=0)
    slow_ratio: float = Field(0.5, gt=0, lt=1)
    clock_offset_s_max: float = Field(2.0, gt=0)
    device_timeout_s: int = Field(30, ge=1)
    link_timeout_s: float = Field(5.0, gt=0)
    storage_timeout_s: float = Field(10.0, gt=0)
    again_s: float = Field(10.0, gt=0)
    rest_s: float = Field(5.0, ge=0)
    rest_s_max: float = Field(600.0, ge=0)
    forget_s: float = Field(600.0, ge=0)


class LocalCluster(Section):
    """The Ray nodes that `elastic train` starts on this machine when no address is given."""

    nodes: int = Field(2, ge=1)
    hosts_per_node: int = Field(2, ge=1)


class Sizes(Section):
    """Sizes of the task's state. Of the built-in model they are computed; of a task of your own they are measured
    before the run starts, where they are not given here.

    shard_bytes: room for the largest shard (parameters, optimizer, registered state) in the smallest allowed world.
    flops_per_token: of forward and backward.
    """

    shard_bytes: int | None = Field(None, ge=1)
    flops_per_token: float | None = Field(None, gt=0)


class Resize(Section):
    """A planned change: from step `step` on, train on `hosts` hosts. A schedule of them makes the twin."""

    step: int = Field(ge=0)
    hosts: int = Field(ge=1)
