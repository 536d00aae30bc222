"""After os.fork(): does every method, in the child, raise or do no harm, and never hang?

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
from cases import mostly_slow
from process_checks import LARGE

import pyringar as pr
from pyringar.engine import load

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: threads and fork
]
LIMIT_S = 20.0
# What a child that is told may answer: nothing of the engine's own state is looked at for it.
HARMLESS = "harmless"


def outcomes_in_children(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """What each call came to in a child of its own: an error's text, or that it returned."""
    return {name: _outcome_in_child(call) for name, call in calls.items()}


def _outcome_in_child(call: Callable[[], Any]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(int(LIMIT_S))  # kills it
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


def methods_of(group: Any) -> set[str]:
    public = {name: value for name, value in vars(type(group)).items() if not name.startswith("_")}
    return {name for name, value in public.items() if not isinstance(value, type)}


def assert_told(outcomes: dict[str, str], harmless: set[str]) -> None:
    for name, outcome in outcomes.items():
        if name in harmless:
            assert outcome == HARMLESS, (name, outcome)
        else:
            assert "made before fork()" in outcome or "begun before fork()" in outcome, (
                name,
                outcome,
            )


# -- one process drives all ranks ------------------------------------------------------------------


def calls_of_threads(group, two, four) -> dict:
    return {
        "all_reduce": lambda: group.all_reduce(two, "sum", "fused", "rank", None),
        "all_reduce_coalesced": lambda: group.all_reduce_coalesced(
            [[t] for t in two], "sum", "fused", "rank", None
        ),
        "reduce_scatter": lambda: group.reduce_scatter(two, four, "sum", "fused", "rank", {}),
        "all_gather": lambda: group.all_gather(four, two, "ring", {}),
        "broadcast": lambda: group.broadcast(two, 0, None),
        "broadcast_coalesced": lambda: group.broadcast_coalesced([[t] for t in two], 0, None),
        "reduce": lambda: group.reduce(two[0], two, "sum", "fused", "rank", 0, None),
        "reduce_coalesced": lambda: group.reduce_coalesced(
            two[:1], [[t] for t in two], "sum", "fused", "rank", 0, {}
        ),
        "bind": lambda: group.bind(two, "sum", "fused", "rank"),
        "bind_coalesced": lambda: group.bind_coalesced([[t] for t in two], "sum", "fused", "rank"),
        "check": lambda: group.check(two),
        "check_usable": group.check_usable,
        "check_coalesced": lambda: group.check_coalesced([[t] for t in two]),
        "close": group.close,
        "stats": group.stats,
        "delay_rank": lambda: group.delay_rank(0, 0.0),
        "end_delay": group.end_delay,
    }


def test_every_method_of_a_group_of_threads():
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
        "work.wait": work.wait,
        "work.is_completed": work.is_completed,
        "work.exception": work.exception,
        "work.finished_ns": work.finished_ns,
        "bound": bound,
        "done.wait": done.wait,
        "done.is_completed": done.is_completed,
        "done.exception": done.exception,
        "naive": lambda: comm.all_reduce(two, algorithm="naive"),
        "comm.close": comm.close,
        "plan": lambda: comm.plan(100),
        "comm.stats": comm.stats,
        "repr": lambda: repr(comm),
        "allreduce": lambda: pr.allreduce(two),
    }
    outcomes = outcomes_in_children({**others, **group_calls})
    assert_told(
        outcomes,
        {"close", "end_delay", "comm.close", "plan", "repr", "allreduce"}
        | {"done.wait", "done.is_completed", "done.exception"},
    )
    group.end_delay()
    assert work.wait(), "the parent goes on"
    comm.close()


# -- one rank per process --------------------------------------------------------------------------


def calls_of_a_rank(group, shared, one, two) -> dict:
    return {
        "absent_ranks": group.absent_ranks,
        "seal": group.seal,
        "all_reduce": lambda: group.all_reduce(shared, "sum", "direct", "rank", None),
        "reduce_scatter": lambda: group.reduce_scatter(one, two, "sum", "rank", None),
        "all_gather": lambda: group.all_gather(two, one, {}),
        "broadcast": lambda: group.broadcast(one, 0, None),
        "barrier": lambda: group.barrier(None),
        "bind": lambda: group.bind(one, "sum", "direct", "rank"),
        "plain_all_reduce": lambda: group.plain_all_reduce("direct", "rank")(
            one, "sum", None, None
        ),
        "close": group.close,
        "delay": lambda: group.delay("idle", 0.0),
        "add_region": lambda: group.add_region(7, [(0, 0)] * 2, None),
        "remove_region": lambda: group.remove_region(0),
        "plan": lambda: group.plan(100, "float32", "direct"),
        "stats": group.stats,
        "flip_bit_of_next": group.flip_bit_of_next,
        "abort": group.abort,
        "check": group.check,
        "check_peers": lambda: group.check_peers([1]),
        "tell": lambda: group.tell("rank 1 is gone", False),
        "progress": group.progress,
        "set_timeout": lambda: group.set_timeout(7.0),
        "submit_step": lambda: group.submit_step(print),
    }


def on_rank_forks_in_every_method(state) -> dict[str, str]:
    comm, group = state.comm, state.comm._group
    shared = pr.shared_empty(100)
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
    group_calls = calls_of_a_rank(group, shared, one, two)
    assert set(group_calls) == methods_of(group), methods_of(group) - set(group_calls)
    del group_calls["add_region"]  # wants memory of the others', which register() cannot ask for
    others = {
        "bound": bound,
        "register": lambda: comm.register(pr.shared_empty(3)),
        "work.wait": work.wait,
        "work.is_completed": work.is_completed,
        "work.exception": work.exception,
        "work.finished_ns": work.finished_ns,
        "done.wait": done.wait,
        "comm.all_reduce": lambda: comm.all_reduce(one, async_op=True),
        "comm.close": comm.close,
        "repr": lambda: repr(comm),
    }
    return outcomes_in_children({**group_calls, **others})


def test_every_method_of_a_rank(joined_crew):
    crew = joined_crew(2, timeout=60)
    crew.start(on_rank_forks_in_every_method)
    outcome = crew[0].outcome()
    assert not outcome.error, outcome.trace
    assert_told(
        outcome.value,
        {"absent_ranks", "seal", "close", "remove_region", "plan", "done.wait"}
        | {"comm.close", "repr", "abort", "set_timeout"},
    )
    # The parent's call goes on, and is as it was.
    crew[1].outcome()
    crew[1].call(reduce_large)


def reduce_large(state) -> None:
    state.comm.all_reduce(torch.ones(LARGE))


# -- while threads are in the engine ---------------------------------------------------------------


@pytest.mark.slow
def test_children_of_a_process_whose_threads_call():
    """A lock that some thread holds at the fork stays locked: no method may want it."""
    load.engine()
    comm = pr.Communicator(["cpu"] * 2)
    tensors = [torch.ones(64), torch.ones(64)]
    bound = comm.bind(tensors)
    stop = threading.Event()

    def call(seed: int) -> None:
        mine = [torch.ones(64), torch.ones(64)]
        while not stop.is_set():
            comm.all_reduce(mine, algorithm=("fused", "ring")[seed % 2], async_op=seed > 1)
            comm.stats()

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    calls = {
        f"{name} {turn}": function
        for turn in range(4)
        for name, function in {
            "bound": bound,
            "stats": comm.stats,
            "all_reduce": lambda: comm.all_reduce(tensors, async_op=True),
            "wait_for_turn": lambda: comm.all_reduce(tensors, algorithm="naive"),
        }.items()
    }
    try:
        outcomes = outcomes_in_children(calls)
        closed = outcomes_in_children({"close": comm.close})
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert_told(outcomes, set())
    assert closed == {"close": HARMLESS}
    comm.close()


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
            signal.alarm(int(LIMIT_S))

    previous = signal.signal(signal.SIGUSR1, fork)
    killer = threading.Timer(0.3, os.kill, (parent, signal.SIGUSR1))
    killer.start()
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


def on_rank_forks_in_a_handler(state, wait: str) -> str:
    comm, tensor = state.comm, torch.full((1000,), float(state.rank + 1))
    if state.rank != 0:
        time.sleep(1.5)
        comm.all_reduce(tensor)
        if wait in ("turn", "thread"):
            comm.barrier()
        said = ""
    elif wait == "call":
        said = outcome_in_forked_handler(lambda: comm.all_reduce(tensor))
    elif wait == "thread":
        thread = threading.Thread(target=comm.all_reduce, args=(tensor,))
        thread.start()
        time.sleep(0.1)
        said = outcome_in_forked_handler(comm.barrier)
    else:
        comm.all_reduce(tensor, async_op=True)
        said = outcome_in_forked_handler(comm.barrier if wait == "turn" else comm.close)
    assert torch.equal(tensor, torch.full((1000,), 3.0)), tensor
    if wait != "close":
        comm.all_reduce(tensor)  # the parent is as good a rank as before
    return said


@pytest.mark.parametrize("wait", mostly_slow(["call", "turn", "thread", "close"], "call"))
def test_a_handler_forks_while_a_rank_waits(joined_crew, wait):
    """The child returns into the wait, which is not its own: it says so, and changes nothing."""
    crew = joined_crew(2, timeout=60)
    said = crew.run(on_rank_forks_in_a_handler, wait=wait)[0]
    assert "a signal handler has called fork() while" in said


@pytest.mark.parametrize("wait", mostly_slow(["turn", "close"], "turn"))
def test_a_handler_forks_while_one_process_waits(wait):
    with pr.Communicator(["cpu"] * 2) as comm:
        comm._group.delay_rank(1, 1.5)
        tensors = [torch.ones(3), torch.ones(3)]
        comm.all_reduce(tensors, algorithm="ring", async_op=True)
        call = comm.close if wait == "close" else lambda: comm.all_reduce(tensors)
        said = outcome_in_forked_handler(call)
    assert "a signal handler has called fork() while" in said
