"""The ring: its own order of additions, pieces and slots, and many ranks on few cores."""

from __future__ import annotations

import random
import time

import pytest
import torch
from cases import mostly_slow
from oracle import (
    DTYPES,
    OPS,
    assert_all_ranks,
    assert_bits,
    bits,
    expected,
    inputs,
    piece_elems,
    reduced,
    ring_reduced,
)


def ring(comm, parts, op="sum", algorithm="ring"):
    tensors = [part.clone() for part in parts]
    comm.all_reduce(tensors, op, algorithm=algorithm)
    context = f"{algorithm} {op} {parts[0].dtype} k={len(parts)} numel={parts[0].numel()}"
    assert_all_ranks(tensors, expected(parts, op, algorithm), context)
    return tensors


@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
def test_the_order_is_the_rings_and_not_the_ranks(comm_of, world_size):
    parts = inputs(10_007, torch.float32, world_size)
    tensors = ring(comm_of(world_size), parts)
    by_rank = reduced(parts, "sum")
    numbers = ~(by_rank.isnan() | tensors[0].isnan())
    assert (bits(tensors[0]) != bits(by_rank))[numbers].any()


def test_two_ranks_give_the_bits_of_rank_order(comm_of):
    parts = inputs(10_007, torch.float32, 2)
    assert_bits(ring(comm_of(2), parts)[1], reduced(parts, "sum"))


def test_every_chunk_by_hand(comm_of):
    """Chunk c of 3 adds c+1, c+2, c: only the last adds 1e30 and -1e30 with nothing between."""
    large = 1e30
    tensors = [torch.full((3,), value) for value in (large, -large, 1.0)]
    comm_of(3).all_reduce(tensors, algorithm="ring")
    # (-large + 1) + large, (1 + large) + -large, (large + -large) + 1
    assert tensors[0].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, torch.float32, torch.bfloat16), ids=str)
def test_around_piece_boundaries(comm_of, dtype):
    """Chunks of one, two and three pieces, short by one, over by one, and of unequal pieces."""
    for piece in (piece_elems(dtype, k) for k in (2, 4, 8)):
        for world_size, numel in [
            (2, 2 * piece - 1),
            (2, 2 * piece),
            (2, 2 * piece + 1),  # one chunk has two pieces, the other one
            (3, 6 * piece + 2),
            (5, 15 * piece - 1),
        ]:
            ring(comm_of(world_size), inputs(numel, dtype, world_size, seed=numel))


@pytest.mark.parametrize("op", mostly_slow(OPS, "sum", "mean"))
def test_many_pieces(comm_of, op):
    """Every slot is used again and again."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        ring(comm_of(4), inputs(4 * 5 * piece_elems(dtype) + 3, dtype, 4), op)


@pytest.mark.parametrize("world_size", [2, 3, 5, 16])
def test_one_ring_for_all_sizes_and_collectives(comm_of, world_size):
    """Counters go on from call to call, whatever each call sent before."""
    comm = comm_of(world_size)
    choice = random.Random(world_size)
    for turn in range(40):
        dtype = choice.choice(DTYPES)
        numel = choice.choice([0, 1, world_size - 1, 100, 1000, 2 * piece_elems(dtype) + 1])
        kind = choice.choice(["all_reduce", "coalesced", "bind"])
        parts = inputs(numel, dtype, world_size, seed=turn)
        wanted = ring_reduced(parts, "sum")
        tensors = [part.clone() for part in parts]
        if kind == "all_reduce":
            comm.all_reduce(tensors, algorithm="ring")
        elif kind == "bind":
            comm.bind(tensors, algorithm="ring")()
        else:
            more = inputs(77, torch.float64, world_size, seed=turn)
            lists = [[t, m.clone()] for t, m in zip(tensors, more, strict=True)]
            comm.all_reduce_coalesced(lists, algorithm="ring")
            assert_all_ranks([row[1] for row in lists], ring_reduced(more, "sum"), turn)
        assert_all_ranks(tensors, wanted, f"turn {turn}: {kind} {dtype} numel={numel}")


def test_results_of_other_algorithms_do_not_disturb_the_ring(comm_of):
    parts = inputs(5_003, torch.float32, 4)
    for algorithm in ("ring", "direct", "fused", "ring", "naive", "direct", "ring"):
        ring(comm_of(4), parts, algorithm=algorithm)


# -- more ranks than cores -------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_sixteen_ranks_do_not_crawl(comm_of, algorithm):
    """Blind spinning on two cores takes a time slice per step: minutes for this many calls."""
    comm = comm_of(16)
    for numel, calls in ((1000, 50), (20_000, 20)):
        tensors = [torch.ones(numel) for _ in range(16)]
        comm.all_reduce(tensors, algorithm=algorithm)  # starts the threads
        start = time.perf_counter()
        for _ in range(calls):
            comm.all_reduce(tensors, "mean", algorithm=algorithm)
        seconds = time.perf_counter() - start
        assert (tensors[0] == 16).all()
        assert seconds < 20, f"{calls} calls took {seconds:.1f} s"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_a_hundred_ranks(make_comm, algorithm):
    comm = make_comm(100, timeout=120)
    for numel in (7, 100, 100_003):
        ring(comm, inputs(numel, torch.float32, 100), algorithm=algorithm)


@pytest.mark.slow
def test_a_race_would_show(comm_of):
    """Hundreds of rings of many pieces, each compared: a slot overwritten too early would show."""
    parts = inputs(4 * 3 * piece_elems(torch.float32) + 1, torch.float32, 4)
    for _ in range(500):
        ring(comm_of(4), parts)
