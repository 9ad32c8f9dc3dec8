"""`python -m tests.storage.crash_campaign --seed 7 --rounds 20`: crash points with new chances, as long as one likes.

Each round has a seed of its own, printed first: all points of a directory, each with another loss of power, then as
many random points on a SeaweedFS as the tier has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from random import Random

from tests.storage.gate import Gate
from tests.storage.servers import Seaweed, credentials
from tests.storage.test_crash_points import POINTS_ON_S3, OnS3, check_directory, run_on_directory


def on_directory(seed: int, tmp: Path) -> None:
    for at in range(run_on_directory(None, tmp / "whole").points):
        check_directory(at, tmp / str(at), seed)
        shutil.rmtree(tmp / str(at))


def on_s3(seed: int, seaweed: Seaweed, tmp: Path) -> None:
    gate = Gate(seaweed.endpoint)
    run, chance = OnS3(seaweed, gate, f"s3://campaign/run-{seed}", tmp / "aside"), Random(seed)
    for at, moment in chance.sample(run.points(), POINTS_ON_S3):
        run.crash(at, moment)
        at, moment = chance.choice(run.writes()), chance.choice(("before", "after"))
        run.freeze(at, moment)
    gate.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.storage.crash_campaign")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    os.environ.update(credentials())
    with tempfile.TemporaryDirectory() as root:
        seaweed = Seaweed(Path(root, "weed"))
        try:
            for seed in range(args.seed, args.seed + args.rounds):
                print(f"seed {seed}", flush=True)
                with tempfile.TemporaryDirectory(dir=root) as tmp:
                    on_directory(seed, Path(tmp, "directory"))
                    on_s3(seed, seaweed, Path(tmp))
        finally:
            seaweed.stop()


if __name__ == "__main__":
    main()
