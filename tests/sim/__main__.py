"""`python -m tests.sim SEED` replays one seed and prints its story; `python -m tests.sim FIRST LAST` plays a range."""

from __future__ import annotations

import sys

from tests.sim.test_simulation import play


def main(first: int, last: int | None = None) -> None:
    if last is None:
        print(play(first).story(lines=10_000))
        return
    for seed in range(first, last):
        play(seed)
        print(f"seed {seed} holds", end="\r", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
