"""Do calls between machines end by Ctrl-C, handlers and abort(), and are local errors only that?"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from cases import mostly_slow
from ranks import Crew

from pyringar.distributed import HierarchicalCommunicator, sockets


@pytest.fixture(scope="module")
def pool():
    made = Crew(2)
    yield made
    made.close()


def join(rank: int, store: Any) -> HierarchicalCommunicator:
    """One rank on each of two machines."""
    os.environ["PYRINGAR_NODE_ID"] = f"machine {rank}"
    return HierarchicalCommunicator(store, rank, 2, timeout=20.0)


def numbers(rank: int) -> torch.Tensor:
    return torch.arange(5.0) % 17 + rank


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "none", ""


def waits(comm: HierarchicalCommunicator, tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    def in_background() -> None:
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    return {
        "call": lambda: comm.all_reduce(tensor),
        "work": in_background,
        "barrier": comm.barrier,
    }


def ended(rank: int, size: int, store: Any, wait: str, how: str) -> Any:
    """Rank 0's wait is ended while rank 1 stays away; then rank 1 calls."""
    comm = join(rank, store)
    tensor = numbers(rank)
    comm.barrier()
    if rank == 1:
        store.wait(["ended"], timedelta(seconds=40))
        if wait == "barrier":
            comm.barrier()  # rank 0 has come to it
        return error_of(lambda: comm.all_reduce(tensor)), error_of(comm.close)
    if how == "abort":
        threading.Timer(0.5, comm.abort).start()
    else:
        handle = signal.default_int_handler if how == "raise" else lambda *_: comm.close()
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    began = time.monotonic()
    error = error_of(waits(comm, tensor)[wait])
    waited_s = time.monotonic() - began
    if (wait, how) == ("work", "raise"):
        comm.abort()  # the work goes on
    store.set("ended", "")
    time.sleep(0.5)  # what was left behind would write now
    next_error = error_of(lambda: comm.all_reduce(numbers(rank)))
    return error, waited_s, tensor.tolist(), next_error, error_of(comm.close)


@pytest.mark.parametrize("how", ["raise", "close", "abort"])
@pytest.mark.parametrize("wait", mostly_slow(["call", "work", "barrier"], "call"))
def test_a_wait_ends_at_once_and_writes_nothing_after(pool, wait, how):
    here, there = pool.check(ended, wait, how)
    error, waited_s, got, next_error, closed = here
    assert waited_s < 10, "its timeout is 20 s"
    assert got == numbers(0).tolist()
    if how == "raise":
        assert error[0] == "KeyboardInterrupt"
    else:
        why = "aborted the group" if how == "abort" else "closed while a call waited"
        assert error[0] == "RingarError"
        assert why in error[1], error
    assert next_error[0] == "RingarError", next_error
    assert closed[0] == "none", closed
    assert there[0][0] == "PeerLostError", there
    assert "waited for ranks [0] of the other machines" in there[0][1]
    assert there[1][0] == "none", there


def local_errors(rank: int, size: int, store: Any) -> Any:
    comm = join(rank, store)
    tensor = numbers(rank)
    expanded = torch.zeros(1).expand(4)
    errors = [
        error_of(lambda: comm.all_reduce([tensor, expanded], "mean")),
        error_of(lambda: comm.broadcast(expanded, 1)),
    ]
    empty = torch.empty

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory for you")

    torch.empty = refuse  # type: ignore[assignment]
    try:
        errors.append(error_of(lambda: comm.all_reduce([tensor, numbers(rank)])))
    finally:
        torch.empty = empty
    comm.all_reduce(tensor)
    comm.close()
    return errors, tensor.tolist()


def test_an_error_of_this_rank_s_own_is_no_lost_peer(pool):
    for errors, got in pool.check(local_errors):
        expanded, sent, memory = errors
        assert expanded[0] == "ArgumentError"
        assert "tensors[1] of shape (4,) overlaps itself" in expanded[1]
        assert sent[0] == "ArgumentError"
        assert "tensor of shape (4,) overlaps itself" in sent[1]
        assert memory == ("RuntimeError", "no memory for you")
        assert got == (numbers(0) + numbers(1)).tolist(), "the group goes on"


def joined_late(rank: int, size: int, store: Any) -> None:
    """Rank 1 connects, and is busy before it knows; rank 0 closes at once."""
    plain = sockets._call

    def slow(*arguments: Any) -> Any:
        connection = plain(*arguments)
        time.sleep(0.5)
        return connection

    sockets._call = slow
    try:
        comm = join(rank, store)
    finally:
        sockets._call = plain
    comm.close()


def test_who_is_connected_may_leave_while_others_do_not_know_yet(pool):
    assert pool.check(joined_late) == [None, None]


def negated(rank: int, size: int, store: Any) -> Any:
    """A tensor whose memory has the other sign, there and back."""
    comm = join(rank, store)
    got = []
    for root in range(2):
        tensor = torch._neg_view(numbers(rank)) if rank == 0 else numbers(rank)
        comm.broadcast(tensor, root)
        got.append(tensor.tolist())
    comm.close()
    return got


def test_a_broadcast_between_machines_keeps_signs(pool):
    assert pool.check(negated) == [[(-numbers(0)).tolist(), numbers(1).tolist()]] * 2


def dropped(rank: int, size: int, store: Any) -> Any:
    comm = join(rank, store)
    tensor = numbers(rank)
    comm.all_reduce(tensor, async_op=True)
    del comm
    deadline = time.monotonic() + 15
    while (names := machines()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return names, tensor.tolist()


def machines() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "pyringar machines"]


def test_a_communicator_that_is_dropped_leaves_no_thread(pool):
    assert pool.check(dropped) == [([], (numbers(0) + numbers(1)).tolist())] * 2
