"""Groups on this machine's processors: here where there is little to do, else in processes of their own.

Not multiprocessing: its children run the caller's main module again, and live on when the caller is killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elastic.data.groups import Group, GroupDone
from elastic.data.shards import DataError

SMALL_BYTES = 64 << 20  # of text; to start processes for less costs more than it gives
_PARENT_LOOK_S = 0.5
_END_WAIT_S = 10.0


def run_groups(
    function: Callable[[Group], GroupDone],
    groups: Sequence[Group],
    *,
    workers: int | None = None,
    small_bytes: int = SMALL_BYTES,
) -> Iterator[GroupDone]:
    """What `function` gives for each, in whatever order they end; raises what it raises. `workers`: default, one for
    each processor."""
    count = min(workers or os.cpu_count() or 1, len(groups))
    if count <= 1 or sum(group.nbytes for group in groups) < small_bytes:
        yield from map(function, groups)
        return
    waiting: queue.SimpleQueue[Group] = queue.SimpleQueue()
    for group in groups:
        waiting.put(group)
    results: queue.SimpleQueue[GroupDone | Exception] = queue.SimpleQueue()
    children = [_start() for _ in range(count)]
    threads = [
        threading.Thread(target=_feed, args=(child, function, waiting, results), daemon=True) for child in children
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in groups:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        for child in children:
            child.kill()
        for thread in threads:
            thread.join(_END_WAIT_S)
        for child in children:
            child.wait(_END_WAIT_S)


def _start() -> subprocess.Popen[bytes]:
    """A session of its own: Ctrl-C is for this process, which ends it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TOKENIZERS_PARALLELISM": "false",  # there is one process for each processor
    }
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def _feed(
    child: subprocess.Popen[bytes],
    function: Callable[[Group], GroupDone],
    waiting: queue.SimpleQueue[Group],
    results: queue.SimpleQueue[GroupDone | Exception],
) -> None:
    assert child.stdin and child.stdout
    with child.stdin, child.stdout:
        try:
            while not waiting.empty():
                try:
                    group = waiting.get_nowait()
                except queue.Empty:
                    break
                pickle.dump((function, group), child.stdin)
                child.stdin.flush()
                results.put(pickle.load(child.stdout))
        except (OSError, EOFError, pickle.UnpicklingError):
            results.put(
                DataError(
                    f"a process that prepared data ended with {child.wait()} (-9: killed, perhaps for memory); run it "
                    "again, what is done is kept; a smaller data.shard_bytes needs less memory"
                )
            )
        except Exception as error:  # handed to the caller of `run_groups`, which raises it
            results.put(error)


def _work() -> None:
    """The child: groups from standard input, results to standard output, until the input ends or the parent does."""
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    while True:
        try:
            function, group = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Any = function(group)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    _work()
