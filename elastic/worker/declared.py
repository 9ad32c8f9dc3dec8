"""From what a task's name leads to, to a loop: its own, or the default one around the parts that it declares.

A task is a function `train(ctx)`; a class with such a method; or a class that declares the parts of `Declared`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elastic.config import Config, ConfigError
from elastic.data.loader import MicroBatch
from elastic.worker.context import Context

Groups = list[dict[str, Any]]


class Declared(Protocol):
    """What a class may declare; `model` and `loss` it must. It is called with the Config, or without arguments."""

    def model(self) -> nn.Module:
        """Built anew in each trainer, with torch's generator seeded alike."""

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Nats, summed over the batch's targets; calls `model(...)`."""

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        """The modules that are gathered as one, in the order of their use."""

    def initialise(self, model: nn.Module, seed: int) -> None:
        """Fill the parameters of a model that was built on the meta device."""

    def parameter_groups(self, model: nn.Module) -> Groups:
        """Groups of model.parameters() for AdamW with `config.optimizer`; else matrices decay, vectors do not."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """In place of AdamW: any other over model.parameters()."""

    def flops_per_token(self, config: Config) -> float:
        """Of forward and backward; else 6 for each parameter."""

    def on_generation(self, ctx: Context) -> None:
        """Called once in each generation, after the restore and before the first step: for caches."""


def loop_of(found: Any, config: Config) -> Callable[[Context], object]:
    """What trains. ConfigError: `found` is no task."""
    if not inspect.isclass(found):
        if callable(found):
            return found
        raise ConfigError(f"task {config.task!r} is {type(found).__name__}, wanted a class or a function train(ctx)")
    if issubclass(found, nn.Module):
        raise ConfigError(
            f"task {config.task!r} is a module: wanted a class whose model() returns one, with loss(model, batch)"
        )
    task = instance_of(found, config)
    if hasattr(task, "train"):
        return task.train
    lacks = [name for name in ("model", "loss") if not hasattr(task, name)]
    if lacks:
        raise ConfigError(
            f"task {config.task!r} has no {' and no '.join(lacks)}: wanted model() and loss(model, batch), or "
            "train(ctx)"
        )
    return lambda ctx: train(task, ctx)


def instance_of(found: Any, config: Config) -> Any:
    """Made with the Config, where it takes an argument."""
    try:
        inspect.signature(found).bind(config)
    except TypeError:
        return found()
    return found(config)


def train(task: Any, ctx: Context) -> None:
    """The default loop."""
    model = task.model()
    model = ctx.parallelize(model, units=task.units(model) if hasattr(task, "units") else None)
    optimizer = task.optimizer(model) if hasattr(task, "optimizer") else _adamw(task, model, ctx)
    if hasattr(task, "on_generation"):
        ctx.on_start(lambda: task.on_generation(ctx))
    initialise = getattr(task, "initialise", None)
    for step in ctx.steps(model, optimizer, loss=task.loss, initialise=initialise):
        for batch in step.micro_batches():
            step.backward(task.loss(model, batch))


def _adamw(task: Any, model: nn.Module, ctx: Context) -> torch.optim.Optimizer:
    """Over this rank's shards: AdamW treats each element by itself."""
    shards = dict(zip(model.parameters(), ctx.shards(model)))
    if hasattr(task, "parameter_groups"):
        groups = [
            {**group, "params": [shards[parameter] for parameter in group["params"]]}
            for group in task.parameter_groups(model)
        ]
    else:
        matrices = [shard for shard in shards.values() if shard.ndim > 1]
        vectors = [shard for shard in shards.values() if shard.ndim <= 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    settings = ctx.config.optimizer
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
