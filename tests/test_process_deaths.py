"""Survivors hear of a rank that dies, stops, leaves or is late, at any moment of a call.

The right error, with the right name, in time; the group refuses from then on, the same processes
can make a new one, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import torch
from cases import mostly_slow
from process_checks import (
    BUSY_S,
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
    refuse,
    stop_in,
    tensor_is_untouched,
)
from ranks import Crew, Outcome, value_of

import pyringar as pr
from pyringar.comm.shared_tensors import shared_empty

TIMEOUT_S = 1.0
PHASES = {
    "idle": SMALL,
    "announce": SMALL,
    "reduce": SMALL,
    "announce of many pieces": LARGE,
    "reduce of many pieces": LARGE,
    "gather of many pieces": LARGE,
}


def others_of(crew: Crew, rank: int) -> list[int]:
    return [other for other in range(crew.world_size) if other != rank]


# -- SIGKILL ---------------------------------------------------------------------------------------


def kill_in_call(crew: Crew, dead: int, phase: str, function, **arguments) -> float:
    """Kill a rank in this phase of a call that all make; when."""
    crew[dead].call(stop_in, phase=phase)
    crew.start(function, **arguments)
    time.sleep(0.2)  # all are in the call, and where they wait
    return crew[dead].kill()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("world_size", "dead"),
    mostly_slow([(2, 0), (3, 1), (2, 1), (4, 3)], (2, 0)),
)
def test_killed(joined_crew, world_size, dead, phase):
    crew = joined_crew(world_size)
    crew.run(reduce, calls=2)
    crew.run(prepare, numel=PHASES[phase])
    survivors = others_of(crew, dead)
    died_at = kill_in_call(crew, dead, phase.split()[0], reduce, numel=PHASES[phase])
    for outcome in crew.outcomes(survivors):
        if phase == "reduce":  # of one wait: the dead had announced, so that nothing is missing
            assert outcome.error is None, outcome
        else:
            assert_lost(outcome, dead, crew, died_at)
            assert "all_reduce (sum) of" in outcome.text
            assert f"{PHASES[phase]} float32 elements" in outcome.text
            last = 2 if phase == "idle" else 3
            assert f"its last was call {last}, all_reduce" in outcome.text, outcome.text
    if phase == "reduce":
        crew.start(reduce, survivors)
        for outcome in crew.outcomes(survivors):
            assert_lost(outcome, dead, crew, outcome.at - outcome.seconds)
    elif phase.split()[0] in ("idle", "announce"):
        assert all(crew.run(tensor_is_untouched, survivors))
    assert_survivors_go_on(crew, survivors)


def reduce_registered(state) -> None:
    if not hasattr(state, "shared"):
        state.shared = shared_empty(LARGE)
        state.comm.register(state.shared)
    state.shared.fill_(1.0)
    state.comm.all_reduce(state.shared)
    assert torch.equal(state.shared, torch.full((LARGE,), float(state.world_size)))


def forget_registered(state) -> None:
    del state.shared


@pytest.mark.parametrize("phase", ["idle", "announce", "reduce"])
def test_killed_with_registered_tensors(joined_crew, phase):
    crew = joined_crew(3)
    crew.run(reduce_registered)
    died_at = kill_in_call(crew, 1, phase, reduce_registered)
    for outcome in crew.outcomes([0, 2]):
        assert_lost(outcome, 1, crew, died_at)
        assert "registered" in outcome.text
    crew.run(forget_registered, [0, 2])
    assert_survivors_go_on(crew, [0, 2])


def reduce_and_leave(state, **arguments) -> None:
    try:
        reduce(state, **arguments)
    finally:
        state.comm.close()


def test_leavers_after_death_are_not_blamed(joined_crew):
    """The first to hear of it leaves at once; others wait for that one, and hear of the dead."""
    crew = joined_crew(4)
    crew.run(prepare, numel=LARGE)
    died_at = kill_in_call(crew, 1, "reduce", reduce_and_leave, numel=LARGE)
    assert_all_lost(crew, [0, 2, 3], 1, died_at)


def test_leaver_is_named(joined_crew):
    crew = joined_crew(2)
    crew[1].start(reduce_and_leave)
    crew[0].start(reduce, calls=2)
    value_of(crew[1].outcome())
    outcome = crew[0].outcome()
    assert_lost(outcome, 1, crew, outcome.at)
    assert "which has left the group; its last was call 1" in outcome.text


def test_zombie_is_gone(joined_crew):
    """The dead process was not waited for: the system still knows it."""
    crew = joined_crew(2)
    crew[0].start(reduce)
    time.sleep(0.2)
    died_at = crew[1].kill(reaped=False)
    assert_all_lost(crew, [0], 1, died_at)
    crew[1].reap()


def test_dead_before_first_call(joined_crew):
    crew = joined_crew(3)
    died_at = crew[2].kill()
    crew.start(reduce, [0, 1])
    for outcome in crew.outcomes([0, 1]):
        assert_lost(outcome, 2, crew, died_at)
        assert "it has called nothing yet" in outcome.text


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


# -- SIGSTOP, and ranks that are late --------------------------------------------------------------


def assert_timed_out(outcomes: list[Outcome], late: int, crew: Crew) -> None:
    for outcome in outcomes:
        assert outcome.error == "CollectiveTimeout", outcome
        assert "TimeoutError" in outcome.classes
        assert crew.name(late) in outcome.text, outcome.text
        assert f"for {TIMEOUT_S:g} s" in outcome.text
        has_called = "it has called nothing yet" not in outcome.text
        assert has_called == ("last heard of" in outcome.text), outcome.text
        assert TIMEOUT_S - 0.3 < outcome.seconds < TIMEOUT_S + LATE_S, outcome.seconds


@pytest.mark.parametrize(
    "phase", mostly_slow((p for p in PHASES if p != "reduce"), "idle", "gather of many pieces")
)
@pytest.mark.parametrize(
    ("world_size", "stopped"), [pytest.param(2, 1, marks=pytest.mark.slow), (3, 0)]
)
def test_stopped(joined_crew, world_size, stopped, phase):
    crew = joined_crew(world_size, timeout=TIMEOUT_S)
    crew.run(reduce)
    crew.run(prepare, numel=PHASES[phase])
    others = others_of(crew, stopped)
    crew[stopped].call(stop_in, phase=phase.split()[0], seconds=0.3)
    crew[stopped].start(reduce, numel=PHASES[phase])
    time.sleep(0.1)
    crew[stopped].send(signal.SIGSTOP)
    crew.start(reduce, others, numel=PHASES[phase])
    outcomes = crew.outcomes(others)
    assert_timed_out(outcomes, stopped, crew)
    last = 1 if phase == "idle" else 2
    for outcome in outcomes:
        assert "call 2" in outcome.text, outcome.text
        assert f"its last was call {last}, all_reduce" in outcome.text, outcome.text
    crew.run(refuse, others, words="failed before and cannot be used", error="CollectiveTimeout")
    # Awake again it hears of it, in this call or in the next.
    crew[stopped].send(signal.SIGCONT)
    outcome = crew[stopped].outcome()
    if outcome.error is None:
        crew[stopped].start(reduce)
        outcome = crew[stopped].outcome()
    assert outcome.error == "CollectiveTimeout", outcome
    assert crew.name(stopped) in outcome.text
    # All can meet again.
    crew.run(leave_nothing)
    crew.join()
    crew.run(reduce, numel=LARGE)


@pytest.mark.parametrize("world_size", mostly_slow([2, 3], 2))
def test_late_but_in_time(joined_crew, world_size):
    crew = joined_crew(world_size, timeout=20.0)
    for phase in ("idle", "announce", "reduce", "gather"):
        crew[world_size - 1].call(stop_in, phase=phase, seconds=0.3)
        crew.run(reduce, numel=LARGE)
        # A delay is for one call.
        crew.start(reduce, numel=LARGE)
        assert all(outcome.seconds < 0.3 + BUSY_S for outcome in crew.outcomes())


def test_exception_in_one_rank(joined_crew):
    """A rank whose own program fails makes no call: the others wait until the deadline."""
    crew = joined_crew(2, timeout=TIMEOUT_S)
    crew[1].start(reduce, numel="many")
    assert crew[1].outcome().error == "TypeError"
    crew[0].start(reduce)
    assert_timed_out([crew[0].outcome()], 1, crew)
    crew[1].start(reduce)
    outcome = crew[1].outcome()
    assert outcome.error == "CollectiveTimeout"
    assert crew.name(1) in outcome.text
