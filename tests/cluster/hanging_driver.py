"""A driver that asks nobody to stop and hangs in its clean-up: `python -m tests.cluster.hanging_driver [gentle]`."""

from __future__ import annotations

import subprocess
import sys
import time

from elastic.cluster.ladder import Ladder


def main() -> None:
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    with Ladder() as ladder:
        ladder.gentle = len(sys.argv) > 1
        try:
            print(child.pid, flush=True)  # from here on signals may come
            while not ladder.asked:
                time.sleep(0.01)
            print("asked", flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("ending", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    main()
