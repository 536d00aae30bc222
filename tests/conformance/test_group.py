"""Groups: order of calls, mismatched calls, close, abort, fork, leaked resources."""

import contextlib
import functools
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import same_bits
from process_checks import PROMPT_S, mapped_memories, open_memories, settled, thread_ids
from promises import promise
from rank_processes import another
from running import CallOutcome, outcome_of
from transports import device_of

import pyringar as pr


def numbers(state, numel: int = 1000) -> torch.Tensor:
    return torch.arange(numel, device=device_of(state)) % 17 + state.rank


def total(state, numel: int = 1000) -> torch.Tensor:
    k = state.world_size
    return (torch.arange(numel, device=device_of(state)) % 17) * k + k * (k - 1) // 2


def times_of_barrier(state, late: int) -> tuple[float, float]:
    if state.rank == late:
        time.sleep(0.3)
    came = time.monotonic()
    state.comm.barrier()
    return came, time.monotonic()


@promise("barrier")
def test_barrier_waits_for_last_rank(transport):
    for late in range(3):
        times = transport.on_ranks(3, times_of_barrier, late=late)
        assert max(came for came, _ in times) <= min(left for _, left in times)


def call_in_background(state) -> None:
    mine, want = numbers(state, 300_000), total(state, 300_000)
    works = [state.comm.all_reduce(mine, async_op=True) for _ in range(5)]
    state.comm.all_reduce(mine)  # the sixth call, after five in the background
    assert torch.equal(mine, want * state.world_size**5)
    for work in works:
        assert work.wait() is True
        assert work.is_completed()
        assert work.exception() is None
    for _ in range(30):
        state.comm.all_reduce(numbers(state, 200_000), async_op=True)
        gc.collect(0)
    mine = numbers(state)
    state.comm.all_reduce(mine)
    assert torch.equal(mine, total(state))


@promise("async-order")
def test_background_calls_run_in_order(transport):
    for k in (1, 3):
        transport.on_ranks(k, call_in_background)


RankCall = Callable[[Any, torch.Tensor], object]


def usual(c: Any, x: torch.Tensor) -> object:
    return c.all_reduce(x)


def gathered(c: Any, x: torch.Tensor) -> object:
    return c.all_gather(x[:3], x[5])


# Each row: the odd rank's call, the other ranks' call, and words of both in the error message.
DIFFERENT: dict[str, tuple[RankCall, RankCall, str, str]] = {
    "size": (lambda c, x: c.all_reduce(x[:10]), usual, "600", "300"),
    "many more": (lambda c, x: c.all_reduce(torch.ones(200_000)), usual, "600", "200000"),
    "dtype": (lambda c, x: c.all_reduce(x.view(torch.int32)), usual, "float32", "int32"),
    "op": (lambda c, x: c.all_reduce(x, "max"), usual, "sum", "max"),
    "mean": (lambda c, x: c.all_reduce(x, "mean"), usual, "sum", "mean|avg"),
    "call": (lambda c, _: c.barrier(), usual, "all_reduce", "barrier"),
    "root": (lambda c, x: c.broadcast(x, 1), lambda c, x: c.broadcast(x), "rank 0", "rank 1"),
    "share": (
        lambda c, x: c.reduce_scatter(x[5, :3], x[10, :9]),
        gathered,
        "all_gather",
        "reduce_scatter",
    ),
    "gathered dtype": (
        lambda c, x: c.all_gather(x[:3].view(torch.int32), x[5].view(torch.int32)),
        gathered,
        "float32",
        "int32",
    ),
    "async": (lambda c, x: c.all_reduce(x[:5], async_op=True).wait(), usual, "600", "150"),
}
# Mismatches in lists of tensors, which torch.distributed does not support.
DIFFERENT_LISTS: dict[str, tuple[RankCall, RankCall, str, str]] = {
    "other sizes": (lambda c, x: c.all_reduce(x.view(30, 20)), usual, "600", "sizes|shapes"),
    "two tensors": (lambda c, x: c.all_reduce([x[:10], x[10:]]), usual, "600", "in 2 tensors"),
    "empty tensor": (lambda c, x: c.all_reduce([x, x[:0]]), usual, "600", "in 2 tensors"),
    "dtype of the second tensor": (
        lambda c, x: c.all_reduce([x[:19], x[19:].view(torch.int32)]),
        lambda c, x: c.all_reduce([x[:19], x[19:]]),
        "600",
        "sizes|shapes",
    ),
    "mixed dtypes": (
        lambda c, x: c.all_reduce([x[:19].view(torch.int32), x[19:]]),
        lambda c, x: c.all_reduce([x[:19], x[19:].view(torch.int32)]),
        "float32",
        "int32",
    ),
}
DIFFERENT_ORDERS: dict[str, tuple[RankCall, RankCall, str, str]] = {
    "order": (lambda c, x: c.all_reduce(x, order="tree"), usual, r"sum\) of 600", "in tree order"),
    "bound op": (lambda c, x: c.bind(x, "max")(), lambda c, x: c.bind(x)(), "sum", "max"),
}
ALL_DIFFERENT = DIFFERENT | DIFFERENT_LISTS | DIFFERENT_ORDERS


def call_different(state, what: str, odd_rank: int) -> tuple[CallOutcome, CallOutcome, bool]:
    odd, others, *_ = ALL_DIFFERENT[what]
    tensor = torch.arange(600.0).view(20, 30) + state.rank
    kept = tensor.clone()
    state.comm.all_reduce(tensor.clone())
    call = odd if state.rank == odd_rank else others
    first = outcome_of(lambda: call(state.comm, tensor))
    return first, outcome_of(lambda: state.comm.all_reduce(tensor)), same_bits(tensor, kept)


def check_different(transport, what: str) -> None:
    *_, words, odd_words = ALL_DIFFERENT[what]
    odd = 1 + list(ALL_DIFFERENT).index(what) % 2
    told = transport.on_new_ranks(3, call_different, what=what, odd_rank=odd)
    for first, again, is_untouched in told:
        assert first.error == "ArgumentError", first
        assert "call different things" in first.text, first
        assert re.search(rf"\b({words})\b", first.text), first
        assert re.search(rf"\b({odd_words})\b", first.text), first
        assert first.seconds < PROMPT_S, "it waited for a deadline"
        assert again.error == "ArgumentError", "the group goes on"
        assert is_untouched


RANKS = ("processes", "launch", "backend", "machines")


@promise("mismatch", "failed", only=RANKS)
@pytest.mark.parametrize("what", DIFFERENT)
def test_mismatched_calls_raise(transport, what):
    check_different(transport, what)


@promise("mismatch", "tuples", only=RANKS)
@pytest.mark.parametrize("what", DIFFERENT_LISTS)
def test_mismatched_lists_raise(transport, what):
    check_different(transport, what)


@promise("mismatch", "order-exact", only=RANKS)
@pytest.mark.parametrize("what", DIFFERENT_ORDERS)
def test_mismatched_orders_raise(transport, what):
    check_different(transport, what)


def close_early(state, has_bind: bool) -> None:
    bound = state.comm.bind(numbers(state, 4)) if has_bind else None
    mine = numbers(state, 500_000)
    work = state.comm.all_reduce(mine, async_op=True)
    state.comm.close()
    assert work.is_completed()
    assert torch.equal(mine, total(state, 500_000))
    state.comm.close()
    mine, part = numbers(state, 4), numbers(state, 4)[:2].clone()
    others = [lambda: state.comm.bind(mine), bound, state.comm.check] if has_bind else []
    for call in (
        *others,
        lambda: state.comm.all_reduce(mine),
        lambda: state.comm.all_reduce(mine, async_op=True),
        lambda: state.comm.all_reduce_coalesced([mine]),
        lambda: state.comm.reduce_scatter(part, mine),
        lambda: state.comm.all_gather(mine, part),
        lambda: state.comm.broadcast(mine),
    ):
        with pytest.raises(pr.RingarError, match="closed"):
            call()
    assert torch.equal(mine, numbers(state, 4))


def destroy_group(state) -> None:
    mine, group = numbers(state), dist.distributed_c10d._get_default_group()
    work = dist.all_reduce(mine, async_op=True)
    dist.destroy_process_group()
    work.wait()
    assert torch.equal(mine, total(state))
    for call in (
        lambda: group.allreduce([mine]).wait(),
        lambda: group.broadcast([mine], 0).wait(),
        lambda: group.barrier().wait(),
    ):
        with pytest.raises(pr.RingarError, match=r"closed|destroyed"):
            call()
    assert torch.equal(mine, total(state))


@promise("close", only=("launch", "backend"))
def test_destroyed_group_raises(transport):
    transport.on_new_ranks(2, destroy_group)


@promise("close", only=("threads", "cuda", "processes", "machines"))
def test_close_finishes_background_calls(transport):
    has_bind = "bind" in transport.entries
    transport.on_new_ranks(2, close_early, has_bind=has_bind)


# How rank 0's call ends: its error, words of its message, and words of the other ranks' messages.
ENDS = {
    "raise": ("KeyboardInterrupt", "", "KeyboardInterrupt|interrupted|rank 0"),
    "close": ("RingarError", "closed while a call waited", "closed while|rank 0"),
    "abort": ("RingarError", "aborted the group", "aborted the group"),
}


def end_wait(state, how: str, wait: str) -> tuple[str, str, float]:
    comm, store = state.comm, state.store
    mine = numbers(state)
    comm.barrier()
    if state.rank > 0:
        store.wait([f"{state.name} ended"], timedelta(seconds=40))
        told = outcome_of(lambda: comm.all_reduce(mine))
        return told.error, told.text, told.seconds
    waits = {
        "call": lambda: comm.all_reduce(mine),
        "work": lambda: comm.all_reduce(mine, async_op=True).wait(),
        "barrier": comm.barrier,
    }
    if how == "abort":
        threading.Timer(0.3, comm.abort).start()
    else:
        handle = signal.default_int_handler if how == "raise" else lambda *_: comm.close()
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        waits[wait]()
        error = "none", ""
    except BaseException as caught:
        error = type(caught).__name__, str(caught)
    seconds = time.monotonic() - began
    if wait == "work" and how == "raise":  # the work still runs: abort it
        with contextlib.suppress(pr.RingarError):
            comm.abort() if hasattr(comm, "abort") else dist.group.WORLD.abort()
    assert torch.equal(mine, numbers(state))
    assert outcome_of(lambda: comm.all_reduce(numbers(state))).error != "none"
    store.set(f"{state.name} ended", "")
    return *error, seconds


def check_end(transport, how: str, wait: str) -> None:
    error, own_words, words = ENDS[how]
    (own, text, seconds), *others = transport.on_new_ranks(3, end_wait, how=how, wait=wait)
    assert own == error, text
    assert re.search(own_words, text), text
    assert seconds < 0.3 + PROMPT_S
    for other, told, _ in others:
        assert other in ("PeerLostError", "RingarError"), told
        assert re.search(words, told), told


@promise("interrupt", only=("processes", "backend", "machines"))
@pytest.mark.parametrize("wait", ["call", "work", "barrier"])
def test_signal_handler_exception_ends_call(transport, wait):
    check_end(transport, "raise", wait)


@promise("close", only=("machines",))
def test_signal_handler_may_close_group(transport):
    check_end(transport, "close", "call")


@promise("abort", only=("processes", "machines"))
@pytest.mark.parametrize("wait", ["call", "work"])
def test_abort_ends_calls_on_all_ranks(transport, wait):
    check_end(transport, "abort", wait)


def fork_child(state) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        told = outcome_of(lambda: state.comm.all_reduce(numbers(state)))
        os.write(writer, f"{told.error} {told.text}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    mine = numbers(state)
    state.comm.all_reduce(mine)
    assert torch.equal(mine, total(state))
    return text


@promise("fork", only=("processes", "backend", "machines"))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_call_in_forked_child_raises(transport):
    for text in transport.on_new_ranks(2, fork_child):
        assert text.startswith("RingarError"), text
        assert "before fork()" in text, text


def held_now(first: set[str]) -> tuple[int, set[str], list[str]]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), thread_ids() - first, mapped_memories()


def make_and_drop(state) -> None:
    with another(state):
        pass  # the first communicator opens files and threads that stay
    first = thread_ids()
    held = functools.partial(held_now, first)
    before = held()
    for turn in range(4):
        comm = another(state)
        assert open_memories() == [], "not sealed"
        comm.all_reduce(numbers(state), async_op=True).wait()
        if turn % 2:
            comm.close()
        del comm
    after = settled(held, before)
    assert after == before, f"{before} before, {after} now"


@promise("nothing-left", only=("processes", "machines"))
def test_dropped_communicators_free_all_resources(transport):
    transport.on_new_ranks(2, make_and_drop)
