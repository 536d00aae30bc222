"""Bits of a reduction: rounding, order of additions, equality on all ranks."""

import itertools
import math

import pytest
import torch
from call_cases import CallSpec, Operand
from case_marks import mostly_slow
from oracle import DTYPES, FLOATS, OPS, limit_bytes
from promises import promise

F32, BF16 = torch.float32, torch.bfloat16


def calls_of(transport, numel, dtype, k, op, *, draw="random"):
    choices = [(algorithm, "any") for algorithm in transport.algorithms]
    choices += [("direct", "tree"), ("auto", "tree"), ("auto", "exact")]
    part = Operand(dtype, (numel,), seed=numel, draw=draw)
    calls = [CallSpec("all_reduce", k, (part,), op, *choice) for choice in choices]
    return [call for call in calls if transport.can_run(call)]


@promise("dtypes", "ops", "same-bits", "order-any")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduction_is_bit_exact(transport, dtype):
    calls, sizes = [], [0, 1, 15, 16, 17, 63, 64, 65] if dtype in (F32, BF16) else []
    for k in transport.world_sizes:
        for op in OPS:
            calls += calls_of(transport, 257, dtype, k, op)
        for numel in {k - 1, k, k + 1, *sizes}:
            calls += calls_of(transport, numel, dtype, k, "sum")
        if dtype in FLOATS:
            calls += calls_of(transport, 257, dtype, k, "sum", draw="masked")
    transport.check(calls)


@promise("all_reduce")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_keep_their_position(transport, dtype):
    """Values encode position and rank: an element in a wrong place has a wrong sum."""
    transport.check(
        [
            call
            for numel in (1009, 70_001)
            for call in calls_of(transport, numel, dtype, 3, "sum", draw="positional")
            if call.order != "exact"
        ]
    )


@promise("all_reduce")
@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, F32, BF16), ids=str)
def test_sizes_around_piece_size_are_exact(transport, dtype):
    for k in (2, 3):
        transport.check(
            [
                call
                for border in transport.borders(dtype, k)
                for numel in (border - 1, border, border + 1)
                for call in calls_of(transport, numel, dtype, k, "sum")
                if call.order == "any" and call.algorithm not in ("auto", "naive", "sharded")
            ]
        )


@promise("all_reduce")
@pytest.mark.usefixtures("two_torch_threads")
def test_million_elements_are_bit_exact(transport):
    for dtype, k, numel in ((F32, 3, 1_000_003), (torch.float16, 4, 786_433)):
        calls = calls_of(transport, numel, dtype, k, "mean")
        transport.check([call for call in calls if call.order in ("any", "tree")])


def each_way(transport):
    ways = [{"algorithm": algorithm} for algorithm in transport.algorithms]
    return ways + [{"order": order} for order in transport.orders]


@promise("integers")
def test_integer_mean_rounds_towards_zero(transport):
    for way in each_way(transport):
        tensors = [torch.tensor([100, -100, -7, 7, -128], dtype=torch.int8)] * 2
        assert transport.reduced(tensors, **way)[1].tolist() == [-56, 56, -14, 14, 0]
        tensors = [torch.tensor([-7, 7, 2**62 + 1]), torch.tensor([0, 0, 2])]
        assert transport.reduced(tensors, "mean", **way)[0].tolist() == [-3, 3, 2**61 + 1]


@promise("one-rounding")
def test_half_sum_rounds_once(transport):
    """2048 + 1 rounds to 2048 in fp16: only a float32 sum returns 2048 + 1 + 1 = 2050."""
    for way, (dtype, large) in itertools.product(
        each_way(transport), ((torch.float16, 2048.0), (BF16, 256.0))
    ):
        tensors = [torch.full((37,), value).to(dtype) for value in (large, 1, 1)]
        for result in transport.reduced(tensors, **way):
            assert (result == large + 2).all(), way


@promise("order-rank")
def test_orders_match_hand_computation(transport):
    """Adding 1 to 1e30 loses the 1, so the result shows the order of additions."""
    small, large = torch.tensor([1.0]), torch.tensor([1e30])
    terms = [small, small, large, -large, small]
    wanted = {"any": 1.0, "rank": 1.0, "tree": 3.0, "exact": 3.0}
    ones = [small, large, small, -large, small]
    for order in transport.orders:
        if order != "exact":
            tensors = [term.repeat(9) for term in ones]
            found = transport.reduced(tensors, order=order)[0]
            assert found.tolist() == [1.0] * 9, order
        found = transport.reduced([term.repeat(9) for term in terms], order=order)[0]
        assert found.tolist() == [wanted[order]] * 9, order


@promise("order-tree", "same-bits")
def test_tree_order_is_bit_exact(transport):
    made = [
        CallSpec("all_reduce", k, (part,), op, order="tree", by_communicator=True)
        for k in {*transport.world_sizes, 8}
        for part in (Operand(F32, (257,), draw="masked"), Operand(BF16, (1031,), draw="masked"))
        for op in ("sum", "mean")
    ]
    calls = [call for call in made if transport.can_run(call)]
    assert {call.k for call in calls} >= {2, 8}
    transport.check(calls)


@promise("ring")
def test_ring_order_matches_hand_computation(transport):
    """The sum of chunk c adds the values of ranks c+1, c+2 and c (modulo 3) in this order."""
    tensors = [torch.full((3,), value) for value in (1e30, -1e30, 1.0)]
    found = transport.reduced(tensors, algorithm="ring")[0]
    # (-1e30 + 1) + 1e30, (1 + 1e30) + -1e30, (1e30 + -1e30) + 1
    assert found.tolist() == [0.0, 0.0, 1.0]


@promise("order-exact")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_sum_handles_special_values(transport, dtype):
    """The partial sums overflow or cancel, or the sum needs rounding."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    numbers = [info.max, -info.max, 1.0, -1.0, info.eps, info.eps / 2, -tiny, tiny, 0.0, -0.0]
    numbers += [math.inf, -math.inf, math.nan, info.smallest_normal, 3.0, -2.0, info.max / 2]
    columns = itertools.product(numbers, repeat=3)
    given = [torch.tensor(row, dtype=torch.float64).to(dtype) for row in zip(*columns, strict=True)]
    part = Operand(dtype, (len(given[0]),), given=tuple(given))
    transport.check(
        [CallSpec("all_reduce", 3, (part,), op, order="exact") for op in ("sum", "mean")]
    )
    # Every 131st element needs the slow path, each at a different position in its block.
    hard = Operand(dtype, (131,), draw="masked")
    given = [torch.ones(131 * 131, dtype=dtype) for _ in range(3)]
    for rank, tensor in enumerate(given):
        values = hard.values(rank, 3).view(f"i{dtype.itemsize}")
        tensor[::131] = torch.from_numpy(values).view(dtype)
    part = Operand(dtype, (131 * 131,), given=tuple(given))
    transport.check([CallSpec("all_reduce", 3, (part,), order="exact")])


@pytest.fixture
def threads(transport_of):
    return transport_of("threads")


@pytest.mark.parametrize("k", [7, 9, 16, 17, 33, 150])
def test_many_ranks_are_bit_exact(threads, k):
    """Above 16 ranks pointer tables are on the heap; the divisor 150 of a mean exceeds int8."""
    for dtype, op in ((F32, "sum"), (BF16, "mean"), (torch.int8, "mean")):
        calls = calls_of(threads, 1031, dtype, k, op)
        threads.check([c for c in calls if k < 100 or c.algorithm not in ("direct", "ring")])


def test_many_ranks_keep_tree_order(threads):
    numel = limit_bytes("fused_block") // 4 + 77
    threads.check(
        [
            CallSpec("all_reduce", k, (Operand(F32, (numel,)),), "mean", order="tree")
            for k in (4, 33, 70)
        ]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["fused", "direct", "ring"])
def test_tensor_above_2_gib_is_summed(make_comm, algorithm):
    numel = 2**31 + 70_001
    pattern = torch.arange(251, dtype=torch.uint8)  # prime length: blocks differ
    tensors = [(pattern * rank).repeat(numel // 251 + 1)[:numel] for rank in (1, 2)]
    make_comm(2, timeout=300).all_reduce(tensors, algorithm=algorithm)
    wanted = (pattern * 3).repeat(2**20)
    for tensor in tensors:
        for piece in tensor.split(251 * 2**20):
            assert torch.equal(piece, wanted[: piece.numel()])
