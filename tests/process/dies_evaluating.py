"""A task whose process dies in the middle of an evaluation, with the whole host, once: where it finds the file to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.data.loader import MicroBatch
from elastic.worker.pretrain import LanguageModel

ONCE = Path(__file__).with_name("once")


class Dying(LanguageModel):
    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        loss = super().loss(model, batch)
        last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        if last and not torch.is_grad_enabled() and ONCE.exists():
            host = ONCE.read_text()
            ONCE.unlink()
            os.kill(int(host), signal.SIGKILL)  # the trainer ends with it
            signal.pause()
        return loss
