"""Storms: threads call one communicator, alarms interrupt them, and another thread closes it.

Results are right until then, and no thread is left. The long forms are for before a release.
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
    settled,
    thread_ids,
)
from ranks import value_of

import pyringar as pr

LONG_RUN = [pytest.mark.thorough, pytest.mark.timeout(1800)]
SIZES = (1, 100, 5_000, 70_000)


def positions(numel: int, rank: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32) % 17 + rank


def summed(numel: int, world_size: int) -> torch.Tensor:
    ranks = world_size * (world_size - 1) // 2
    return (torch.arange(numel, dtype=torch.int32) % 17) * world_size + ranks


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
