"""Calls in the background keep the memory of their tensors alive until they finish.

The tensors use memory of NumPy arrays, whose weak references tell when the memory is freed.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from programs import run_programs

import pyringar as pr
from pyringar.comm.background_work import Work

NUMEL = 5000
Tensors = Sequence[torch.Tensor]


class ArrayMemory:
    """Tensors in the memory of NumPy arrays."""

    def __init__(self, count: int, numel: int = NUMEL) -> None:
        arrays = [np.arange(numel, dtype=np.float32) % 17 + i for i in range(count)]
        self.tensors = [torch.from_numpy(array) for array in arrays]
        self._arrays = [weakref.ref(array) for array in arrays]

    def replace_data(self) -> None:
        for tensor in self.tensors:
            tensor.data = torch.zeros(tensor.numel())

    def num_alive(self) -> int:
        return sum(array() is not None for array in self._arrays)


# The arguments of each call, from two large and two small tensors.
CALLS: dict[str, Callable[[Tensors, Tensors], tuple[object, ...]]] = {
    "all_reduce": lambda a, b: (a,),
    "all_reduce_coalesced": lambda a, b: ([[x] for x in a],),
    "reduce_scatter": lambda a, b: (b, a),
    "all_gather": lambda a, b: (a, b),
    "broadcast": lambda a, b: (a,),
    "broadcast_coalesced": lambda a, b: ([[x] for x in a],),
    "reduce": lambda a, b: (a[0], a),
    "reduce_coalesced": lambda a, b: (a[:1], [[x] for x in a]),
}


@pytest.mark.parametrize("call", CALLS)
def test_pending_call_keeps_replaced_memory(call):
    with pr.Communicator(["cpu"] * 2) as comm:
        comm._group.delay_rank(1, 20.0)
        before = [torch.ones(8), torch.ones(8)]
        first = comm.all_reduce(before, algorithm="ring", async_op=True)
        large, small = ArrayMemory(2), ArrayMemory(2, NUMEL // 2)
        arguments = CALLS[call](large.tensors, small.tensors)
        work = getattr(comm, call)(*arguments, async_op=True)
        for memory in (large, small):
            memory.replace_data()
        assert not first.is_completed(), "the calls finished before the test could look"
        is_used = call in ("reduce_scatter", "all_gather")
        assert [large.num_alive(), small.num_alive()] == [2, 2 if is_used else 0]
        comm._group.end_delay()
        work.wait()
        assert work.is_completed()
        del work
        assert [large.num_alive(), small.num_alive()] == [0, 0]
        for tensor in (*large.tensors, *small.tensors):
            assert not tensor.any(), "the new memory was written"


def replace_on_rank_0(state, coalesced: bool) -> float:
    memory = ArrayMemory(3)
    if state.rank == 0:
        tensors = memory.tensors if coalesced else memory.tensors[0]
        work = state.comm.all_reduce(tensors, async_op=True)
        memory.replace_data()
        assert memory.num_alive() == (3 if coalesced else 1)
        state.store.set(f"{state.name} replaced", "1")
        work.wait()
        del work
        assert memory.num_alive() == 0
        return float(memory.tensors[0].sum())
    state.store.wait([f"{state.name} replaced"])
    tensors = [tensor.clone() for tensor in memory.tensors]
    state.comm.all_reduce(tensors if coalesced else tensors[0])
    assert torch.equal(tensors[0], memory.tensors[0] * 2)
    return 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")
@pytest.mark.parametrize("coalesced", [False, True])
def test_pending_process_call_keeps_replaced_memory(new_rank_group, coalesced):
    group = new_rank_group(2)
    group.join()
    assert group.run(replace_on_rank_0, coalesced=coalesced) == [0.0, 0.0]


INTERRUPTED = """
import random, signal, sys, time
import torch
import torch.distributed as dist
import pyringar as pr

class Alarm(KeyboardInterrupt):
    pass

is_calling = False

def stop(number, frame):
    if is_calling:  # Python 3.11 may call a handler late
        raise Alarm

torch.set_num_threads(1)
if sys.argv[1] == "ranks in one process":
    comm, num_ranks = pr.Communicator(["cpu"] * 2), 2
else:
    comm, num_ranks = pr.ProcessCommunicator(dist.HashStore(), 0, 1), 1

def begin(numel, count):
    lists = [[torch.ones(numel) for _ in range(count)] for _ in range(num_ranks)]
    return comm.all_reduce_coalesced(lists if num_ranks > 1 else lists[0], async_op=True)

signal.signal(signal.SIGALRM, stop)
interrupts, ends = 0, time.monotonic() + 2
while time.monotonic() < ends:
    try:
        is_calling = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-2))
        begin(4000, 300)
        is_calling = False
    except Alarm:
        is_calling = False
        interrupts += 1
        ours = [torch.zeros(4000) for _ in range(300 * num_ranks)]
        while any(not work.is_completed() for work in tuple(comm._in_flight)):
            time.sleep(1e-4)
        assert not any(tensor.any() for tensor in ours), "the call wrote to freed memory"
        begin(1, 1).wait()
        assert len(comm._in_flight) <= 1, "the next call drops finished works"
    signal.setitimer(signal.ITIMER_REAL, 0)
assert interrupts, "no signal interrupted a call"
comm.close()
assert not comm._in_flight
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ranks in one process", "one rank"])
def test_interrupted_call_keeps_memory(where):
    """A signal may arrive after the engine has returned, before the caller has the Work."""
    [done] = run_programs(INTERRUPTED, [where])
    assert (done.returncode, done.stderr) == (0, "")


def test_finalizer_may_wait_for_work(make_comm):
    comm = make_comm(2)
    works: list[Work] = []

    class WaitsWhenCollected:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if works:
                works.pop().wait()

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for _ in range(3000):
            works.append(comm.all_reduce([torch.ones(1), torch.ones(1)], async_op=True))
            WaitsWhenCollected()
    finally:
        gc.set_threshold(*before)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks in processes need Linux")
@pytest.mark.parametrize("collects", [False, True], ids=["closure", "garbage cycle"])
def test_engine_thread_can_free_communicator(collects):
    comm = pr.ProcessCommunicator(dist.HashStore(), 0, 1, name=f"last {collects}", timeout=5)
    held: list[object] = [comm]
    if collects:
        held.append(held)

    def step(held: object) -> None:
        time.sleep(0.2)
        if collects:
            gc.collect()

    gc.disable()
    try:
        last = functools.partial(step, None if collects else held)
        native = comm._submit_step(last)._native
        del comm, held, last
        assert native.wait(5.0)
    finally:
        gc.enable()
