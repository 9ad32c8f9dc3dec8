"""Which of a run's older checkpoints still count after a new one. Pure: the committer writes it into the new entry."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from elastic.checkpoint.log import Entry
from elastic.checkpoint.manifest import Manifest
from elastic.checkpoint.shard import table_object
from elastic.config_sections import Checkpoint

HELD_OUT = "held_out"  # the metric: nats per token, so lower is better


def kept(
    line: Sequence[Entry], rule: Checkpoint, new: Manifest, *, pinned: Collection[int], whole: Collection[int]
) -> set[int]:
    """Numbers of the entries that `rule` keeps beside `new`, which is whole. line: the run's, newest first.

    What is damaged is never counted for a whole one. Pins keep all that they name, also what the run went back from.
    """
    found = [entry for entry in line if entry.number in whole]
    return {
        *pinned,
        *_newest(line, rule.keep - 1, whole),
        *_first_of_each(rule.keep_every_steps, found),
        *_best(rule.keep_best, found, new),
    }


def _newest(line: Sequence[Entry], count: int, whole: Collection[int]) -> Iterator[int]:
    """Down to the whole one that completes the count: what is damaged between them takes no whole one's place."""
    for entry in line:
        if count <= 0:
            return
        count -= entry.number in whole
        yield entry.number


def _first_of_each(every_steps: int, line: Sequence[Entry]) -> Iterator[int]:
    """Checkpoints come when they are due and storage has time, so multiples alone may never be met: of the steps from
    one multiple to the next the first checkpoint stays."""
    if every_steps:
        firsts = {_manifest(entry).key.step // every_steps: entry.number for entry in line}
        yield from (number for stretch, number in firsts.items() if stretch > 0)


def _best(count: int, line: Sequence[Entry], new: Manifest) -> Iterator[int]:
    """Also the new one is among the best. Of equals the older, so that a plateau does not replace them all the time."""
    told = [(_manifest(entry).metrics.get(HELD_OUT, math.nan), entry.number) for entry in line]
    ranked = sorted((*told, (new.metrics.get(HELD_OUT, math.nan), math.inf)), key=_ranking)
    yield from (int(number) for loss, number in ranked[:count] if math.isfinite(loss) and math.isfinite(number))


def _ranking(told: tuple[float, float]) -> tuple[bool, float, float]:
    loss, number = told
    return (not math.isfinite(loss), loss if math.isfinite(loss) else 0.0, number)


def whole(entries: Sequence[Entry], sizes: Mapping[str, int]) -> set[int]:
    """Numbers of those whose objects all lie there in full size. sizes: of every object under data/."""
    return {entry.number for entry in entries if _is_whole(_manifest(entry), sizes)}


def _is_whole(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    described = [manifest.index_object, *(table_object(record.object) for record in manifest.shards)]
    return all(name in sizes for name in described) and all(
        sizes.get(record.object) == record.nbytes for record in manifest.shards
    )


def _manifest(entry: Entry) -> Manifest:
    assert entry.manifest is not None, entry
    return entry.manifest
