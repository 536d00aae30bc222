"""Mistakes, exceptions and signals in ranks: all ranks end at once, and the error names a rank."""

import contextlib
import io
import logging
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # takes a second, which time limits of tests would include
import torch.distributed as dist
from case_marks import mostly_slow
from rank_processes import begin

import pyringar as pr
from pyringar.cluster import internals
from pyringar.comm.threads import handlers_wait

K = 4


@pytest.fixture(autouse=True, scope="module")
def first_launch() -> None:
    pr.launch(lambda: 1, K)


Mistake = tuple[type[BaseException], str, tuple[str, ...]]
MISTAKES: dict[Callable[[], None], Mistake] = {}


def mistake(kind: type[BaseException], words: str, *rows: str) -> Callable[..., Any]:
    """Register a program with the error, first words and table rows (patterns) that it causes."""
    return lambda program: MISTAKES.setdefault(program, (kind, words, rows)) and program


@mistake(
    pr.ArgumentError,
    "ranks call different things",
    r"1 .*broadcast \(root 0\) +1 +the world +\(4,\) +float32 +test_cluster_failures.py:\d+",
)
def missing_collective() -> None:
    x = torch.ones(4)
    if begin() != 1:
        dist.all_reduce(x)
    dist.broadcast(x, 0)


@mistake(
    pr.CollectiveTimeout,
    r"rank 3 ran .*1 s without a call of torch.distributed .which other ranks waited for",
    r"3 +runs",
    r"[012] +waits +all_reduce",
    r"ranks? [0-2, ]+:\n(  .*\n)+    dist\.all_reduce",
)
def endless_loop() -> None:
    rank = begin()
    while rank == 3:
        pass
    dist.all_reduce(torch.ones(4))


@mistake(
    pr.CollectiveTimeout,
    "all ranks wait for each other",
    r"0 +waits .* group 0, 1  .* 1 ",
    r"1 +waits .* group 0, 1 #2 .* 0 ",
)
def groups_in_opposite_order() -> None:
    rank = begin()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if rank < 2:
        for group in reversed(groups) if rank else groups:
            dist.all_reduce(torch.ones(4), group=group)


@mistake(pr.CollectiveTimeout, "all ranks wait for each other", r"0 +waits +recv \(from 3\)")
def all_receive_first() -> None:
    dist.recv(torch.ones(4), (begin() - 1) % K)


@mistake(pr.CollectiveTimeout, "all ranks wait for each other", "1 +waits +(the|in the) store")
def missing_key() -> None:
    if begin() == 1:
        dist.distributed_c10d._get_default_store().get("weights")
    dist.barrier()


@mistake(pr.PeerLostError, "", "0 +returned +after 2 calls")
def unequal_steps() -> None:
    for _ in range(3 if begin() == 3 else 2):
        dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("program", MISTAKES, ids=lambda program: program.__name__)
def test_mistake_error_has_rank_table(program, processes):
    kind, words, rows = MISTAKES[program]
    num_threads, is_timed = threading.active_count(), processes or program is endless_loop
    for seed in [0] if is_timed else range(5):
        began_s = time.monotonic()
        with pytest.raises(kind) as caught:
            pr.launch(program, K, processes=processes, timeout=1 if is_timed else 60, seed=seed)
        assert type(caught.value) is kind, caught.value
        message = str(caught.value)
        assert re.search(words, message.split("\n\n")[0]), message
        for row in rows:
            assert re.search(rf"^{row}", message, re.M), f"{row} is not in\n{message}"
        if not processes or kind is pr.CollectiveTimeout:  # else __cause__ has the tracebacks
            assert f", in {program.__name__}\n" in message, "the stacks"
        assert processes or f"seed={seed} repeats this run" in message
        assert time.monotonic() - began_s < 10, "found before the timeout"
        assert threading.active_count() == num_threads
    assert pr.launch(lambda: 1, K) == [1] * K


@pytest.mark.parametrize(
    ("members", "rows"),
    [
        ({0: [0, 1]}, r"0 +waits +new_group .* group 0, 1 +1 .*\n1 +waits +barrier"),
        ({0: [0, 1], 1: [0, 1], 2: [0, 2]}, r"0 +waits +barrier(.*\n)+2 +waits +new_group .* 0 "),
    ],
)
def test_new_group_waits_for_its_ranks(members, rows):
    def program() -> None:
        if (rank := begin()) in members:
            dist.new_group(members[rank])
        dist.barrier()

    for seed in range(5):
        with pytest.raises(pr.CollectiveTimeout, match="all ranks wait for each other") as caught:
            pr.launch(program, 3, seed=seed)
        assert re.search(rf"^{rows}", str(caught.value), re.M), caught.value


def test_init_waits_for_all_ranks():
    def program() -> None:
        if os.environ["RANK"] == "0":
            dist.init_process_group()

    words = r"rank 1, which has ended(.*\n)+0 +waits +init_process_group +the world +1 "
    with pytest.raises(pr.PeerLostError, match=words):
        pr.launch(program, 2)


def test_mismatch_error_names_differing_ranks():
    told = "ranks 0, 2, 3: all_reduce (sum) of 4 float32; rank 1: broadcast (root 0) of 4"
    with pytest.raises(pr.ArgumentError, match=re.escape(f"call 1 of the world: {told}")):
        pr.launch(missing_collective, K)
    with pytest.raises(pr.PeerLostError, match="ranks wait for ranks 0, 1, 2, which have ended"):
        pr.launch(unequal_steps, K)


@pytest.mark.parametrize("processes", [False, True])
def test_errors_show_global_rank_of_root(processes):
    def program() -> None:
        rank, group = begin(), dist.new_group([1, 3])
        if rank == 1:
            dist.broadcast(torch.ones(2), 3, group=group)
        elif rank == 3:
            dist.all_reduce(torch.ones(2), group=group)

    with pytest.raises(pr.ArgumentError) as caught:
        pr.launch(program, 4, processes=processes)
    roots = re.findall(r"broadcast \(root (\d)\)|broadcast from rank (\d)", str(caught.value))
    assert len(roots) == 2, caught.value
    assert {root or from_rank for root, from_rank in roots} == {"3"}, caught.value


def test_table_shows_global_ranks_of_messages():
    def program() -> None:
        rank, group = begin(), dist.new_group([1, 3])
        if rank == 1:
            dist.recv(torch.ones(2), 3, group=group)

    with pytest.raises(pr.PeerLostError, match=r"1 +waits +recv \(from 3\)"):
        pr.launch(program, 4)


def test_recv_of_wrong_size_raises():
    def program() -> None:
        dist.send(torch.ones(4), 1) if begin() == 0 else dist.recv(torch.ones(5), 0)

    with pytest.raises(
        pr.ArgumentError, match=r"a tensor of 4 elements .* is sent to a tensor of 5"
    ):
        pr.launch(program, 2)


def test_exception_reaches_all_ranks():
    heard: dict[int, str] = {}

    def program() -> None:
        try:
            if begin() == 2:
                raise KeyError("no such layer" + "!" * 10**6)
            dist.barrier()
        except pr.PeerLostError as error:
            heard[dist.get_rank()] = str(error)
            raise

    with pytest.raises(KeyError) as caught:
        pr.launch(program, K)
    lines = "".join(traceback.format_exception(caught.value))
    assert 'raise KeyError("no such layer"' in lines
    if hasattr(caught.value, "__notes__"):
        assert "raised by rank 2 of 4, seed=0 repeats this run" in lines
    assert heard.keys() == {0, 1, 3}
    for text in heard.values():
        assert text.startswith("rank 2 raised KeyError: 'no such layer!")
        assert len(text) < 3000


def test_wait_timeout_raises_without_delay():
    def program() -> bool:
        rank = begin()
        if rank == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            with pytest.raises(pr.CollectiveTimeout, match="not done after 3600 s"):
                work.wait(timeout=timedelta(seconds=3600))
            dist.send(torch.ones(1), 1)
            return work.wait()
        if rank == 1:
            dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(2))
        return True

    assert pr.launch(program, 3) == [True] * 3


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NeedyError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


ERRORS = {
    "no text": NoTextError(),
    "two arguments": NeedyError(1, 2),
    "exit": SystemExit(3),
}


@pytest.mark.parametrize("name", ERRORS)
def test_exceptions_are_raised_unchanged(name):
    def program() -> None:
        if begin() == 1:
            raise ERRORS[name]
        dist.barrier()

    with pytest.raises(type(ERRORS[name])) as caught:
        pr.launch(program, 3)
    assert caught.value is ERRORS[name]


def test_rank_catching_all_errors_ends():
    def program() -> None:
        if begin() == 1:
            raise KeyError("gone")
        while True:
            with contextlib.suppress(Exception):
                dist.barrier()

    num_threads, began_s = threading.active_count(), time.monotonic()
    with pytest.raises(KeyError):
        pr.launch(program, 3, timeout=0.5)
    assert time.monotonic() - began_s < 8
    assert threading.active_count() == num_threads


def test_callback_exception_is_runtime_error():
    def program() -> list[str]:
        begin()
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        told = []
        for each in (
            future.then(lambda _: 1 / 0),
            future.then(lambda _: 1 / 0).then(lambda done: done.wait()),
        ):
            with pytest.raises(RuntimeError) as caught:
                each.wait()
            told.append(f"{caught.type.__name__}: {caught.value}".splitlines()[0])
        return told

    running = "Got the following error when running the callback: "
    first = f"RuntimeError: {running}ZeroDivisionError: division by zero"
    second = f"RuntimeError: {running}{first}"
    for seed in range(4):  # the rank that calls last gets a completed future
        assert pr.launch(program, 3, seed=seed) == [[first, second]] * 3


def poll_a_call() -> None:
    if begin() == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()


def poll_the_store() -> None:
    if begin() == 0:
        store = dist.distributed_c10d._get_default_store()
        while not store.check(["flag"]):
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (poll_a_call, pr.PeerLostError, "which has ended"),
        (poll_the_store, pr.CollectiveTimeout, "all ranks wait, and none can go on"),
    ],
)
def test_endless_polling_raises_after_timeout(program, kind, text):
    began_s = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        pr.launch(program, 2, timeout=0.5)
    assert "polls" in str(caught.value)
    assert 0.4 < time.monotonic() - began_s < 5


def test_slow_ranks_without_calls_succeed():
    assert pr.launch(lambda: time.sleep(0.2) or 1, 3, timeout=0.1) == [1] * 3


def spin() -> None:
    while True:
        pass


def test_endless_loop_error_explains_limit():
    with pytest.raises(pr.CollectiveTimeout, match=r"for 1 s .*10 times timeout=0.1: no other"):
        pr.launch(spin, 2, timeout=0.1)


def test_debugger_prompt_does_not_time_out():
    def prompt() -> None:
        time.sleep(0.6)

    prompt = types.FunctionType(prompt.__code__, {"__name__": "pdb", "time": time})

    def program() -> int:
        if begin() == 1:
            prompt()
        dist.barrier()
        return 1

    for seed in range(2):
        assert pr.launch(program, 2, timeout=0.2, seed=seed) == [1, 1]


HAND_OVER = ("rank_threads.py", "state.py")


@pytest.mark.parametrize("first", mostly_slow(range(10), 0, 5))
def test_exception_in_wait_hangs_no_rank(first):
    """Raise MemoryError at every tenth line event of a wait, once per launch."""
    num_threads = threading.active_count()

    def program(number: int) -> bool:
        events = [0]
        seen: set[tuple[types.FrameType, int]] = set()

        def trace(frame: types.FrameType, event: str, _: Any) -> Any:
            name = frame.f_code.co_filename.rpartition(os.sep)[2]
            if "/cluster/" not in frame.f_code.co_filename or name not in HAND_OVER:
                return None
            line = frame, frame.f_lineno
            # Once per line: an error at the second event of a `with` line leaves the lock locked.
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


class AlarmError(Exception):
    pass


@pytest.mark.parametrize("seed", mostly_slow(range(10), 0))
def test_signal_handler_exception_ends_rank_threads(seed):
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


def test_raising_handlers_stay_installed(monkeypatch):
    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    called: list[int] = []

    def handler(number: int, _: Any) -> None:
        called.append(number)
        raise AlarmError

    def put(number: int, new: Any) -> Any:
        if new is handler and not called:
            handler(0, None)  # simulates a signal while handlers are restored
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


@pytest.mark.slow
def test_endless_rank_runs_in_background(caplog):
    target, may_end, ended = types.SimpleNamespace(value=1), threading.Event(), []

    def program() -> None:
        rank = begin()
        dist.barrier()
        if rank == 0:
            raise KeyError("planted")
        try:
            with mock.patch.object(target, "value", 2) if rank == 1 else contextlib.nullcontext():
                with contextlib.suppress(pr.PeerLostError):
                    dist.barrier()
                while rank == 1 and not may_end.is_set():
                    with contextlib.suppress(BaseException):
                        may_end.wait(0.1)
        finally:
            ended.append(rank)

    with pytest.raises(KeyError):
        pr.launch(program, 3, timeout=0.5)
    assert ended == [2]
    assert "run on in the background: rank 1\n" in caplog.text
    assert target.value == 1, "its patch is undone"
    may_end.set()


def test_interrupt_waits_for_thread_start():
    """Up to Python 3.11, a new thread briefly has the ident of the thread that starts it."""

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
        internals.interrupt(rank) if ended else None
        thread.join(0.01)
    assert ended == ["started"]


@pytest.mark.parametrize("kind", ["handler", "condition"])
def test_interrupted_rank_releases_locks(kind):
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
        time.sleep(0.1)  # until the thread waits for the lock
        internals.interrupt(rank)
        time.sleep(0.05)
    while thread.is_alive():
        assert time.monotonic() < deadline
        internals.interrupt(rank)
        thread.join(0.01)
    assert lock.acquire(timeout=5.0), "the lock stayed taken"
    lock.release()
