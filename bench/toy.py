"""The model of the recovery benchmark, ours and the peers': small, in one FSDP2 unit, so that a clean step takes
under 50 ms with four trainers on two cores, where each collective costs about 8 ms of waiting for a turn."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elastic.config import Config
from elastic.data.loader import MicroBatch
from elastic.model.transformer import loss_sum
from elastic.worker.context import Context
from elastic.worker.shards import local_part

VOCABULARY = 257
WIDTH = 32


def build() -> nn.Module:
    """A byte predictor of 25 thousand parameters: embedding, two hidden layers, head."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, VOCABULARY),
    )


class Toy:
    """The same as a task of this project."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def train(self, ctx: Context) -> None:
        with torch.device("meta"):
            model = build()
        model = ctx.parallelize(model, units=[])
        optimizer = torch.optim.AdamW(ctx.shards(model), lr=1e-3, fused=True)
        for step in ctx.steps(model, optimizer, initialise=_initialise, loss=_loss):
            for batch in step.micro_batches():
                step.backward(_loss(model, batch))


def _loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    return loss_sum(model(batch.tokens), batch.targets)


def _initialise(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(local_part(parameter), std=0.02)
