"""The peer in the overhead benchmark: the same model and batch, FSDP2 and AdamW as torch's tutorials write it.

No elastic below the model: gradients are averaged by FSDP, clipped by torch, data lies in memory, nothing is saved.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elastic.config import Config


class PlainRanks:
    """Rank processes that take steps when told; idle in between. Close them."""

    def __init__(self, config: Config, world: int) -> None:
        self._store = tempfile.TemporaryDirectory(prefix="elastic-plain-")
        told = json.dumps({"config": config.model_dump(mode="json"), "world": world, "store": self._store.name})
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.overhead_plain", str(rank), told],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]

    def step(self, count: int) -> list[float]:
        """Seconds of each of `count` steps on rank 0."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{count}\n")
            rank.stdin.flush()
        answers = [json.loads(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None]
        seconds: list[float] = answers[0]
        return seconds

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._store.cleanup()


def main() -> None:
    rank, told = int(sys.argv[1]), json.loads(sys.argv[2])
    config, world = Config.model_validate(told["config"]), told["world"]
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from elastic.model.transformer import Transformer, initialise

    torch.set_num_threads(1)
    store = dist.FileStore(f"{told['store']}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(minutes=10))
    model = Transformer(config.model)
    initialise(model, config.seed)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    own = config.batch.global_samples // world
    tokens = torch.randint(0, config.model.vocab_size, (own, config.model.seq_len + 1))
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            began_s = time.perf_counter()
            micro = tokens.split(config.batch.micro_samples)
            for index, rows in enumerate(micro):
                model.set_requires_gradient_sync(index == len(micro) - 1)
                model.set_reshard_after_backward(index == len(micro) - 1)
                logits = model(rows[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                (loss / len(micro)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began_s)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
