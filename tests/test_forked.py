"""After os.fork(): every method, in the child, raises or does no harm, and never hangs.

The child is forked while a call waits in the background and threads of the parent are in the
engine, so that locks may be held for ever there.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_checks import LARGE

import pyringar as pr
from pyringar.comm.shared_tensors import shared_empty
from pyringar.comm.work import Work

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: threads and fork
]
LIMIT_S = 20
HARMLESS = "harmless"
TOLD = ("made before fork()", "begun before fork()")


def outcome_in_child(call: Callable[[], Any]) -> str:
    """What a call came to in a child: an error's text, or that it returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)  # kills it
        try:
            call()
            text = HARMLESS
        except pr.RingarError as error:
            text = f"{type(error).__name__}: {error}"
        except BaseException as error:
            text = f"unexpected {error!r}"
        os.write(writer, json.dumps(text).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "hangs"


def wrong_outcomes(calls: dict[str, Callable[[], Any]], harmless: set[str]) -> dict[str, str]:
    """Call each in a child; what neither raises that it was made before the fork nor may return."""
    wrong = {}
    for name, call in calls.items():
        outcome = outcome_in_child(call)
        is_told = any(words in outcome for words in TOLD)
        if not (outcome == HARMLESS if name in harmless else is_told):
            wrong[name] = outcome
    return wrong


def methods_of(group: Any) -> set[str]:
    public = {name: value for name, value in vars(type(group)).items() if not name.startswith("_")}
    return {name for name, value in public.items() if not isinstance(value, type)}


def calls_of_work(work: Work) -> dict[str, Callable[[], Any]]:
    names = ("wait", "is_completed", "exception", "finished_ns")
    return {f"work.{name}": getattr(work, name) for name in names}


# -- one process drives all ranks ------------------------------------------------------------------


def calls_of_threads(group, two, four) -> dict:
    lists = [[t] for t in two]
    how = "sum", "fused", "rank"
    return {
        "all_reduce": lambda: group.all_reduce(two, *how, None),
        "all_reduce_coalesced": lambda: group.all_reduce_coalesced(lists, *how, None),
        "reduce_scatter": lambda: group.reduce_scatter(two, four, *how, {}),
        "all_gather": lambda: group.all_gather(four, two, "ring", {}),
        "broadcast": lambda: group.broadcast(two, 0, None),
        "broadcast_coalesced": lambda: group.broadcast_coalesced(lists, 0, None),
        "reduce": lambda: group.reduce(two[0], two, *how, 0, None),
        "reduce_coalesced": lambda: group.reduce_coalesced(two[:1], lists, *how, 0, {}),
        "bind": lambda: group.bind(two, *how),
        "bind_coalesced": lambda: group.bind_coalesced(lists, *how),
        "check": lambda: group.check(two),
        "check_usable": group.check_usable,
        "check_coalesced": lambda: group.check_coalesced(lists),
        "close": group.close,
        "stats": group.stats,
        "delay_rank": lambda: group.delay_rank(0, 0.0),
        "end_delay": group.end_delay,
    }


def test_every_method_of_threads():
    comm = pr.Communicator(["cpu"] * 2, timeout=60)
    group = comm._group
    two = [torch.ones(4), torch.ones(4)]
    four = [torch.ones(8), torch.ones(8)]
    bound = comm.bind(two)
    done = comm.all_reduce(two, async_op=True)
    done.wait()
    group.delay_rank(1, 20.0)
    work = comm.all_reduce([torch.ones(4), torch.ones(4)], algorithm="ring", async_op=True)
    group_calls = calls_of_threads(group, two, four)
    assert set(group_calls) == methods_of(group)
    others = {
        "bound": bound,
        "done": done.wait,
        "naive": lambda: comm.all_reduce(two, algorithm="naive"),
        "comm.close": comm.close,
        "plan": lambda: comm.plan(100),
        "comm.stats": comm.stats,
        "repr": lambda: repr(comm),
        "allreduce": lambda: pr.allreduce(two),
    }
    harmless = {"close", "end_delay", "comm.close", "plan", "repr", "allreduce", "done"}
    assert wrong_outcomes({**others, **calls_of_work(work), **group_calls}, harmless) == {}
    group.end_delay()
    assert work.wait(), "the parent goes on"
    comm.close()


# -- one rank per process --------------------------------------------------------------------------


def calls_of_rank(group, shared, one, two) -> dict:
    return {
        "absent_ranks": group.absent_ranks,
        "seal": group.seal,
        "all_reduce": lambda: group.all_reduce(shared, "sum", "rank", None),
        "reduce_scatter": lambda: group.reduce_scatter(one, two, "sum", "rank", None),
        "all_gather": lambda: group.all_gather(two, one, {}),
        "broadcast": lambda: group.broadcast(one, 0, None),
        "barrier": lambda: group.barrier(None),
        "bind": lambda: group.bind(one, "sum", "rank"),
        "plain_all_reduce": lambda: group.plain_all_reduce("rank")(one, "sum", None, None),
        "close": group.close,
        "delay": lambda: group.delay("idle", 0.0),
        "add_region": lambda: None,  # wants memory of the others', which register() cannot ask for
        "remove_region": lambda: group.remove_region(0),
        "plan": lambda: group.plan(100),
        "stats": group.stats,
        "abort": group.abort,
        "check": group.check,
        "check_peers": lambda: group.check_peers([1]),
        "tell": lambda: group.tell("rank 1 is gone", False),
        "progress": group.progress,
        "set_timeout": lambda: group.set_timeout(7.0),
        "submit_step": lambda: group.submit_step(print),
    }


def make_own_group() -> None:
    """A child may have a group that it makes itself."""
    with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as own:
        tensor = torch.ones(3)
        own.all_reduce(tensor)
        own.all_reduce(tensor, async_op=True).wait()
        assert torch.equal(tensor, torch.ones(3))


def on_rank_forks_in_every_method(state) -> dict[str, str]:
    comm, group = state.comm, state.comm._group
    shared = shared_empty(100)
    comm.register(shared)
    one, two = torch.ones(4), torch.ones(4 * state.world_size)
    bound = comm.bind(one)
    bound()
    done = comm.all_reduce(one, async_op=True)
    done.wait()
    if state.rank != 0:
        time.sleep(0.5)
        return {}
    work = comm.all_reduce(torch.ones(LARGE), async_op=True)
    time.sleep(0.1)  # its thread waits
    group_calls = calls_of_rank(group, shared, one, two)
    assert set(group_calls) == methods_of(group), methods_of(group) ^ set(group_calls)
    others = {
        "bound": bound,
        "done": done.wait,
        "register": lambda: comm.register(shared_empty(3)),
        "comm.all_reduce": lambda: comm.all_reduce(one, async_op=True),
        "comm.close": comm.close,
        "repr": lambda: repr(comm),
        "own group": make_own_group,
    }
    harmless = {
        "own group",
        "absent_ranks",
        "seal",
        "close",
        "add_region",
        "remove_region",
        "plan",
        "abort",
    }
    harmless |= {"done", "comm.close", "repr", "set_timeout"}
    return wrong_outcomes({**group_calls, **others, **calls_of_work(work)}, harmless)


def reduce_large(state) -> None:
    state.comm.all_reduce(torch.ones(LARGE))


def test_every_method_of_rank(joined_crew):
    crew = joined_crew(2, timeout=60)
    crew.start(on_rank_forks_in_every_method)
    outcome = crew[0].outcome()
    assert not outcome.error, outcome.trace
    assert outcome.value == {}
    # The parent's call goes on, and is as it was.
    crew[1].outcome()
    crew[1].call(reduce_large)


# -- forked by a signal handler, in the midst of a wait --------------------------------------------


def outcome_in_forked_handler(wait: Callable[[], Any]) -> str:
    """What ``wait`` came to in a child that a signal handler forked while the parent waited."""
    reader, writer = os.pipe()
    parent, children = os.getpid(), []

    def fork(*_: object) -> None:
        child = os.fork()
        if child != 0:
            children.append(child)
        else:
            signal.alarm(LIMIT_S)

    previous = signal.signal(signal.SIGUSR1, fork)
    threading.Timer(0.3, os.kill, (parent, signal.SIGUSR1)).start()
    text = "returned"
    try:
        wait()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        if os.getpid() != parent:
            os.write(writer, text.encode())
            os._exit(0)
        signal.signal(signal.SIGUSR1, previous)
    os.close(writer)
    assert text == "returned", text
    with os.fdopen(reader) as answer:
        said = answer.read()
    assert [os.waitpid(child, 0)[1] for child in children] == [0], said
    return said


def on_rank_forks_in_a_handler(state, is_async: bool) -> str:
    tensor = torch.full((1000,), float(state.rank + 1))
    said = ""
    if state.rank != 0:
        time.sleep(1.5)
        state.comm.all_reduce(tensor)
    elif is_async:
        state.comm.all_reduce(tensor, async_op=True)
        said = outcome_in_forked_handler(state.comm.barrier)
    else:
        said = outcome_in_forked_handler(lambda: state.comm.all_reduce(tensor))
    if state.rank != 0 and is_async:
        state.comm.barrier()
    assert torch.equal(tensor, torch.full((1000,), 3.0)), tensor
    state.comm.all_reduce(tensor)  # the parent is as good a rank as before
    return said


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_handler_forks_while_rank_waits(joined_crew, is_async):
    """The child returns into the wait, which is not its own: it says so, and changes nothing."""
    crew = joined_crew(2, timeout=60)
    said = crew.run(on_rank_forks_in_a_handler, is_async=is_async)[0]
    assert "a signal handler has called fork() while" in said


@pytest.mark.parametrize("is_closing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_handler_forks_while_threads_wait(is_closing):
    with pr.Communicator(["cpu"] * 2) as comm:
        comm._group.delay_rank(1, 1.5)
        tensors = [torch.ones(3), torch.ones(3)]
        comm.all_reduce(tensors, algorithm="ring", async_op=True)
        call = comm.close if is_closing else lambda: comm.all_reduce(tensors)
        said = outcome_in_forked_handler(call)
    assert "a signal handler has called fork() while" in said
