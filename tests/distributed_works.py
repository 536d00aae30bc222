"""Cases of ``test_distributed.py`` for Work objects: poll, drop, compare with gloo."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import assert_equal, values
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from pyringar.distributed.torch_works import PendingWork

Case = Callable[[int, int], None]
LATE_S = 30.0
HAS_EXCEPTIONS = torch.__version__.split(".")[:2] >= ["2", "14"]  # in 2.11, exception() raises
N = 5


def store() -> Any:
    return dist.distributed_c10d._get_default_store()


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LATE_S
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def assert_alike(actual: Any, expected: Any, context: str) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), (context, actual)
        assert actual.shape == expected.shape, (context, actual, expected)
        assert_equal(actual, expected, context)
        return
    assert isinstance(actual, list), (context, actual)
    assert len(actual) == len(expected), (context, actual, expected)
    for one, other in zip(actual, expected, strict=True):
        assert_alike(one, other, context)


def numbers(rank: int, numel: int = N) -> Tensor:
    """Return integers as floats, so that sums are exact in any order."""
    return torch.arange(numel, dtype=torch.float32) % 17 + 10 * rank + 1


def calls(rank: int, size: int) -> dict[str, tuple[Callable[..., Any], Sequence[Any], Any]]:
    x, short, whole = numbers(rank), numbers(rank, 2), numbers(rank, N * size)
    out, outs = torch.zeros(N), torch.zeros(N * size)
    rows = [torch.zeros(N) for _ in range(size)]
    pairs = [[torch.zeros(N), torch.zeros(2)] for _ in range(size)]
    is_root = rank == 0
    parts = [numbers(r) for r in range(size)] if is_root else None
    scattered = [numbers(rank + 3 * i) for i in range(size)]
    return {
        "all_reduce": (dist.all_reduce, [x], x),
        "all_reduce_coalesced": (dist.all_reduce_coalesced, [[x, short]], [x, short]),
        "broadcast": (dist.broadcast, [x, 1], x),
        "all_gather": (dist.all_gather, [rows, x], rows),
        "all_gather_into_tensor": (dist.all_gather_into_tensor, [outs, x], outs),
        "all_gather_coalesced": (dist.all_gather_coalesced, [pairs, [x, short]], pairs),
        "reduce_scatter": (dist.reduce_scatter, [out, scattered], out),
        "reduce_scatter_tensor": (dist.reduce_scatter_tensor, [out, whole], out),
        "barrier": (dist.barrier, [], []),
        "reduce": (dist.reduce, [x, 1], x if rank == 1 else []),
        "gather": (dist.gather, [x, rows if is_root else None, 0], rows if is_root else []),
        "scatter": (dist.scatter, [out, parts, 0], out),
        "all_to_all": (dist.all_to_all_single, [outs, whole], outs),
    }


COLLECTIVES = tuple(calls(0, 2))


def begin(name: str, rank: int, size: int, group: Any = None) -> tuple[Any, Any]:
    call, arguments, written = calls(rank, size)[name]
    return call(*arguments, group=group, async_op=True), written


def total_of(size: int) -> Tensor:
    return sum((numbers(r) for r in range(size)), torch.zeros(N))


def is_future(handle: Any) -> bool:
    return not hasattr(handle, "is_completed")


def answers(rank: int, size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for name in COLLECTIVES:
        control, expected = begin(name, rank, size, gloo)
        handle, written = begin(name, rank, size)
        control.wait()
        if is_future(handle):
            assert_alike(handle.wait(), control.value(), name)
            continue
        wait_until(handle.is_completed, f"{name} is never completed")
        assert handle.is_success(), name
        if isinstance(handle, PendingWork) or HAS_EXCEPTIONS:
            assert handle.exception() is None, name
        assert_alike(written, expected, name)
        assert handle.wait() is True, name
        assert handle.is_completed(), name
        assert handle.get_future().done(), f"{name}: the future of a finished work"
        if "reduce_scatter" in name:  # the gloo Work has no future
            assert_alike(handle.get_future().value(), [expected], name)
        elif name == "reduce" and rank != 1:  # gloo writes partial sums on these ranks
            assert_alike(handle.get_future().value(), [numbers(rank)], name)
        else:
            assert_alike(handle.get_future().value(), control.get_future().wait(), name)
        assert_alike(handle.result(), handle.get_future().value(), name)


def answers_while_it_runs(rank: int, size: int) -> None:
    x = numbers(rank)
    if rank == 1:
        store().wait(["asked"])
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        for _ in range(3):
            assert not work.is_completed()
            assert not work.is_success()
            assert work.exception() is None
        assert not work.get_future().done()
        store().set("asked", "")
    assert_alike(work.get_future().wait(), work.result(), "future")


def converted(rank: int, size: int, group: Any = None) -> list[tuple[str, Any, Any]]:
    """Begin calls that run on temporary copies; return (name, tensors, expected) of each."""
    begun: list[tuple[str, Any, Any]] = []
    mine = numbers(rank).to(torch.int16)
    dist.all_reduce(mine, group=group, async_op=True)
    begun.append(("all_reduce", mine, total_of(size).to(torch.int16)))
    flags = (
        torch.zeros(N, 2, dtype=torch.bool).t() if rank else values(2 * N, torch.bool, 3).view(2, N)
    )
    dist.broadcast(flags, 0, group=group, async_op=True)
    begun.append(("broadcast bool", flags, values(2 * N, torch.bool, 3).view(2, N)))
    rows = [torch.zeros(2 + r) for r in range(size)]
    dist.all_gather(rows, numbers(rank, 2 + rank), group=group, async_op=True)
    begun.append(("uneven all_gather", rows, [numbers(r, 2 + r) for r in range(size)]))
    out = torch.zeros(2 + rank)
    uneven = [numbers(rank, 2 + r) for r in range(size)]
    dist.reduce_scatter(out, uneven, group=group, async_op=True)
    total = sum((numbers(r, 2 + rank) for r in range(size)), torch.zeros(2 + rank))
    begun.append(("uneven reduce_scatter", out, total))
    return begun


def results_without_waits(rank: int, size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for asynchronous in (False, True):
        for name in COLLECTIVES:
            control, expected = begin(name, rank, size, gloo)
            control.wait()
            written = begin(name, rank, size)[1]
            work = dist.barrier(async_op=asynchronous)
            if work is not None:
                work.wait()
            assert_alike(written, expected, name)
    other = dist.new_group()
    ends = {None: dist.barrier, other: lambda: dist.destroy_process_group(other)}
    for group, end_all in ends.items():
        begun = converted(rank, size, group)
        rows = begin("all_gather", rank, size, group)[1]
        end_all()
        for name, tensors, wanted in begun:
            assert_alike(tensors, wanted, name)
        assert_alike(rows, [numbers(r) for r in range(size)], "all_gather")


def later_calls_see_the_result(rank: int, size: int) -> None:
    for asynchronous in (False, True):
        small = torch.full((N,), rank + 1, dtype=torch.int16)
        rows = [torch.zeros(N) for _ in range(size)]
        out, total = torch.zeros(N), torch.zeros(size * N)
        if rank == size - 1:
            store().wait([f"begun {asynchronous}"])
        works = [
            dist.all_reduce(small, async_op=True),
            dist.all_gather(rows, numbers(rank), async_op=True),
            dist.all_reduce(small, async_op=True),
            dist.reduce_scatter(out, rows, async_op=True),
        ]
        if rank == 0:
            assert not any(work.is_completed() for work in works)
            store().set(f"begun {asynchronous}", "")
        last = dist.all_gather_into_tensor(total, out, async_op=asynchronous)
        if last is not None:
            last.wait()
        sum_of_ranks = size * (size + 1) // 2
        assert_equal(small, torch.full((N,), sum_of_ranks * size, dtype=torch.int16))
        assert_equal(total, torch.cat([size * numbers(r) for r in range(size)]))


def in_inference_mode(rank: int, size: int) -> None:
    with torch.inference_mode():
        begun = converted(rank, size)
        work, rows = begin("all_gather", rank, size)
        begun.append(("all_gather", rows, [numbers(r) for r in range(size)]))
    work.wait()
    dist.barrier()
    for name, tensors, expected in begun:
        assert_alike(tensors, expected, name)


def future_of(x: Tensor) -> Any:
    return dist.all_reduce(x, async_op=True).get_future()


def num_future_threads() -> int:
    return sum("pyringar futures" in thread.name for thread in threading.enumerate())


def callbacks_wait(rank: int, size: int) -> None:
    total = total_of(size)

    def nested(depth: int) -> Tensor:
        x = numbers(rank)
        future = future_of(x)
        if depth:
            future = future.then(lambda _: nested(depth - 1))
        future.wait()
        return x

    for _ in range(2):
        assert_equal(nested(6), total)
    assert num_future_threads() <= 9


def power_sgd(rank: int, size: int) -> None:
    """Train with one bucket: ranks may run the callbacks of several buckets in different orders."""
    trained = []
    for group in (dist.new_group(backend="gloo"), dist.new_group()):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(16, 16), process_group=group)
        state = PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook)
        torch.manual_seed(rank)
        for _ in range(4):
            ddp(torch.randn(8, 16)).square().mean().backward()
        trained.append(ddp.module.weight.grad)
    assert_equal(*trained)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        answers,
        answers_while_it_runs,
        results_without_waits,
        later_calls_see_the_result,
        in_inference_mode,
        callbacks_wait,
    )
}


def peer_killed(rank: int, size: int) -> Any:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rows = [torch.zeros(N) for _ in range(size)]
    works = [
        dist.all_reduce(numbers(rank), async_op=True),
        dist.all_gather(rows, numbers(rank), async_op=True),
    ]
    for work in works:
        wait_until(work.is_completed, "a work whose peer was killed is never completed")
    answers = [(work.is_success(), type(work.exception()).__name__) for work in works]
    late = [work.get_future() for work in works]
    assert all(future.done() for future in late)
    with pytest.raises(RuntimeError, match="rank 1"):
        late[0].wait()
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()
    return answers, [row.tolist() for row in rows]
