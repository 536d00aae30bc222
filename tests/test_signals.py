"""An exception in a signal handler ends a blocking wait within 0.2 s and fails the group."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from case_marks import mostly_slow
from process_checks import BUSY_S, PROMPT_S, SMALL, leave_nothing, reduce
from programs import run_programs
from rank_processes import LONG_S, connect, value_of

import pyringar as pr
from pyringar.comm.background_work import Work

# The wait must end within these seconds after the signal.
ENDS_S = 0.2 + BUSY_S


class Alarm(BaseException):
    """Exception of a signal handler. Like KeyboardInterrupt, it does not subclass Exception."""


WAITS = {
    "call": reduce,
    "prepared call": lambda state: state.comm.bind(torch.ones(SMALL))(),
    "work": lambda state: state.comm.all_reduce(torch.ones(SMALL), async_op=True).wait(),
    "call after background call": lambda state: state.comm.barrier(),
    "close after background call": lambda state: state.comm.close(),
}


def wait_in(state, kind: str) -> None:
    if "background" in kind:
        state.work = state.comm.all_reduce(torch.ones(SMALL), async_op=True)
    WAITS[kind](state)


def wait_with_handler(state, kind: str, handler) -> list[str]:
    handled = []

    def handle(*_: object) -> None:
        try:
            handled.extend(handler(state))
        finally:
            state.store.set(f"{state.name} handled", "1")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        wait_in(state, kind)
    finally:
        signal.signal(signal.SIGUSR1, before)
    return handled


def exit_program(state) -> list[str]:
    raise SystemExit(3)


@pytest.mark.parametrize("kind", mostly_slow(WAITS, *[*WAITS][1:4]))
def test_signal_ends_wait_and_fails_group(new_rank_group, kind):
    group = new_rank_group(2)
    group.join(timeout=20)
    group[0].start(wait_with_handler, kind=kind, handler=exit_program)
    time.sleep(0.4)  # rank 0 waits in the call by then
    sent_at = time.monotonic()
    group[0].send(signal.SIGUSR1)
    outcome = group[0].outcome()
    assert outcome.error == "SystemExit", outcome
    assert outcome.at - sent_at < ENDS_S
    group.start(reduce)  # the signal has failed the group on all ranks
    for rank, refused in enumerate(group.outcomes()):
        assert refused.error in ("RingarError", "PeerLostError"), refused
        assert rank == 0 or group.name(0) in refused.text, refused.text
        assert refused.seconds < PROMPT_S
    group.run(leave_nothing)
    group.join()
    group.run(reduce)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_joining(new_rank_group, rank):
    group = new_rank_group(2)
    name = group.start_group([rank], world_size=2)
    time.sleep(0.4)
    sent_at = time.monotonic()
    group[rank].send(signal.SIGINT)
    outcome = group[rank].outcome()
    assert outcome.error == "KeyboardInterrupt", outcome
    assert outcome.at - sent_at < ENDS_S
    group.run(leave_nothing, [rank])
    group.join(name=name)
    group.run(reduce)


def use_group(state) -> list[str]:
    tensor = torch.ones(3)
    calls = [
        lambda: state.comm.all_reduce(tensor),
        lambda: state.comm.barrier(),
        lambda: state.comm.all_reduce(tensor, async_op=True),
        lambda: state.comm.close(),
    ]
    if hasattr(state, "work"):
        calls = [state.work.wait]
    errors = []
    for call in calls:
        with pytest.raises(pr.RingarError) as caught:
            call()
        errors.append(str(caught.value))
    state.comm.stats()
    state.comm.plan(100)
    repr(state.comm)
    return errors


@pytest.mark.parametrize("kind", ["call", "prepared call", "call after background call"])
def test_signal_handler_cannot_call_waiting_group(new_rank_group, kind):
    group = new_rank_group(2)
    name = group.join(timeout=20)
    group[0].start(wait_with_handler, kind=kind, handler=use_group)
    time.sleep(0.4)
    group[0].send(signal.SIGUSR1)
    connect(group.port).wait([f"{name} handled"], timedelta(seconds=LONG_S))
    group[1].start(wait_in, kind=kind)
    errors = value_of(group[0].outcome())
    value_of(group[1].outcome())
    is_work = "background" in kind
    words = "wait for a work" if is_work else "use this communicator"
    assert len(errors) == (1 if is_work else 4)
    assert all(f"a signal handler cannot {words}" in text for text in errors), errors
    group.run(reduce)


@contextlib.contextmanager
def signal_after(seconds: float, handle) -> Iterator[None]:
    """Send SIGUSR1 to this process after ``seconds``; pytest-timeout already uses SIGALRM."""
    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def raise_alarm(*_: object) -> None:
    raise Alarm


def delayed(comm: pr.Communicator) -> Work:
    comm._group.delay_rank(1, 20.0)
    return comm.all_reduce([torch.ones(8), torch.ones(8)], algorithm="ring", async_op=True)


@pytest.mark.parametrize("wait", ["close", "call", "work", "naive call"])
def test_signal_ends_wait_in_one_process(wait):
    comm = pr.Communicator(["cpu"] * 2)
    group = comm._group
    work = delayed(comm)
    pair = [torch.ones(8), torch.ones(8)]
    later = comm.all_reduce(pair, async_op=True)
    waits = {
        "close": comm.close,
        "call": lambda: comm.all_reduce([torch.ones(8), torch.ones(8)]),
        "work": work.wait,
        "naive call": lambda: comm.all_reduce([torch.ones(8), torch.ones(8)], algorithm="naive"),
    }
    began = time.monotonic()
    with signal_after(0.2, raise_alarm), pytest.raises(Alarm):
        waits[wait]()
    assert time.monotonic() - began < 0.2 + ENDS_S
    assert not work.is_completed()
    group.end_delay()
    comm.close()
    assert work.wait()
    if wait == "close":
        with pytest.raises(pr.RingarError, match="closed"):
            later.wait()
        assert torch.equal(pair[0], torch.ones(8))
    else:
        assert torch.equal(pair[0], torch.full((8,), 2.0))


DAEMONS = """
import threading, time, torch, pyringar as pr

def loop(call):
    while True:
        call()

def tensors():
    return [torch.ones(1 << 20) for _ in range(2)]

comms = [pr.Communicator(["cpu"] * 2) for _ in range(4)]
a, b, c = tensors(), tensors(), tensors()
many = [[torch.ones(1) for _ in range(500)] for _ in range(2)]  # many calls into torch
calls = (
    lambda: comms[0].all_reduce(a, algorithm="ring"),
    lambda: comms[1].all_reduce(b, algorithm="direct", async_op=True).wait(),
    comms[2].bind(c),
    lambda: comms[3].all_reduce_coalesced(many),
)
for call in calls:
    threading.Thread(target=loop, args=(call,), daemon=True).start()
time.sleep(0.5)
print("the end")
"""


@pytest.mark.slow
def test_daemon_threads_do_not_block_exit():
    for ended in run_programs(DAEMONS, [], [], []):
        assert ended.returncode == 0, ended
        assert ended.stdout == "the end\n"
