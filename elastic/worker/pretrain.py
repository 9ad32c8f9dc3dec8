"""The built-in task: a decoder language model on the run's corpus, written as any user's task is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from elastic.config import Config
from elastic.data.loader import MicroBatch
from elastic.model import shape
from elastic.model.transformer import Transformer, initialise, loss_sum


class LanguageModel:
    """Next-token prediction. Built on the meta device: no time is lost to values that a restore overwrites."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return Transformer(self.config.model)

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        return cast(Transformer, model).layers

    def initialise(self, model: nn.Module, seed: int) -> None:
        initialise(cast(Transformer, model), seed)

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        return loss_sum(model(batch.tokens, batch.documents), batch.targets)

    def flops_per_token(self, config: Config) -> float:
        return shape.flops_per_token(config.model)
