"""The built-in task: a decoder language model on the run's corpus, written as any user's task is."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from elastic.config import Config
from elastic.data.loader import MicroBatch
from elastic.model.transformer import Transformer, initialise, loss_sum
from elastic.worker.context import Context


class LanguageModel:
    """Next-token prediction with AdamW; matrices decay, norms do not."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def train(self, ctx: Context) -> None:
        with torch.device("meta"):
            transformer = Transformer(self.config.model)
        model = ctx.parallelize(transformer, units=transformer.layers)
        optimizer = self._optimizer(ctx.shards(model))
        for step in ctx.steps(model, optimizer, initialise=_initialise, loss=self.loss):
            for batch in step.micro_batches():
                step.backward(self.loss(model, batch))

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Nats, summed over the batch's targets."""
        return loss_sum(model(batch.tokens), batch.targets)

    def _optimizer(self, shards: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [shard for shard in shards if shard.ndim > 1]
        vectors = [shard for shard in shards if shard.ndim <= 1]
        settings = self.config.optimizer
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (settings.beta1, settings.beta2)
        return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)


def _initialise(model: nn.Module, seed: int) -> None:
    initialise(cast(Transformer, model), seed)
