"""Storms: ranks that are killed, stopped and told to end at random; threads, closes, forks, alarms.

Whatever happens when, survivors get the right error in time, results are right until then, the
same processes can go on, and nothing is left behind. Seeds are fixed and printed; the long forms
are for before a release.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from process_checks import (
    PROMPT_S,
    leave_nothing,
    named_shared_memory,
    reduce,
    settled,
    stop_in,
    thread_ids,
)
from ranks import Crew, connect, fork_server, value_of
from test_forked import wrong_outcomes

import pyringar as pr

TIMEOUT_S = 2.0
LONG_RUN = [pytest.mark.thorough, pytest.mark.timeout(1800)]
SIZES = (1, 100, 5_000, 70_000)


def positions(numel: int, rank: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32) % 17 + rank


def summed(numel: int, world_size: int) -> torch.Tensor:
    ranks = world_size * (world_size - 1) // 2
    return (torch.arange(numel, dtype=torch.int32) % 17) * world_size + ranks


# -- processes -------------------------------------------------------------------------------------


def reduce_until_told(state, seed: int) -> None:
    """Reduce in every way, the same on all ranks, until something ends it."""

    def end(*_: object) -> None:
        raise SystemExit(3)

    choice = random.Random(seed)
    comm, k = state.comm, state.world_size
    try:
        signal.signal(signal.SIGTERM, end)
        state.store.add(f"{state.name} ready", 1)
        while True:
            numel, kind = choice.choice(SIZES), choice.randrange(5)
            tensor = positions(numel, state.rank)
            if kind == 0:
                comm.all_reduce_coalesced([tensor])
            elif kind == 1:
                works = [comm.all_reduce(t, async_op=True) for t in (tensor, tensor.clone())]
                for work in works:
                    work.wait()
            elif kind == 2:
                comm.barrier()
                continue
            elif kind == 3:
                comm.broadcast(tensor, numel % k)
                assert torch.equal(tensor, positions(numel, numel % k)), (seed, "broadcast")
                continue
            else:
                comm.all_reduce(tensor)
            assert torch.equal(tensor, summed(numel, k)), (seed, kind, numel)
    except (KeyboardInterrupt, SystemExit):
        comm.close()
        raise


EVENTS = {
    "kill": (signal.SIGKILL, ("PeerLostError",)),
    "stop": (signal.SIGSTOP, ("CollectiveTimeout",)),
    "term": (signal.SIGTERM, ("PeerLostError",)),
    # RingarError: it was still joining.
    "interrupt": (signal.SIGINT, ("RingarError", "PeerLostError")),
}


PHASES = ("idle", "announce", "reduce", "gather")


def strike(crew: Crew, choice: random.Random, event: str) -> None:
    """One rank meets with it; the others find out, and all that live meet again."""
    number, errors = EVENTS[event]
    struck = choice.randrange(crew.world_size)
    others = [rank for rank in range(crew.world_size) if rank != struck]
    name = crew.join(timeout=TIMEOUT_S)
    if event == "kill" and choice.random() < 0.5:
        crew[struck].call(stop_in, phase=choice.choice(PHASES))
    crew.start(reduce_until_told, seed=choice.randrange(1000))
    while connect(crew.port).add(f"{name} ready", 0) < crew.world_size:
        time.sleep(0.01)
    time.sleep(choice.random() * 0.2)
    if choice.random() < 0.4:  # shorter than the timeout: nobody minds
        crew[others[0]].send(signal.SIGSTOP)
        time.sleep(0.1)
        crew[others[0]].send(signal.SIGCONT)
    at = time.monotonic()
    if event == "kill":
        crew[struck].kill()
    else:
        crew[struck].send(number)
    late_s = PROMPT_S + (TIMEOUT_S if event == "stop" else 0.0)
    for outcome in crew.outcomes(others):
        assert outcome.error in errors, (event, struck, outcome)
        assert crew.name(struck) in outcome.text, (event, struck, outcome.text)
        assert outcome.at - at < late_s, (event, f"{outcome.at - at:.2f} s")
    alive = others
    if event != "kill":
        alive = list(range(crew.world_size))
        crew[struck].send(signal.SIGCONT)
        ended = crew[struck].outcome().error
        expected = {"stop": "CollectiveTimeout", "term": "SystemExit"}
        assert ended == expected.get(event, "KeyboardInterrupt")
    crew.run(leave_nothing, alive)
    crew.join(alive)
    crew.run(reduce, alive)
    crew.run(leave_nothing, alive)


def many_events(seed: int) -> list[str]:
    return random.Random(seed).choices(list(EVENTS), weights=[3, 1, 1, 1], k=70)


@pytest.mark.parametrize(
    ("seed", "events"),
    [
        (1, ["kill", "interrupt"]),
        pytest.param(
            1, ["kill", "term", "kill", "interrupt", "kill", "stop"] * 2, marks=pytest.mark.slow
        ),
        *(pytest.param(seed, many_events(seed), marks=LONG_RUN) for seed in range(2, 6)),
    ],
)
def test_survivors_outlive_random_events(seed, events):
    print(f"seed {seed}")
    before = fork_server().children()
    choice = random.Random(seed)
    for event in events:
        with Crew(choice.randint(2, 5)) as crew:
            strike(crew, choice, event)
    assert fork_server().children() == before, "a process is left"
    assert not named_shared_memory()


# -- threads ---------------------------------------------------------------------------------------


def call_at_random(comm: pr.Communicator, seed: int, report: SimpleNamespace) -> None:
    """Calls until the communicator is closed; every result is looked at."""
    choice, k = random.Random(seed), comm.world_size
    own = [positions(100, rank) for rank in range(k)]
    try:
        bound = comm.bind(own)
        while True:
            numel, kind = choice.choice(SIZES), choice.randrange(6)
            tensors = [positions(numel, rank) for rank in range(k)]
            want = summed(numel, k)
            if kind == 0:
                for tensor, rank in zip(own, range(k), strict=True):
                    tensor.copy_(positions(100, rank))
                bound()
                tensors, want = own, summed(100, k)
            elif kind == 1:
                comm.all_reduce(tensors, async_op=True).wait()
            elif kind == 2:
                comm.all_reduce(tensors, algorithm="naive")
            elif kind == 3:
                comm.stats()
                comm.all_reduce_coalesced([[tensor] for tensor in tensors])
            else:
                comm.all_reduce(tensors, algorithm=("ring", "direct")[kind % 2])
            if not all(torch.equal(tensor, want) for tensor in tensors):
                report.wrong.append((seed, kind, numel))
            report.calls += 1
    except pr.RingarError as error:
        if "closed" not in str(error):
            report.wrong.append((seed, repr(error)))
    except BaseException as error:
        report.wrong.append((seed, repr(error)))


def fork_and_try(comm: pr.Communicator) -> list[str]:
    """Call methods in children; those that hang, or do what a child may not.

    A lock that a thread holds at the fork stays locked: no method may want it.
    """
    tensors = [torch.ones(64) for _ in range(comm.world_size)]
    calls = {
        "bound": comm.bind(tensors),
        "stats": comm.stats,
        "all_reduce": lambda: comm.all_reduce(tensors),
        "in the background": lambda: comm.all_reduce(tensors, async_op=True),
        "naive": lambda: comm.all_reduce(tensors, algorithm="naive"),
        "close": comm.close,
    }
    return list(wrong_outcomes(calls, {"close"}))


def on_rank_storms(state, seed: int, seconds: float) -> dict[str, int]:
    """Threads call; the main thread gets alarms, forks and closes under fire, again and again."""
    choice = random.Random(seed)
    report = SimpleNamespace(calls=0, wrong=[], alarms=0, closed=0, forked=0)
    end = time.monotonic() + seconds
    beside = pr.Communicator(["cpu"] * 2)
    comm = beside

    def alarm(*_: object) -> None:
        report.alarms += 1
        comm.stats()
        pair = [positions(50, 0), positions(50, 1)]
        beside.all_reduce(pair)
        if not torch.equal(pair[0], summed(50, 2)):
            report.wrong.append("alarm")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.007)
    try:
        while time.monotonic() < end and not report.wrong:
            comm = pr.Communicator(["cpu"] * choice.randint(1, 4))
            threads = [
                threading.Thread(target=call_at_random, args=(comm, choice.random(), report))
                for _ in range(choice.randint(2, 8))
            ]
            for thread in threads:
                thread.start()
            time.sleep(choice.random() * 0.3)
            if choice.random() < 0.5:
                report.forked += 1
                report.wrong += fork_and_try(comm)
            comm.close()
            report.closed += 1
            for thread in threads:
                thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    beside.close()
    assert not report.wrong, (seed, report.wrong[:3])
    return {**vars(report), "threads": settled(lambda: len(thread_ids()), 1)}


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [
        pytest.param(7, 6.0, marks=pytest.mark.slow),
        *(pytest.param(seed, 120.0, marks=LONG_RUN) for seed in range(8, 12)),
    ],
)
def test_threads_alarms_forks_and_closes(new_crew, seed, seconds):
    crew = new_crew(1)
    crew[0].start(on_rank_storms, seed=seed, seconds=seconds)
    report = value_of(crew[0].outcome(seconds + 60))
    print(report)
    assert report["threads"] == 1, "threads are left"
    assert min(report[what] for what in ("calls", "alarms", "closed")) > 3
