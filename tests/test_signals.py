"""Signals while the engine waits: do handlers run at once, whatever they do with communicators?

What a handler raises ends the wait; a call on the communicator that waits is refused, and closing
it ends the wait, on all ranks; other communicators are as usable as ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from cases import mostly_slow
from process_checks import PROMPT_S, SMALL, leave_nothing, reduce
from programs import run_programs
from ranks import LONG_S, Crew, Function, connect, new_name, value_of

import pyringar as pr


class Alarm(BaseException):
    """What handlers of these tests raise: no Exception, as KeyboardInterrupt is none."""


# -- what ranks do ---------------------------------------------------------------------------------


def wait_in_a_call(state) -> None:
    reduce(state)


def wait_in_a_bound_call(state) -> None:
    state.comm.bind(torch.ones(SMALL))()


def wait_for_work(state) -> None:
    state.comm.all_reduce(torch.ones(SMALL), async_op=True).wait()


def wait_for_turn(state) -> None:
    state.comm.all_reduce(torch.ones(SMALL), async_op=True)
    state.comm.barrier()


def wait_for_another_thread(state) -> None:
    def call() -> None:
        with contextlib.suppress(pr.RingarError):
            state.comm.barrier()

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    try:
        state.comm.barrier()
    finally:
        state.thread = thread


def wait_in_close(state) -> None:
    state.comm.all_reduce(torch.ones(SMALL), async_op=True)
    state.comm.close()


def wait_at_the_end_of_with(state) -> None:
    with state.comm:
        state.comm.all_reduce(torch.ones(SMALL), async_op=True)


CALLS = [wait_in_a_call, wait_in_a_bound_call]  # where the handler interrupts a call itself
CLOSES = [wait_in_close, wait_at_the_end_of_with]
WAITS = [*CALLS, wait_for_work, wait_for_turn, wait_for_another_thread, *CLOSES]
SOME_WAITS = CALLS[0], wait_for_work, CLOSES[0]


def close(state) -> None:
    state.comm.close()


def close_and_leave(state) -> None:
    state.comm.close()
    raise SystemExit(3)


def leave(state) -> None:
    raise Alarm


def call_again(state) -> None:
    tensor = torch.ones(3)
    calls = (
        lambda: state.comm.all_reduce(tensor),
        lambda: state.comm.barrier(),
        lambda: state.comm.all_reduce(tensor, async_op=True),
        lambda: state.comm.register(pr.shared_empty(3)),
    )
    for call in calls:
        with pytest.raises(pr.RingarError, match="a signal handler cannot call this communicator"):
            call()
    state.comm.stats()
    state.comm.plan(100)
    repr(state.comm)


def use_another(state) -> None:
    tensor = torch.ones(3)
    with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as other:
        other.all_reduce(tensor)
        other.all_reduce(tensor, async_op=True).wait()
    with pr.Communicator(["cpu"] * 2) as other:
        other.all_reduce([tensor, torch.ones(3)], algorithm="ring")
    assert torch.equal(tensor, torch.full((3,), 2.0))


def wait_with_handler(state, wait: Function, handler: Function, number: int) -> None:
    """``state.handled``: how often the handler came to its end."""
    state.handled = 0

    def handle(*_: object) -> None:
        try:
            handler(state)
            state.handled += 1
        finally:
            state.store.set(f"{state.name} handled", "1")

    before = signal.signal(number, handle)
    try:
        wait(state)
    finally:
        signal.signal(number, before)


def times_handled(state) -> int:
    if hasattr(state, "thread"):
        state.thread.join()
    return state.handled


def start_and_signal(
    crew: Crew, wait: Function, handler: Function, number: int = signal.SIGTERM
) -> float:
    """When the signal was sent; the handler has run."""
    name = crew.join(timeout=20)
    crew[0].start(wait_with_handler, wait=wait, handler=handler, number=number)
    time.sleep(0.4)  # by now it waits
    sent_at = time.monotonic()
    crew[0].send(number)
    connect(crew.port).wait([f"{name} handled"], timedelta(seconds=LONG_S))
    return sent_at


@pytest.mark.parametrize("wait", mostly_slow(WAITS, *SOME_WAITS))
def test_what_a_handler_raises_ends_the_wait(new_crew, wait):
    crew = new_crew(2)
    sent_at = start_and_signal(crew, wait, leave, signal.SIGUSR1)
    outcome = crew[0].outcome()
    assert outcome.error == "Alarm", outcome
    assert outcome.at - sent_at < PROMPT_S
    if wait in CALLS + CLOSES:
        crew[1].start(reduce)  # the others hear of it at once
        other = crew[1].outcome()
        assert other.error in ("RingarError", "PeerLostError"), other
        assert crew.name(0) in other.text, other.text
        assert other.seconds < PROMPT_S
    if wait in CLOSES:
        crew.run(leave_nothing, [0])


@pytest.mark.parametrize("handler", mostly_slow([close, close_and_leave], close))
@pytest.mark.parametrize("wait", mostly_slow(WAITS, *SOME_WAITS))
def test_a_handler_closes_the_communicator_that_waits(new_crew, wait, handler):
    crew = new_crew(2)
    sent_at = start_and_signal(crew, wait, handler)
    outcome = crew[0].outcome()
    assert outcome.at - sent_at < PROMPT_S
    if handler is close_and_leave:
        assert outcome.error == "SystemExit", outcome
    elif wait in CLOSES:
        value_of(outcome)
    else:
        assert outcome.error == "RingarError", outcome
        assert "this communicator " in outcome.text
        assert "closed" in outcome.text
    crew[1].start(reduce)
    other = crew[1].outcome()
    assert other.error == "PeerLostError", other
    assert crew.name(0) in other.text, other.text
    assert other.seconds < PROMPT_S
    crew[0].call(times_handled)
    crew.run(leave_nothing)
    crew.join()
    crew.run(reduce)


@pytest.mark.parametrize("wait", CALLS)
def test_a_handler_cannot_call_the_communicator_that_waits(new_crew, wait):
    crew = new_crew(2)
    start_and_signal(crew, wait, call_again)
    crew[1].start(wait)
    crew.values()
    assert crew[0].call(times_handled) == 1


@pytest.mark.parametrize("wait", mostly_slow(WAITS, *SOME_WAITS))
def test_a_handler_may_use_another_and_ctrl_c_still_works(new_crew, wait):
    crew = new_crew(2)
    start_and_signal(crew, wait, use_another, signal.SIGUSR1)
    sent_at = time.monotonic()
    crew[0].send(signal.SIGINT)
    outcome = crew[0].outcome()
    assert outcome.error == "KeyboardInterrupt", outcome
    assert outcome.at - sent_at < PROMPT_S
    crew[1].kill()  # whoever waits in another thread need not go on
    assert crew[0].call(times_handled) == 1


def close_while_another_thread_waits(state) -> None:
    """A call that another thread waits in ends first, as what is in the background."""
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(state.comm.barrier)
        time.sleep(0.2)
        state.comm.close()
        call.result()


def call_late(state) -> None:
    time.sleep(0.4)
    state.comm.barrier()


def test_close_waits_for_the_call_of_another_thread(joined_crew):
    crew = joined_crew(2, timeout=20)
    crew[0].start(close_while_another_thread_waits)
    crew[1].call(call_late)
    value_of(crew[0].outcome())


# -- ranks in one process --------------------------------------------------------------------------


@contextlib.contextmanager
def signal_after(seconds: float, handle) -> Iterator[None]:
    """SIGUSR1 to this process, once. (pytest-timeout has SIGALRM.)"""
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


def delayed(comm: pr.Communicator) -> pr.Work:
    """Begin what runs until ``end_delay`` of the communicator's group."""
    comm._group.delay_rank(1, 20.0)
    return comm.all_reduce([torch.ones(8), torch.ones(8)], algorithm="ring", async_op=True)


@pytest.mark.parametrize("what", ["close", "call", "work", "check"])
def test_waits_for_the_background_of_one_process_end_with_a_signal(what):
    comm = pr.Communicator(["cpu"] * 2)
    group = comm._group
    work = delayed(comm)
    pair = [torch.ones(8), torch.ones(8)]
    later = comm.all_reduce(pair, async_op=True)
    waits = {
        "close": comm.close,
        "call": lambda: comm.all_reduce([torch.ones(8), torch.ones(8)]),
        "work": work.wait,
        "check": lambda: comm.all_reduce([torch.ones(8), torch.ones(8)], algorithm="naive"),
    }
    with signal_after(0.2, raise_alarm), pytest.raises(Alarm):
        waits[what]()
    assert not work.is_completed()
    group.end_delay()
    comm.close()
    assert work.wait()
    if what == "close":  # what had not begun does not begin any more
        with pytest.raises(pr.RingarError, match="closed"):
            later.wait()
        assert torch.equal(pair[0], torch.ones(8))
    else:
        assert torch.equal(pair[0], torch.full((8,), 2.0))


def test_a_communicator_that_is_dropped_keeps_tensors_when_interrupted(monkeypatch):
    """What a handler raises in __del__ goes nowhere; what still runs must keep its memory."""
    from pyringar.comm import base

    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: unraisable.append(args.exc_type))
    monkeypatch.setattr(base, "_interrupted", kept := [])
    comm = pr.Communicator(["cpu"] * 2)
    group = comm._group
    work = delayed(comm)
    with signal_after(0.2, raise_alarm):
        del comm
    group.end_delay()
    assert unraisable == [Alarm]
    assert len(kept) == 1
    assert work.wait()


def test_stats_do_not_wait_for_what_runs():
    with pr.Communicator(["cpu"] * 2) as comm:
        comm.all_reduce([torch.ones(8), torch.ones(8)])
        work = delayed(comm)
        assert comm.stats()["fused"]["calls"] == 1
        assert not work.is_completed()
        comm._group.end_delay()
        work.wait()


# -- torch.distributed -----------------------------------------------------------------------------


def on_rank_destroys(state, name: str) -> list[object]:
    """Rank 0 waits for rank 1, and a handler ends the group meanwhile."""
    import torch.distributed as dist

    import pyringar.distributed  # noqa: F401

    store = dist.PrefixStore(name, state.store)
    dist.init_process_group("ringar", store=store, rank=state.rank, world_size=state.world_size)
    dist.all_reduce(torch.ones(4))
    if state.rank == 1:
        return []
    handled = []

    def handle(*_: object) -> None:
        start = time.monotonic()
        dist.destroy_process_group()
        handled.append(time.monotonic() - start)

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    start = time.monotonic()
    with pytest.raises(pr.RingarError, match="closed"):
        dist.all_reduce(torch.ones(4))
    return [*handled, time.monotonic() - start]


def test_a_handler_destroys_the_process_group_that_waits(joined_crew):
    crew = joined_crew(2)
    crew.start(on_rank_destroys, name=new_name())
    seconds = value_of(crew[0].outcome())
    assert len(seconds) == 2
    assert max(seconds) < 0.3 + PROMPT_S


# -- the end of the interpreter --------------------------------------------------------------------

DAEMONS = """
import threading, time, torch, pyringar as pr

def loop(call):
    while True:
        call()

def tensors():
    return [torch.ones(1 << 20) for _ in range(2)]

comms = [pr.Communicator(["cpu"] * 2) for _ in range(4)]
a, b, c = tensors(), tensors(), tensors()
many = [[torch.ones(1) for _ in range(500)] for _ in range(2)]  # torch is asked about each
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


def test_daemon_threads_in_the_engine_when_the_interpreter_ends():
    """Python ends them where they come back; that must not abort the process."""
    for ended in run_programs(DAEMONS, [], [], []):
        assert ended.returncode == 0, ended
        assert ended.stdout == "the end\n"
