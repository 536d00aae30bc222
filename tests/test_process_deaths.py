"""How a group of processes ends, where the table of faults does not say it.

`tests/conformance/faults.py` holds the table: victim, phase, event, error.
"""

from __future__ import annotations

import contextlib
import signal
import time

import torch
from process_checks import (
    LARGE,
    PROMPT_S,
    SMALL,
    assert_all_lost,
    assert_survivors_go_on,
    leave_nothing,
    reduce,
    stop_in,
)
from ranks import Crew, value_of

import pyringar as pr


def begin_call(crew: Crew, victim: int, phase: str, numel: int, function=reduce) -> list[int]:
    crew[victim].call(stop_in, phase=phase, seconds=50.0 if phase == "reduce" else 0.8)
    crew.start(function, numel=numel)
    time.sleep(0.3)  # all are in the call, and where they wait
    return [rank for rank in range(crew.world_size) if rank != victim]


def test_death_after_announcement_fails_next_call(joined_crew):
    """A small call has one wait: the victim has announced its data, so that nothing is missing."""
    crew = joined_crew(3)
    crew.run(reduce)
    others = begin_call(crew, 1, "reduce", SMALL)
    crew[1].kill()
    assert [outcome.error for outcome in crew.outcomes(others)] == [None] * 2
    crew.start(reduce, others)
    assert_all_lost(crew, others, 1, time.monotonic())
    assert_survivors_go_on(crew, others)


def test_stopped_rank_hears_of_timeout(joined_crew):
    crew = joined_crew(3, timeout=1.0)
    crew.run(reduce)
    others = begin_call(crew, 0, "idle", SMALL)
    crew[0].send(signal.SIGSTOP)
    assert [outcome.error for outcome in crew.outcomes(others)] == ["CollectiveTimeout"] * 2
    crew[0].send(signal.SIGCONT)
    outcome = crew[0].outcome()
    if outcome.error is None:  # the others had announced their data: then in its next call
        crew[0].start(reduce)
        outcome = crew[0].outcome()
    assert outcome.error == "CollectiveTimeout", outcome
    assert crew.name(0) in outcome.text
    crew.run(leave_nothing)
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
    others = begin_call(crew, 1, "reduce", LARGE, reduce_and_leave)
    assert_all_lost(crew, others, 1, crew[1].kill())


def submit_many(state, calls: int) -> list[str]:
    works = [state.comm.all_reduce(torch.ones(LARGE), async_op=True) for _ in range(calls)]
    classes = []
    for work in works:
        with contextlib.suppress(pr.RingarError):
            work.wait()
        classes.append(type(work.exception()).__name__)
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
