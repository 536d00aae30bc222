"""Timeouts apply to stopped ranks, not to long calls.

Ranks are stopped repeatedly to make calls long.
"""

from __future__ import annotations

import contextlib
import functools
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from case_marks import mostly_slow
from oracle import assert_bits
from process_checks import stop_in
from rank_processes import LONG_S, RankProcess, value_of

import pyringar as pr

TIMEOUT_S = 1.0
# A rank is stopped for STOPPED_S, then runs for RUNNING_S of processor time, and is stopped again.
# In RUNNING_S a rank joins the call (1 ms) or packs 512 KiB (0.3 to 9 ms), so that others see its
# progress. It is short enough for several stops per call.
STOPPED_S = 0.4
RUNNING_S = 0.02
LARGE = 1 << 25  # elements: 128 MiB
SMALL = 1000
# On a busy machine, a timeout error may come this many seconds late.
BUSY_S = 3.0


def filled(numel: int, rank: int) -> torch.Tensor:
    part = torch.arange(17, dtype=torch.float32) + rank
    return part.repeat(numel // 17 + 1)[:numel].clone()


def expected(numel: int, world_size: int) -> torch.Tensor:
    return filled(numel, 0) * world_size + sum(range(world_size))


def prepare(state, numel: int, how: str) -> None:
    if how == "local ring":  # ranks in one process
        numel, count, rank = 2 * numel, 3, 0
        comm = pr.Communicator(["cpu"] * count, timeout=TIMEOUT_S)
        state.tensors = [filled(numel, i) for i in range(count)]
        state.call = functools.partial(comm.all_reduce, state.tensors, algorithm="ring")
    else:
        count, rank = state.world_size, state.rank
        tensor = torch.empty(2 * numel)[::2] if how == "strided" else torch.empty(numel)
        tensor.copy_(filled(numel, rank))
        state.tensors = [tensor]
        state.call = functools.partial(state.comm.all_reduce, tensor)
    state.expected = expected(numel, count)


def reduce(state) -> float:
    began = time.monotonic()
    state.call()
    seconds = time.monotonic() - began
    for tensor in state.tensors:
        assert_bits(tensor, state.expected)
    return seconds


def processor_s(rank: RankProcess) -> float:
    return int(Path(f"/proc/{rank.pid}/schedstat").read_text().split()[0]) * 1e-9


@contextlib.contextmanager
def stopped_repeatedly(rank: RankProcess) -> Iterator[None]:
    is_over = threading.Event()
    ran_s = processor_s(rank)

    def let_run(at_most_s: float) -> None:
        began = time.monotonic()
        while processor_s(rank) < ran_s + RUNNING_S and time.monotonic() < began + at_most_s:
            time.sleep(0.0005)

    def stop_and_continue() -> None:
        nonlocal ran_s
        let_run(at_most_s=TIMEOUT_S)
        while not is_over.is_set():
            rank.send(signal.SIGSTOP)
            is_over.wait(STOPPED_S)
            ran_s = processor_s(rank)
            rank.send(signal.SIGCONT)
            let_run(at_most_s=0.1)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "how"), [(2, "exchange"), (2, "strided"), (3, "direct"), (1, "local ring")]
)
def test_call_longer_than_timeout_succeeds(joined_rank_group, world_size, how):
    """Stop the last rank repeatedly, until a call takes longer than the timeout."""
    group = joined_rank_group(world_size, timeout=TIMEOUT_S)
    for numel in (LARGE, 2 * LARGE, 4 * LARGE):
        group.run(prepare, numel=numel, how=how)
        with stopped_repeatedly(group[world_size - 1]):
            group.start(reduce)
            # These stops exceed the timeout; the rest of the call runs without stops.
            time.sleep(6 * STOPPED_S)
        if min(map(value_of, group.outcomes())) > 1.1 * TIMEOUT_S:
            return
    pytest.fail("no call took longer than the timeout, so the test shows nothing")


def test_stopped_group_continues(joined_rank_group):
    """Stop all ranks, as when a laptop sleeps: no call times out."""
    group = joined_rank_group(3, timeout=TIMEOUT_S)
    group.run(prepare, numel=SMALL, how="")
    group.start(reduce, [0, 1])
    time.sleep(0.2)  # until ranks 0 and 1 wait for rank 2
    for rank in group.ranks:
        rank.send(signal.SIGSTOP)
    time.sleep(2 * TIMEOUT_S)
    for rank in group.ranks:
        rank.send(signal.SIGCONT)
    group[2].start(reduce)
    group.values()


@pytest.mark.slow
def test_timeout_names_stopped_rank(joined_rank_group):
    group = joined_rank_group(3, timeout=TIMEOUT_S)
    group.run(prepare, numel=LARGE, how="strided")  # packing takes rank 1 several timeouts
    group[2].call(stop_in, phase="announce", seconds=LONG_S)
    with stopped_repeatedly(group[1]):
        began = time.monotonic()
        group.start(reduce)
        outcome = group[0].outcome()
    assert outcome.at - began < TIMEOUT_S + 2 * BUSY_S
    for late in (outcome, group[1].outcome()):
        assert late.error == "CollectiveTimeout", late
        assert f"for {group.name(2)}" in late.text, late.text
        assert f"for {TIMEOUT_S:g} s" in late.text


def wait_for_last_call(state, pauses_s: list[float], timeout: float | None = None) -> list:
    tensors = [filled(SMALL, state.rank) for _ in pauses_s]
    works = []
    for tensor, seconds in zip(tensors, pauses_s, strict=True):
        time.sleep(seconds)
        works.append(state.comm.all_reduce(tensor, async_op=True))
    try:
        works[-1].wait(timeout)
        message = ""
    except pr.CollectiveTimeout as error:
        message = str(error)
    works[-1].wait()
    for tensor in tensors:
        assert_bits(tensor, expected(SMALL, state.world_size))
    return [message, works[-1].is_completed(), works[-1].exception() is None]


@pytest.mark.parametrize(
    ("calls", "state"), mostly_slow([(1, "begun"), (3, "queued")], (3, "queued"))
)
def test_wait_timeout_names_awaited_rank(joined_rank_group, calls, state):
    group = joined_rank_group(2, timeout=LONG_S)
    group[0].start(wait_for_last_call, pauses_s=[0.0] * calls, timeout=0.3)
    time.sleep(1.5)
    group[1].start(wait_for_last_call, pauses_s=[0.0] * calls)
    message, *ended_well = value_of(group[0].outcome())
    value_of(group[1].outcome())
    assert ended_well == [True, True], "wait(timeout) must not end the call"
    awaited = rf"for rank 1 \(process {group[1].pid} on \S+\) to join"
    queued = "" if state == "begun" else "for the calls before it and they "
    assert re.fullmatch(
        rf"wait: not done after 0.3 s, and goes on: all_reduce \(sum\) of {SMALL} float32 elements "
        rf"of rank 0, which waits {queued}{awaited}",
        message,
    ), message
