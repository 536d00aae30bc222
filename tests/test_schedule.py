"""The ring's schedule and chunk ranges, without arithmetic: which contributions are in which chunk.

Every contribution travels through the ring as an entry of a list. Formulas with planted mistakes
show that the checks can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import inputs, same_bits

import pyringar as pr
from pyringar.comm.ring_schedule import chunk_slices, ring_schedule
from pyringar.engine.load import engine

# (send chunk, receive chunk, whether to reduce) of a rank at a step.
RingStep = Callable[[int, int, int], tuple[int, int, bool]]
ChunkRange = Callable[[int, int, int], tuple[int, int]]


def num_steps(world_size: int) -> int:
    return 2 * (world_size - 1)


def check_ring(ring_step: RingStep, world_size: int) -> None:
    # held[rank][chunk] lists the ranks inside, in the order in which they were added.
    held = [[[rank] for _ in range(world_size)] for rank in range(world_size)]
    for step in range(num_steps(world_size)):
        before = [list(chunks) for chunks in held]  # entries are replaced, never changed
        for rank in range(world_size):
            prev = (rank - 1) % world_size
            send, _, prev_reduces = ring_step(prev, world_size, step)
            _, recv, reduces = ring_step(rank, world_size, step)
            assert recv == send, f"step {step}: {prev} sends {send}, {rank} expects {recv}"
            assert prev_reduces == reduces == (step < world_size - 1)
            held[rank][recv] = before[prev][send] + (before[rank][recv] if reduces else [])
        if step == world_size - 2:
            assert all(len(held[rank][rank]) == world_size for rank in range(world_size))
    for rank, chunks in enumerate(held):
        for chunk, added in enumerate(chunks):
            order = [(chunk + i) % world_size for i in range(1, world_size + 1)]
            assert added == order, f"rank {rank}, chunk {chunk}"


def check_chunks(chunk_range: ChunkRange, numel: int, world_size: int) -> None:
    ranges = [chunk_range(numel, world_size, chunk) for chunk in range(world_size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(end == begin for (_, end), (begin, _) in pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert sizes == sorted(sizes, reverse=True), "the longer ones come first"
    assert sizes[0] - sizes[-1] in (0, 1)


@pytest.mark.parametrize("world_size", [*range(1, 18), 33])
def test_every_contribution_arrives_once_in_order(world_size: int) -> None:
    check_ring(engine().ring_step, world_size)


@pytest.mark.parametrize("world_size", [*range(1, 18), 33])
def test_every_link_is_busy_at_every_step(world_size: int) -> None:
    for step in range(num_steps(world_size)):
        sent = {engine().ring_step(rank, world_size, step)[0] for rank in range(world_size)}
        assert sent == set(range(world_size))


@given(world_size=st.integers(1, 1024), data=st.data())
def test_formula(world_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    step = data.draw(st.integers(0, max(0, num_steps(world_size) - 1)))
    assert engine().ring_step(rank, world_size, step) == planted()(rank, world_size, step)


@given(numel=st.integers(0, 70) | st.integers(0, 2**40), world_size=st.integers(1, 300))
def test_chunks_cover_exactly(numel: int, world_size: int) -> None:
    check_chunks(engine().chunk_range, numel, world_size)


# -- planted mistakes ------------------------------------------------------------------------------


def planted(
    send: Callable[[int, int, int], int] = lambda rank, k, step: (rank - 1 - step) % k,
    recv: Callable[[int, int], int] = lambda send, k: (send - 1) % k,
    reduce: Callable[[int, int], bool] = lambda k, step: step < k - 1,
) -> RingStep:
    def ring_step(rank: int, world_size: int, step: int) -> tuple[int, int, bool]:
        chunk = send(rank, world_size, step)
        return chunk, recv(chunk, world_size), reduce(world_size, step)

    return ring_step


PLANTED_STEPS = {
    "starts with its own chunk": planted(send=lambda rank, k, step: (rank - step) % k),
    "walks the other way": planted(send=lambda rank, k, step: (rank - 1 + step) % k),
    "receives what it sends": planted(recv=lambda send, k: send),
    "receives from the next": planted(recv=lambda send, k: (send + 1) % k),
    "reduces a step too many": planted(reduce=lambda k, step: step < k),
    "reduces a step too few": planted(reduce=lambda k, step: step < k - 2),
    "never reduces": planted(reduce=lambda k, step: False),
    "restarts with the first chunk in the gather": planted(
        send=lambda rank, k, step: (rank - 1 - step % (k - 1)) % k
    ),
}
PLANTED_RANGES: dict[str, ChunkRange] = {
    "loses the remainder": lambda n, k, c: (c * (n // k), (c + 1) * (n // k)),
    "rounds up": lambda n, k, c: (min(n, c * -(-n // k)), min(n, (c + 1) * -(-n // k))),
    "longer ones last": lambda n, k, c: (c * n // k, (c + 1) * n // k),
    "shifted by one": lambda n, k, c: (
        c * (n // k) + min(c, n % k) + 1,
        (c + 1) * (n // k) + min(c + 1, n % k) + 1,
    ),
}


@pytest.mark.parametrize("mistake", PLANTED_STEPS)
def test_planted_steps_are_caught(mistake: str) -> None:
    check_ring(planted(), 5)
    with pytest.raises(AssertionError):
        check_ring(PLANTED_STEPS[mistake], 5)


@pytest.mark.parametrize("mistake", PLANTED_RANGES)
def test_planted_ranges_are_caught(mistake: str) -> None:
    with pytest.raises(AssertionError):
        check_chunks(PLANTED_RANGES[mistake], 17, 5)


# -- the schedule in Python, for readers -----------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_python_schedule_matches_engine(
    comm_of: Callable[[int], pr.Communicator], world_size: int
) -> None:
    parts = inputs(1003, torch.float64, world_size)
    expected = [part.clone() for part in parts]
    comm_of(world_size).all_reduce(expected, algorithm="ring")
    where = chunk_slices(1003, world_size)
    for moves in ring_schedule(world_size):
        sent = [parts[move.src][where[move.chunk]].clone() for move in moves]
        for move, arrived in zip(moves, sent, strict=True):
            own = parts[move.dst][where[move.chunk]]
            own.copy_(arrived + own if move.is_reduction else arrived)
    for ours, theirs in zip(parts, expected, strict=True):
        assert same_bits(ours.nan_to_num(), theirs.nan_to_num())


def test_schedule_in_python_refuses_bad_sizes() -> None:
    for call, words in (
        (lambda: ring_schedule(0), "world_size is 0"),
        (lambda: chunk_slices(3, 0), "world_size is 0"),
        (lambda: chunk_slices(-1, 2), "numel is -1"),
    ):
        with pytest.raises(pr.ArgumentError, match=words):
            call()
