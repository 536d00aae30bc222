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
from ranks import value_of

import pyringar as pr
from pyringar.comm.work import Work

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: threads and fork
]
LIMIT_S = 20
HARMLESS = "harmless"
TOLD = ("made before fork()", "begun before fork()")


def outcome_in_child(call: Callable[[], Any]) -> str:
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
    wrong = {}
    for name, call in calls.items():
        outcome = outcome_in_child(call)
        is_told = any(words in outcome for words in TOLD)
        if not (outcome == HARMLESS if name in harmless else is_told):
            wrong[name] = outcome
    return wrong


def calls_of(comm: Any, data: Any, whole: Any) -> dict[str, Callable[[], Any]]:
    lists = [[tensor] for tensor in data] if isinstance(data, list) else [data]
    bound = comm.bind(data)
    done = comm.all_reduce(data, async_op=True)
    done.wait()
    return {
        "all_reduce": lambda: comm.all_reduce(data),
        "async": lambda: comm.all_reduce(data, async_op=True),
        "coalesced": lambda: comm.all_reduce_coalesced(lists),
        "reduce_scatter": lambda: comm.reduce_scatter(data, whole),
        "all_gather": lambda: comm.all_gather(whole, data, async_op=True),
        "broadcast": lambda: comm.broadcast(data),
        "bind": lambda: comm.bind(data),
        "bind_coalesced": lambda: comm.bind_coalesced(lists),
        "bound": bound,
        "check": comm.check,
        "stats": comm.stats,
        "plan": lambda: comm.plan(100),
        "done": done.wait,
        "close": comm.close,
        "repr": lambda: repr(comm),
    }


HARMLESS_CALLS = {"plan", "done", "close", "repr", "own group"}


def calls_of_work(work: Work) -> dict[str, Callable[[], Any]]:
    names = ("wait", "is_completed", "exception", "finished_ns")
    return {f"work.{name}": getattr(work, name) for name in names}


# -- one process drives all ranks ------------------------------------------------------------------


def reduce_two() -> None:
    two = [torch.ones(1_000), torch.ones(1_000)]
    pr.allreduce(two)
    assert torch.equal(two[0], torch.full((1_000,), 2.0))


def test_child_cannot_use_threads():
    reduce_two()
    comm = pr.Communicator(["cpu"] * 2, timeout=60)
    two, four = ([torch.ones(n), torch.ones(n)] for n in (4, 8))
    calls = calls_of(comm, two, four) | {
        "reduce": lambda: comm.reduce(torch.empty(4), two),
        "reduce_coalesced": lambda: comm.reduce_coalesced(two[:1], [two[:1], two[1:]]),
        "broadcast_coalesced": lambda: comm.broadcast_coalesced([two[:1], two[1:]]),
        "naive": lambda: comm.all_reduce(two, algorithm="naive"),
        "own group": reduce_two,
    }
    comm._group.delay_rank(1, 20.0)
    work = comm.all_reduce([torch.ones(4), torch.ones(4)], algorithm="ring", async_op=True)
    assert wrong_outcomes(calls | calls_of_work(work), HARMLESS_CALLS) == {}
    comm._group.end_delay()
    assert work.wait(), "the parent goes on"
    comm.close()


# -- one rank per process --------------------------------------------------------------------------


def make_own_group() -> None:
    with pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 1) as own:
        tensor = torch.ones(3)
        own.all_reduce(tensor)
        own.all_reduce(tensor, async_op=True).wait()
        assert torch.equal(tensor, torch.ones(3))


def on_rank_forks_in_every_call(state) -> dict[str, str]:
    comm = state.comm
    calls = calls_of(comm, torch.ones(4), torch.ones(4 * state.world_size)) | {
        "barrier": comm.barrier,
        "check_peers": lambda: comm.check_peers([1]),
        "abort": comm.abort,
        "set_timeout": lambda: comm.set_timeout(7.0),
        "own group": make_own_group,
    }
    if state.rank != 0:
        time.sleep(0.5)
        return {}
    work = comm.all_reduce(torch.ones(LARGE), async_op=True)
    time.sleep(0.1)  # its thread waits
    return wrong_outcomes(calls | calls_of_work(work), HARMLESS_CALLS | {"abort", "set_timeout"})


def reduce_large(state) -> None:
    state.comm.all_reduce(torch.ones(LARGE))


def test_child_cannot_use_rank(joined_crew):
    crew = joined_crew(2, timeout=60)
    crew.start(on_rank_forks_in_every_call)
    assert value_of(crew[0].outcome()) == {}
    # The parent's call goes on, and is as it was.
    crew[1].outcome()
    crew[1].call(reduce_large)


# -- forked by a signal handler, in the midst of a wait --------------------------------------------


def outcome_in_forked_handler(wait: Callable[[], Any]) -> str:
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


def on_rank_forks_in_a_handler(state) -> str:
    tensor = torch.full((1000,), float(state.rank + 1))
    said = ""
    if state.rank != 0:
        time.sleep(1.5)
        state.comm.all_reduce(tensor)
    else:
        said = outcome_in_forked_handler(lambda: state.comm.all_reduce(tensor))
    assert torch.equal(tensor, torch.full((1000,), 3.0)), tensor
    state.comm.all_reduce(tensor)  # the parent is as good a rank as before
    return said


def test_handler_forks_while_rank_waits(joined_crew):
    said = joined_crew(2, timeout=60).run(on_rank_forks_in_a_handler)[0]
    assert "a signal handler has called fork() while" in said
