"""The arena's control board: one page of words through which host, trainer and mover of a host speak.

Each word is an aligned int64 with one writer; a load or store of it is one instruction, so nothing is torn.
A snapshot key fits one word for that reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic.plan import SnapshotKey

Words = npt.NDArray[np.int64]

STEP_BITS = 40


class Word:
    """Places on the board. Shape: by the creator; then who writes: host (8-10), trainer (16-19), mover (24-26)."""

    MAGIC = 0
    VERSION = 1
    RECEIVED_BUFFERS = 2
    OWN_BYTES = 3
    RECEIVED_BYTES = 4
    TABLE_BYTES = 5
    GENERATION = 8
    KEEP = 9  # packed key of the newest safe snapshot, -1: none
    DRAIN_GENERATION = 10  # the trainer of this generation pauses at the next step boundary
    PROGRESS = 16  # packed (generation, step)
    PHASE = 17
    PROGRESS_NS = 18  # monotonic clock
    SKIPPED = 19
    MOVER = 24  # incarnation of the living mover: pins of another one are void
    PARTNER_BUSY = 25
    MOVER_CPU_NS = 26


def pack(key: SnapshotKey | None) -> int:
    """One 64-bit word, so that no reader sees half of a key."""
    if key is None:
        return -1
    assert 0 <= key.generation < 1 << 63 - STEP_BITS and 0 <= key.step < 1 << STEP_BITS, key
    return key.generation << STEP_BITS | key.step


def unpack(word: int) -> SnapshotKey | None:
    if word < 0:
        return None
    return SnapshotKey(generation=word >> STEP_BITS, step=word & (1 << STEP_BITS) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the trainer of `generation` is: steps completed, phase index, and when (monotonic ns) it said so."""

    generation: int
    step: int
    phase: int
    at_ns: int


class Board:
    """The control words. Each property is one aligned 8-byte load or store."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def order(self, *, generation: int, keep: SnapshotKey | None) -> None:
        """Host: what the coordinator wants. `keep` first: it must be protected before its generation is old."""
        self._words[Word.KEEP] = pack(keep)
        self._words[Word.GENERATION] = generation

    @property
    def generation(self) -> int:
        return int(self._words[Word.GENERATION])

    @property
    def keep(self) -> SnapshotKey | None:
        return unpack(int(self._words[Word.KEEP]))

    @property
    def drain_generation(self) -> int:
        return int(self._words[Word.DRAIN_GENERATION])

    @drain_generation.setter
    def drain_generation(self, generation: int) -> None:
        self._words[Word.DRAIN_GENERATION] = generation

    @property
    def progress(self) -> Progress:
        key = unpack(int(self._words[Word.PROGRESS]))
        assert key is not None
        phase, at_ns = int(self._words[Word.PHASE]), int(self._words[Word.PROGRESS_NS])
        return Progress(generation=key.generation, step=key.step, phase=phase, at_ns=at_ns)

    @progress.setter
    def progress(self, progress: Progress) -> None:
        key = SnapshotKey(generation=progress.generation, step=progress.step)
        self._words[Word.PHASE] = progress.phase
        self._words[Word.PROGRESS_NS] = progress.at_ns
        self._words[Word.PROGRESS] = pack(key)

    @property
    def skipped(self) -> int:
        """Snapshots that the trainers of this arena skipped because no own buffer was free."""
        return int(self._words[Word.SKIPPED])

    def count_skipped(self) -> None:
        self._words[Word.SKIPPED] += 1

    @property
    def partner_busy(self) -> int:
        """Sends that the partner refused for want of a free buffer (each was tried again)."""
        return int(self._words[Word.PARTNER_BUSY])

    def count_partner_busy(self) -> None:
        self._words[Word.PARTNER_BUSY] += 1

    @property
    def mover_cpu_ns(self) -> int:
        """CPU time of the living mover, told with its news; less than before after it was replaced."""
        return int(self._words[Word.MOVER_CPU_NS])

    @mover_cpu_ns.setter
    def mover_cpu_ns(self, cpu_ns: int) -> None:
        self._words[Word.MOVER_CPU_NS] = cpu_ns

    @property
    def mover(self) -> int:
        return int(self._words[Word.MOVER])

    @mover.setter
    def mover(self, incarnation: int) -> None:
        self._words[Word.MOVER] = incarnation
