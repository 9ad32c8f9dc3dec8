"""The life of one forked trainer: warm up, wait to be given a generation, train it, say how it ended.

It is killed rather than repaired, so nothing here cleans up: the process ends by `os._exit`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import socket
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from elastic.checkpoint import save
from elastic.checkpoint.arena import Arena
from elastic.checkpoint.errors import Damaged, SourceFailed, StateError
from elastic.config import Config, ConfigError, TaskError
from elastic.config_sections import Sizes
from elastic.data.feed import feed_of, open_corpora, open_corpus
from elastic.data.loader import EvaluationSet, Loader, Slice, held_out_batches
from elastic.data.packed import PackedCorpus
from elastic.data.remote import Prepared, prepared_at
from elastic.data.shards import Corpus
from elastic.events import Exit, from_json, to_json
from elastic.plan import Assignment, Endpoint, Member
from elastic.planner.search import choose
from elastic.storage.errors import StorageError, StorageUnavailable
from elastic.storage.store import store_at
from elastic.telemetry.logs import trainer_log
from elastic.worker import declared, task
from elastic.worker.context import Context, Seat, SnapshotBlocked
from elastic.worker.probes import Probes, traceback_tail
from elastic.worker.rendezvous import is_peer_failure, join
from elastic.worker.step import seed_generators

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inheritance:
    """What a trainer is born with: the host's descriptors and settings, through the template."""

    config: Config
    log_dir: Path
    threads: int
    token: str
    arena_fd: int
    store_fd: int
    wake_fd: int


def run(inheritance: Inheritance, channel: socket.socket, *, warm: bool) -> int:
    """All of a trainer's life; returns the process's exit code. Ends silently when the host closes `channel`."""
    torch.set_num_threads(inheritance.threads)
    arena = Arena.attach(inheritance.arena_fd)
    probes = Probes(channel)
    corpora = Corpora(inheritance.config)
    if warm:
        rehearse(inheritance.config)
        arena.map_own()
        corpora.open()
        gc.freeze()  # no collection walks through all of torch while this trainer starts
        probes.warm()
    channel.settimeout(None)  # a standby waits as long as its host lives: the host's end closes with it
    line = channel.makefile("rb").readline()
    if not line:
        return 0
    probes = Probes(channel)
    assignment = from_json(json.loads(line))
    assert isinstance(assignment, Assignment), assignment
    probes.mark("start")
    _redirect_output(inheritance.log_dir / trainer_log(assignment.generation, assignment.rank))
    _log_where(assignment)
    seat = Seat(
        arena=arena,
        store=store_at(inheritance.config.place()),
        probes=probes,
        wake_fd=inheritance.wake_fd,
        token=inheritance.token,
    )
    ended = _train(inheritance, assignment, seat, corpora)
    sys.stdout.flush()
    sys.stderr.flush()
    probes.ended(ended)
    return 0 if ended.kind in ("paused", "done") else 1


def _train(inheritance: Inheritance, assignment: Assignment, seat: Seat, corpora: Corpora) -> Exit:
    """Run the generation; whatever is raised becomes the record of how it ended."""
    config = inheritance.config
    device = device_of(config)
    ctx = Context(
        config=config,
        assignment=assignment,
        device=device,
        samples=CorpusSamples(config, corpora, assignment),
        seat=seat,
    )
    try:
        join(
            assignment,
            store_fd=inheritance.store_fd,
            device=device,
            start_s=config.control.start_timeout_s,
            collective_s=config.control.collective_timeout_s,
        )
        seat.probes.mark("group")
        return run_task(ctx)
    except SnapshotBlocked as error:
        return Exit(kind="lost", step=ctx.step, code=1, detail=str(error))
    except BaseException as error:  # of any kind: it ends this process, and its host has to hear of it
        ours = isinstance(error, StateError | TaskError | ConfigError)  # one sentence that says it all
        damaged = isinstance(error, Damaged)
        detail = str(error) if ours or isinstance(error, Damaged | StorageUnavailable) else traceback_tail(error)
        print(traceback_tail(error), file=sys.stderr)
        peers = is_peer_failure(error) or isinstance(error, StorageError)
        kind = "user" if ours or not peers else "storage" if isinstance(error, StorageUnavailable) else "peer"
        blame = error.host if isinstance(error, SourceFailed) else ""
        return Exit(kind=kind, step=ctx.step, code=1, detail=detail, blame=blame, damaged=damaged)  # type: ignore[arg-type]  # one of the three


def device_of(config: Config) -> torch.device:
    """The one device of this host: its first visible GPU, or the CPU."""
    return torch.device("cuda", 0) if config.use_gpu else torch.device("cpu")


def run_task(ctx: Context) -> Exit:
    """Import the task and run its loop to the end. Its generators start alike on every rank, for what it builds."""
    found = task.load(ctx.config.task)
    seed_generators(ctx.config.seed, ctx.device)
    declared.loop_of(found, ctx.config)(ctx)
    if ctx.ended is None:
        raise TaskError(
            f"{ctx.config.task} returned after step {ctx.step} of {ctx.config.steps}; "
            "it must run the loop over ctx.steps() to its end"
        )
    return ctx.ended


def _redirect_output(path: Path) -> None:
    """From here on stdout and stderr of this process and its children are the trainer's log."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def _log_where(assignment: Assignment) -> None:
    """So that a log says by itself whose it is."""
    me = assignment.members[assignment.rank]
    step = assignment.restore.key.step if assignment.restore else 0
    log.info(
        "generation %d of %s, rank %d of %d: pid %d on host %s, from step %d",
        *(assignment.generation, assignment.run, assignment.rank, assignment.world, os.getpid(), me.host, step),
    )


def rehearse(config: Config, *, steps: int = 1) -> Context:
    """One throw-away step of the task at the real shapes, on a process group that moves nothing.

    What torch does lazily at first use (imports, kernels, threads, memory) is done afterwards in this process.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    assignment = replace(_made_up_assignment(config), until_step=steps)
    assert from_json(to_json(assignment)) == assignment  # and its parser is built
    batch = config.batch.model_copy(update={"global_samples": sum(assignment.plan.shares)})
    evaluation = config.evaluation.model_copy(update={"interval_steps": 1})
    config = config.model_copy(update={"batch": batch, "evaluation": evaluation})
    samples = CorpusSamples(config, MadeUpCorpora(config), assignment)
    dist.init_process_group("fake", rank=0, world_size=assignment.world, store=FakeStore())
    ctx = Context(config=config, assignment=assignment, device=device_of(config), samples=samples, seat=None)
    run_task(ctx)
    samples.close()
    dist.destroy_process_group()
    gc.collect()
    if config.use_gpu:
        torch.cuda.empty_cache()
    return ctx


def measure(config: Config, *, steps: int) -> Sizes:
    """Sizes of the task's state, from a rehearsal."""
    ctx, found = rehearse(config, steps=steps), task.load(config.task)
    assert ctx.model is not None
    flops = 6.0 * sum(parameter.numel() for parameter in ctx.model.parameters())
    if hasattr(found, "flops_per_token"):
        flops = declared.instance_of(found, config).flops_per_token(config)
    return Sizes(shard_bytes=save.shard_bytes_max(ctx.entries, config.hosts_min), flops_per_token=flops)


def _made_up_assignment(config: Config) -> Assignment:
    """Rank 0 of a world that is one larger than any real one.

    torch caches placements by meshes that compare equal, and they do whatever rank this process has: after a
    rehearsal in a world that comes true, this trainer would cut tensors where rank 0 does.
    """
    largest = choose(config, config.hosts_max)
    plan = replace(largest, world=largest.world + 1, shares=(*largest.shares, largest.shares[-1]))
    nobody = Endpoint(address="127.0.0.1", port=0)
    member = Member(host="", node="", domain="", mover=nobody, store=nobody)
    return Assignment(
        run=config.run,
        attempt=0,
        generation=0,
        rank=0,
        plan=plan,
        members=(member,) * plan.world,
        restore=None,
        until_step=0,
        partner=None,
    )


def smallest(config: Config) -> Config:
    """The same run with the smallest model and batch: its step needs the same modules."""
    model = config.model.model_copy(
        update={"layers": 1, "dim": 2 * config.model.heads, "ffn_dim": 8, "seq_len": 8, "vocab_size": 16}
    )
    batch = config.batch.model_copy(update={"global_samples": config.hosts_max})
    return config.model_copy(update={"model": model, "batch": batch})


# ---------------------------------------------------------------- samples


class Corpora:
    """What is trained on and what is evaluated, by name, opened once: by a standby ahead of time."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def open(self) -> None:
        try:
            for corpora in (self.train, self.held_out, self.sets):
                for corpus in corpora.values():
                    corpus.windows(self._config.model.seq_len)  # packed, it looks for its plan
        except StorageUnavailable as error:  # what needs it tries again
            log.warning("the corpus can't be opened ahead of time: %s", error)

    @cached_property
    def train(self) -> dict[str, Corpus]:
        return open_corpora(self._config.data, "train")

    @cached_property
    def held_out(self) -> dict[str, Corpus]:
        return open_corpora(self._config.data, "held_out")

    @cached_property
    def sets(self) -> dict[str, Corpus]:
        return {
            one.name: open_corpus(one.prepared, "held_out", self._config.data) for one in self._config.evaluation.sets
        }


class MadeUpCorpora(Corpora):
    """Zeros in place of text, for a rehearsal."""

    def __init__(self, config: Config) -> None:
        # More than a step takes, in windows and in bins; two documents in each. No memory is behind zeros not written.
        seq_len, windows = config.model.seq_len, 2 * config.batch.global_samples
        begins = np.arange(windows, dtype=np.uint64) * np.uint64(seq_len)
        documents = np.append(np.stack([begins, begins + np.uint64(seq_len // 3)], axis=1), windows * seq_len + 1)
        made_up = (PackedCorpus if config.data.packing == "best_fit" else Corpus)(
            fingerprint="",
            vocab_size=config.model.vocab_size,
            values=[np.zeros(windows * seq_len + 1, dtype=np.uint16)],
            documents=[documents.astype(np.uint64)],
        )
        made_up.is_apart = config.data.documents == "apart"
        self.train = self.held_out = dict.fromkeys(config.data.parts(), made_up)
        self.sets = dict.fromkeys((one.name for one in config.evaluation.sets), made_up)
        for part in config.data.parts().values():
            if isinstance(prepared := prepared_at(part), Prepared):
                prepared.store(0.0)  # connects nothing; what its client imports is then here when trainers are forked


class CorpusSamples:
    """This rank's samples: training steps read ahead, held-out ones read once."""

    def __init__(self, config: Config, corpora: Corpora, assignment: Assignment) -> None:
        self._config = config
        self._corpora = corpora
        self._assignment = assignment

    def micro_batches(self, step: int) -> list[Slice]:
        return self._loader.micro_batches(step)

    def held_out(self) -> list[EvaluationSet]:
        return self._held_out

    def close(self) -> None:
        self._loader.close()

    @cached_property
    def _loader(self) -> Loader:
        return Loader(
            feed_of(self._config, self._corpora.train),
            global_samples=self._config.batch.global_samples,
            plan=self._assignment.plan,
            rank=self._assignment.rank,
            # Before the others' collectives give up on this rank: an outage that is told as one spends no failure.
            wait_s=self._config.control.collective_timeout_s / 2,
        )

    @cached_property
    def _held_out(self) -> list[EvaluationSet]:
        sources = [EvaluationSet(name=name, batches=self._batches(one)) for name, one in self._corpora.held_out.items()]
        further = [
            EvaluationSet(name=name, batches=self._batches(one), counts=False)
            for name, one in self._corpora.sets.items()
        ]
        return sources + further

    def _batches(self, corpus: Corpus) -> list[Slice]:
        return held_out_batches(
            corpus,
            samples=self._config.evaluation.samples,
            micro_samples=self._config.batch.micro_samples,
            seq_len=self._config.model.seq_len,
            world=self._assignment.world,
            rank=self._assignment.rank,
        )
