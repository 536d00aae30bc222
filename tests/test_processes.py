"""Does one rank per process have the right bits, for every dtype, reduction, size, list, layout?"""

from __future__ import annotations

import copy
import random as python_random
import time

import pytest
import torch
from oracle import (
    DTYPES,
    OPS,
    assert_bits,
    bits,
    expected,
    inputs,
    positional,
    random,
    reduced,
    ring_reduced,
    same_bits,
)
from process_checks import (
    ALGORITHMS,
    WORLD_SIZES,
    check,
    check_list,
    crc,
    exchange_bytes,
    random_lists,
    reads_ahead_bytes,
    slot_bytes,
)
from ranks import on_ranks

import pyringar as pr

# -- dtypes, reductions, sizes ---------------------------------------------------------------------


def check_all(state, dtype: torch.dtype, sizes: list[int], ops=OPS) -> list[int]:
    k = state.world_size
    found = []
    for numel in sizes:
        parts = inputs(numel, dtype, k, seed=numel)
        for op in ops:
            found += [check(state, parts, op, algorithm) for algorithm in ALGORITHMS]
    return found


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_ops_sizes(state, dtype):
    k = state.world_size
    return check_all(state, dtype, sorted({0, 1, max(1, k - 1), k + 1, 15, 65, 257}))


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_around_the_borders(state, dtype):
    """From one wait to two, from one piece to two, over all slots."""
    borders = [exchange_bytes() * n for n in (1, 2, 4)] + [slot_bytes()]
    borders += [4 * slot_bytes(), reads_ahead_bytes()] if dtype == torch.float32 else []
    sizes = [b // dtype.itemsize + d for b in borders for d in (-1, 0, 1)]
    return check_all(state, dtype, sizes[:: 2 if state.world_size in (1, 3) else 1], ["sum"])


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_million(state, dtype):
    return check_all(state, dtype, [1_000_003], ["mean"])


EACH_TIME = (torch.float32, torch.bfloat16, torch.int8)


@pytest.mark.slow
@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(d, marks=[] if d in EACH_TIME else pytest.mark.thorough, id=str(d))
        for d in DTYPES
    ],
)
def test_all_borders_and_millions(state, dtype):
    borders = [n * exchange_bytes() for n in (1, 2, 4, 8, 32, 40)]
    sizes = [b // dtype.itemsize + d for b in borders for d in (-1, 0, 1)] + [3_000_017]
    return check_all(state, dtype, sizes)


@on_ranks(3)
def test_positions(state):
    """Integers that name position and rank: an element in the wrong place has the wrong sum."""
    k = state.world_size
    found = []
    for dtype in DTYPES:
        for numel in (1009, 70_001):
            parts = [positional(numel, dtype, rank) for rank in range(k)]
            found += [check(state, parts, "sum", algorithm) for algorithm in ALGORITHMS]
    return found


@on_ranks(3, 4)
def test_rank_order(state):
    """The inputs tell orders apart."""
    parts = inputs(200_003, torch.float32, state.world_size)
    by_rank, by_ring = reduced(parts, "sum"), ring_reduced(parts, "sum")
    numbers = ~(by_rank.isnan() | by_ring.isnan())
    assert (bits(by_rank) != bits(by_ring))[numbers].any()
    ordered = parts[state.rank].clone()
    state.comm.all_reduce(ordered, order="rank")
    assert_bits(ordered, by_rank, "order='rank'")
    return [check(state, parts, "sum", a) for a in ALGORITHMS]


@on_ranks(3)
def test_a_rank_that_flushes_denormals(state):
    """A rank that flushes denormals gives, and gets, the same bits; its own mode stays."""
    flushes = state.rank == 1
    if flushes and not torch.set_flush_denormal(True):
        flushes = False
    tiny = torch.finfo(torch.float32).smallest_normal
    found = []
    try:
        for numel in (100, 50_001):
            parts = [torch.full((numel,), tiny / 4) for _ in range(state.world_size)]
            with_flush_off(parts)
            for algorithm in ALGORITHMS:
                mine = parts[state.rank].clone()
                state.comm.all_reduce(mine, algorithm=algorithm)
                work = state.comm.all_reduce(mine.clone(), algorithm=algorithm, async_op=True)
                work.wait()
                found.append(crc(mine))
        if flushes:
            assert (torch.tensor([tiny]) / 4).item() == 0.0, "the caller's mode was changed"
    finally:
        torch.set_flush_denormal(False)
    wanted = torch.full((100,), tiny / 4 * state.world_size)
    assert found[0] == crc(wanted), "denormals were flushed"
    return found


def with_flush_off(parts: list) -> None:
    """The constant of a flushing rank would be 0."""
    bits_of_quarter = 0x00200000  # the smallest normal float32, 0x00800000, divided by 4
    for part in parts:
        part.view(torch.int32).fill_(bits_of_quarter)


# -- lists and layouts -----------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_lists_of_mixed_dtypes_and_empties(state):
    k = state.world_size
    found = []
    for algorithm in ALGORITHMS:
        choice = python_random.Random(3)
        for count, most in ((0, 1), (1, 50), (7, 300), (40, 9000), (300, 40)):
            found.append(check_list(state, random_lists(choice, k, count, most), "sum", algorithm))
        # One byte each, of two dtypes in turn: more padding than data.
        turns = [(torch.int8, torch.uint8)[i % 2] for i in range(3000)]
        bytes_ = [[random(1, d, 7 * r + i) for i, d in enumerate(turns)] for r in range(k)]
        found.append(check_list(state, bytes_, "max", algorithm))
    return found


def check_many(state, count: int, numel: int, dtype: torch.dtype) -> list[int]:
    rows = [
        list(random(count * numel, dtype, rank).view(count, numel))
        for rank in range(state.world_size)
    ]
    return [check_list(state, rows, "mean", algorithm) for algorithm in ALGORITHMS]


@on_ranks(2, 4)
def test_a_thousand_small_tensors(state):
    return check_many(state, 1000, 37, torch.float32)


@on_ranks(2)
def test_64_tensors_of_64_kib(state):
    floats = check_many(state, 64, 16 * 1024, torch.float32)
    return floats + check_many(state, 64, 32_769, torch.bfloat16)


def layouts(rank: int) -> list[torch.Tensor]:
    """Views with gaps, of every kind, and dense ones in other orders than the index's."""
    base = random(4 * 6 * 5 * 8, torch.float32, rank).view(4, 6, 5, 8)
    images = random(2 * 3 * 8 * 8, torch.float16, rank).view(2, 3, 8, 8)
    return [
        base[:, 1:4],
        base[..., ::2],
        base[1:, :, 2],
        base.expand(4, 6, 5, 8)[0],
        images.to(memory_format=torch.channels_last),
        random(35, torch.int64, rank).view(5, 7).t(),
        random(120_000, torch.float64, rank).view(300, 400).t(),
        random(60_000, torch.int8, rank).view(300, 200)[:, ::3],
        torch.tensor(float(rank)),
    ]


@on_ranks(2, 3)
def test_layouts(state):
    found = []
    given_by_rank = [layouts(rank) for rank in range(state.world_size)]
    for algorithm in ALGORITHMS:
        for i in range(len(given_by_rank[0])):
            given = [copy.deepcopy(of_rank[i]) for of_rank in given_by_rank]  # gaps included
            mine = given[state.rank]
            whole = torch.tensor([], dtype=mine.dtype).set_(mine.untyped_storage())
            before = whole.clone()
            touched = torch.zeros(whole.shape, dtype=torch.bool)
            touched.as_strided(mine.shape, mine.stride(), mine.storage_offset()).fill_(True)
            parts = [tensor.clone(memory_format=torch.preserve_format) for tensor in given]
            if not mine.is_contiguous() and is_dense(mine):
                flat = [part.as_strided((part.numel(),), (1,)) for part in parts]
                wanted = expected(flat, "sum", algorithm).as_strided(mine.shape, mine.stride())
            else:
                flat = [part.reshape(-1) for part in parts]
                wanted = expected(flat, "sum", algorithm).view(mine.shape)
            state.comm.all_reduce(mine, algorithm=algorithm)
            assert_bits(mine, wanted, f"{algorithm} layout {i}")
            assert same_bits(whole[~touched], before[~touched]), f"layout {i}: a gap was written"
            found.append(crc(mine))
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@on_ranks(3)
def test_gaps_on_some_ranks_only(state):
    """A tensor with gaps on one rank and one without on another: elements in index order."""
    parts = inputs(600, torch.float32, state.world_size)
    if state.rank % 2:
        wide = torch.zeros(20, 60)
        mine = wide[:, ::2]
        mine.copy_(parts[state.rank].view(20, 30))
    else:
        mine = parts[state.rank].clone().view(20, 30)
    state.comm.all_reduce(mine)
    assert_bits(mine.reshape(-1), reduced(parts, "sum"))
    # A dimension of one element has a stride that means nothing.
    one = torch.arange(12.0).view(3, 4).t() + state.rank
    odd = one.as_strided((1, 4, 3), (17 + 5 * state.rank, 1, 4))
    state.comm.all_reduce(odd)
    k = state.world_size
    assert torch.equal(odd[0], torch.arange(12.0).view(3, 4).t() * k + k * (k - 1) / 2)
    return crc(mine)


# -- at random, and more ranks than cores ----------------------------------------------------------


def call_of(comm, kind: str, parts, *, op: str, algorithm: str, root: int, async_op: bool):
    """Make a call with these parts of all ranks: this rank's result, its work, what it must be."""
    k, rank = comm.world_size, comm.rank
    mine, dtype, numel = parts[rank].clone(), parts[0].dtype, parts[0].numel()
    if kind == "one":
        work = comm.all_reduce(mine, op, algorithm=algorithm, async_op=async_op)
        return mine, work, expected(parts, op, algorithm)
    if kind == "scatter":
        output = torch.empty(numel // k, dtype=dtype)
        work = comm.reduce_scatter(output, mine, op, async_op=async_op)
        return output, work, reduced(parts, op).chunk(k)[rank] if numel else output
    if kind == "gather":
        output = torch.empty(numel * k, dtype=dtype)
        return output, comm.all_gather(output, mine, async_op=async_op), torch.cat(parts)
    return mine, comm.broadcast(mine, root, async_op=async_op), parts[root]


def check_at_random(state, seed: int, calls: int) -> list[int]:
    """All ranks draw the same calls; every result is compared."""
    choice = python_random.Random(seed)
    comm, k, rank = state.comm, state.world_size, state.rank
    shared = pr.shared_empty(20_000)
    comm.register(shared)
    found = []
    for turn in range(calls):
        dtype, op = choice.choice(DTYPES), choice.choice(OPS)
        numel = choice.choice([0, 1, k, 100, 8192, 8193, choice.randrange(80_000)])
        algorithm = choice.choice(ALGORITHMS)
        kind = choice.choice(["one", "one", "list", "scatter", "gather", "broadcast", "shared"])
        asynchronous = choice.random() < 0.3
        root, seed_of_turn = choice.randrange(k), choice.randrange(10**6)
        if choice.random() < 0.2 and choice.randrange(k) == rank:
            time.sleep(0.002)
        if kind == "list":
            found.append(check_list(state, random_lists(choice, k, 9, 2000), op, algorithm))
            continue
        if kind == "shared":
            parts = inputs(20_000, torch.float32, k, seed=seed_of_turn)
            first = choice.randrange(19_000)
            shared.copy_(parts[rank])
            mine = shared[first : first + 1000]
            work = comm.all_reduce(mine, op, async_op=asynchronous)
            wanted = reduced([p[first : first + 1000] for p in parts], op)
        else:
            count = numel * k if kind == "scatter" else numel
            parts = inputs(count, dtype, k, seed=seed_of_turn)
            mine, work, wanted = call_of(
                comm, kind, parts, op=op, algorithm=algorithm, root=root, async_op=asynchronous
            )
        if work is not None:
            work.wait()
        assert_bits(mine, wanted, f"seed {seed} turn {turn}: {kind} {op} {dtype} {numel}")
        found.append(crc(mine) if kind != "scatter" else 0)
    return found


@on_ranks(2, 3, 4)
def test_random_calls(state):
    return check_at_random(state, seed=state.world_size, calls=100)


MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.thorough) for seed in range(101, 110)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@on_ranks(2, 3, 4, 7, within_s=300)
@pytest.mark.parametrize("seed", [100, *MORE_SEEDS])
def test_many_random_calls(state, seed):
    return check_at_random(state, seed, calls=400)


def on_rank_crowd(state, calls: int) -> float:
    start = time.monotonic()
    tensor = torch.ones(20_000)
    for _ in range(calls):
        state.comm.all_reduce(tensor, "mean")
        state.comm.all_reduce(tensor, "mean")
        state.comm.barrier()
    assert torch.equal(tensor, torch.ones(20_000))
    return time.monotonic() - start


def test_more_ranks_than_cores_do_not_crawl(joined_crew):
    """Blind spinning on few cores takes a time slice per wait: minutes for this many calls."""
    crew = joined_crew(10)
    assert max(crew.run(on_rank_crowd, calls=10)) < 20
