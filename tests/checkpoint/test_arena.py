"""The arena: the rule for reuse, what counts as a holding, what attaching sees."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.arena import VERSION, Arena, State, reusable
from elastic.checkpoint.board import Progress, Word, pack, unpack
from elastic.checkpoint.errors import CheckpointError
from elastic.plan import SnapshotKey
from tests.checkpoint.hosts import key

keys = st.builds(SnapshotKey, generation=st.integers(0, 6), step=st.integers(0, 8))
states = st.sampled_from(State)
whole = st.sampled_from([State.WRITTEN, State.SEALED])


@given(st.integers(0, 2**22), st.integers(0, 2**40 - 1))
def test_a_key_is_one_word_and_words_order_as_keys(generation: int, step: int) -> None:
    assert unpack(pack(key(generation, step))) == key(generation, step)
    assert pack(key(generation, step)) < pack(key(generation + 1, 0))
    assert unpack(pack(None)) is None


@given(whole, keys, st.integers(0, 6))
def test_the_safe_snapshot_is_never_reusable(state: State, keep: SnapshotKey, generation: int) -> None:
    assert not reusable(state, keep, generation=generation, keep=keep)


@given(whole, keys, st.integers(0, 6), st.one_of(st.none(), keys))
def test_pending_snapshots_of_this_generation_are_protected(
    state: State, held: SnapshotKey, generation: int, keep: SnapshotKey | None
) -> None:
    pending = held.generation == generation and not (keep and keep.generation == generation and held.step < keep.step)
    if pending:
        assert not reusable(state, held, generation=generation, keep=keep)


@given(states, keys, st.integers(0, 6), st.one_of(st.none(), keys))
def test_all_else_is_reusable(state: State, held: SnapshotKey, generation: int, keep: SnapshotKey | None) -> None:
    if state == State.FREE or (state == State.WRITING and held.generation < generation):
        assert reusable(state, held, generation=generation, keep=keep)
    if state in (State.WRITTEN, State.SEALED) and held.generation < generation and held != keep:
        assert reusable(state, held, generation=generation, keep=keep)
    if state == State.WRITING and held.generation >= generation:
        assert not reusable(state, held, generation=generation, keep=keep)


@given(st.lists(st.tuples(st.sampled_from(["write", "safe", "generation"]), st.integers(1, 3)), max_size=60))
def test_two_buffers_always_hold_the_safe_snapshot_and_never_block_for_good(
    moves: list[tuple[str, int]],
) -> None:
    """Any order of snapshots, safe words and generation changes: what is safe stays, and one more fits."""
    arena = Arena.create(own_bytes=64, received_bytes=64, received_buffers=0, prefault=False)
    generation, step, keep, newest = 1, 0, None, None
    arena.board.order(generation=generation, keep=keep)
    for move, _ in moves:
        if move == "write":
            free = [buffer for buffer in arena.own if buffer.reusable()]
            if not free:
                continue
            step += 1
            newest = key(generation, step)
            free[0].begin(newest, rank=0, world=1, nbytes=1, table=b"[]")
            free[0].finish()
        elif move == "safe" and newest:
            keep = newest
        elif move == "generation":
            generation, newest, step = generation + 1, None, keep.step if keep else 0
        arena.board.order(generation=generation, keep=keep)
        if keep:
            assert arena.find(keep, 0) is not None
        if newest is None or newest == keep:
            assert any(buffer.reusable() for buffer in arena.own)
    os.close(arena.fd)


def make() -> Arena:
    arena = Arena.create(own_bytes=5000, received_bytes=3000, received_buffers=3)
    arena.board.order(generation=1, keep=None)
    return arena


def test_a_buffer_is_a_holding_from_finish_until_begin_and_sealed_by_its_own_sequence_only() -> None:
    arena = make()
    seen = Arena.attach(os.dup(arena.fd))
    buffer = arena.own[0]
    data = buffer.begin(key(1, 7), rank=2, world=3, nbytes=4097, table=b"[1]")
    assert seen.holdings() == () and buffer.state == State.WRITING
    data[:] = 9
    buffer.finish()
    (holding,) = seen.holdings()
    assert (holding.key, holding.rank, holding.world, holding.sealed) == (key(1, 7), 2, 3, False)
    assert seen.own[0].table() == b"[1]" and seen.own[0].data.tolist() == [9] * 4097
    assert seen.own[0].writer_pid == os.getpid()
    stale = buffer.sequence
    assert buffer.seal(stale, np.array([5], dtype=np.uint32), 6)
    assert seen.holdings()[0].sealed and seen.find(key(1, 7), 2) is seen.own[0]
    buffer.begin(key(1, 8), rank=2, world=3, nbytes=10, table=b"[]")
    buffer.finish()
    assert not buffer.seal(stale, np.array([5], dtype=np.uint32), 6), "CRCs of an older write must not seal"
    assert seen.own[0].state == State.WRITTEN


def test_received_shards_count_sealed_only() -> None:
    arena = make()
    buffer = arena.received[1]
    buffer.begin(key(1, 1), rank=0, world=1, nbytes=10, table=b"[]")
    buffer.finish()
    assert arena.holdings() == ()
    buffer.seal(buffer.sequence, np.array([0], dtype=np.uint32), 0)
    assert [holding.tier for holding in arena.holdings()] == ["received"]


def test_buffers_do_not_overlap() -> None:
    arena = make()
    for i, buffer in enumerate((*arena.own, *arena.received)):
        nbytes = len(buffer.room)
        buffer.begin(key(1, i), rank=i, world=5, nbytes=nbytes, table=b"t" * (i + 1))[:] = i
        buffer.finish()
        buffer.seal(buffer.sequence, np.array([i], dtype=np.uint32), i)
    for i, buffer in enumerate((*arena.own, *arena.received)):
        assert set(buffer.data.tolist()) == {i} and buffer.table() == b"t" * (i + 1)
        assert buffer.crcs.tolist() == [i] and buffer.facts_crc == i
        assert arena.memory[buffer.offset] == i


def test_a_pin_holds_while_its_mover_lives() -> None:
    arena = make()
    arena.board.mover = 4
    buffer = arena.own[0]
    buffer.pin(4)
    assert not buffer.reusable()
    arena.board.mover = 5
    assert buffer.reusable()
    buffer.pin(5)
    buffer.unpin()
    assert buffer.reusable()


def test_board_words() -> None:
    arena = make()
    board = Arena.attach(os.dup(arena.fd)).board
    arena.board.order(generation=3, keep=key(2, 9))
    arena.board.drain_generation = 3
    progress = Progress(generation=3, step=10, phase=4, at_ns=123)
    arena.board.progress = progress
    arena.board.count_skipped()
    assert (board.generation, board.keep, board.drain_generation) == (3, key(2, 9), 3)
    assert board.progress == progress and board.skipped == 1


def test_what_does_not_fit_and_what_is_no_arena_is_said() -> None:
    arena = make()
    with pytest.raises(CheckpointError, match=r"5001 bytes .* larger arena"):
        arena.own[0].begin(key(1, 1), rank=0, world=1, nbytes=5001, table=b"")
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(CheckpointError, match="no arena"):
        Arena.attach(fd)
    os.close(fd)


def test_an_arena_of_another_version_is_refused() -> None:
    arena = make()
    os.pwrite(arena.fd, (VERSION + 1).to_bytes(8, "little"), 8 * Word.VERSION)
    with pytest.raises(CheckpointError, match=r"no arena of version 1: .* version 2; if elastic was upgraded while"):
        Arena.attach(os.dup(arena.fd))
