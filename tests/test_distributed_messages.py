"""Do messages (`send`, `recv`) end once for all who ask, by timeout and by Ctrl-C?"""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_faults import error_of
from ranks import run_group

from pyringar.distributed.work import DelegatedPart


def here(rank: int, size: int, place: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{place}/{rank}", "")
    store.wait([f"{place}/{r}" for r in range(size)], timedelta(seconds=30))


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(5.0) % 17 + rank


def asked_again(rank: int, size: int) -> Any:
    tensor = numbers(rank)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    waits: list[Any] = []
    threads = [threading.Thread(target=lambda: waits.append(work.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [waits, work.wait(), work.is_completed(), work.is_success(), work.exception()]
    if rank == 1:
        assert work._source_rank() == 0
    future = work.get_future().wait()
    here(rank, size, "asked")  # who left would be the reason
    return answers, work.result()[0].tolist(), future[0].tolist()


def test_message_is_waited_for_once():
    """Gloo would wait for another message, which nobody sends, and break off all others."""
    expected = numbers(0).tolist()
    answers = [[True] * 3, True, True, True, None]
    assert run_group(asked_again, 2, timeout_s=10.0) == [(answers, expected, expected)] * 2


def polled(rank: int, size: int) -> Any:
    tensor = numbers(rank)
    work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    here(rank, size, "polled")
    return work.is_completed(), work.is_success(), tensor.tolist()


def test_message_ends_without_wait():
    assert run_group(polled, 2) == [(True, True, numbers(0).tolist())] * 2


def not_sent_yet(rank: int, size: int, how: str) -> Any:
    tensor = numbers(rank)
    if rank == 0:
        here(rank, size, "vain")
        dist.send(tensor, 1)
        here(rank, size, "done")
        return None
    work = dist.irecv(tensor, None if how == "any" else 0)
    began = time.monotonic()
    if how == "signal":
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            work.wait()
            first = "no error"
        except KeyboardInterrupt:
            first = "KeyboardInterrupt"
    else:
        first = error_of(lambda: work.wait(timedelta(seconds=0.3)))[0]
    waited_s = time.monotonic() - began
    is_completed = work.is_completed()
    here(rank, size, "vain")
    work.wait()
    here(rank, size, "done")
    return first, is_completed, waited_s, tensor.tolist()


@pytest.mark.parametrize("how", ["timeout", "any", "signal"])
def test_early_wait_keeps_message(how):
    _, receiver = run_group(not_sent_yet, 2, how)
    assert not isinstance(receiver, str), receiver
    first, is_completed, waited_s, got = receiver
    assert first == ("KeyboardInterrupt" if how == "signal" else "CollectiveTimeout")
    assert not is_completed
    assert 0.2 < waited_s < 15, "the group's timeout is 30 s"
    assert got == numbers(0).tolist()


def test_timeout_reaches_coalesced_works():
    class Recorded:
        timeouts: list[Any]

        def wait(self, *timeouts: Any) -> bool:
            self.timeouts = list(timeouts)
            return True

    work = Recorded()
    for given, expected in [
        (None, []),
        (2.0, [timedelta(seconds=2)]),
        (0.0, [timedelta(0, 0, 1000)]),
    ]:
        DelegatedPart(work).wait(given)
        assert work.timeouts == expected
