"""The ring's schedule and chunk ranges, without arithmetic: who is inside which chunk, when.

Every contribution travels through the ring as an entry of a list. Copies of the formula with
planted bugs show that the checks can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pyringar as pr
from pyringar.comm.ring_schedule import chunk_slices, ring_schedule
from pyringar.engine.load import engine
from pyringar.errors import ArgumentError

# (send chunk, receive chunk, whether to reduce) of a rank at a step.
RingStep = Callable[[int, int, int], tuple[int, int, bool]]
ChunkRange = Callable[[int, int, int], tuple[int, int]]

WORLD_SIZES = range(1, 34)
# The first example may have to build the engine.
no_deadline = settings(deadline=None)


def num_steps(world_size: int) -> int:
    return 2 * (world_size - 1)


def check_neighbours_agree(ring_step: RingStep, world_size: int) -> None:
    """What one rank sends is what the next one expects, to be treated alike by all."""
    for step in range(num_steps(world_size)):
        for rank in range(world_size):
            send, _, reduce = ring_step(rank, world_size, step)
            _, recv, next_reduces = ring_step((rank + 1) % world_size, world_size, step)
            assert recv == send, f"step {step}: {rank} sends {send}, the next expects {recv}"
            assert next_reduces == reduce == (step < world_size - 1)


def follow(
    ring_step: RingStep, world_size: int
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Run the ring on lists; returns what is held after the reduction, and at the end.

    held[rank][chunk] lists the ranks inside, in the order in which they were added.
    """
    held = [[[rank] for _ in range(world_size)] for rank in range(world_size)]
    reduced = held
    for step in range(num_steps(world_size)):
        before = [list(chunks) for chunks in held]  # entries are replaced, never changed
        for rank in range(world_size):
            prev = (rank - 1) % world_size
            send, _, _ = ring_step(prev, world_size, step)
            _, recv, reduce = ring_step(rank, world_size, step)
            own = before[rank][recv] if reduce else []
            held[rank][recv] = before[prev][send] + own
        if step == world_size - 2:
            reduced = [list(chunks) for chunks in held]
    return reduced, held


def check_contributions(ring_step: RingStep, world_size: int) -> None:
    """Every rank ends up with every contribution once, added in the promised order."""
    reduced, held = follow(ring_step, world_size)
    for chunk in range(world_size):
        order = [(chunk + i) % world_size for i in range(1, world_size + 1)]
        assert reduced[chunk][chunk] == order, f"rank {chunk} does not own chunk {chunk}"
        for rank in range(world_size):
            assert held[rank][chunk] == order, f"rank {rank}, chunk {chunk}"


def check_ring(ring_step: RingStep, world_size: int) -> None:
    check_neighbours_agree(ring_step, world_size)
    check_contributions(ring_step, world_size)


def check_chunks(chunk_range: ChunkRange, numel: int, world_size: int) -> None:
    """Chunks follow each other without gap or overlap, their sizes differ by at most one."""
    ranges = [chunk_range(numel, world_size, chunk) for chunk in range(world_size)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(end == begin for (_, end), (begin, _) in pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert sizes == sorted(sizes, reverse=True), "the longer ones come first"
    assert sizes[0] - sizes[-1] in (0, 1)
    assert sizes[-1] >= 0


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_contribution_arrives_once_in_order(world_size: int) -> None:
    check_ring(engine().ring_step, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_link_is_busy_at_every_step(world_size: int) -> None:
    """All ranks send different chunks at a step, and each sends every chunk once per phase."""
    ring_step: RingStep = engine().ring_step
    everything = set(range(world_size))
    for step in range(num_steps(world_size)):
        assert {ring_step(rank, world_size, step)[0] for rank in range(world_size)} == everything
    for rank in range(world_size):
        reducing = {ring_step(rank, world_size, s)[0] for s in range(world_size - 1)}
        gathering = {
            ring_step(rank, world_size, s)[0] for s in range(world_size - 1, num_steps(world_size))
        }
        assert reducing == everything - {rank}
        assert gathering == everything - {(rank + 1) % world_size}


def test_the_example_in_the_header() -> None:
    ring_step: RingStep = engine().ring_step
    assert [ring_step(0, 4, step)[0] for step in range(6)] == [3, 2, 1, 0, 3, 2]
    assert [ring_step(1, 4, step)[0] for step in range(6)] == [0, 3, 2, 1, 0, 3]


def reference_step(rank: int, world_size: int, step: int) -> tuple[int, int, bool]:
    send = (rank - 1 - step) % world_size
    return send, (send - 1) % world_size, step < world_size - 1


@no_deadline
@given(world_size=st.integers(1, 1024), data=st.data())
def test_the_formula(world_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    step = data.draw(st.integers(0, max(0, num_steps(world_size) - 1)))
    assert engine().ring_step(rank, world_size, step) == reference_step(rank, world_size, step)


def planted(
    send: Callable[[int, int, int], int] = lambda rank, k, step: (rank - 1 - step) % k,
    recv: Callable[[int, int], int] = lambda send, k: (send - 1) % k,
    reduce: Callable[[int, int], bool] = lambda k, step: step < k - 1,
) -> RingStep:
    """Build the formula with one part replaced."""

    def ring_step(rank: int, world_size: int, step: int) -> tuple[int, int, bool]:
        chunk = send(rank, world_size, step)
        return chunk, recv(chunk, world_size), reduce(world_size, step)

    return ring_step


PLANTED_STEPS = {
    "starts with its own chunk": planted(send=lambda rank, k, step: (rank - step) % k),
    "starts with the next chunk": planted(send=lambda rank, k, step: (rank + 1 - step) % k),
    "walks the other way": planted(send=lambda rank, k, step: (rank - 1 + step) % k),
    "stands still": planted(send=lambda rank, k, step: (rank - 1) % k),
    "receives what it sends": planted(recv=lambda send, k: send),
    "receives from the next": planted(recv=lambda send, k: (send + 1) % k),
    "receives two back": planted(recv=lambda send, k: (send - 2) % k),
    "reduces a step too many": planted(reduce=lambda k, step: step < k),
    "reduces a step too few": planted(reduce=lambda k, step: step < k - 2),
    "always reduces": planted(reduce=lambda k, step: True),
    "never reduces": planted(reduce=lambda k, step: False),
    "restarts with the first chunk in the gather": planted(
        send=lambda rank, k, step: (rank - 1 - step % (k - 1)) % k
    ),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_unchanged_formula_passes(world_size: int) -> None:
    check_ring(planted(), world_size)


# Two ranks have two chunks: "forwards" is "backwards".
SAME_FOR_TWO = {
    "starts with the next chunk",
    "walks the other way",
    "receives from the next",
}


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("bug", PLANTED_STEPS)
def test_planted_steps_are_caught(bug: str, world_size: int) -> None:
    if world_size == 2 and bug in SAME_FOR_TWO:
        check_ring(PLANTED_STEPS[bug], world_size)
        return
    with pytest.raises(AssertionError):
        check_ring(PLANTED_STEPS[bug], world_size)


@no_deadline
@given(numel=st.integers(0, 2**40), world_size=st.integers(1, 300))
def test_chunks_cover_exactly(numel: int, world_size: int) -> None:
    check_chunks(engine().chunk_range, numel, world_size)


@no_deadline
@given(numel=st.integers(0, 70), world_size=st.integers(1, 33))
def test_chunks_of_few_elements_cover_exactly(numel: int, world_size: int) -> None:
    check_chunks(engine().chunk_range, numel, world_size)


PLANTED_RANGES: dict[str, ChunkRange] = {
    "loses the remainder": lambda n, k, c: (c * (n // k), (c + 1) * (n // k)),
    "gives the remainder to the last": lambda n, k, c: (
        c * (n // k),
        n if c == k - 1 else (c + 1) * (n // k),
    ),
    "rounds up": lambda n, k, c: (min(n, c * -(-n // k)), min(n, (c + 1) * -(-n // k))),
    "longer ones last": lambda n, k, c: (c * n // k, (c + 1) * n // k),
    "one longer too few": lambda n, k, c: (
        c * (n // k) + min(c, max(0, n % k - 1)),
        (c + 1) * (n // k) + min(c + 1, max(0, n % k - 1)),
    ),
    "shifted by one": lambda n, k, c: (
        c * (n // k) + min(c, n % k) + 1,
        (c + 1) * (n // k) + min(c + 1, n % k) + 1,
    ),
}


@pytest.mark.parametrize("bug", PLANTED_RANGES)
def test_planted_ranges_are_caught(bug: str) -> None:
    caught = 0
    for numel in range(20):
        for world_size in range(1, 8):
            try:
                check_chunks(PLANTED_RANGES[bug], numel, world_size)
            except AssertionError:
                caught += 1
    assert caught > 0


# -- the same for people ---------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_the_schedule_for_people_is_what_the_engine_adds(
    comm_of: Callable[[int], pr.Communicator], world_size: int
) -> None:
    """Whoever does by hand what it says gets the ring's bits."""
    parts = [
        torch.randn(1003, generator=torch.Generator().manual_seed(r)) for r in range(world_size)
    ]
    expected = [part.clone() for part in parts]
    comm_of(world_size).all_reduce(expected, algorithm="ring")
    where = chunk_slices(1003, world_size)
    for moves in ring_schedule(world_size):
        sent = [parts[move.src][where[move.chunk]].clone() for move in moves]
        for move, arrived in zip(moves, sent, strict=True):
            own = parts[move.dst][where[move.chunk]]
            own.copy_(arrived + own if move.is_reduction else arrived)
    for ours, theirs in zip(parts, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_schedule_for_people_refuses_no_ranks() -> None:
    with pytest.raises(ArgumentError, match="world_size is 0"):
        ring_schedule(0)
    with pytest.raises(ArgumentError, match="world_size is 0"):
        chunk_slices(3, 0)
    with pytest.raises(ArgumentError, match="numel is -1"):
        chunk_slices(-1, 2)
