"""Do works and futures of the backend `ringar` tell the truth, and end without anybody waiting?"""

from __future__ import annotations

import threading
import time

import distributed_works
import pytest
import torch
from ranks import Died, Failed, run_cases, run_group
from test_distributed import check, verdicts
from torch.futures import Future

from pyringar.distributed.waits import Completer


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", distributed_works.CASES)
def test_works(case, size):
    check(verdicts("works", size), case)


# -- threads that complete futures -----------------------------------------------------------------


def threads_of(name: str) -> int:
    return sum(name in thread.name for thread in threading.enumerate())


def test_slow_callbacks_start_few_threads():
    completer = Completer("of test_few_threads")
    futures: list[Future[None]] = [Future() for _ in range(100)]
    for future in futures:
        future.add_done_callback(lambda _: time.sleep(0.005))
        completer.complete(future, lambda: None)
    torch.futures.wait_all(futures)
    assert threads_of("of test_few_threads") <= 12  # not one for each future
    completer.close()
    assert threads_of("of test_few_threads") == 0


def test_future_after_close_is_done():
    completer = Completer("of test_future_after_the_end")
    completer.close()
    future: Future[None] = Future()
    completer.complete(future, lambda: None)
    assert future.done()


def refuse_start(self) -> None:
    raise RuntimeError("can't start new thread")


def test_no_further_thread_can_start(monkeypatch):
    """Callbacks that hold all threads up hold up no future that another thread can complete."""
    completer = Completer("of test_no_further_thread")
    gate = threading.Event()
    futures: list[Future[None]] = [Future() for _ in range(3)]
    for future in futures:
        completer.complete(future, lambda: None)  # starts the threads
    torch.futures.wait_all(futures)
    monkeypatch.setattr(threading.Thread, "start", refuse_start)
    blocked: Future[None] = Future()
    blocked.add_done_callback(lambda _: gate.wait(30))
    completer.complete(blocked, lambda: None)
    last: Future[None] = Future()
    last.add_done_callback(lambda _: gate.set())
    completer.complete(last, lambda: None)
    assert gate.wait(30)
    completer.close()


def test_power_sgd():
    check(run_group(run_cases, 2, [("hook", distributed_works.power_sgd)]), "hook")


def test_peer_killed():
    survivor, dead = run_group(distributed_works.peer_killed, 2)
    assert dead == Died(-9)
    assert not isinstance(survivor, Failed), survivor
    answers, rows = survivor
    assert [is_success for is_success, _ in answers] == [False, False]
    assert answers[0][1] == "PeerLostError"
    assert rows == [[0.0] * distributed_works.N] * 2, "what failed copies nothing"
