"""Are arrays of other libraries reduced where they lie?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pyringar as pr


def arrays(world_size: int, numel: int = 1000) -> list[np.ndarray]:
    return [
        np.random.default_rng(rank).standard_normal(numel, dtype=np.float32)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("algorithm", ["fused", "direct", "ring"])
def test_numpy_arrays_are_written_in_place(algorithm):
    mine = arrays(3)
    expected = [torch.from_numpy(a.copy()) for a in mine]
    before = [a.ctypes.data for a in mine]
    with pr.Communicator(["cpu"] * 3, algorithm=algorithm) as comm:
        comm.all_reduce(expected)
        comm.all_reduce(mine)
    for array, address, want in zip(mine, before, expected, strict=True):
        assert array.ctypes.data == address
        assert np.array_equal(array, want.numpy())


def test_arrays_and_tensors_may_be_mixed_in_every_collective():
    a, b = arrays(2, 8)
    total = torch.from_numpy(a) + torch.from_numpy(b)
    with pr.Communicator(["cpu"] * 2) as comm:
        comm.all_reduce_coalesced([[a], [torch.from_numpy(b)]])
        assert np.array_equal(a, total.numpy())
        assert np.array_equal(b, total.numpy())
        halves = [np.zeros(4, dtype=np.float32) for _ in range(2)]
        comm.reduce_scatter(halves, [a, b], "max")
        assert np.array_equal(np.concatenate(halves), a)
        comm.all_gather([a, b], halves)
        assert np.array_equal(a, total.numpy())
        a[:] = 7
        comm.broadcast([a, b])
        assert (b == 7).all()


def test_an_asynchronous_call_keeps_arrays_alive():
    with pr.Communicator(["cpu"] * 2) as comm:
        work = comm.all_reduce(arrays(2, 1 << 20), async_op=True)
        work.wait()


def test_arrays_that_share_memory_are_refused():
    a = arrays(1)[0]
    with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] shares memory with tensors\[0\]"):
        pr.allreduce([a, a])
