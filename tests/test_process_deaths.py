"""How a group of processes ends: a rank is killed, stops, leaves or raises.

The survivors get the right error, with the right name, in time. The group refuses from then on,
the same processes can make a new one, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import torch
from cases import mostly_slow
from process_checks import (
    LARGE,
    LATE_S,
    PROMPT_S,
    SMALL,
    assert_all_lost,
    assert_lost,
    assert_survivors_go_on,
    leave_nothing,
    prepare,
    reduce,
    stop_in,
    tensor_is_untouched,
)
from ranks import Crew, Outcome, value_of

import pyringar as pr

TIMEOUT_S = 1.0
PHASES = {
    "idle": SMALL,
    "announce": SMALL,
    "reduce": SMALL,
    "announce of many pieces": LARGE,
    "reduce of many pieces": LARGE,
    "gather of many pieces": LARGE,
}
GROUPS = [(2, 0), (3, 1), (2, 1), (4, 3)]  # world size, victim


def others_of(crew: Crew, rank: int) -> list[int]:
    return [other for other in range(crew.world_size) if other != rank]


def begin_call(crew: Crew, victim: int, phase: str, seconds: float, function=reduce) -> list[int]:
    crew.run(prepare, numel=PHASES[phase])
    crew[victim].call(stop_in, phase=phase.split()[0], seconds=seconds)
    crew.start(function, numel=PHASES[phase])
    time.sleep(0.2)  # all are in the call, and where they wait
    return others_of(crew, victim)


def assert_describes(outcome: Outcome, phase: str) -> None:
    assert f"all_reduce (sum) of {PHASES[phase]} float32 elements" in outcome.text, outcome.text
    last = 2 if phase == "idle" else 3
    assert f"its last was call {last}, all_reduce" in outcome.text, outcome.text


def assert_timed_out(outcomes: list[Outcome], late: int, crew: Crew) -> None:
    for outcome in outcomes:
        assert outcome.error == "CollectiveTimeout", outcome
        assert "TimeoutError" in outcome.classes
        assert crew.name(late) in outcome.text, outcome.text
        assert f"for {TIMEOUT_S:g} s" in outcome.text
        has_called = "it has called nothing yet" not in outcome.text
        assert has_called == ("last heard of" in outcome.text), outcome.text
        assert TIMEOUT_S - 0.3 < outcome.seconds < TIMEOUT_S + LATE_S, outcome.seconds


# -- in the midst of a call ------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "victim"), mostly_slow(GROUPS, GROUPS[0]))
def test_killed_rank_is_named(joined_crew, world_size, victim, phase):
    crew = joined_crew(world_size)
    crew.run(reduce, calls=2)
    others = begin_call(crew, victim, phase, 50.0)
    died_at = crew[victim].kill()
    outcomes = crew.outcomes(others)
    if phase == "reduce":  # of one wait: the victim had announced, so that nothing is missing
        assert [outcome.error for outcome in outcomes] == [None] * len(others)
        crew.start(reduce, others)
        assert_all_lost(crew, others, victim, time.monotonic())
    else:
        for outcome in outcomes:
            assert_lost(outcome, victim, crew, died_at)
            assert_describes(outcome, phase)
    if phase in ("idle", "announce"):
        assert all(crew.run(tensor_is_untouched, others))
    assert_survivors_go_on(crew, others)


@pytest.mark.parametrize(
    "phase", mostly_slow((p for p in PHASES if p != "reduce"), "idle", "gather of many pieces")
)
@pytest.mark.parametrize(
    ("world_size", "victim"), [pytest.param(2, 1, marks=pytest.mark.slow), (3, 0)]
)
def test_stopped_rank_is_named(joined_crew, world_size, victim, phase):
    crew = joined_crew(world_size, timeout=TIMEOUT_S)
    crew.run(reduce, calls=2)
    others = begin_call(crew, victim, phase, 0.8)
    crew[victim].send(signal.SIGSTOP)
    outcomes = crew.outcomes(others)
    assert_timed_out(outcomes, victim, crew)
    for outcome in outcomes:
        assert_describes(outcome, phase)
    # Awake again it hears of it, in this call or in the next.
    crew[victim].send(signal.SIGCONT)
    outcome = crew[victim].outcome()
    if outcome.error is None:
        crew[victim].start(reduce)
        outcome = crew[victim].outcome()
    assert outcome.error == "CollectiveTimeout", outcome
    assert crew.name(victim) in outcome.text
    crew.run(leave_nothing, [victim])
    assert_survivors_go_on(crew, others, "CollectiveTimeout")
    crew.join()
    crew.run(reduce, numel=LARGE)


def reduce_and_leave(state, **arguments) -> None:
    try:
        reduce(state, **arguments)
    finally:
        state.comm.close()


def test_leavers_after_death_are_not_blamed(joined_crew):
    """The first to hear of it leaves at once; others wait for that one, and hear of the dead."""
    crew = joined_crew(4)
    others = begin_call(crew, 1, "reduce of many pieces", 50.0, reduce_and_leave)
    assert_all_lost(crew, others, 1, crew[1].kill())


# -- a rank that makes no call ---------------------------------------------------------------------


def leave(state) -> None:
    state.comm.close()


def fail(state) -> None:
    raise TypeError("of the program")


# Event, and the words of rank 0's error beside the name of rank 1.
ABSENT = {
    "killed": "it has called nothing yet",
    "zombie": "it has called nothing yet",  # not waited for: the system still knows it
    "left": "which has left the group; it has called nothing yet",
    "raised": "it has called nothing yet",
}


@pytest.mark.parametrize("event", ABSENT)
def test_absent_rank_is_named(joined_crew, event):
    crew = joined_crew(2, timeout=TIMEOUT_S if event == "raised" else 20.0)
    crew[0].start(reduce)
    time.sleep(0.2)
    at = time.monotonic()
    if event in ("killed", "zombie"):
        crew[1].kill(reaped=event == "killed")
    else:
        crew[1].start(leave if event == "left" else fail)
        assert crew[1].outcome().error == (None if event == "left" else "TypeError")
    outcome = crew[0].outcome()
    assert ABSENT[event] in outcome.text, outcome
    if event == "raised":
        assert_timed_out([outcome], 1, crew)
        crew[1].start(reduce)
        told = crew[1].outcome()
        assert told.error == "CollectiveTimeout"
        assert crew.name(1) in told.text
    else:
        assert_lost(outcome, 1, crew, at)
    if event == "zombie":
        crew[1].reap()


def submit_many(state, calls: int) -> list[str]:
    works = [state.comm.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(calls)]
    classes = []
    for work in works:
        with contextlib.suppress(pr.RingarError):
            work.wait()
        error = work.exception()
        classes.append(type(error).__name__ if error else "")
    return classes


def test_death_fails_all_background_work(joined_crew):
    crew = joined_crew(2)
    crew[0].start(submit_many, calls=5)
    time.sleep(0.2)
    died_at = crew[1].kill()
    outcome = crew[0].outcome()
    assert value_of(outcome) == ["PeerLostError"] * 5
    assert outcome.at - died_at < PROMPT_S
    assert_survivors_go_on(crew, [0])
