"""Is a sum in tree order, or an exact one, the equation's, bit for bit, and refused elsewhere?"""

from __future__ import annotations

import itertools
import math
import random as python_random

import pytest
import torch
from cases import mostly_slow
from oracle import (
    DTYPES,
    FLOATS,
    OPS,
    assert_all_ranks,
    assert_bits,
    bits,
    exact_reduced,
    exact_sum,
    expected,
    inputs,
    limit_bytes,
    random,
    reduced,
    same_bits,
    tree_reduced,
)
from process_checks import check as check_in_processes
from process_checks import crc, exchange_bytes
from ranks import another, on_ranks

import pyringar as pr
from pyringar.comm.orders import engine_order, tree

ORDERS = ("tree", "exact")
SUMS = ("sum", "mean")
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17)
SMALL, LARGE = 257, 20_000


def ops_of(order: str) -> tuple[str, ...]:
    return OPS if order == "tree" else SUMS


def masked(numel: int, dtype: torch.dtype, k: int) -> list[torch.Tensor]:
    """Small numbers, and in every element a large one of two ranks, which cancel.

    Of the others only those are left that are added after the two have met.
    """
    choice = python_random.Random(numel + k)
    info = torch.finfo(dtype)
    large = info.max / 4
    small = info.smallest_normal if dtype == torch.float16 else 1.0
    rows = torch.tensor([[choice.uniform(1, 2) * small for _ in range(k)] for _ in range(numel)])
    rows = rows.to(dtype)
    for row in rows if k > 1 else ():
        i, j = choice.sample(range(k), 2)
        row[i], row[j] = large, -large
    return list(rows.t().contiguous())


def check(comm, parts, op, order, **options) -> None:
    tensors = [part.clone() for part in parts]
    comm.all_reduce(tensors, op, order=order, **options)
    context = f"{order} {op} {parts[0].dtype} k={len(parts)} {options}"
    assert_all_ranks(tensors, expected(parts, op, "fused", order), context)


@pytest.fixture(scope="module")
def comm_of():
    comms: dict[int, pr.Communicator] = {}

    def comm(k: int) -> pr.Communicator:
        return comms.setdefault(k, pr.Communicator(["cpu"] * k))

    yield comm
    for made in comms.values():
        made.close()


# -- that these tests can fail ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_inputs_tell_orders_apart(dtype):
    parts = masked(SMALL, dtype, 6)  # of three ranks a tree is a left fold
    found = [reduced(parts, "sum"), tree_reduced(parts, "sum"), exact_reduced(parts, "sum")]
    for one, other in itertools.combinations(found, 2):
        assert (bits(one) != bits(other)).any()


def test_the_oracle_of_exact_sums_rounds_as_the_types_do():
    for dtype in FLOATS:
        info = torch.finfo(dtype)
        tiny = info.smallest_normal * info.eps
        half = info.eps / 2
        assert exact_sum([1.0, half], dtype) == 1.0
        assert exact_sum([1.0, half, tiny], dtype) == 1.0 + info.eps
        assert exact_sum([1.0 + info.eps, half], dtype) == 1.0 + 2 * info.eps
        assert exact_sum([info.max, info.max, -info.max], dtype) == info.max
        assert exact_sum([-info.max, -info.max], dtype) == -math.inf
        assert exact_sum([tiny, tiny, -info.smallest_normal], dtype) == (
            2 * tiny - info.smallest_normal
        )
    values = random(2000, torch.float32, 7, specials=False)  # torch rounds doubles twice
    for dtype in FLOATS[1:]:
        rounded = [exact_sum([x], dtype) for x in values.tolist()]
        assert same_bits(torch.tensor(rounded, dtype=torch.float64).to(dtype), values.to(dtype))


# -- in one process --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "dtype", mostly_slow(DTYPES, torch.float32, torch.bfloat16, torch.int32), ids=str
)
def test_every_dtype_reduction_and_number_of_ranks(comm_of, order, dtype):
    for k in COUNTS:
        for numel in (0, 1, 7, 33, SMALL):
            parts = inputs(numel, dtype, k, seed=numel)
            for op in ops_of(order):
                check(comm_of(k), parts, op, order)
            check(comm_of(k), parts, "sum", order, algorithm="direct")
        if dtype.is_floating_point:
            check(comm_of(k), masked(SMALL, dtype, k), "sum", order)


@pytest.mark.parametrize("k", [3, 4, 8, 33, 70])
def test_large_tensors_and_many_ranks_in_tree_order(comm_of, k):
    for dtype in FLOATS:
        parts = inputs(limit_bytes("fused_block") // dtype.itemsize + 77, dtype, k)
        check(comm_of(k), parts, "mean", "tree")
        check(comm_of(k), parts, "prod", "tree", algorithm="direct")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_sums_of_numbers_that_fast_paths_lose(comm_of, dtype):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    numbers = [info.max, -info.max, 1.0, -1.0, info.eps, info.eps / 2, -tiny, tiny, 0.0, -0.0]
    numbers += [math.inf, -math.inf, math.nan, info.smallest_normal, 3.0, -2.0, info.max / 2]
    columns = list(itertools.product(numbers, repeat=3))
    parts = [torch.tensor(row, dtype=torch.float64).to(dtype) for row in zip(*columns, strict=True)]
    for op in SUMS:
        check(comm_of(3), parts, op, "exact")
    choice = python_random.Random(5)
    spread = [
        torch.tensor(
            [choice.choice(numbers) * choice.uniform(0.5, 1.5) for _ in range(SMALL)],
            dtype=torch.float64,
        ).to(dtype)
        for _ in range(9)
    ]
    check(comm_of(9), spread, "sum", "exact")


@pytest.mark.parametrize("dtype", mostly_slow(FLOATS, torch.float32), ids=str)
def test_an_exact_sum_that_a_fast_path_loses_alone(comm_of, dtype):
    apart = 131  # more than a block has, and odd: each is at another place of its block
    parts = [torch.ones(apart * apart, dtype=dtype) for _ in range(5)]
    for part, hard in zip(parts, masked(apart, dtype, 5), strict=True):
        part[::apart] = hard
    check(comm_of(5), parts, "sum", "exact")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_sums_of_ordinary_numbers(comm_of, dtype):
    for k in (2, 3, 8):
        generator = torch.Generator().manual_seed(k)
        parts = [
            torch.randn(3000, generator=generator, dtype=torch.float64).to(dtype) for _ in range(k)
        ]
        check(comm_of(k), parts, "sum", "exact")
        check(comm_of(k), parts, "mean", "exact", algorithm="direct")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_exact_sums_do_not_depend_on_who_gives_what(comm_of, dtype):
    parts = inputs(SMALL, dtype, 7)
    wanted = [part.clone() for part in parts]
    comm_of(7).all_reduce(wanted, order="exact")
    choice = python_random.Random(3)
    for _ in range(10):
        shuffled = choice.sample(parts, 7)
        tensors = [part.clone() for part in shuffled]
        comm_of(7).all_reduce(tensors, order="exact")
        assert_bits(tensors[0], wanted[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("each", [2, 4, 8])
def test_ranks_that_add_so_have_the_bits_of_as_many_more(comm_of, dtype, each):
    for k in (1, 2, 3, 5):
        parts = inputs(SMALL, dtype, k * each)
        sums = [
            tree(parts[rank * each : (rank + 1) * each], torch.add).clone() for rank in range(k)
        ]
        comm_of(k).all_reduce(sums, order="tree")
        assert_all_ranks(sums, tree_reduced(parts, "sum"), f"{k} ranks of {each}")


@pytest.mark.parametrize("order", ORDERS)
def test_every_call_of_a_communicator_keeps_its_order(order):
    k = 5
    with pr.Communicator(["cpu"] * k, order=order) as comm:
        assert comm.plan(100).order == order
        lists = [
            [
                random(n, dtype, 10 * rank + i)
                for i, (n, dtype) in enumerate(zip((9, 300), FLOATS, strict=False))
            ]
            for rank in range(k)
        ]
        wanted = [
            expected(list(parts), "sum", "fused", order) for parts in zip(*lists, strict=True)
        ]

        def fresh() -> list[list[torch.Tensor]]:
            return [[t.clone() for t in mine] for mine in lists]

        def holds(found: list[list[torch.Tensor]]) -> None:
            for mine in found:
                for tensor, want in zip(mine, wanted, strict=True):
                    assert_bits(tensor, want)

        found = fresh()
        comm.all_reduce_coalesced(found)
        holds(found)
        found = fresh()
        comm.all_reduce_coalesced(found, async_op=True).wait()
        holds(found)
        found = fresh()
        comm.bind_coalesced(found)()
        holds(found)
        found = fresh()
        comm.bind([mine[1] for mine in found])()
        assert_all_ranks([mine[1] for mine in found], wanted[1])
        parts = inputs(k * 100, torch.bfloat16, k)
        outputs = [torch.empty(100, dtype=torch.bfloat16) for _ in range(k)]
        comm.reduce_scatter(outputs, parts)
        assert_bits(torch.cat(outputs), expected(parts, "sum", "fused", order))
        strided = [random(400, torch.float32, rank).view(20, 20).t()[::2] for rank in range(k)]
        want = expected([part.reshape(-1) for part in strided], "sum", "fused", order)
        comm.all_reduce(strided)
        assert_all_ranks([t.reshape(-1) for t in strided], want)


@pytest.mark.parametrize("order", ORDERS)
def test_buckets_are_added_in_the_order_of_the_communicator(order):
    k = 6
    torch.manual_seed(1)
    layers = [torch.nn.Linear(17, 17) for _ in range(4)]
    replicas = pr.replicate(torch.nn.Sequential(*layers), ["cpu"] * k)
    terms = [
        [random(289, torch.float32, 9 * r + i, specials=False) for i in range(4)] for r in range(k)
    ]
    caps = {"bucket_cap_mb": 0.002}
    with (
        pr.Communicator(["cpu"] * k, order=order) as comm,
        pr.GradientBucketer(replicas, comm=comm, **caps) as buckets,
    ):
        for rank, replica in enumerate(replicas):
            sum(
                (layer.weight * term.view(17, 17)).sum()
                for layer, term in zip(replica, terms[rank], strict=True)
            ).backward()
        buckets.wait()
    for i in range(4):
        want = expected([terms[rank][i] for rank in range(k)], "sum", "fused", order)
        for replica in replicas:
            assert_bits(replica[i].weight.grad.reshape(-1), want)


# -- in processes ----------------------------------------------------------------------------------


@on_ranks(*mostly_slow([1, 2, 3, 5], 1, 3))
@pytest.mark.parametrize("order", ORDERS)
def test_among_processes(state, order):
    k, found = state.world_size, []
    for dtype in FLOATS:
        for numel in (0, 1, 65, SMALL, exchange_bytes() // dtype.itemsize + 3):
            parts = inputs(numel, dtype, k, seed=numel)
            for op in ops_of(order) if numel <= 65 else ("mean",):
                found.append(check_in_processes(state, parts, op, "direct", order=order))
        found.append(check_in_processes(state, masked(99, dtype, k), "sum", "direct", order=order))
    return found


@on_ranks(4)
@pytest.mark.parametrize("order", ORDERS)
def test_every_call_among_processes_keeps_its_order(state, order):
    k, rank = state.world_size, state.rank
    parts = inputs(4000, torch.float32, k)
    want = expected(parts, "sum", "direct", order)
    with another(state, order=order) as comm:
        assert comm.plan(100).order == order
        assert comm.guarantee.order == order
        mine = parts[rank].clone()
        comm.all_reduce(mine)  # the plain call
        assert_bits(mine, want)
        mine = parts[rank].clone()
        comm.bind(mine)()
        assert_bits(mine, want)
        mine = parts[rank].clone()
        comm.all_reduce_coalesced([mine], async_op=True).wait()
        assert_bits(mine, want)
        share = torch.empty(1000)
        comm.reduce_scatter(share, parts[rank])
        assert_bits(share, want[rank * 1000 : (rank + 1) * 1000])
        shared = pr.shared_empty(4000)
        comm.register(shared)
        shared.copy_(parts[rank])
        comm.all_reduce(shared)
        assert_bits(shared, want)
        assert comm.stats()["registered"]["calls"] == 1
    return crc(mine)


@on_ranks(2)
def test_ranks_that_ask_for_other_orders_are_told(state):
    order = ("tree", "rank")[state.rank]
    with another(state) as comm, pytest.raises(pr.ArgumentError) as error:
        comm.all_reduce(torch.ones(3), order=order)
    assert "all_reduce (sum in tree order) of 3" in str(error.value)
    assert "all_reduce (sum) of 3" in str(error.value)


# -- what is refused, what is promised -------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("algorithm", ["ring", "naive", "sharded"])
def test_an_algorithm_that_cannot_keep_an_order_refuses_it(order, algorithm):
    words = f"algorithm is '{algorithm}' and order is '{order}'"
    with pytest.raises(pr.ArgumentError, match=words):
        pr.Communicator(["cpu"] * 2, algorithm=algorithm, order=order)
    with pr.Communicator(["cpu"] * 2, algorithm=algorithm) as comm:
        tensors = [torch.ones(3), torch.ones(3)]
        with pytest.raises(pr.ArgumentError, match=words):
            comm.all_reduce(tensors, order=order)
        assert all((t == 1).all() for t in tensors)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_exact_is_for_sums(op):
    tensors = [torch.ones(3), torch.ones(3)]
    with pr.Communicator(["cpu"] * 2, order="exact") as comm:
        with pytest.raises(pr.ArgumentError, match=f"order is 'exact' and op '{op}'"):
            comm.all_reduce(tensors, op)
        with pytest.raises(pr.ArgumentError, match=f"order is 'exact' and op '{op}'"):
            comm.bind(tensors, op)


def test_exact_sums_are_refused_where_ranks_are_on_gpus():
    assert engine_order("direct", "tree", has_gpus=True) == "tree"
    with pytest.raises(pr.UnsupportedError, match="order is 'exact' and ranks are on GPUs"):
        engine_order("direct", "exact", has_gpus=True)


def test_an_unknown_order_is_named():
    with pytest.raises(pr.ArgumentError, match=r"order is 'trees'.*did you mean 'tree'"):
        pr.Communicator(["cpu"] * 2, order="trees")


def test_guarantees_grow_with_the_order():
    kept = {}
    for order in ("any", "rank", "tree", "exact"):
        with pr.Communicator(["cpu"] * 2, order=order) as comm:
            guarantee = comm.guarantee
        assert guarantee.order == order
        kept[order] = (
            guarantee.run_to_run,
            guarantee.across_sizes,
            guarantee.across_rank_counts,
            guarantee.across_orders,
        )
    assert kept == {
        "any": (True, False, False, False),
        "rank": (True, True, False, False),
        "tree": (True, True, True, False),
        "exact": (True, True, False, True),
    }
    assert str(guarantee) == (
        "exact: same bits across runs, sizes, splits and engines, orders of the ranks"
    )
