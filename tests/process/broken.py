"""A task with a mistake in its loop."""

from __future__ import annotations

from torch import Tensor, nn

from elastic.data.loader import MicroBatch
from elastic.worker.context import Context
from elastic.worker.pretrain import LanguageModel


class Broken(LanguageModel):
    def on_generation(self, ctx: Context) -> None:
        self.ctx = ctx

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        if self.ctx.step == 4 and self.ctx.assignment.rank == 0:
            raise ArithmeticError("the fifth step is broken")
        return super().loss(model, batch)
