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


@pytest.mark.parametrize("algorithm", ["fused", "direct", "ring", "naive", "sharded"])
def test_arrays_in_tuples(algorithm):
    """The caller's own tuples, which keep their arrays."""
    a, b = arrays(2, 8)
    total = a + b
    with pr.Communicator(["cpu"] * 2, algorithm=algorithm) as comm:
        both = (a, b)
        comm.all_reduce(both)
        assert both[0] is a
        assert both[1] is b
        assert np.array_equal(a, total)
        assert np.array_equal(b, total)
        nested = ((a,), (b,))
        comm.all_reduce_coalesced(nested, "max")
        assert nested[0][0] is a
        assert np.array_equal(b, total)
        if algorithm in ("naive", "sharded"):
            return
        halves = (np.zeros(4, dtype=np.float32), np.zeros(4, dtype=np.float32))
        comm.reduce_scatter(halves, (a, b), "max")
        comm.all_gather((a, b), halves)
        comm.broadcast((a, b))
        assert np.array_equal(a, total)
    pr.allreduce((a, b))
    assert np.array_equal(b, total + total)


class Hostile:
    """Says that it is an array, and fails when it is asked."""

    def __init__(self, error: BaseException | None = None, **attributes: object) -> None:
        self._error = error
        self.__dict__.update(attributes)

    def __dlpack__(self, **_options: object) -> object:
        if self._error is not None:
            raise self._error
        return "no capsule"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("make", [list, tuple])
def test_what_an_array_raises_is_raised(make):
    comm = pr.Communicator(["cpu"] * 2)
    cases = [
        (Hostile(KeyError("mine")), KeyError, "mine"),
        (Hostile(KeyboardInterrupt("now")), KeyboardInterrupt, "now"),
        (Hostile(), Exception, "capsule|PyCapsule|dlpack|DLPack"),
        (Hostile(__array_interface__=5), pr.ArgumentError, "Hostile's __array_interface__ is 5"),
        (Hostile(__array_interface__={}), pr.ArgumentError, "__array_interface__ is {}"),
    ]
    for hostile, error, words in cases:
        for call, tensors in (
            (pr.allreduce, make([torch.ones(2), hostile])),
            (comm.all_reduce, make([hostile, torch.ones(2)])),
            (comm.all_reduce_coalesced, make([make([torch.ones(2)]), make([hostile])])),
            (comm.broadcast, make([torch.ones(2), hostile])),
        ):
            with pytest.raises(error, match=words) as raised:
                call(tensors)
            assert not isinstance(raised.value, SystemError)
    comm.all_reduce([torch.ones(2), torch.ones(2)])  # as usable as before
    comm.close()


def test_names_that_no_encoding_has(comm_of):
    with pytest.raises(pr.ArgumentError, match=r"algorithm is '.udc80', expected one of fused"):
        comm_of(2)._group.all_reduce([torch.ones(2), torch.ones(2)], "sum", "\udc80", "rank", None)


def test_an_asynchronous_call_keeps_arrays_alive():
    with pr.Communicator(["cpu"] * 2) as comm:
        work = comm.all_reduce(arrays(2, 1 << 20), async_op=True)
        work.wait()


def test_arrays_that_share_memory_are_refused():
    a = arrays(1)[0]
    with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] shares memory with tensors\[0\]"):
        pr.allreduce([a, a])
