"""Storms: ranks that are killed, stopped and told to end at random; threads, closes, alarms.

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
from fork_server import servers
from process_checks import (
    PROMPT_S,
    leave_nothing,
    named_shared_memory,
    reduce,
    settled,
    stop_in,
    thread_ids,
)
from ranks import Crew, connect, value_of

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
    def end(*_: object) -> None:
        raise SystemExit(3)

    choice = random.Random(seed)
    comm, k = state.comm, state.world_size
    try:
        signal.signal(signal.SIGTERM, end)
        state.store.add(f"{state.name} ready", 1)
        while True:
            numel, kind = choice.choice(SIZES), choice.choice(["now", "list", "works", "broadcast"])
            tensor, want = positions(numel, state.rank), summed(numel, k)
            if kind == "now":
                comm.all_reduce(tensor)
            elif kind == "list":
                comm.all_reduce_coalesced([tensor])
            elif kind == "works":
                works = [comm.all_reduce(t, async_op=True) for t in (tensor, tensor.clone())]
                for work in works:
                    work.wait()
            else:
                comm.broadcast(tensor, numel % k)
                want = positions(numel, numel % k)
            assert torch.equal(tensor, want), (seed, kind, numel)
    except (KeyboardInterrupt, SystemExit):
        comm.close()
        raise


EVENTS = {
    "kill": (signal.SIGKILL, ("PeerLostError",)),
    "stop": (signal.SIGSTOP, ("CollectiveTimeout",)),
    # RingarError: in a wait of the engine.
    "term": (signal.SIGTERM, ("RingarError", "PeerLostError")),
    "interrupt": (signal.SIGINT, ("RingarError", "PeerLostError")),
}


PHASES = ("idle", "announce", "reduce", "gather")


def strike(crew: Crew, choice: random.Random, event: str) -> None:
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
    before = servers()["ranks"].children()
    choice = random.Random(seed)
    for event in events:
        with Crew(choice.randint(2, 5)) as crew:
            strike(crew, choice, event)
    assert servers()["ranks"].children() == before, "a process is left"
    assert not named_shared_memory()


# -- threads ---------------------------------------------------------------------------------------


def call_until_closed(comm: pr.Communicator, seed: float, report: SimpleNamespace) -> None:
    choice, k = random.Random(seed), comm.world_size
    own = [positions(100, rank) for rank in range(k)]
    try:
        bound = comm.bind(own)
        calls = {
            "bound": lambda _: bound(),
            "background": lambda tensors: comm.all_reduce(tensors, async_op=True).wait(),
            "list": lambda tensors: comm.all_reduce_coalesced([[tensor] for tensor in tensors]),
            "naive": lambda tensors: comm.all_reduce(tensors, algorithm="naive"),
            "ring": lambda tensors: comm.all_reduce(tensors, algorithm="ring"),
            "direct": lambda tensors: comm.all_reduce(tensors, algorithm="direct"),
        }
        while True:
            name, numel = choice.choice([*calls]), choice.choice(SIZES)
            tensors = own if name == "bound" else [positions(numel, rank) for rank in range(k)]
            for rank, tensor in enumerate(own):
                tensor.copy_(positions(100, rank))
            calls[name](tensors)
            if not all(torch.equal(tensor, summed(len(tensor), k)) for tensor in tensors):
                report.wrong.append((seed, name, numel))
            report.calls += 1
    except BaseException as error:
        if not (isinstance(error, pr.RingarError) and "closed" in str(error)):
            report.wrong.append((seed, repr(error)))


def on_rank_storms(state, seed: int, seconds: float) -> dict[str, int]:
    choice = random.Random(seed)
    report = SimpleNamespace(calls=0, wrong=[], alarms=0, closed=0)
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
                threading.Thread(target=call_until_closed, args=(comm, choice.random(), report))
                for _ in range(choice.randint(2, 8))
            ]
            for thread in threads:
                thread.start()
            time.sleep(choice.random() * 0.3)
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
def test_threads_alarms_and_closes(new_crew, seed, seconds):
    crew = new_crew(1)
    crew[0].start(on_rank_storms, seed=seed, seconds=seconds)
    report = value_of(crew[0].outcome(seconds + 60))
    print(report)
    assert report["threads"] == 1, "threads are left"
    assert min(report[what] for what in ("calls", "alarms", "closed")) > 3
