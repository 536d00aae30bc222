"""Do bits depend on whether the caller's thread flushes denormals (torch.set_flush_denormal)?"""

from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch
from cases import mostly_slow
from oracle import ALGORITHMS, FLOATS, assert_all_ranks, expected, positional

import pyringar as pr
from pyringar.comm.float_mode import default_float_mode


@pytest.fixture(autouse=True)
def _keeps_denormals():
    yield
    torch.set_flush_denormal(False)


def flushes() -> bool:
    return sys.float_info.min / 2 == 0


def test_the_mode_is_that_of_one_thread_and_comes_back():
    assert torch.set_flush_denormal(True)
    assert flushes()
    with default_float_mode():
        assert not flushes()
        torch.set_flush_denormal(False)
    assert flushes()
    with pytest.raises(ZeroDivisionError), default_float_mode():
        assert 1 / 0
    assert flushes()
    in_another = []
    with default_float_mode():
        thread = threading.Thread(target=lambda: in_another.append(flushes()))
        thread.start()
        thread.join()
    assert in_another == [False]
    torch.set_flush_denormal(False)
    with default_float_mode():
        assert not flushes()
    assert not flushes()


def denormals(numel, dtype, rank):
    tiny = torch.finfo(dtype).smallest_normal / 32
    return (positional(numel, dtype, rank).double() * tiny).to(dtype)


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("algorithm", mostly_slow(ALGORITHMS, "ring", "fused"))
def test_denormals_in_the_callers_mode(comm_of, algorithm):
    """Many elements too, which torch computes in threads that have a mode of their own."""
    for dtype, numel in itertools.product(FLOATS, (1009, 36_003)):
        parts = [denormals(numel, dtype, rank) for rank in range(3)]
        assert (parts[0] > 0).all()
        for op in ("sum", "mean"):
            wanted = expected(parts, op, algorithm)
            tensors = [p.clone() for p in parts]
            torch.set_flush_denormal(True)
            comm_of(3).all_reduce(tensors, op, algorithm=algorithm)
            assert flushes()
            torch.set_flush_denormal(False)
            assert_all_ranks(tensors, wanted, f"{algorithm} {op} {dtype} {numel}")


def test_denormals_in_the_books_call():
    torch.set_flush_denormal(True)
    tensors = [torch.tensor([1], dtype=torch.int32).view(torch.float32) for _ in range(2)]
    pr.allreduce(tensors)
    assert [t.view(torch.int32).item() for t in tensors] == [2, 2]
