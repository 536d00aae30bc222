"""Does a call in the background keep the memory it uses, whatever becomes of the tensors?

Tensors lie in NumPy arrays here: those go when the last that uses their memory does, and say so.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

import pyringar as pr

NUMEL = 5000


class Memory:
    """Tensors whose memory can be seen to go."""

    def __init__(self, count: int, numel: int = NUMEL) -> None:
        arrays = [np.arange(numel, dtype=np.float32) % 17 + i for i in range(count)]
        self.tensors = [torch.from_numpy(array) for array in arrays]
        self._arrays = [weakref.ref(array) for array in arrays]

    def replace_data(self) -> None:
        """Give the tensors other memory, so that they do not keep this."""
        for tensor in self.tensors:
            tensor.data = torch.zeros(tensor.numel())

    def num_alive(self) -> int:
        return sum(array() is not None for array in self._arrays)


Start = Callable[[pr.Communicator, Sequence[torch.Tensor], Sequence[torch.Tensor]], pr.Work]
CALLS: dict[str, Start] = {
    "all_reduce": lambda comm, a, b: comm.all_reduce(a, async_op=True),
    "all_reduce_coalesced": lambda comm, a, b: comm.all_reduce_coalesced(
        [[x] for x in a], async_op=True
    ),
    "reduce_scatter": lambda comm, a, b: comm.reduce_scatter(b, a, async_op=True),
    "all_gather": lambda comm, a, b: comm.all_gather(a, b, async_op=True),
    "broadcast": lambda comm, a, b: comm.broadcast(a, async_op=True),
}


@pytest.mark.parametrize("call", CALLS)
def test_new_data_while_it_waits(call):
    with pr.Communicator(["cpu"] * 2) as comm:
        comm._group.delay_rank(1, 1.0)
        before = [torch.ones(8), torch.ones(8)]
        first = comm.all_reduce(before, algorithm="ring", async_op=True)
        large, small = Memory(2), Memory(2, NUMEL // 2)
        work = CALLS[call](comm, large.tensors, small.tensors)
        for memory in (large, small):
            memory.replace_data()
        assert not first.is_completed(), "too late to see anything"
        is_used = call in ("reduce_scatter", "all_gather")
        assert [large.num_alive(), small.num_alive()] == [2, 2 if is_used else 0]
        work.wait()
        assert work.is_completed()
        del work
        assert [large.num_alive(), small.num_alive()] == [0, 0]
        for tensor in (*large.tensors, *small.tensors):
            assert not tensor.any(), "the new memory was written"


def on_rank_replaces(state, coalesced: bool) -> float:
    memory = Memory(3)
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
def test_new_data_of_a_rank_while_others_are_late(new_crew, coalesced):
    crew = new_crew(2)
    crew.join()
    assert crew.run(on_rank_replaces, coalesced=coalesced) == [0.0, 0.0]
