"""Ranks that are threads: mistakes and exceptions end all ranks, at once and by name."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch._dynamo  # DistributedDataParallel imports it, in a second
import torch.distributed as dist
from ranks import begin
from torch.nn.parallel import DistributedDataParallel

import pyringar as pr

K = 4


@pytest.fixture(autouse=True, scope="module")
def first_launch() -> None:
    pr.launch(lambda: 1, K)


# -- mistakes in programs --------------------------------------------------------------------------

Program = Callable[[], None]
MISTAKES: dict[Program, tuple[type[BaseException], str, tuple[str, ...]]] = {}


def mistake(kind: type[BaseException], text: str, *rows: str) -> Callable[[Program], Program]:
    """Note the error of a program, a part of its first lines, and rows of its table."""

    def note(program: Program) -> Program:
        MISTAKES[program] = kind, text, rows
        return program

    return note


@mistake(
    pr.ArgumentError,
    "number 1 of the world: ranks 0, 2, 3: all_reduce (op sum) of 4 float32; rank 1: broadcast "
    "(root 0) of 4 float32",
    r"1 .*broadcast \(root 0\) +1 +the world +\(4,\) +float32 +test_cluster_failures.py:\d+",
)
def missing_collective() -> None:
    x = torch.ones(4)
    if begin() != 1:
        dist.all_reduce(x)
    dist.broadcast(x, 0)


@mistake(
    pr.ArgumentError,
    "ranks 0, 1, 3: all_reduce (op sum) of 4 float32; rank 2: all_reduce (op sum) of 8 float32",
    r"2 .* \(8,\)",
    r"3 .* \(4,\)",
)
def swapped_order() -> None:
    tensors = [torch.ones(4), torch.ones(8)]
    for tensor in reversed(tensors) if begin() == 2 else tensors:
        dist.all_reduce(tensor)


@mistake(
    pr.ArgumentError,
    "rank 3: all_reduce (op sum) of 2 float32, 2 float32, 2 float32, 3 float32",
)
def wrong_size_late_in_a_list() -> None:
    tensors = [torch.ones(2), torch.ones(2), torch.ones(2), torch.ones(3 if begin() == 3 else 2)]
    with contextlib.suppress(pr.ArgumentError):
        dist.all_reduce_coalesced(tensors)
    assert all((tensor == 1).all() for tensor in tensors), "none is written"
    dist.barrier()


@mistake(
    pr.CollectiveTimeout,
    "all ranks wait for each other",
    r"0 +waits .* group 0, 1 .* 1  ",
    r"1 +waits .* the world .* 0  ",
)
def wrong_group() -> None:
    rank = begin()
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=pair if rank == 0 else None)


@mistake(KeyError, "no such layer")
def exception() -> None:
    if begin() == 2:
        raise KeyError("no such layer")
    dist.all_reduce(torch.ones(4))


@mistake(
    pr.CollectiveTimeout,
    "rank 2 ran for 0.5 s without a call in which others go on",
    r"2 +runs",
    r"0 +waits +all_reduce",
)
def endless_loop() -> None:
    rank = begin()
    while rank == 2:
        pass
    dist.all_reduce(torch.ones(4))


@mistake(
    pr.CollectiveTimeout,
    "all ranks wait for each other",
    r"0 +waits .* group 0, 1  ",
    r"1 +waits .* group 0, 1 #2 ",
)
def groups_in_opposite_order() -> None:
    rank = begin()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if rank < 2:
        for group in reversed(groups) if rank else groups:
            dist.all_reduce(torch.ones(4), group=group)


@mistake(
    pr.CollectiveTimeout,
    "all ranks wait for each other",
    r"0 +waits +send \(to 1\)",
    r"3 +waits +send \(to 0\)",
)
def all_send_first() -> None:
    rank = begin()
    dist.send(torch.ones(4), (rank + 1) % K)
    dist.recv(torch.ones(4), (rank - 1) % K)


@mistake(
    pr.ArgumentError,
    "a tensor of 4 elements of torch.float32 is for one of 5",
    r"0 .*send \(to 1\)",
    r"1 .*recv \(from 0\)",
)
def message_of_another_size() -> None:
    rank = begin()
    if rank == 0:
        dist.send(torch.ones(4), 1)
    if rank == 1:
        dist.recv(torch.ones(5), 0)


@mistake(pr.CollectiveTimeout, "all ranks wait for each other", "1 +waits +the store's weights")
def missing_key() -> None:
    if begin() == 1:
        dist.distributed_c10d._get_default_store().get("weights")
    dist.barrier()


@mistake(
    pr.PeerLostError,
    "ranks wait for ranks 0, 1, 2, which have ended",
    "0 +returned +after .* calls",
    "3 +waits +all_reduce .* 0, 1, 2 ",
)
def unequal_steps_of_data_parallel() -> None:
    rank = begin()
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(3 if rank == 3 else 2):
        model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("program", MISTAKES, ids=lambda program: program.__name__)
def test_mistake_is_told_in_words(program):
    kind, text, rows = MISTAKES[program]
    num_threads = threading.active_count()
    seeds, timeout = ([0], 0.5) if program is endless_loop else (range(5), 60.0)
    for seed in seeds:
        began_s = time.monotonic()
        with pytest.raises(kind) as caught:
            pr.launch(program, K, timeout=timeout, seed=seed)
        took_s = time.monotonic() - began_s
        assert type(caught.value) is kind, caught.value
        message = str(caught.value)
        assert text in message.split("\n\n")[0]
        for row in rows:
            assert re.search(rf"^{row}", message, re.M), f"{row} is not in\n{message}"
        if kind is not KeyError:
            assert f", in {program.__name__}\n" in message, "the stacks"
            assert f"seed={seed} repeats this run" in message
        assert took_s < 10, "the others were found without waiting for the timeout"
        assert threading.active_count() == num_threads
    assert pr.launch(lambda: 1, K) == [1] * K


def test_exception_reaches_all_ranks():
    heard: dict[int, str] = {}

    def program() -> None:
        try:
            exception()
        except pr.PeerLostError as error:
            heard[dist.get_rank()] = str(error)
            raise

    with pytest.raises(KeyError) as caught:
        pr.launch(program, K)
    lines = "".join(traceback.format_exception(caught.value))
    assert 'raise KeyError("no such layer")' in lines
    if hasattr(caught.value, "__notes__"):
        assert "raised by rank 2 of 4, seed=0 repeats this run" in lines
    assert heard == dict.fromkeys((0, 1, 3), "rank 2 raised KeyError: 'no such layer'")


def test_handled_error_is_not_raised():
    def program() -> str:
        try:
            all_send_first()
        except pr.CollectiveTimeout:
            return "handled"
        return ""

    assert pr.launch(program, K) == ["handled"] * K


def test_wait_with_limit_takes_no_time():
    """No time passes: nothing could happen in it."""

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


# -- exceptions ------------------------------------------------------------------------------------


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NeedyError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


ERRORS = {
    "no text": NoTextError(),
    "two arguments": NeedyError(1, 2),
    "long": ValueError("x" * 10**6),
    "stop": StopIteration(),
    "generator": GeneratorExit(),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_any_exception_is_raised_as_it_is(name):
    heard: list[int] = []

    def program() -> None:
        if begin() == 1:
            raise ERRORS[name]
        try:
            dist.barrier()
        except pr.PeerLostError as told:
            heard.append(len(str(told)))
            raise

    with pytest.raises(type(ERRORS[name])) as caught:
        pr.launch(program, 3)
    assert caught.value is ERRORS[name]
    assert all(length < 3000 for length in heard)


def test_rank_that_catches_everything_is_ended():
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


# -- futures ---------------------------------------------------------------------------------------


def test_callbacks_exception_is_a_runtime_error():
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
    for seed in range(4):  # the last rank to call has a future that is complete
        assert pr.launch(program, 3, seed=seed) == [[first, second]] * 3


def test_deadlock_of_futures_names_get_future():
    def program() -> None:
        dist.irecv(torch.empty(2), 1 - begin()).get_future()

    with pytest.raises(pr.CollectiveTimeout, match="get_future of ranks 0, 1 waits for its call"):
        pr.launch(program, 2)


# -- polling ---------------------------------------------------------------------------------------


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
def test_endless_polling_ends_after_the_timeout(program, kind, text):
    began_s = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        pr.launch(program, 2, timeout=0.5)
    assert "asks" in str(caught.value)
    assert 0.4 < time.monotonic() - began_s < 5


def test_endless_loop_after_a_poll():
    def program() -> None:
        if begin() == 1:
            dist.distributed_c10d._get_default_store().check(["never"])
            while True:
                pass
        dist.barrier()

    for seed in range(4):  # rank 0 waits in its call, or to run
        with pytest.raises(pr.CollectiveTimeout, match=r"rank 1 ran for [\d.]+ s without a call"):
            pr.launch(program, 2, timeout=0.1, seed=seed)


def test_limits_of_repeated_waits_add_up():
    def program() -> int:
        if begin() == 1:
            with pytest.raises(pr.CollectiveTimeout):
                dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=0.55))
        work, tries = dist.barrier(async_op=True), 0
        while True:
            try:
                work.wait(timedelta(seconds=0.1))
            except pr.CollectiveTimeout:
                tries += 1
            else:
                return tries

    assert pr.launch(program, 2) == [5, 0]


def test_slow_ranks_without_calls_may_go_on():
    assert pr.launch(lambda: time.sleep(0.2) or 1, 3, timeout=0.1) == [1] * 3


def test_debugger_prompt_is_not_counted():
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
