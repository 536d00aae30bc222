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
# Of a stop, and the processor's time that a rank gets between two: short, so that a call takes
# many of them.
STOPPED_S = 0.4
RUNNING_S = 0.002
LARGE = 1 << 25  # elements: 128 MiB
SMALL = 1000
# How much later than its deadline a busy machine may be.
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
def stopped_again_and_again(rank: RankProcess) -> Iterator[None]:
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            rank.send(signal.SIGSTOP)
            is_over.wait(STOPPED_S)
            began = time.monotonic()
            ran_s = processor_s(rank)
            rank.send(signal.SIGCONT)
            while processor_s(rank) < ran_s + RUNNING_S and time.monotonic() < began + 0.05:
                time.sleep(RUNNING_S / 4)

    thread = threading.Thread(target=stop_and_go)
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
def test_long_call_is_not_late(joined_rank_group, world_size, how):
    """Stop the last rank repeatedly, until a call takes longer than the timeout."""
    group = joined_rank_group(world_size, timeout=TIMEOUT_S)
    for numel in (LARGE, 2 * LARGE, 4 * LARGE):
        group.run(prepare, numel=numel, how=how)
        with stopped_again_and_again(group[world_size - 1]):
            group.start(reduce)
            # The stops end with the long part, so that the test does.
            time.sleep(6 * STOPPED_S)
        if min(map(value_of, group.outcomes())) > 1.1 * TIMEOUT_S:
            return
    pytest.fail("too fast a call: it shows nothing")


def test_stopped_group_continues(joined_rank_group):
    """All ranks stop, as on a laptop that sleeps: no rank is late."""
    group = joined_rank_group(3, timeout=TIMEOUT_S)
    group.run(prepare, numel=SMALL, how="")
    group.start(reduce, [0, 1])
    time.sleep(0.2)  # these wait for rank 2
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
    group.run(prepare, numel=LARGE, how="strided")  # to be packed for several timeouts
    group[2].call(stop_in, phase="announce", seconds=LONG_S)
    with stopped_again_and_again(group[1]):
        began = time.monotonic()
        group.start(reduce)
        outcome = group[0].outcome()
    assert outcome.at - began < TIMEOUT_S + 2 * BUSY_S
    for told in (outcome, group[1].outcome()):
        assert told.error == "CollectiveTimeout", told
        assert f"for {group.name(2)}" in told.text, told.text
        assert f"for {TIMEOUT_S:g} s" in told.text


def wait_for_the_last(state, pauses_s: list[float], timeout: float | None = None) -> list:
    tensors = [filled(SMALL, state.rank) for _ in pauses_s]
    works = []
    for tensor, seconds in zip(tensors, pauses_s, strict=True):
        time.sleep(seconds)
        works.append(state.comm.all_reduce(tensor, async_op=True))
    try:
        works[-1].wait(timeout)
        told = ""
    except pr.CollectiveTimeout as error:
        told = str(error)
    works[-1].wait()
    for tensor in tensors:
        assert_bits(tensor, expected(SMALL, state.world_size))
    return [told, works[-1].is_completed(), works[-1].exception() is None]


@pytest.mark.parametrize(
    ("calls", "state"), mostly_slow([(1, "begun"), (3, "queued")], (3, "queued"))
)
def test_wait_timeout_names_awaited_rank(joined_rank_group, calls, state):
    group = joined_rank_group(2, timeout=LONG_S)
    group[0].start(wait_for_the_last, pauses_s=[0.0] * calls, timeout=0.3)
    time.sleep(1.5)
    group[1].start(wait_for_the_last, pauses_s=[0.0] * calls)
    told, *ended_well = value_of(group[0].outcome())
    value_of(group[1].outcome())
    assert ended_well == [True, True], "it goes on"
    awaited = rf"for rank 1 \(process {group[1].pid} on \S+\) to join"
    queued = "" if state == "begun" else "for the calls before it and they "
    assert re.fullmatch(
        rf"wait: not done after 0.3 s, and goes on: all_reduce \(sum\) of {SMALL} float32 elements "
        rf"of rank 0 of 2, which waits {queued}{awaited}",
        told,
    ), told
