"""Does every rank get the right bits, for every algorithm, dtype, reduction, k and size (P1-P4)?"""

from __future__ import annotations

import math
import os

import pytest
import torch
from cases import mostly_slow
from oracle import (
    ALGORITHMS,
    DTYPES,
    FLOATS,
    NATIVE,
    OPS,
    RANK_ORDER,
    assert_all_ranks,
    assert_bits,
    bits,
    expected,
    inputs,
    limit_bytes,
    positional,
    reduced,
    ring_reduced,
    same_bits,
)

import pyringar as pr


def sizes_around(world_size):
    """Nothing, less than a rank each, one each, a vector and its neighbours, primes."""
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, 15, 16, 17, 63, 64, 65, 257})


def check(comm, parts, op="sum", algorithm="fused", **options):
    """One call against the oracle; the list must be left alone."""
    tensors = [part.clone() for part in parts]
    same = list(tensors)
    assert comm.all_reduce(tensors, op, algorithm=algorithm, **options) is None
    assert len(tensors) == len(same)
    assert all(a is b for a, b in zip(tensors, same, strict=True)), "the list was changed"
    context = f"{algorithm} {op} {parts[0].dtype} k={len(parts)} numel={parts[0].numel()}"
    assert_all_ranks(tensors, expected(parts, op, algorithm), context)
    return tensors


# -- that these tests can fail ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_inputs_tell_orders_apart(dtype):
    parts = inputs(20_000, dtype, 5)
    by_rank, by_ring = reduced(parts, "sum"), ring_reduced(parts, "sum")
    numbers = ~(by_rank.isnan() | by_ring.isnan())
    assert (bits(by_rank) != bits(by_ring))[numbers].any()
    backwards = reduced(parts[::-1], "sum")
    assert (bits(by_rank) != bits(backwards))[numbers].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_inputs_tell_one_rounding_from_many(dtype):
    parts = inputs(1000, dtype, 5)
    many = parts[0]
    for part in parts[1:]:
        many = many + part
    once = reduced(parts, "sum")
    numbers = ~(once.isnan() | many.isnan())
    assert (bits(once) != bits(many))[numbers].any()


def test_the_inputs_hold_every_special_value():
    values = inputs(1000, torch.float32, 1)[0]
    tiny = torch.finfo(torch.float32).smallest_normal
    assert values.isnan().any()
    assert values.isposinf().any()
    assert values.isneginf().any()
    assert ((values == 0) & values.signbit()).any()
    assert ((values != 0) & (values.abs() < tiny)).any()


# -- everything against everything -----------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_ops_algorithms(comm_of, dtype, op):
    for world_size in (1, 2, 3, 5, 8):
        for numel in (world_size + 1, 257):
            parts = inputs(numel, dtype, world_size, seed=numel)
            for algorithm in ALGORITHMS:
                check(comm_of(world_size), parts, op, algorithm)


@pytest.mark.parametrize("world_size", mostly_slow(range(1, 18), *range(1, 6), 8, 15, 16, 17))
def test_ranks_and_sizes(comm_of, world_size):
    for dtype in (torch.float32, torch.bfloat16):
        for numel in sizes_around(world_size):
            parts = inputs(numel, dtype, world_size, seed=numel)
            for algorithm in NATIVE:
                check(comm_of(world_size), parts, "sum", algorithm)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything(comm_of, dtype, algorithm):
    for world_size in range(1, 18):
        for numel in sizes_around(world_size):
            parts = inputs(numel, dtype, world_size, seed=numel)
            for op in OPS:
                check(comm_of(world_size), parts, op, algorithm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions(comm_of, dtype):
    """Integers that name position and rank: an element in the wrong place has the wrong sum."""
    parts = [positional(1009, dtype, rank) for rank in range(4)]
    for algorithm in ALGORITHMS:
        check(comm_of(4), parts, "sum", algorithm)


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("algorithm", NATIVE)
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, torch.float32), ids=str)
def test_around_block_boundaries(comm_of, dtype, algorithm):
    """Large enough for several threads; the last block full, short by one, over by one."""
    block = limit_bytes("fused_block") // dtype.itemsize
    for world_size, numel in [
        (2, 2 * block - 1),
        (2, 2 * block),
        (2, 2 * block + 1),
        (3, 3 * block + 1),
        (4, 5 * block - 1),
        (5, 2 * block + 7),
    ]:
        parts = inputs(numel, dtype, world_size, seed=numel)
        check(comm_of(world_size), parts, "sum", algorithm)
    check(comm_of(world_size), parts, "mean", algorithm)


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("algorithm", mostly_slow(ALGORITHMS, "ring", "fused"))
def test_several_mebibytes(comm_of, algorithm):
    for dtype, world_size, numel in [
        (torch.float32, 3, 1_000_003),
        (torch.float16, 4, 786_433),
        (torch.int8, 2, 3_000_017),
    ]:
        parts = inputs(numel, dtype, world_size)
        check(comm_of(world_size), parts, "mean", algorithm)


@pytest.mark.parametrize("order", ["any", "rank"])
@pytest.mark.parametrize("algorithm", RANK_ORDER)
def test_rank_order(make_comm, algorithm, order):
    """P4, for the communicator's own setting and for the call's."""
    for dtype in FLOATS:
        parts = inputs(2 * limit_bytes("fused_block") // dtype.itemsize + 3, dtype, 6)
        tensors = [part.clone() for part in parts]
        make_comm(6, algorithm=algorithm, order=order).all_reduce(tensors)
        assert_all_ranks(tensors, reduced(parts, "sum"), f"{algorithm} {dtype}")
        check(make_comm(6), parts, algorithm=algorithm, order=order)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_bits_in_every_run(comm_of, algorithm):
    parts = inputs(100_003, torch.float32, 5)
    results = [check(comm_of(5), parts, algorithm=algorithm) for _ in range(10)]
    assert all(same_bits(tensor, results[0][0]) for tensors in results for tensor in tensors)


def test_integers_wrap_and_divide_towards_zero(comm_of):
    for algorithm in ALGORITHMS:
        tensors = [torch.tensor([100, -100, -7, 7, -128], dtype=torch.int8) for _ in range(2)]
        comm_of(2).all_reduce(tensors, algorithm=algorithm)
        assert tensors[1].tolist() == [-56, 56, -14, 14, 0]
        tensors = [torch.tensor([-7, 7, 2**62 + 1]), torch.tensor([0, 0, 2])]
        comm_of(2).all_reduce(tensors, "mean", algorithm=algorithm)
        assert tensors[0].tolist() == [-3, 3, 2**61 + 1], "as exact integers, not as doubles"


def test_one_rounding_by_hand(comm_of):
    """2048 + 1 is 2048 in fp16, so only a wider sum sees 2048 + 1 + 1 = 2050."""
    for algorithm in ALGORITHMS:
        for dtype, large in [(torch.float16, 2048.0), (torch.bfloat16, 256.0)]:
            tensors = [torch.full((37,), value).to(dtype) for value in (large, 1, 1)]
            comm_of(3).all_reduce(tensors, algorithm=algorithm)
            assert all((tensor == large + 2).all() for tensor in tensors), algorithm


def test_subnormals_survive(comm_of):
    """No flushing to zero, in any width."""
    for dtype in FLOATS:
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        for algorithm in ALGORITHMS:
            tensors = [torch.full((67,), tiny, dtype=dtype) for _ in range(3)]
            comm_of(3).all_reduce(tensors, algorithm=algorithm)
            wanted = torch.tensor(3 * tiny, dtype=torch.float64).to(dtype)
            assert (tensors[2] == wanted).all(), (dtype, algorithm)


def test_nan_wins_wherever_it_stands(comm_of):
    for algorithm in ALGORITHMS:
        for op in ("max", "min"):
            for holder in range(3):
                tensors = [torch.tensor([1.0, math.inf, -math.inf]) for _ in range(3)]
                tensors[holder][:] = math.nan
                comm_of(3).all_reduce(tensors, op, algorithm=algorithm)
                assert all(tensor.isnan().all() for tensor in tensors), (algorithm, op, holder)


# -- the book's call -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 17])
def test_allreduce_is_the_books(world_size):
    """P1: a list, one per rank, in place, in the caller's tensors, None returned."""
    for numel in sizes_around(world_size):
        parts = inputs(numel, torch.float32, world_size)
        data = [part.clone() for part in parts]
        same = list(data)
        pointers = [tensor.data_ptr() for tensor in data]
        assert pr.allreduce(data) is None
        assert all(a is b for a, b in zip(data, same, strict=True))
        assert [tensor.data_ptr() for tensor in data] == pointers
        assert_all_ranks(data, reduced(parts, "sum"))


def test_allreduce_equals_copying_to_rank_0():
    parts = inputs(10_007, torch.float32, 4)
    book = [part.clone() for part in parts]
    for i in range(1, len(book)):
        book[0][:] += book[i].to(book[0].device)
    data = [part.clone() for part in parts]
    pr.allreduce(data)
    assert_bits(data[3], book[0])


def test_allreduce_takes_ops_and_any_number_of_ranks():
    for op in OPS:
        for world_size in (1, 2, 5, 33):
            parts = inputs(129, torch.float64, world_size)
            data = tuple(part.clone() for part in parts)
            pr.allreduce(data, op)
            assert_all_ranks(data, reduced(parts, op), f"{op} k={world_size}")


# -- many ranks, huge tensors ----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_ranks_than_any_table(make_comm, algorithm):
    """Past 16 ranks the pointer tables move from the stack; past 127 a rank count leaves int8."""
    world_size = 33 if algorithm in ("direct", "ring") else 150
    for dtype in (torch.float32, torch.int8):
        for op in ("sum", "mean"):
            check(make_comm(world_size), inputs(1031, dtype, world_size), op, algorithm)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", NATIVE)
def test_more_than_two_to_the_31_elements(make_comm, algorithm):
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    numel = 2**31 + 70_001
    if memory_bytes < 4 * numel:
        pytest.skip(f"needs {4 * numel / 2**30:.0f} GiB of free memory")
    tensors = [torch.empty(numel, dtype=torch.uint8) for _ in range(2)]
    pattern = torch.arange(251, dtype=torch.uint8)  # a prime: no two blocks look alike
    for rank, tensor in enumerate(tensors):
        whole = numel // 251 * 251
        tensor[:whole].view(-1, 251).copy_(pattern * (rank + 1))
        tensor[whole:] = pattern[: numel - whole] * (rank + 1)
    make_comm(2, timeout=300).all_reduce(tensors, algorithm=algorithm)
    wanted = pattern + pattern * 2
    whole = numel // 251 * 251
    for tensor in tensors:
        for begin in range(0, whole, 251 * 2**20):
            rows = tensor[begin : min(begin + 251 * 2**20, whole)].view(-1, 251)
            assert (rows == wanted).all()
        assert torch.equal(tensor[whole:], wanted[: numel - whole])
