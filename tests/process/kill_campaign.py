"""Many kills at random moments in worlds of 1 to 5 hosts, over mixed sources: `python -m tests.process.kill_campaign`.

Trainers hold the loaders, so theirs are the processes that are killed: one, some or all of a world, also in the middle
of a recovery. After each world the journal must prove that every sample was used once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from elastic.controller.state import Phase
from elastic.events import StopRequested
from elastic.proof import verify_data
from tests.process.mixing import keep, mixed
from tests.process.running import Running

WORLDS = (1, 2, 3, 4, 5)
PAUSE_S_MAX = 0.8
ALL_AT_ONCE = 0.1
WITHOUT_PROGRESS = 0.3  # part of the kills that don't wait for a new step


def campaign(world: int, *, kills: int, seed: int, path: Path) -> str:
    """What the proof says, after so many kills. AssertionError, ReportError: something was lost or used twice."""
    draw = random.Random(f"{seed} {world}")
    config = mixed(
        path,
        steps=1_000_000,
        hosts_min=world,
        hosts_max=world,
        control={"failures_without_progress_max": 10**6, "collective_timeout_s": 30.0},
        checkpoint={"interval_steps": 50},
    )
    done = 0
    with Running(config, path, nodes=world, hosts_per_node=1) as run:
        run.until(run.step(1))
        while done < kills:
            if draw.random() >= WITHOUT_PROGRESS:
                before = run.driver.state.step
                run.until(run.step(before + 1))
            until_s = time.monotonic() + draw.uniform(0, PAUSE_S_MAX)
            run.until(lambda until_s=until_s: time.monotonic() >= until_s)
            ranks = range(world) if draw.random() < ALL_AT_ONCE else [draw.randrange(world)]
            pids = [pid for rank in ranks if rank < len(run.driver.state.members) and (pid := run.pid(rank, "trainer"))]
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    done += 1
                except ProcessLookupError:
                    pass  # it had ended already: not a kill
        run.driver.take(StopRequested(who="the campaign", why="enough"))
        run.until(lambda: run.driver.state.phase is Phase.STOPPED)
        assert all(len(found) == 1 for found in run.losses().values()), "a step that was redone had another loss"
        generations = run.driver.state.generation
        keep(run)
    return f"{world} hosts, {done} kills, {generations} generations: {'; '.join(verify_data(config.place())[:2])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="in all worlds together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for world in WORLDS:
        with tempfile.TemporaryDirectory(prefix="elastic-kills-") as name:
            print(campaign(world, kills=given.kills // len(WORLDS), seed=given.seed, path=Path(name)), flush=True)


if __name__ == "__main__":
    main()
