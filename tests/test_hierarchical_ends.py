"""Do calls between machines end on all ranks: by Ctrl-C, handlers, abort(), lost and late ranks?"""

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
from process_checks import settled
from ranks import Crew

from pyringar.distributed import HierarchicalCommunicator, between, hierarchical
from pyringar.distributed.machines import Column


@pytest.fixture(scope="module")
def pool():
    made = Crew(2)
    yield made
    made.close()


def join(rank: int, store: Any, machines: str = "ab", timeout: float = 20.0) -> Any:
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    return HierarchicalCommunicator(store, rank, len(machines), timeout=timeout)


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


def ended(rank: int, size: int, store: Any, machines: str, wait: str, how: str) -> Any:
    comm = join(rank, store, machines)
    tensor = numbers(rank)
    comm.barrier()
    if rank == 1:
        store.wait(["ended"], timedelta(seconds=40))
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
@pytest.mark.parametrize("machines", ["ab", "aa"])
def test_wait_ends_at_once(pool, machines, wait, how):
    here, there = pool.check(ended, machines, wait, how)
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
    assert machines == "aa" or "waited for ranks [0] of the other machines" in there[0][1]
    why = {"raise": "KeyboardInterrupt", "close": "closed while", "abort": "aborted the group"}
    assert why["abort" if (wait, how) == ("work", "raise") else how] in there[0][1], there
    assert there[1][0] == "none", there


def local_errors(rank: int, size: int, store: Any) -> Any:
    comm = join(rank, store)
    tensor = numbers(rank)
    expanded = torch.zeros(1).expand(4)
    errors = [
        error_of(lambda: comm.all_reduce([tensor, expanded], "mean")),
        error_of(lambda: comm.broadcast(expanded, 1)),
    ]
    cat = torch.cat

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory for you")

    torch.cat = refuse  # type: ignore[assignment]
    try:
        errors.append(error_of(lambda: comm.all_reduce([tensor, numbers(rank)])))
    finally:
        torch.cat = cat
    comm.all_reduce(tensor)
    comm.close()
    return errors, tensor.tolist()


def test_local_error_keeps_group(pool):
    for errors, got in pool.check(local_errors):
        expanded, sent, memory = errors
        assert expanded[0] == "ArgumentError"
        assert "tensors[1] of shape (4,) overlaps itself" in expanded[1]
        assert sent[0] == "ArgumentError"
        assert "tensors of shape (4,) overlaps itself" in sent[1]
        assert memory == ("RuntimeError", "no memory for you")
        assert got == (numbers(0) + numbers(1)).tolist(), "the group goes on"


def dropped(rank: int, size: int, store: Any) -> Any:
    def is_running() -> bool:
        return any(thread.name == "pyringar machines" for thread in threading.enumerate())

    comm = join(rank, store)
    tensor = numbers(rank)
    comm.all_reduce(tensor, async_op=True)
    assert is_running()
    del comm
    assert settled(is_running, False) is False
    return tensor.tolist()


def test_dropped_communicator_leaves_no_thread(pool):
    assert pool.check(dropped) == [(numbers(0) + numbers(1)).tolist()] * 2


# -- ranks that are lost or late -------------------------------------------------------------------


def lost(rank: int, size: int, store: Any, machines: str, how: str) -> Any:
    comm = join(rank, store, machines, timeout=2.0)
    comm.all_reduce(numbers(rank))
    if rank == 3:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(7)
        comm.close()
        return None
    began = time.monotonic()
    error = error_of(lambda: comm.all_reduce(torch.ones(100_000)))
    seconds = time.monotonic() - began
    return error, seconds, error_of(lambda: comm.all_reduce(numbers(rank))), error_of(comm.close)


LOST = [
    ("aabb", "killed"),
    ("aaab", "killed"),
    ("abcd", "killed"),
    ("aabb", "closed"),
    ("aabb", "late"),
    ("aaab", "late"),
]


@pytest.mark.parametrize(
    ("machines", "how"), mostly_slow(LOST, *[case for case in LOST if case[1] == "killed"])
)
def test_lost_rank_is_named_on_all_ranks(machines, how):
    with Crew(4) as crew:
        answers = crew.results(lost, machines, how)
    for rank, (error, seconds, after, closed) in enumerate(answers[:3]):
        kinds = ["CollectiveTimeout"] if how == "late" else ["PeerLostError"]
        assert error[0] in kinds, (rank, error)
        assert "all_reduce (sum) of 100000 torch.float32 elements" in error[1], error
        is_same_machine = machines[rank] == machines[3]
        place = "waited for ranks [3] of" if machines == "abcd" else "3]"
        assert ("rank 3 (process" if is_same_machine else place) in error[1], (rank, error)
        assert seconds < (5 if how == "late" else 3), (rank, error)
        assert after[0] == error[0], after
        assert "cannot be used again" in after[1]
        assert closed[0] == "none", closed


def looped(rank: int, size: int, store: Any, machines: str, victim: int) -> Any:
    comm = join(rank, store, machines, timeout=5.0)
    tensor = torch.ones(200_000)
    if rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def reduce() -> None:
        while True:
            comm.all_reduce(tensor)

    return error_of(reduce)


# A rank of another machine may wait for a rank that lives, and has closed its connections.
@pytest.mark.parametrize(
    ("machines", "victim"),
    mostly_slow([("aabb", 0), ("aabb", 1), ("aaab", 1), ("aaab", 2), ("abb", 2)], ("aaab", 2)),
)
def test_killed_rank_is_named_elsewhere(machines, victim):
    with Crew(len(machines)) as crew:
        answers = crew.results(looped, machines, victim)
    for rank, answer in enumerate(answers):
        if rank != victim:
            kind, text = answer
            assert kind == "PeerLostError", (rank, text)
            names = (
                f"waited for rank {victim} (process",
                f"waited for ranks [{victim}] of the other",
            )
            assert any(name in text for name in names), (rank, text)
            assert "in what follows" not in text
            assert all(f"waited for ranks [{r}]" not in text for r in range(4) if r != victim), text


def unknown_network(rank: int, size: int, store: Any) -> tuple[str, str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "nonsense0"
    try:
        return error_of(lambda: join(rank, store))
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def test_unknown_network_is_named(pool):
    for kind, text in pool.check(unknown_network):
        assert kind == "ArgumentError", text
        assert "GLOO_SOCKET_IFNAME is 'nonsense0'" in text


def absent(rank: int, size: int, store: Any) -> tuple[str, str]:
    if rank == 1:
        hierarchical.Column = lambda *_: time.sleep(1.5)
    try:
        return error_of(lambda: join(rank, store, timeout=1.0))
    finally:
        hierarchical.Column = Column


def test_machine_that_does_not_connect_is_named(pool):
    (kind, text), _ = pool.check(absent)
    assert kind == "CollectiveTimeout", text
    assert "machine 1" in text
    assert "has ranks [1]" in text


class SlowColumn(Column):
    """Connections over which 4,000 bytes take 0.3 s."""

    def exchange(self, sent: Any, received: Any) -> Any:
        arrived = super().exchange(sent, received)
        nbytes = sum(tensor.numel() * tensor.itemsize for tensor in received.values())
        return lambda: (time.sleep(0.3 * nbytes / 4000), arrived())


def slowly(rank: int, size: int, store: Any) -> list[float]:
    between.PIECE_ELEMENTS = 1000
    hierarchical.Column = SlowColumn
    try:
        with join(rank, store, "aabb", timeout=0.5) as comm:
            tensor = numbers(rank).repeat(1000)
            comm.broadcast(tensor, 0)
            return tensor[-5:].tolist()
    finally:
        hierarchical.Column = Column


def test_timeout_counts_time_without_progress():
    with Crew(4) as crew:
        assert crew.check(slowly) == [numbers(0).tolist()] * 4
