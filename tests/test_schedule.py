"""The ring schedule moves every chunk to every rank, in the documented order of addition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import chunk, inputs, same_bits

import pyringar as pr
from pyringar.comm.ring_schedule import chunk_slices, ring_schedule
from pyringar.engine.load import engine


@pytest.mark.parametrize("world_size", [*range(1, 18), 33])
def test_ring_adds_ranks_in_order(world_size):
    # held[rank][chunk] lists the ranks in the partial sum, in order of addition.
    held = [[[rank] for _ in range(world_size)] for rank in range(world_size)]
    for step in range(2 * (world_size - 1)):
        before = [list(chunks) for chunks in held]  # the lists of ranks are never mutated
        for rank in range(world_size):
            prev = (rank - 1) % world_size
            send, _, prev_reduces = engine().ring_step(prev, world_size, step)
            _, recv, reduces = engine().ring_step(rank, world_size, step)
            assert recv == send, f"step {step}: {prev} sends {send}, {rank} expects {recv}"
            assert prev_reduces == reduces == (step < world_size - 1)
            held[rank][recv] = before[prev][send] + (before[rank][recv] if reduces else [])
        if step == world_size - 2:
            assert all(len(held[rank][rank]) == world_size for rank in range(world_size))
    for rank, chunks in enumerate(held):
        for i, added in enumerate(chunks):
            order = [(i + n) % world_size for n in range(1, world_size + 1)]
            assert added == order, f"rank {rank}, chunk {i}"


@given(numel=st.integers(0, 70) | st.integers(0, 2**40), world_size=st.integers(1, 300))
def test_chunks_cover_tensor(numel, world_size):
    found = chunk_slices(numel, world_size)
    assert found == [chunk(numel, world_size, i) for i in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_python_schedule_matches_engine(comm_of, world_size):
    parts = inputs(1003, torch.float64, world_size)
    expected = [part.clone() for part in parts]
    comm_of(world_size).all_reduce(expected, algorithm="ring")
    slices = chunk_slices(1003, world_size)
    for moves in ring_schedule(world_size):
        sent = [parts[move.src][slices[move.chunk]].clone() for move in moves]
        for move, arrived in zip(moves, sent, strict=True):
            own = parts[move.dst][slices[move.chunk]]
            own.copy_(arrived + own if move.is_reduction else arrived)
    for ours, theirs in zip(parts, expected, strict=True):
        assert same_bits(ours.nan_to_num(), theirs.nan_to_num())


def test_invalid_sizes_raise():
    for call, words in (
        (lambda: ring_schedule(0), "world_size is 0"),
        (lambda: chunk_slices(3, 0), "world_size is 0"),
        (lambda: chunk_slices(-1, 2), "numel is -1"),
    ):
        with pytest.raises(pr.ArgumentError, match=words):
            call()
