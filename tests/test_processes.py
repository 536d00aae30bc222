"""One rank per process: every collective, bit for bit, and what is refused.

What runs in the ranks stands here too: functions of a ``state`` (see ranks.py), most named
``on_rank_...``. Each returns a checksum of what it holds, equal on all ranks.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import os
import random as python_random
import subprocess
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import pytest
import torch
from oracle import (
    DTYPES,
    FLOATS,
    OPS,
    assert_bits,
    bits,
    chunk,
    expected,
    inputs,
    limit_bytes,
    positional,
    random,
    reduced,
    ring_reduced,
    same_bits,
)
from ranks import changed_environment, connect, new_name, value_of

import pyringar as pr

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")

EXCHANGE_BYTES = limit_bytes("process_exchange")  # up to here every rank reduces everything
SLOT_BYTES = limit_bytes("process_slot")
ALGORITHMS = ("direct", "ring")
# On this many cores or fewer; more ranks than cores must work, too.
WORLD_SIZES = (1, 2, 3, 4)


def crc(*tensors: torch.Tensor) -> int:
    """Of bits, NaN's included: what all ranks must agree on."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(bits(tensor).numpy().tobytes(), value)
    return value


def assert_alike(values: list) -> None:
    """All ranks returned the same."""
    assert all(value == values[0] for value in values), values


def check(state: SimpleNamespace, parts: list, op: str, algorithm: str, **options) -> int:
    """One all_reduce against the oracle; a checksum."""
    mine = parts[state.rank].clone()
    assert state.comm.all_reduce(mine, op, algorithm=algorithm, **options) is None
    context = f"{algorithm} {op} {mine.dtype} k={len(parts)} numel={mine.numel()}"
    assert_bits(mine, expected(parts, op, algorithm), context)
    return crc(mine)


# -- dtypes, reductions, sizes ---------------------------------------------------------------------


def on_rank_everything(state, dtype: str, sizes: list[int], ops: list[str]) -> list[int]:
    k = state.world_size
    found = []
    for numel in sizes:
        parts = inputs(numel, getattr(torch, dtype), k, seed=numel)
        for op in ops:
            found += [check(state, parts, op, algorithm) for algorithm in ALGORITHMS]
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_ops_sizes(crew_of, dtype, world_size):
    k = world_size
    sizes = sorted({0, 1, max(1, k - 1), k + 1, 15, 65, 257})
    name = str(dtype).removeprefix("torch.")
    assert_alike(crew_of(k).run(on_rank_everything, dtype=name, sizes=sizes, ops=OPS))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_around_the_borders(crew_of, dtype, world_size):
    """From one wait to two, from one piece to more, from even pieces to full slots, over slots."""
    borders = [EXCHANGE_BYTES, 2 * EXCHANGE_BYTES, 4 * EXCHANGE_BYTES, SLOT_BYTES]
    borders += [4 * SLOT_BYTES, 5 * SLOT_BYTES] if dtype == torch.float32 else []
    sizes = [b // dtype.itemsize + d for b in borders for d in (-1, 0, 1)]
    if world_size in (1, 3):
        sizes = sizes[::2]
    name = str(dtype).removeprefix("torch.")
    assert_alike(crew_of(world_size).run(on_rank_everything, dtype=name, sizes=sizes, ops=["sum"]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_million(crew_of, world_size):
    sizes = [1_000_003]
    run = functools.partial(crew_of(world_size).run, on_rank_everything, sizes=sizes, ops=["mean"])
    assert_alike(run(dtype="float32"))
    assert_alike(run(dtype="float16"))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_borders_and_millions(crew_of, dtype, world_size):
    borders = [n * EXCHANGE_BYTES for n in (1, 2, 4, 8, 32, 40)]
    sizes = [b // dtype.itemsize + d for b in borders for d in (-1, 0, 1)] + [3_000_017]
    name = str(dtype).removeprefix("torch.")
    assert_alike(crew_of(world_size).run(on_rank_everything, dtype=name, sizes=sizes, ops=OPS))


def on_rank_positions(state) -> list[int]:
    k = state.world_size
    found = []
    for dtype in DTYPES:
        for numel in (1009, 70_001):
            parts = [positional(numel, dtype, rank) for rank in range(k)]
            found += [check(state, parts, "sum", algorithm) for algorithm in ALGORITHMS]
    return found


def test_positions(crew_of):
    """Integers that name position and rank: an element in the wrong place has the wrong sum."""
    assert_alike(crew_of(3).run(on_rank_positions))


def on_rank_order(state) -> list[int]:
    """That the inputs tell orders apart, and that each algorithm keeps its own."""
    parts = inputs(200_003, torch.float32, state.world_size)
    by_rank, by_ring = reduced(parts, "sum"), ring_reduced(parts, "sum")
    numbers = ~(by_rank.isnan() | by_ring.isnan())
    assert (bits(by_rank) != bits(by_ring))[numbers].any()
    ordered = parts[state.rank].clone()
    state.comm.all_reduce(ordered, order="rank")
    assert_bits(ordered, by_rank, "order='rank'")
    return [check(state, parts, "sum", a) for a in ALGORITHMS]


def test_rank_order_and_ring_order(crew_of):
    assert_alike(crew_of(3).run(on_rank_order))
    assert_alike(crew_of(4).run(on_rank_order))


def on_rank_like_threads(state) -> int:
    """The ring of processes has the bits of the ring of threads, NaN's included."""
    found = []
    for dtype in FLOATS:
        for numel in (state.world_size + 1, 100_003):
            parts = inputs(numel, dtype, state.world_size, seed=5)
            mine = parts[state.rank].clone()
            state.comm.all_reduce(mine, "mean", algorithm="ring")
            if state.rank == 0:
                threads = [part.clone() for part in parts]
                with pr.Communicator(["cpu"] * state.world_size) as comm:
                    comm.all_reduce(threads, "mean", algorithm="ring")
                assert same_bits(mine, threads[0]), f"{dtype} {numel}"
            found.append(crc(mine))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ring_is_that_of_threads(crew_of, world_size):
    assert_alike(crew_of(world_size).run(on_rank_like_threads))


def on_rank_flush_denormal(state) -> list[int]:
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


def test_a_rank_that_flushes_denormals(crew_of):
    assert_alike(crew_of(3).run(on_rank_flush_denormal))


# -- lists and layouts -----------------------------------------------------------------------------


def check_list(state, lists: list, op: str = "sum", algorithm: str = "direct") -> int:
    """``lists[rank][i]``, contiguous."""
    mine = [tensor.clone() for tensor in lists[state.rank]]
    state.comm.all_reduce_coalesced(mine, op, algorithm=algorithm)
    for i, tensor in enumerate(mine):
        parts = [row[i].reshape(-1) for row in lists]
        wanted = expected(parts, op, algorithm)
        assert_bits(tensor.reshape(-1), wanted, f"{algorithm} tensor {i} {tensor.dtype}")
    return crc(*mine)


def random_lists(choice: python_random.Random, k: int, count: int, most: int) -> list:
    """Lists of tensors of mixed dtypes, empties among them."""
    shapes = [
        (choice.choice(DTYPES), choice.choice([0, 1, choice.randrange(most)])) for _ in range(count)
    ]
    return [
        [random(n, dtype, 100 * rank + i) for i, (dtype, n) in enumerate(shapes)]
        for rank in range(k)
    ]


def on_rank_lists(state) -> list[int]:
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lists_of_mixed_dtypes_and_empties(crew_of, world_size):
    assert_alike(crew_of(world_size).run(on_rank_lists))


def on_rank_many_tensors(state, count: int, numel: int, dtype: str) -> list[int]:
    rows = [
        list(random(count * numel, getattr(torch, dtype), rank).view(count, numel))
        for rank in range(state.world_size)
    ]
    return [check_list(state, rows, "mean", algorithm) for algorithm in ALGORITHMS]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_thousand_small_tensors(crew_of, world_size):
    run = crew_of(world_size).run
    assert_alike(run(on_rank_many_tensors, count=1000, numel=37, dtype="float32"))


def test_64_tensors_of_64_kib(crew_of):
    run = functools.partial(crew_of(2).run, on_rank_many_tensors)
    assert_alike(run(count=64, numel=16 * 1024, dtype="float32"))
    assert_alike(run(count=64, numel=32_769, dtype="bfloat16"))


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


def on_rank_layouts(state) -> list[int]:
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
                # In the order of memory, which is the ring's.
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


def test_layouts(crew_of):
    assert_alike(crew_of(2).run(on_rank_layouts))
    assert_alike(crew_of(3).run(on_rank_layouts))


def on_rank_gap_here_none_there(state) -> int:
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


def test_gaps_on_some_ranks_only(crew_of):
    assert_alike(crew_of(3).run(on_rank_gap_here_none_there))


# -- other collectives -----------------------------------------------------------------------------


def on_rank_collectives(state, numels: list[int]) -> list[int]:
    k, rank, comm = state.world_size, state.rank, state.comm
    found = []
    for numel in numels:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            wholes = inputs(k * numel, dtype, k, seed=numel)
            for op in ("sum", "mean", "max"):
                whole, part = wholes[rank].clone(), torch.zeros(numel, dtype=dtype)
                comm.reduce_scatter(part, whole, op)
                where = slice(rank * numel, (rank + 1) * numel)
                assert_bits(part, reduced(wholes, op)[where], f"reduce_scatter {op} {numel}")
                assert same_bits(whole, wholes[rank]), "the input was written"
            mine = wholes[rank][:numel].clone()
            gathered = torch.zeros(k * numel, dtype=dtype)
            comm.all_gather(gathered, mine)
            wanted = torch.cat([w[:numel] for w in wholes])
            assert same_bits(gathered, wanted), f"all_gather {numel} {dtype}"
            assert same_bits(mine, wholes[rank][:numel]), "the input was written"
            found.append(crc(gathered))
            for root in range(k):
                mine = wholes[rank].clone()
                comm.broadcast(mine, root)
                assert same_bits(mine, wholes[root]), f"broadcast from {root} {numel} {dtype}"
            comm.barrier()
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatter_all_gather_broadcast(crew_of, world_size):
    part = SLOT_BYTES // world_size // 4  # of a float32 slot
    numels = [0, 1, 33, part - 1, part + 1, SLOT_BYTES // 4 + 3]
    assert_alike(crew_of(world_size).run(on_rank_collectives, numels=numels))


def on_rank_collectives_with_gaps(state) -> int:
    k, rank, comm = state.world_size, state.rank, state.comm
    wholes = inputs(k * 12, torch.float32, k)
    wide = torch.zeros(k * 12, 3)
    wide[:, 1] = wholes[rank]
    out = torch.zeros(4, 6)[:, ::2]
    comm.reduce_scatter(out, wide[:, 1])
    assert_bits(out.reshape(-1), reduced(wholes, "sum")[rank * 12 : rank * 12 + 12])
    assert same_bits(wide[:, 1], wholes[rank])
    turned = wholes[rank][:12].clone().view(3, 4).t()  # index order is not memory order
    gathered = torch.zeros(12, k).t()
    comm.all_gather(gathered, turned)
    wanted = torch.stack([w[:12].view(3, 4).t().reshape(-1) for w in wholes])
    assert same_bits(gathered, wanted)
    spread = torch.zeros(12, 2)
    spread[:, 0] = wholes[rank][:12]
    comm.broadcast(spread[:, 0], k - 1)
    assert same_bits(spread[:, 0], wholes[k - 1][:12])
    assert torch.equal(spread[:, 1], torch.zeros(12))
    return crc(gathered)


def test_collectives_with_gaps(crew_of):
    assert_alike(crew_of(3).run(on_rank_collectives_with_gaps))


def on_rank_barrier(state, late: int) -> list[float]:
    if state.rank == late:
        time.sleep(0.3)
    came = time.monotonic()
    state.comm.barrier()
    return [came, time.monotonic()]


def test_nobody_leaves_a_barrier_before_the_last_has_come(crew_of):
    for late in range(3):
        times = crew_of(3).run(on_rank_barrier, late=late)
        assert max(came for came, _ in times) <= min(left for _, left in times)


def on_rank_bind(state) -> list[int]:
    parts = inputs(3000, torch.float32, state.world_size)
    found = []
    for algorithm in ALGORITHMS:
        mine = [parts[state.rank][:1000].clone(), parts[state.rank][1000:].clone()]
        call = state.comm.bind(mine, "max", algorithm=algorithm)
        version = mine[0]._version
        for _ in range(5):
            assert call() is None
        assert mine[0]._version > version
        for i, part in enumerate((slice(0, 1000), slice(1000, None))):
            assert_bits(mine[i], reduced([p[part] for p in parts], "max"))
        found.append(crc(*mine))
    gap = torch.zeros(50, 2)
    gap[:, 0] = state.rank + 1
    call = state.comm.bind(gap[:, 0])
    call()
    gap[:, 0] = state.rank  # what it holds at the time of the call counts
    call()
    k = state.world_size
    assert torch.equal(gap[:, 0], torch.full((50,), k * (k - 1) / 2.0))
    return found


def test_bound_calls(crew_of):
    assert_alike(crew_of(2).run(on_rank_bind))
    assert_alike(crew_of(3).run(on_rank_bind))


def on_rank_interop(state) -> list[float]:
    import numpy

    array = numpy.arange(5, dtype=numpy.float32) + state.rank
    state.comm.all_reduce(array)
    with torch.inference_mode():
        tensor = torch.ones(3)
        state.comm.all_reduce(tensor, torch.distributed.ReduceOp.SUM)
    weight = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    loss = (weight * saved).sum()
    state.comm.all_reduce(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    return [*array.tolist(), *tensor.tolist()]


def test_arrays_inference_and_autograd(crew_of):
    wanted = [1.0, 3.0, 5.0, 7.0, 9.0, 2.0, 2.0, 2.0]
    assert crew_of(2).run(on_rank_interop) == [wanted, wanted]


# -- in the background -----------------------------------------------------------------------------


def on_rank_async(state) -> list[int]:
    comm, k = state.comm, state.world_size
    choice = python_random.Random(11)
    pending = []
    for turn in range(60):
        dtype, numel = choice.choice(DTYPES), choice.choice([0, 1, 500, 9000, 70_000])
        algorithm = choice.choice(ALGORITHMS)
        parts = inputs(numel, dtype, k, seed=turn)
        mine = parts[state.rank].clone()
        work = comm.all_reduce(mine, algorithm=algorithm, async_op=True)
        pending.append((work, mine, expected(parts, "sum", algorithm)))
        if turn % 20 == 19:  # runs after what was submitted before
            comm.barrier()
            assert all(w.is_completed() for w, _, _ in pending)
    found = []
    for work, mine, wanted in pending:
        assert work.wait() is True
        assert work.exception() is None
        assert_bits(mine, wanted)
        found.append(crc(mine))
    whole = torch.arange(2.0 * k)
    part, gathered = torch.zeros(2), torch.zeros(k)
    works = [
        comm.reduce_scatter(part, whole, async_op=True),
        comm.all_gather(gathered, torch.tensor([float(state.rank)]), async_op=True),
        comm.broadcast(whole, 0, async_op=True),
        comm.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
    assert torch.equal(part, torch.arange(2.0 * k)[2 * state.rank : 2 * state.rank + 2] * k)
    assert torch.equal(gathered, torch.arange(float(k)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_in_flight(crew_of, world_size):
    assert_alike(crew_of(world_size).run(on_rank_async))


def on_rank_dropped_works(state) -> float:
    kept = torch.ones(300_000)
    for _ in range(20):
        state.comm.all_reduce(torch.ones(200_000), async_op=True)
        gc.collect(0)
    state.comm.all_reduce(kept)
    return kept.sum().item()


def test_dropped_works_keep_their_tensors(crew_of):
    assert crew_of(2).run(on_rank_dropped_works) == [600_000.0] * 2


def on_rank_submits_while_waiting(state) -> float:
    """Rank 0 submits ten while rank 1 has not come: at once, though the first one waits."""
    if state.rank == 1:
        time.sleep(1.0)
    tensors = [torch.ones(1000) for _ in range(10)]
    start = time.monotonic()
    works = [state.comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    seconds = time.monotonic() - start
    for work in works:
        work.wait()
    return seconds


def test_submitting_does_not_wait_for_what_runs(crew_of):
    assert max(crew_of(2).run(on_rank_submits_while_waiting)) < 0.6


def on_rank_threads_share(state) -> int:
    """While a thread waits for the other rank, a second one may call, and others run."""
    if state.rank == 1:
        time.sleep(1.0)
        tensors = [torch.ones(10) for _ in range(2)]
        for tensor in tensors:
            state.comm.all_reduce(tensor)
        return 0
    tensors = [torch.ones(10) for _ in range(2)]
    threads = [threading.Thread(target=state.comm.all_reduce, args=(t,)) for t in tensors]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    ticks = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.005)
        ticks += 1
    assert all(torch.equal(t, torch.full((10,), 2.0)) for t in tensors)
    return ticks


def test_two_threads_of_a_rank_wait_and_others_run(crew_of):
    ticks, _ = crew_of(2).run(on_rank_threads_share)
    assert ticks > 20, "no other thread ran while one waited"


# -- groups ----------------------------------------------------------------------------------------


def on_rank_two_communicators(state, name: str) -> list[int]:
    with pr.ProcessCommunicator(
        state.store, state.rank, state.world_size, name=name, algorithm="ring"
    ) as other:
        k = state.world_size
        found = []
        for turn in range(20):
            parts = inputs(1000 * turn, torch.float32, k, seed=turn)
            one, two = parts[state.rank].clone(), parts[state.rank].clone()
            # Not in the same order on all ranks: the one does not wait for the other.
            first = state.comm.all_reduce(one, async_op=True)
            second = other.all_reduce(two, async_op=True)
            for work in (first, second) if state.rank % 2 else (second, first):
                work.wait()
            assert_bits(one, reduced(parts, "sum"))
            assert_bits(two, ring_reduced(parts, "sum"))
            found += [crc(one), crc(two)]
        assert set(other.stats()) == {"ring"} if k > 1 else {"exchange"}
        return found


def test_two_communicators_at_once(crew_of):
    assert_alike(crew_of(2).run(on_rank_two_communicators, name=new_name()))


def on_rank_sub_groups(state) -> list[float]:
    comm, rank = state.comm, state.rank
    found = []
    for ranks in ([0, 1], [3, 1], [2], [0, 1], [2, 3, 0]):
        group = comm.new_group(ranks)
        assert (group is None) == (rank not in ranks)
        if group is not None:
            assert (group.rank, group.world_size) == (ranks.index(rank), len(ranks))
            tensor = torch.full((3000,), 10.0**rank)
            group.all_reduce(tensor)
            assert torch.equal(tensor, torch.full((3000,), float(sum(10**r for r in ranks))))
            gathered = torch.zeros(len(ranks))
            group.all_gather(gathered, torch.tensor([float(rank)]))
            assert gathered.tolist() == [float(r) for r in ranks]
            if len(ranks) == 3:
                inner = group.new_group([2, 1])
                assert (inner is None) == (rank == 2)
                if inner is not None:
                    inner.barrier()
                    inner.close()
            group.close()
        comm.barrier()
        found.append(float(len(ranks)))
    return found


def test_sub_groups(crew_of):
    assert_alike(crew_of(4).run(on_rank_sub_groups))


def on_rank_describe(state) -> list:
    comm = state.comm
    assert comm.rank == state.rank
    assert comm.world_size == state.world_size
    assert [m.rank for m in comm.members] == list(range(state.world_size))
    assert comm.members[state.rank].pid == os.getpid()
    assert f"rank {state.rank} of {state.world_size}" in repr(comm)
    return [m.pid for m in comm.members]


def test_members_plan_and_repr(crew_of):
    crew = crew_of(3)
    assert crew.run(on_rank_describe) == [[rank.pid for rank in crew.ranks]] * 3


def on_rank_plans(state, name: str, sizes: list[int], algorithm: str) -> list:
    """What each size's plan says, which must be what runs."""
    options = {"name": name, "algorithm": algorithm}
    found = []
    with pr.ProcessCommunicator(state.store, state.rank, state.world_size, **options) as comm:
        for nbytes in sizes:
            plan = comm.plan(nbytes)
            before = {name: row["calls"] for name, row in comm.stats().items()}
            comm.all_reduce(torch.ones(nbytes // 4))
            ran = [n for n, row in comm.stats().items() if row["calls"] > before.get(n, 0)]
            assert ran == [plan.algorithm], (nbytes, plan, ran)
            found.append((plan.algorithm, plan.steps, plan.traffic_bytes, plan.order))
    return found


MIB = 2**20


@pytest.mark.parametrize(
    ("world_size", "nbytes", "algorithm", "plan"),
    [
        # A piece of a call is a quarter of it, of 32 to 256 KiB, or 128 KiB for two ranks.
        (1, MIB, "auto", ("exchange", 0, 0, "rank")),
        (2, 4, "auto", ("exchange", 1, 10 * 4, "rank")),
        (2, MIB, "auto", ("exchange", 8, 10 * MIB, "rank")),
        (3, EXCHANGE_BYTES, "auto", ("exchange", 1, 18 * EXCHANGE_BYTES, "rank")),
        (3, EXCHANGE_BYTES + 4, "auto", ("direct", 4, 13 * (EXCHANGE_BYTES + 4), "rank")),
        (3, 2 * MIB, "direct", ("direct", 16, 26 * MIB, "rank")),
        (3, 12, "ring", ("ring", 5, 14 * 12, "ring")),
    ],
)
def test_a_plan_says_what_runs(crew_of, world_size, nbytes, algorithm, plan):
    found = crew_of(world_size).run(
        on_rank_plans, name=new_name(), sizes=[nbytes], algorithm=algorithm
    )
    assert found == [[list(plan)]] * world_size


def on_rank_refuse_plans(state) -> None:
    for arguments, words in (
        ((-1,), "nbytes is -1"),
        ((True,), "nbytes is True"),
        ((8, "float32"), "dtype is 'float32'"),
        ((8, torch.bool), "dtype is 'bool', expected one of float64"),
    ):
        with pytest.raises(pr.ArgumentError, match=words):
            state.comm.plan(*arguments)


def test_plans_refuse_what_is_no_call(crew_of):
    crew_of(2).run(on_rank_refuse_plans)


def on_rank_stats(state, name: str) -> dict:
    with pr.ProcessCommunicator(state.store, state.rank, state.world_size, name=name) as comm:
        assert comm.stats() == {}
        comm.all_reduce(torch.ones(10))
        comm.all_reduce(torch.ones(100_000))
        comm.all_reduce(torch.ones(10), algorithm="ring")
        comm.barrier()
        shared = pr.shared_empty(100)
        comm.register(shared)
        comm.all_reduce(shared)
        stats = comm.stats()
        return {name: [row["calls"], row["bytes"]] for name, row in stats.items()}


def test_stats_count_what_ran(crew_of):
    first, *others = crew_of(3).run(on_rank_stats, name=new_name())  # two ranks only exchange
    assert others == [first] * 2
    assert first["direct"] == [1, 400_000]
    assert first["ring"] == [1, 40]
    assert first["registered"] == [1, 400]
    assert first["exchange"][0] >= 2


# -- registered tensors ----------------------------------------------------------------------------


def registered_calls(comm) -> int:
    return comm.stats().get("registered", {}).get("calls", 0)


def on_rank_registered(state) -> list[int]:
    comm, k, rank = state.comm, state.world_size, state.rank
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        numel = 70_003
        parts = inputs(numel, dtype, k, seed=1)
        shared = pr.shared_empty(numel, dtype)
        assert shared.count_nonzero() == 0
        comm.register(shared)
        for op in OPS:
            shared.copy_(parts[rank])
            before = registered_calls(comm)
            comm.all_reduce(shared, op)
            assert registered_calls(comm) == before + (k > 1)
            assert_bits(shared, reduced(parts, op), f"registered {op} {dtype}")
            found.append(crc(shared))
        # Views at an offset, in a list, and through bind and async.
        shared.copy_(parts[rank])
        views = [shared[5:1005], shared[2000:2001], shared[3000:60_000]]
        comm.all_reduce_coalesced(views, "max")
        wanted = parts[rank].clone()
        for where in (slice(5, 1005), slice(2000, 2001), slice(3000, 60_000)):
            wanted[where] = reduced([p[where] for p in parts], "max")
        assert_bits(shared, wanted, "views, and nothing between them")
        shared.copy_(parts[rank])
        comm.bind(shared)()
        assert_bits(shared, reduced(parts, "sum"), "bound")
        shared.copy_(parts[rank])
        comm.all_reduce(shared, async_op=True).wait()
        assert_bits(shared, reduced(parts, "sum"), "async")
        del shared, views
    assert registered_calls(comm) >= 3 * 8 or k == 1
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_registered_tensors(crew_of, world_size):
    assert_alike(crew_of(world_size).run(on_rank_registered))


def on_rank_registered_mixes(state) -> list[int]:
    """Registered and others in one list, with gaps, in the ring, empty: right all the same."""
    comm, k, rank = state.comm, state.world_size, state.rank
    parts = inputs(4000, torch.float32, k, seed=2)
    shared = pr.shared_empty((4, 1000))
    comm.register(shared[1:])  # any view shows the whole memory
    before = registered_calls(comm)
    shared.copy_(parts[rank].view(4, 1000))
    own = parts[rank].clone()
    comm.all_reduce_coalesced([shared, own])
    assert_bits(shared.view(-1), reduced(parts, "sum"))
    assert_bits(own, reduced(parts, "sum"))
    shared.copy_(parts[rank].view(4, 1000))
    comm.all_reduce(shared[:, ::2])
    even = [p.view(4, 1000)[:, ::2].reshape(-1) for p in parts]
    assert_bits(shared[:, ::2].reshape(-1), reduced(even, "sum"))
    assert same_bits(shared[:, 1::2], parts[rank].view(4, 1000)[:, 1::2])
    assert registered_calls(comm) == before
    shared.copy_(parts[rank].view(4, 1000))
    comm.all_reduce_coalesced([shared[0], shared[1, :0], torch.empty(0), shared[1:]])
    assert_bits(shared.view(-1), reduced(parts, "sum"), "with empties")
    transposed = pr.shared_empty((30, 20))
    comm.register(transposed)
    flat = [p[:600] for p in parts]
    transposed.copy_(flat[rank].view(30, 20))
    comm.all_reduce(transposed.t())
    assert_bits(transposed.view(-1), reduced(flat, "sum"), "transposed")
    nothing = pr.shared_empty(0)
    assert nothing.numel() == 0
    comm.all_reduce(nothing)
    return [crc(shared), crc(own)]


def test_registered_and_other_tensors_together(crew_of):
    assert_alike(crew_of(2).run(on_rank_registered_mixes))
    assert_alike(crew_of(3).run(on_rank_registered_mixes))


def on_rank_register_refusals(state) -> list[str]:
    """On every rank the same error, and the communicator works on."""
    comm, rank = state.comm, state.rank
    texts = []
    for numel in (100 + 50 * (rank == 1), 100):
        # First another size on rank 1, then no shared memory on rank 1.
        tensor = torch.zeros(100) if numel == 100 and rank == 1 else pr.shared_empty(numel)
        with pytest.raises(pr.ArgumentError, match="register: the tensor of rank 1") as caught:
            comm.register(tensor)
        texts.append(str(caught.value))
        plain = torch.ones(10)
        comm.all_reduce(plain)
        assert torch.equal(plain, torch.full((10,), float(state.world_size)))
    with pytest.raises(pr.ArgumentError, match="tensor is 3, expected"):
        comm.register(3)
    return texts


def test_unequal_registration_is_refused_on_all_ranks(crew_of):
    texts = crew_of(3).run(on_rank_register_refusals)
    assert_alike(texts)
    assert "600 bytes" in texts[0][0]
    assert "400" in texts[0][0]
    assert "0 bytes" in texts[0][1]


def on_rank_register_again(state) -> int:
    """Memory is freed and taken again, at the same address as likely as not."""
    comm, k = state.comm, state.world_size
    before = mapped_memories()
    descriptors = len(os.listdir("/proc/self/fd"))
    addresses = set()
    for turn in range(20):
        shared = pr.shared_empty(5000)
        addresses.add(shared.data_ptr())
        if turn % 3 == 2:  # not registered: by another way, with the same result
            used = registered_calls(comm)
        else:
            comm.register(shared)
            if turn % 3 == 1:
                comm.register(shared)
            used = registered_calls(comm) + 1
        shared.fill_(float(state.rank + turn))
        comm.all_reduce(shared)
        assert registered_calls(comm) == used
        assert shared[4999] == k * turn + k * (k - 1) // 2
        del shared
        gc.collect()
    comm.barrier()
    assert mapped_memories() == before, "memory of freed tensors is still mapped"
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a descriptor leaks"
    return len(addresses)


def mapped_memories() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:pyringar" in line for line in maps)


def test_registering_again_and_again(crew_of):
    crew_of(2).run(on_rank_register_again)


def on_rank_region_outlives_comm(state, name: str) -> float:
    comm = pr.ProcessCommunicator(state.store, state.rank, state.world_size, name=name)
    shared = pr.shared_empty(1000)
    comm.register(shared)
    call = comm.bind(shared)
    shared.fill_(1.0)
    call()
    comm.close()
    with pytest.raises(pr.RingarError, match="closed"):
        call()
    shared.add_(1.0)
    del comm, call
    gc.collect()
    total = shared.sum().item()
    state.comm.register(shared)  # in another group
    state.comm.all_reduce(shared)
    return total + shared.sum().item()


def test_shared_tensors_outlive_their_communicator(crew_of):
    assert crew_of(2).run(on_rank_region_outlives_comm, name=new_name()) == [9000.0] * 2


def test_shared_empty():
    tensor = pr.shared_empty((3, 5), torch.float16)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.float16
    assert tensor.is_contiguous()
    assert tensor.count_nonzero() == 0
    tensor.requires_grad_()  # as any other
    assert pr.shared_empty(7).shape == (7,)
    assert pr.shared_empty(()).shape == ()
    assert pr.shared_empty(torch.Size([2, 0])).shape == (2, 0)
    wrong = (2.5, "ab", None, True, -1, (3, -1), (2, 2.0), [True], {3: 4}, (2**70,), (2**61,))
    for shape in wrong:
        with pytest.raises(pr.ArgumentError, match="shape is "):
            pr.shared_empty(shape)
    with pytest.raises(pr.ArgumentError, match="dtype is 'float32', expected a "):
        pr.shared_empty(3, "float32")
    with pytest.raises(pr.RingarError, match=r"cannot allocate 4611686018427387904 bytes.*limit"):
        pr.shared_empty(2**60)


def test_shared_empty_while_signals_come():
    """An alarm every millisecond interrupts the kernel while it finds pages."""
    import signal

    beats = []
    before = signal.signal(signal.SIGALRM, lambda *_: beats.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        for _ in range(5):
            tensor = pr.shared_empty(4_000_000)
            assert tensor[-1] == 0
            del tensor
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert beats


# -- at random -------------------------------------------------------------------------------------


def on_rank_random(state, seed: int, calls: int) -> list[int]:
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
        parts = inputs(numel, dtype, k, seed=seed_of_turn)
        mine, work = parts[rank].clone(), None
        if kind == "one":
            work = comm.all_reduce(mine, op, algorithm=algorithm, async_op=asynchronous)
            wanted = expected(parts, op, algorithm)
        elif kind == "list":
            found.append(check_list(state, random_lists(choice, k, 9, 2000), op, algorithm))
            continue
        elif kind == "scatter":
            parts = inputs(numel * k, dtype, k, seed=seed_of_turn)
            mine = torch.empty(numel, dtype=dtype)
            work = comm.reduce_scatter(mine, parts[rank].clone(), op, async_op=asynchronous)
            wanted = reduced(parts, op)[rank * numel : (rank + 1) * numel]
        elif kind == "gather":
            mine = torch.empty(numel * k, dtype=dtype)
            work = comm.all_gather(mine, parts[rank].clone(), async_op=asynchronous)
            wanted = torch.cat(parts)
        elif kind == "broadcast":
            work = comm.broadcast(mine, root, async_op=asynchronous)
            wanted = parts[root]
        else:
            parts = inputs(20_000, torch.float32, k, seed=seed_of_turn)
            first = choice.randrange(19_000)
            shared.copy_(parts[rank])
            mine = shared[first : first + 1000]
            work = comm.all_reduce(mine, op, async_op=asynchronous)
            wanted = reduced([p[first : first + 1000] for p in parts], op)
        if work is not None:
            work.wait()
        assert_bits(mine, wanted, f"seed {seed} turn {turn}: {kind} {op} {dtype} {numel}")
        found.append(crc(mine) if kind != "scatter" else 0)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_calls(crew_of, world_size):
    assert_alike(crew_of(world_size).run(on_rank_random, seed=world_size, calls=100))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_many_random_calls(crew_of, world_size):
    for seed in range(10):
        run = functools.partial(crew_of(world_size).run, within_s=300)
        assert_alike(run(on_rank_random, seed=100 + seed, calls=400))


# -- more ranks than cores -------------------------------------------------------------------------


def on_rank_crowd(state, calls: int) -> float:
    start = time.monotonic()
    tensor = torch.ones(20_000)
    for _ in range(calls):
        state.comm.all_reduce(tensor, "mean", algorithm="direct")
        state.comm.all_reduce(tensor, "mean", algorithm="ring")
        state.comm.barrier()
    assert torch.equal(tensor, torch.ones(20_000))
    return time.monotonic() - start


def test_more_ranks_than_cores_do_not_crawl(new_crew):
    """Blind spinning on few cores takes a time slice per wait: minutes for this many calls."""
    crew = new_crew(10)
    crew.join()
    assert max(crew.run(on_rank_crowd, calls=10)) < 20


# -- what is refused, with nothing changed and no rank told ----------------------------------------


def refusals(comm) -> list:
    """(call, words of the ArgumentError or UnsupportedError)."""
    good, four = torch.ones(4), torch.ones(4)
    overlapping = torch.ones(6)
    twice = torch.ones(3).expand(4, 3)
    grad = torch.ones(3, requires_grad=True)
    k = comm.world_size
    return [
        (lambda: comm.all_reduce(good, "median"), "op is 'median', expected one of sum"),
        (lambda: comm.all_reduce(good, torch.distributed.ReduceOp.BAND), "op is "),
        (lambda: comm.all_reduce(good, algorithm="fused"), "algorithm is 'fused', expected one of"),
        (lambda: comm.all_reduce(good, order="mine"), "order is 'mine', expected one of any, rank"),
        (lambda: comm.all_reduce(good, algorithm="ring", order="rank"), "algorithm is 'ring' and"),
        (lambda: comm.all_reduce(3), r"all_reduce: tensor is (a|an)? ?(3|int)"),
        (lambda: comm.all_reduce([good, None]), r"tensors\[1\] is"),
        (lambda: comm.all_reduce(good.to("meta")), "tensor is on meta|tensor .*meta"),
        (lambda: comm.all_reduce(good.to(torch.complex64)), "complex64"),
        (lambda: comm.all_reduce(good.bool()), "bool"),
        (lambda: comm.all_reduce(good.to_sparse()), "tensor"),
        (lambda: comm.all_reduce(grad), "requires grad|requires_grad"),
        (lambda: comm.all_reduce([good, grad]), r"tensors\[1\]"),
        (lambda: comm.all_reduce(twice), "tensor"),
        (lambda: comm.all_reduce([overlapping[:4], overlapping[3:]]), r"tensors\[[01]\]"),
        (lambda: comm.all_reduce([good, good]), r"tensors\[[01]\]"),
        (lambda: comm.all_reduce_coalesced(good), "tensors is a Tensor, expected a list"),
        (lambda: comm.bind(good, "mode"), "op is 'mode'"),
        (lambda: comm.bind(twice), "bind"),
        (lambda: comm.broadcast(good, -1), "root is -1, expected a rank from 0 to"),
        (lambda: comm.broadcast(good, k), f"root is {k}, expected a rank from 0 to {k - 1}"),
        (lambda: comm.broadcast(good, True), "root is True, expected a rank"),
        (lambda: comm.broadcast(good, "0"), "root is '0', expected a rank"),
        (lambda: comm.broadcast(good, 2**40), f"root is {2**40}, expected a rank"),
        (lambda: comm.reduce_scatter(good, four[:3]), "input has 3 float32 elements"),
        (lambda: comm.reduce_scatter(good, torch.ones(4 * k).double()), "float64"),
        (lambda: comm.all_gather(torch.ones(4 * k - 1), good), f"output has {4 * k - 1} float32"),
        (lambda: comm.all_gather(torch.ones(4 * k)[: 4 * k], torch.ones(4).int()), "int32"),
        (lambda: comm.all_gather(grad, good), "output"),
        (lambda: comm.new_group([]), r"ranks is \[\], expected different ranks"),
        (lambda: comm.new_group([0, 0]), r"ranks is \[0, 0\], expected different ranks"),
        (lambda: comm.new_group([k]), rf"ranks is \[{k}\], expected ranks from 0 to {k - 1}"),
        (lambda: comm.new_group([True]), r"ranks is \[True\]"),
        (lambda: comm.new_group(0), "ranks is 0, expected"),
        (lambda: comm.new_group([[0]]), r"ranks is \[\[0\]\]"),
        (lambda: comm.plan(-1), "nbytes is -1"),
        (lambda: comm.plan(4, "float32"), "dtype is 'float32'"),
    ]


def on_rank_refusals(state) -> int:
    count = 0
    for call, words in refusals(state.comm):
        with pytest.raises((pr.ArgumentError, pr.UnsupportedError), match=words):
            call()
        count += 1
    # Nobody was told: the next call is the next call.
    tensor = torch.ones(5)
    state.comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((5,), float(state.world_size)))
    return count


def test_wrong_arguments_are_refused_by_name(crew_of):
    assert crew_of(2).run(on_rank_refusals)[0] == len(refusals(SimpleNamespace(world_size=2)))


def test_wrong_arguments_of_the_constructor(store_port):
    store = connect(store_port)

    def refused(words: str, *arguments, **options) -> None:
        start = time.monotonic()
        with pytest.raises(pr.ArgumentError, match=words):
            pr.ProcessCommunicator(*arguments, **options)
        assert time.monotonic() - start < 5, "it waited for others first"

    refused("store is 5, expected a torch.distributed.Store", 5, 0, 1)
    refused("rank is None", store)
    refused("world_size is None", store, 0)
    refused("rank is True", store, True, 1)
    refused("rank is '0'", store, "0", 1)
    refused("rank is 2 and world_size 2, expected 0 <= rank < world_size", store, 2, 2)
    refused("rank is -1 and world_size 2", store, -1, 2)
    refused("rank is 0 and world_size 0", store, 0, 0)
    refused("world_size is 2.0", store, 0, 2.0)
    refused("rank is 0 and world_size 2 without a store", None, 0, 2)
    refused(
        "algorithm is 'fused', expected one of auto, direct, ring", store, 0, 1, algorithm="fused"
    )
    refused("order is None", store, 0, 1, order=None)
    refused("algorithm is 'ring' and order is 'rank'", store, 0, 1, algorithm="ring", order="rank")
    refused("timeout is 0, expected a positive number", store, 0, 1, timeout=0)
    refused("timeout is nan", store, 0, 1, timeout=math.nan)
    refused("timeout is '3'", store, 0, 1, timeout="3")
    refused("name is 3, expected", store, 0, 1, name=3)
    with changed_environment({"PYRINGAR_CHECK": "everything"}):
        refused("PYRINGAR_CHECK is 'everything', expected .*digest", store, 0, 1)


def test_no_store_and_nothing_in_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pr.ArgumentError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        pr.ProcessCommunicator()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(pr.ArgumentError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not"):
        pr.ProcessCommunicator()


def on_rank_from_environment(state, rank: int, port: int) -> float:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with pr.ProcessCommunicator() as comm, pr.ProcessCommunicator() as again:
        tensor = torch.ones(10)
        comm.all_reduce(tensor)
        again.all_reduce(tensor)
        return tensor.sum().item()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_store_from_torchruns_environment(new_crew):
    crew = new_crew(2)
    port = free_port()
    for rank in range(2):
        crew[rank].start(on_rank_from_environment, rank=rank, port=port)
    assert [value_of(o) for o in crew.outcomes()] == [40.0, 40.0]


def on_rank_torch_distributed(state, rank: int, path: str) -> float:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        with pr.ProcessCommunicator() as comm:
            tensor = torch.ones(10)
            comm.all_reduce(tensor)
            dist.all_reduce(tensor)  # beside it
            return tensor.sum().item()
    finally:
        dist.destroy_process_group()


def test_the_store_of_torch_distributed(new_crew, tmp_path):
    """A file store, with gloo at work beside us."""
    crew = new_crew(2)
    for rank in range(2):
        crew[rank].start(on_rank_torch_distributed, rank=rank, path=str(tmp_path / "store"))
    assert [value_of(o) for o in crew.outcomes()] == [40.0, 40.0]


# -- closing, forking ------------------------------------------------------------------------------


def on_rank_closed(state, name: str) -> int:
    comm = pr.ProcessCommunicator(state.store, state.rank, state.world_size, name=name)
    tensor = torch.ones(100_000)
    work = comm.all_reduce(tensor, async_op=True)
    bound = comm.bind(tensor)
    comm.close()
    comm.close()
    assert work.is_completed()
    assert torch.equal(tensor, torch.full((100_000,), float(state.world_size)))
    two, four = torch.ones(2), torch.ones(4)
    calls = (
        lambda: comm.all_reduce(two),
        lambda: comm.all_reduce(two, async_op=True),
        lambda: comm.all_reduce_coalesced([two]),
        lambda: comm.reduce_scatter(two, four),
        lambda: comm.all_gather(four, two),
        lambda: comm.broadcast(two),
        lambda: comm.barrier(),
        lambda: comm.bind(two),
        lambda: comm.register(pr.shared_empty(3)),
        bound,
    )
    for call in calls:
        with pytest.raises(pr.RingarError, match="closed"):
            call()
    assert torch.equal(two, torch.ones(2))
    return len(calls)


def test_a_closed_communicator_refuses_everything(crew_of):
    crew_of(2).run(on_rank_closed, name=new_name())


def on_rank_leaks(state, name: str) -> list[int]:
    """Communicators come and go, closed or dropped; what they held goes too."""

    def held() -> list[int]:
        gc.collect()
        return [
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            mapped_memories(),
        ]

    before = held()
    for turn in range(8):
        comm = pr.ProcessCommunicator(
            state.store, state.rank, state.world_size, name=f"{name}-{turn}"
        )
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        assert not any("memfd:pyringar" in link for link in links), "not sealed"
        comm.all_reduce(torch.ones(100), async_op=True).wait()
        if turn % 2:
            comm.close()
        del comm
    assert held() == before
    return before


def test_nothing_is_held_when_communicators_go(crew_of):
    crew_of(2).run(on_rank_leaks, name=new_name())


def on_rank_forks(state) -> int:
    """The child is told, works on its own, and takes nothing from its parent by ending."""
    shared = pr.shared_empty(100)
    state.comm.register(shared)
    state.comm.all_reduce(torch.ones(3), async_op=True).wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                state.comm.all_reduce(torch.ones(3))
            except pr.RingarError as error:
                with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as own:
                    tensor = torch.ones(3)
                    own.all_reduce(tensor)
                    own.all_reduce(tensor, async_op=True).wait()
                told = "made before fork()" in str(error)
                status = 0 if told and torch.equal(tensor, torch.ones(3)) else 2
            state.comm.close()
            del shared, state.comm
            gc.collect()
        finally:
            os._exit(status)
    status = wait_for(child)
    shared.fill_(2.0)
    state.comm.all_reduce(shared)
    assert shared[0] == 2.0 * state.world_size
    return status


def wait_for(child: int) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -99


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_fork_the_child_is_told_and_the_parent_goes_on(crew_of):
    assert crew_of(2).run(on_rank_forks) == [0, 0]


SCRIPT = """
import sys, torch, pyringar as pr
torch.set_num_threads(1)
rank, path = int(sys.argv[1]), sys.argv[2]
comm = pr.ProcessCommunicator(torch.distributed.FileStore(path, 2), rank, 2)
tensor = torch.arange(5.0) + rank
comm.all_reduce(tensor)
works = [comm.all_reduce(torch.ones(100_000), async_op=True) for _ in range(5)]
print(tensor.tolist())
"""


def test_programs_that_just_end(tmp_path):
    """As a user would write them: no close(), works dropped, the interpreter ends."""
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=60)
            assert (rank.returncode, out, err) == (0, "[1.0, 3.0, 5.0, 7.0, 9.0]\n", "")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_one_rank_needs_nobody(store_port):
    with pr.ProcessCommunicator(connect(store_port), 0, 1, name=new_name()) as comm:
        for numel in (0, 1, 100_000):
            tensor = random(numel, torch.float32, 1)
            for op in OPS:
                for algorithm in ALGORITHMS:
                    mine = tensor.clone()
                    comm.all_reduce(mine, op, algorithm=algorithm)
                    assert_bits(mine, reduced([tensor], op))
        comm.broadcast(tensor)
        comm.barrier()
        assert comm.new_group([0]).world_size == 1


def on_rank_chunks(state) -> list[int]:
    """What reduce_scatter's parts and the ring's chunks have to do with each other: nothing."""
    parts = inputs(2 * state.world_size, torch.float64, state.world_size)
    part = torch.empty(2, dtype=torch.float64)
    state.comm.reduce_scatter(part, parts[state.rank])
    where = chunk(2 * state.world_size, state.world_size, state.rank)
    assert_bits(part, reduced(parts, "sum")[where])
    return []


def test_parts_are_in_rank_order(crew_of):
    crew_of(4).run(on_rank_chunks)
