"""One rank per process: are the other collectives, works, groups, plans and counts right?"""

from __future__ import annotations

import gc
import os
import random as python_random
import threading
import time

import numpy as np
import pytest
import torch
from oracle import (
    DTYPES,
    assert_bits,
    chunk,
    expected,
    inputs,
    reduced,
    same_bits,
)
from process_checks import ALGORITHMS, WORLD_SIZES, crc, exchange_bytes, slot_bytes
from ranks import another, on_ranks

import pyringar as pr

# -- reduce_scatter, all_gather, broadcast, barrier ------------------------------------------------


@on_ranks(*WORLD_SIZES)
def test_reduce_scatter_all_gather_broadcast(state):
    k, rank, comm = state.world_size, state.rank, state.comm
    part = slot_bytes() // k // 4  # of a float32 slot
    numels = [0, 1, 33, part - 1, part + 1, slot_bytes() // 4 + 3]
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


@on_ranks(3)
def test_collectives_with_gaps(state):
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


@on_ranks(4)
def test_parts_are_in_rank_order(state):
    parts = inputs(2 * state.world_size, torch.float64, state.world_size)
    part = torch.empty(2, dtype=torch.float64)
    state.comm.reduce_scatter(part, parts[state.rank])
    where = chunk(2 * state.world_size, state.world_size, state.rank)
    assert_bits(part, reduced(parts, "sum")[where])


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


# -- bound calls, arrays, autograd -----------------------------------------------------------------


@on_ranks(2, 3)
def test_bound_calls(state):
    parts = inputs(3000, torch.float32, state.world_size)
    found = []
    for algorithm in ALGORITHMS:
        mine = [parts[state.rank][:1000].clone(), parts[state.rank][1000:].clone()]
        call = state.comm.bind_coalesced(mine, "max", algorithm=algorithm)
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


@on_ranks(2)
def test_arrays_inference_and_autograd(state):
    array = np.arange(5, dtype=np.float32) + state.rank
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
    assert array.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert tensor.tolist() == [2.0, 2.0, 2.0]


@on_ranks(1, 2)
def test_the_root_is_refused_what_the_others_are(state):
    """Else it would wait for them."""
    comm = state.comm
    param = torch.nn.Parameter(torch.full((4,), float(state.rank)))
    for root in range(state.world_size):
        with pytest.raises(pr.ArgumentError, match="broadcast: tensor requires grad") as caught:
            comm.broadcast(param, root)
    comm.broadcast(param.detach(), 0)
    with torch.no_grad():
        comm.broadcast(param, 0)
    assert param.tolist() == [0.0] * 4
    return str(caught.value)


# -- in the background -----------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_many_in_flight(state):
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


@on_ranks(2)
def test_dropped_works_keep_their_tensors(state):
    kept = torch.ones(300_000)
    for _ in range(20):
        state.comm.all_reduce(torch.ones(200_000), async_op=True)
        gc.collect(0)
    state.comm.all_reduce(kept)
    assert kept.sum().item() == 600_000.0


@on_ranks(2)
def test_submitting_does_not_wait_for_what_runs(state):
    """Rank 0 submits ten while rank 1 has not come: at once, though the first one waits."""
    if state.rank == 1:
        state.store.wait([f"{state.name} ten are submitted"])
    tensors = [torch.ones(1000) for _ in range(10)]
    works = [state.comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    if state.rank == 0:
        assert not works[0].is_completed()
        state.store.set(f"{state.name} ten are submitted", "")
    for work in works:
        work.wait()


@on_ranks(2)
def test_two_threads_of_a_rank_wait_and_others_run(state):
    """While a thread waits for the other rank, a second one may call, and others run."""
    if state.rank == 1:
        state.store.wait([f"{state.name} others run"])
        tensors = [torch.ones(10) for _ in range(2)]
        for tensor in tensors:
            state.comm.all_reduce(tensor)
        return
    tensors = [torch.ones(10) for _ in range(2)]
    threads = [threading.Thread(target=state.comm.all_reduce, args=(t,)) for t in tensors]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for _ in range(20):
        time.sleep(0.005)
    state.store.set(f"{state.name} others run", "")  # for which both threads wait
    for thread in threads:
        thread.join()
    assert all(torch.equal(t, torch.full((10,), 2.0)) for t in tensors)


# -- groups ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_two_communicators_at_once(state):
    k = state.world_size
    with another(state) as other:
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
            assert_bits(two, reduced(parts, "sum"))
            found += [crc(one), crc(two)]
        return found


@on_ranks(4)
def test_sub_groups(state):
    comm, rank = state.comm, state.rank
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
    assert crew.agree(on_rank_describe) == [rank.pid for rank in crew.ranks]


MIB = 2**20


def on_rank_plans(state, nbytes: int, algorithm: str) -> tuple:
    with another(state, algorithm=algorithm) as comm:
        plan = comm.plan(nbytes)
        before = {name: row["calls"] for name, row in comm.stats().items()}
        comm.all_reduce(torch.ones(nbytes // 4))
        ran = [n for n, row in comm.stats().items() if row["calls"] > before.get(n, 0)]
        assert ran == [plan.algorithm], (nbytes, plan, ran)
        return plan.algorithm, plan.steps, plan.traffic_bytes, plan.order


@pytest.mark.parametrize(
    ("world_size", "nbytes", "algorithm", "plan"),
    [
        # A piece of a call is all of it, or 64 KiB of two ranks, 128 KiB of more.
        (1, MIB, "auto", ("exchange", 0, 0, "rank")),
        (2, 4, "auto", ("exchange", 1, 10 * 4, "rank")),
        (2, MIB, "auto", ("exchange", 16, 10 * MIB, "rank")),
        (3, 2 * MIB, "direct", ("direct", 32, 26 * MIB, "rank")),
    ],
)
def test_a_plan_says_what_runs(crew_of, world_size, nbytes, algorithm, plan):
    found = crew_of(world_size).agree(on_rank_plans, nbytes=nbytes, algorithm=algorithm)
    assert found == plan


MIB = 2**20


@on_ranks(3)
def test_a_plan_on_both_sides_of_the_exchange(state):
    most = exchange_bytes()
    assert on_rank_plans(state, most, "auto") == ("exchange", 1, 18 * most, "rank")
    assert on_rank_plans(state, most + 4, "auto") == ("direct", 2, 13 * (most + 4), "rank")


@on_ranks(2)
def test_plans_refuse_what_is_no_call(state):
    for arguments, words in (
        ((-1,), "nbytes is -1"),
        ((True,), "nbytes is True"),
        ((8, "float32"), "dtype is 'float32'"),
        ((8, torch.bool), "dtype is 'bool', expected one of float64"),
    ):
        with pytest.raises(pr.ArgumentError, match=words):
            state.comm.plan(*arguments)


@on_ranks(3)
def test_stats_count_what_ran(state):
    with another(state) as comm:
        assert comm.stats() == {}
        comm.all_reduce(torch.ones(10))
        comm.all_reduce(torch.ones(100_000))
        comm.barrier()
        shared = pr.shared_empty(100)
        comm.register(shared)
        comm.all_reduce(shared)
        ran = {name: [row["calls"], row["bytes"]] for name, row in comm.stats().items()}
    assert ran["direct"] == [1, 400_000]  # two ranks would only exchange
    assert ran["registered"] == [1, 400]
    assert ran["exchange"][0] >= 2
    return ran
