"""Is a repeated all-reduce checked once, and again when anything about its tensors changes?"""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import assert_all_ranks, expected
from torch import Tensor

import pyringar as pr

K = 3
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.cuda, NO_GPU])]


@pytest.fixture(params=DEVICES)
def comm(request):
    with pr.Communicator([request.param] * K, order="rank") as made:
        yield made


def ranks_of(comm, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator) * 9).to(dtype).to(device)
        for device in comm.devices
    ]


def assert_reduces(comm, tensors, op: str = "sum", **more) -> None:
    """Reduce in place twice, the second time on values that were written in between."""
    for _ in range(2):
        before = [tensor.detach().cpu().clone() for tensor in tensors]
        comm.all_reduce(tensors, op, **more)
        wanted = expected(before, op, "fused", more.get("order") or "rank")
        assert_all_ranks([tensor.detach().cpu() for tensor in tensors], wanted, op)
        for rank, tensor in enumerate(tensors):
            tensor.detach().mul_(rank + 2)


def test_repeated_call_has_same_bits(comm):
    tensors = ranks_of(comm, 1031)
    for op in ("sum", "mean", "max", "sum"):
        assert_reduces(comm, tensors, op)
        assert_reduces(comm, tuple(tensors), op)
    assert_reduces(comm, tensors, order="tree")


def test_repeated_call_counts_versions(comm):
    tensors = ranks_of(comm, 7)
    before = [tensor._version for tensor in tensors]
    for _ in range(3):
        comm.all_reduce(tensors)
    assert [tensor._version - was for tensor, was in zip(tensors, before, strict=True)] == [3] * K


def test_new_memory_is_reduced(comm):
    tensors = ranks_of(comm, 33)
    assert_reduces(comm, tensors)
    old = tensors[1].data
    kept = old.clone()
    tensors[1].data = ranks_of(comm, 33, seed=5)[1]
    assert_reduces(comm, tensors)
    assert torch.equal(old, kept)
    tensors[2].set_(ranks_of(comm, 33, seed=6)[2])
    assert_reduces(comm, tensors)


def test_other_views_of_the_same_memory(comm):
    tensors = ranks_of(comm, 6, 4)
    assert_reduces(comm, tensors)
    assert_reduces(comm, [tensor[:3] for tensor in tensors])
    assert_reduces(comm, [tensor.flatten() for tensor in tensors])
    assert_reduces(comm, [tensor.view(torch.int32) for tensor in tensors])
    assert_reduces(comm, [tensor.t() for tensor in tensors])
    assert_reduces(comm, [tensor[:, ::2] for tensor in tensors])
    assert_reduces(comm, [torch._neg_view(tensor) for tensor in tensors])
    assert_reduces(comm, tensors)


@pytest.mark.parametrize("is_new_object", [True, False], ids=["new object", "new data"])
def test_negated_view_is_noticed(comm, is_new_object):
    base = ranks_of(comm, 8)
    views = [tensor.view(8) for tensor in base]
    for _ in range(20):
        if is_new_object:  # at the address of a view that is gone
            views = [tensor.view(8) for tensor in base]
        views[0].data = base[0]
        assert_reduces(comm, views)
        if is_new_object:
            views = []
            views = [torch._neg_view(base[0]), *(tensor.view(8) for tensor in base[1:])]
        else:
            views[0].data = torch._neg_view(base[0])
        assert_reduces(comm, views)


def test_memory_that_changes_during_the_call():
    """A signal handler changes it, while the call waits for a late rank."""
    with pr.Communicator(["cpu"] * K, algorithm="direct", order="rank") as comm:
        old = ranks_of(comm, 33)
        tensors = [tensor.view(33) for tensor in old]
        new = ranks_of(comm, 33, seed=5)

        def change(*_: object) -> None:
            for tensor, memory in zip(tensors, new, strict=True):
                tensor.data = memory

        comm.all_reduce(tensors)
        comm._group.delay_rank(1, 0.5)
        handler = signal.signal(signal.SIGALRM, change)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            comm.all_reduce(tensors)
        finally:
            signal.signal(signal.SIGALRM, handler)
        assert tensors[0].data_ptr() == new[0].data_ptr()
        comm._group.delay_rank(1, 0)
        assert_reduces(comm, tensors)


def test_mixed_layouts_are_matched_by_index(comm):
    tensors = ranks_of(comm, 4, 4)
    assert_reduces(comm, tensors)
    assert_reduces(comm, [tensors[0].t(), *tensors[1:]])


def test_repeated_call_refuses_bad_arguments(comm):
    tensors = ranks_of(comm, 9)
    assert_reduces(comm, tensors)
    for bad, message in [
        ([tensors[0], tensors[0], tensors[2]], "shares memory"),
        (tensors[:-1], "has 2 entries, expected 3"),
        ([*tensors[:-1], None], r"tensors\[2\] is None"),
        ([*tensors[:-1], tensors[2][:4]], r"shape \(4,\)"),
        (tensors[0], "is a Tensor, expected a list"),
    ]:
        kept = [tensor.clone() for tensor in tensors]
        with pytest.raises(pr.ArgumentError, match=message):
            comm.all_reduce(bad)
        assert all(torch.equal(*pair) for pair in zip(tensors, kept, strict=True))
    for algorithm in ("fusd", ["fused"]):
        with pytest.raises(pr.ArgumentError, match="algorithm") as refused:
            comm.all_reduce(tensors, algorithm=algorithm)
        assert refused.value.__context__ is None
    assert_reduces(comm, tensors)


def test_tensor_that_requires_grad_is_refused(comm):
    tensors = ranks_of(comm, 9)
    assert_reduces(comm, tensors)
    tensors[1].requires_grad_()
    with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] requires grad"):
        comm.all_reduce(tensors)
    with torch.no_grad():
        assert_reduces(comm, tensors)


def test_lists_are_cut_as_given(comm):
    lists = [[tensor[:5], tensor[5:]] for tensor in ranks_of(comm, 12)]
    flat = [tensor for mine in lists for tensor in mine]
    for _ in range(2):
        before = [[tensor.cpu().clone() for tensor in mine] for mine in lists]
        comm.all_reduce_coalesced(lists)
        for i in range(2):
            wanted = expected([mine[i] for mine in before], "sum", "fused", "rank")
            assert_all_ranks([mine[i].cpu() for mine in lists], wanted)
    with pytest.raises(pr.ArgumentError, match="expected 3"):
        comm.all_reduce_coalesced([flat[:3], flat[3:]])
    with pytest.raises(pr.ArgumentError, match=r"lists\[1\] has 1 entry, expected 2"):
        comm.all_reduce_coalesced([lists[0], lists[1][:1], lists[2]])


def test_nothing_is_kept_alive(comm):
    tensors = ranks_of(comm, 4096)
    comm.all_reduce(tensors)
    watches = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    gc.collect()
    assert [watch() for watch in watches] == [None] * K


def test_closed_communicator_refuses_again():
    comm = pr.Communicator(["cpu"] * K)
    tensors = ranks_of(comm, 5)
    comm.all_reduce(tensors)
    comm.close()
    with pytest.raises(pr.RingarError, match="closed"):
        comm.all_reduce(tensors)


def test_random_calls_have_right_bits(comm):
    draw = random.Random(7)
    pool = [ranks_of(comm, 64, seed=seed) for seed in range(4)]
    for step in range(400):
        tensors = list(draw.choice(pool))
        begin = draw.choice([0, 0, 0, 1, 8])
        end = draw.choice([64, 64, 64, 33])
        tensors = [tensor[begin:end] for tensor in tensors]
        if draw.random() < 0.2:
            draw.shuffle(tensors)
        before = [tensor.cpu().clone() for tensor in tensors]
        op = draw.choice(["sum", "max", "mean"])
        comm.all_reduce(tensors, op)
        wanted = expected(before, op, "fused", "rank")
        assert_all_ranks([tensor.cpu() for tensor in tensors], wanted, step)
        for rank, tensor in enumerate(tensors):
            tensor.copy_(before[rank]).add_(rank)


def test_more_calls_than_are_kept(comm):
    pool = [ranks_of(comm, 3, seed=seed) for seed in range(150)]
    for tensors in pool * 2:
        assert_reduces(comm, tensors)


def test_threads_share_the_calls(comm):
    pool = [ranks_of(comm, 257, seed=seed) for seed in range(6)]

    def run(tensors: list[Tensor]) -> None:
        for _ in range(30):
            assert_reduces(comm, tensors)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(run, pool))


def test_threads_reduce_new_views(comm):
    """Reading a view gives the GIL away: other threads replace calls meanwhile."""
    base = ranks_of(comm, 300)
    is_done = threading.Event()
    interval = sys.getswitchinterval()

    def replace_calls() -> None:
        pool = [ranks_of(comm, 3, seed=seed) for seed in range(70)]
        while not is_done.is_set():
            for tensors in pool:
                comm.all_reduce(tensors)

    def reduce_views() -> None:
        try:
            for _ in range(60):
                views = [[tensor[i : i + 1] for i in range(300)] for tensor in base]
                comm.all_reduce_coalesced(views, "max")
        finally:
            is_done.set()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda run: run(), [reduce_views, replace_calls, replace_calls]))
    finally:
        sys.setswitchinterval(interval)
