"""Ranks that are threads: exceptions at any line, signals and Ctrl-C lose no rank."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import signal
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch.distributed as dist
from cases import mostly_slow
from programs import programs
from ranks import begin

import pyringar as pr
from pyringar.cluster import internals
from pyringar.comm.threads import handlers_wait

K = 4


@pytest.fixture(autouse=True, scope="module")
def first_launch() -> None:
    pr.launch(lambda: 1, K)


# -- exceptions at any line ------------------------------------------------------------------------

HAND_OVER = ("ranks.py", "state.py")


@pytest.mark.parametrize("first", mostly_slow(range(10), 0, 5))
def test_hand_over_exception_loses_no_rank(first):
    """MemoryError at every tenth line event of a wait, in a launch of its own each."""
    num_threads = threading.active_count()

    def program(number: int) -> bool:
        events = [0]
        seen: set[tuple[types.FrameType, int]] = set()

        def trace(frame: types.FrameType, event: str, _: Any) -> Any:
            name = frame.f_code.co_filename.rpartition(os.sep)[2]
            if "/cluster/" not in frame.f_code.co_filename or name not in HAND_OVER:
                return None
            line = frame, frame.f_lineno
            # Once: at a second event of its line, `with` would not release its lock.
            if event == "line" and events[0] >= 0 and line not in seen:
                seen.add(line)
                events[0] += 1
                if events[0] == number:
                    events[0] = -1
                    raise MemoryError("planted")
            return trace

        rank = begin()
        if rank == 1:
            sys.settrace(trace)
        try:
            with contextlib.suppress(MemoryError):
                dist.barrier()
        finally:
            sys.settrace(None)
        with contextlib.suppress(pr.RingarError):
            dist.barrier()
        return events[0] < 0 or rank != 1

    for number in range(1 + first, 1000, 10):
        began_s = time.monotonic()
        reached: list[bool] = [True]
        with contextlib.suppress(MemoryError, pr.RingarError):
            reached = pr.launch(program, 3, args=(number,), timeout=2)
        assert time.monotonic() - began_s < 1.5, number
        assert threading.active_count() == num_threads, number
        assert pr.launch(lambda: 1, 3) == [1] * 3
        if not all(reached):
            break
    assert 30 < number < 990


def test_recursion_error_comes_before_the_call():
    def program(depth: int) -> bool:
        def down(levels: int) -> None:
            down(levels - 1) if levels else dist.barrier()

        begin()
        raised = False
        try:
            down(depth)
        except RecursionError:
            raised = True
        dist.barrier() if raised else None
        return raised

    limit = sys.getrecursionlimit()
    for depth in range(limit - 90, limit - 20, 7):
        assert len(set(pr.launch(program, 3, args=(depth,), timeout=2))) == 1


class AlarmError(Exception):
    pass


@pytest.mark.parametrize("seed", mostly_slow(range(10), 0))
def test_signal_handlers_exception_ends_all_ranks(seed):
    def program() -> None:
        begin()
        dist.barrier()
        while True:
            counted.append(1)

    def ring(*_: Any) -> None:
        raise AlarmError

    def launch_with_alarm(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        pr.launch(program, 3)

    counted: list[int] = []
    before = signal.signal(signal.SIGALRM, ring)
    num_threads = threading.active_count()
    moments = random.Random(seed)
    try:
        for _ in range(15):
            with pytest.raises(AlarmError):
                launch_with_alarm(moments.uniform(1e-4, 2e-2))
            assert threading.active_count() == num_threads
            counted.clear()
            assert pr.launch(lambda: 1, 2) == [1, 1]
            assert counted == []
    finally:
        signal.signal(signal.SIGALRM, before)


def test_handlers_that_raise_stay(monkeypatch):
    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    called: list[int] = []

    def handler(number: int, _: Any) -> None:
        called.append(number)
        raise AlarmError

    def put(number: int, new: Any) -> Any:
        if new is handler and not called:
            handler(0, None)  # of a signal that comes while handlers are put back
        return own(number, new)

    own = signal.signal
    before = [own(number, handler) for number in numbers]
    try:
        monkeypatch.setattr(signal, "signal", put)
        with pytest.raises(AlarmError), handlers_wait():  # noqa: PT012  the end raises
            for number in numbers:
                signal.raise_signal(number)
            assert called == []
        assert called == [0, *numbers]
        assert [signal.getsignal(number) for number in numbers] == [handler] * 2
    finally:
        for number, old in zip(numbers, before, strict=True):
            own(number, old)


TWICE = """
import ctypes, signal, threading, time
import pyringar as pr

class Alarm(Exception): pass

def program():
    ctypes.CDLL(None).usleep(800_000)  # no exception ends it

def handle(*_):
    times.append(time.monotonic())
    raise Alarm

times = []
pr.launch(lambda: 1, 2)
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.1, 0.2)
try:
    pr.launch(program, 2)
except Alarm:
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(len(times) > 1, threading.active_count())
print(pr.launch(lambda: 1, 2))
"""


def test_second_signal_does_not_leave_ranks():
    with programs(TWICE, []) as (program,):
        out, err = program.communicate(timeout=60)
    assert out == "True 1\n[1, 1]\n", err


SWALLOWED = """
import os, signal, threading, time
import torch.distributed as dist
import pyringar as pr

def program():
    dist.init_process_group()
    rank = dist.get_rank()
    dist.barrier()
    if rank != 1:
        try:
            dist.barrier()
        finally:
            ended.append(rank)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        try:
            time.sleep(10)
        except KeyboardInterrupt:
            pass

ended = []
try:
    pr.launch(program, 3)
except KeyboardInterrupt:
    print(sorted(ended), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_end_beside_one_that_does_not():
    with programs(SWALLOWED, []) as (program,):
        out, err = program.communicate(timeout=60)
    assert out == "[0, 2]\n", err
    assert "go on in the background: rank 1\n" in err


# -- Ctrl-C ----------------------------------------------------------------------------------------

INTERRUPTED = """
import sys, threading
import torch, torch.distributed as dist
import pyringar as pr

def program():
    begun.append(1)
    dist.init_process_group()
    rank = dist.get_rank()
    try:
        if rank == 1:
            num_begun.append(len(begun))
            print("running", flush=True)
            while True:
                sum(range(100))
        while True:
            dist.all_reduce(torch.ones(1))
    finally:
        ended.append(1)

begun, ended, num_begun = [], [], []
try:
    pr.launch(program, 3, seed=int(sys.argv[1]))
except KeyboardInterrupt:
    print(begun == ended, num_begun == [len(begun)], threading.active_count())
print(pr.launch(lambda: 7, 3), dist.is_initialized())
"""


@pytest.mark.parametrize("seed", mostly_slow(range(3), 0))
def test_ctrl_c_ends_all_ranks(seed):
    with programs(INTERRUPTED, [seed]) as (program,):
        assert program.stdout.readline() == "running\n"
        time.sleep(0.1)
        os.kill(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=20)
    assert out.splitlines() == ["True True 1", "[7, 7, 7] False"], err


def test_interrupt_waits_until_a_thread_has_begun():
    """Up to Python 3.11 it would end the new thread, which has the starter's ident."""

    def program() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            with rank.starting:
                inside.set()
                go_on.wait(10)
                ended.append("started")
            while True:
                time.sleep(0.001)

    thread = threading.Thread(target=program, daemon=True)
    rank = types.SimpleNamespace(thread=thread, starting=threading.RLock())
    inside, go_on, ended = threading.Event(), threading.Event(), list[str]()
    thread.start()
    inside.wait()
    internals.interrupt(rank)
    go_on.set()
    while thread.is_alive():
        if ended:
            internals.interrupt(rank)
        thread.join(0.01)
    assert ended == ["started"]


@pytest.mark.parametrize("kind", ["handler", "condition"])
def test_interrupt_leaves_no_lock_taken(kind):
    handler, condition = logging.StreamHandler(io.StringIO()), threading.Condition()
    logger = logging.Logger("ranks")
    logger.addHandler(handler)
    lock = handler.lock if kind == "handler" else condition

    def take() -> None:
        if kind == "handler":
            logger.warning("on")
        else:
            with condition:
                pass

    def program() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                take()
                time.sleep(0.001)

    thread = threading.Thread(target=program, daemon=True)
    rank = types.SimpleNamespace(thread=thread, starting=threading.RLock())
    deadline = time.monotonic() + 30.0
    with lock:
        thread.start()
        while not internals._takes_lock(sys._current_frames()[thread.ident]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)  # it waits for the lock by now
        internals.interrupt(rank)
        time.sleep(0.05)
    while thread.is_alive():
        assert time.monotonic() < deadline
        internals.interrupt(rank)
        thread.join(0.01)
    assert lock.acquire(timeout=5.0), "nobody holds it, and it is taken"
    lock.release()
