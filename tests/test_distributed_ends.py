"""Calls of torch.distributed raise after a death, abort or timeout, and name the rank."""

import functools
import itertools
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_marks import mostly_slow
from process_checks import error_of
from rank_processes import run_group

DELEGATED = {
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty(4), x),
    "async": lambda x: dist.all_to_all_single(torch.empty(4), x, async_op=True).wait(),
    "future": lambda x: (
        dist.all_to_all_single(torch.empty(4), x, async_op=True).get_future().wait()
    ),
    "gather": lambda x: dist.gather(x, [torch.empty(4), torch.empty(4)], dst=0),
    "sparse": lambda x: dist.all_reduce(x.to_sparse()),
    "send": lambda x: dist.send(x, 1),
    "recv": lambda x: dist.recv(x, 1),
}


def gone_before(rank: int, size: int) -> Any:
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while error_of(dist.barrier)[0] == "none" and time.monotonic() < deadline:
        pass  # until rank 1 is dead
    x = torch.arange(4.0)
    return {name: error_of(functools.partial(call, x)) for name, call in DELEGATED.items()}


def test_gloo_calls_name_dead_rank():
    survivor, _ = run_group(gone_before, 2)
    assert set(survivor) == set(DELEGATED), survivor
    for name, (kind, _, text, seconds) in survivor.items():
        assert "PeerLostError" in kind + text, (name, kind, text)
        assert "rank 1 (process" in text, text
        assert seconds < 10, "gloo alone takes 30 s"


THREE = {
    "all_to_all": lambda rank: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
    "gather": lambda rank: dist.gather(
        torch.ones(3), [torch.empty(3) for _ in range(3)] if rank == 0 else None, dst=0
    ),
    "recv": lambda rank: dist.recv(torch.ones(3), {0: 2, 1: 0}[rank]),
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(3)),
}


def leave_because_of(rank: int, size: int, first: str, then: str, culprit: str) -> Any:
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:
        if culprit == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["over"], timedelta(seconds=40))
        return None
    if rank == 1:
        store.wait(["left"], timedelta(seconds=35))
    error = error_of(lambda: THREE[first if rank == 0 else then](rank))
    dist.destroy_process_group()
    store.set("left" if rank == 0 else "over", "")
    return error


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("all_to_all", "gather"),
        ("gather", "all_to_all"),
        ("recv", "recv"),
        ("all_to_all", "all_reduce"),
    ],
)
@pytest.mark.parametrize("machines", mostly_slow(["", "aab"], "aab"))
def test_exiting_survivor_is_not_blamed(first, then, machines):
    *survivors, _ = run_group(leave_because_of, 3, first, then, "dead", machines=machines)
    for kind, _, text, _ in survivors:
        assert kind == "PeerLostError", text
        assert "rank 2 (process" in text, text
        assert "is gone" in text, text
        assert "has left" not in text, text


def test_late_rank_is_named_after_exit():
    options = ("all_to_all", "gather", "late")
    *waiters, _ = run_group(leave_because_of, 3, *options, timeout_s=1.0)
    for kind, _, text, _ in waiters:
        assert kind == "CollectiveTimeout", text
        assert "rank 0 waited for ranks [1, 2]: " in text, text


def wrong_dtype(rank: int, size: int) -> Any:
    error = error_of(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16).to_sparse()))
    dist.barrier()  # otherwise the error may name a rank that has exited
    return error


def test_refused_dtype_blames_no_rank():
    for kind, _, text, _ in run_group(wrong_dtype, 2):
        assert kind == "RuntimeError", text
        assert "rank" not in text, text


def leave_early(rank: int, size: int) -> Any:
    x = torch.arange(2.0) + rank
    into = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    if rank == 1:
        time.sleep(1.5)
    dist.gather(x, into, dst=0)
    return [t.tolist() for t in into] if into else None


def test_finished_rank_can_exit():
    results = run_group(leave_early, 3)
    assert results[0] == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]], results


def aborted(rank: int, size: int) -> Any:
    dist.all_reduce(torch.ones(3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["aborted"], timedelta(seconds=20))
        return {"peer": error_of(dist.barrier)}
    errors: dict[str, Any] = {}
    works = {
        "engine": dist.all_reduce(torch.ones(4), async_op=True),
        "queued": dist.broadcast(torch.ones(4), 0, async_op=True),
        "gloo": dist.all_to_all_single(torch.empty(4), torch.ones(4), async_op=True),
        "message": dist.irecv(torch.empty(4), 1),
        "from any": dist.irecv(torch.empty(4)),
    }

    def wait_for(name: str) -> None:
        errors[name] = error_of(works[name].wait)

    threads = [threading.Thread(target=wait_for, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    errors["abort"] = error_of(dist.distributed_c10d._get_default_group().abort)
    for thread in threads:
        thread.join(20)
    store.set("aborted", "")
    return errors


@pytest.mark.parametrize("machines", ["", "ab"])
def test_abort_ends_all_waits(machines):
    first, second = run_group(aborted, 2, machines=machines)
    assert not isinstance(first, str), first
    kind, _, text, seconds = first.pop("abort")
    assert (kind, seconds < 10) == ("none", True), text
    assert set(first) == {"engine", "queued", "gloo", "message", "from any"}, first
    for name, (kind, _, text, _) in {**first, **second}.items():
        assert kind == ("PeerLostError" if name == "peer" else "RingarError"), (name, kind, text)
        culprit = "rank 0 " if machines else "rank 0 (process"
        assert name == "gloo" or culprit in text, (name, text)
        assert name == "gloo" or machines or "has aborted the group" in text, (name, text)


def given_less_time(rank: int, size: int) -> Any:
    dist.all_reduce(torch.ones(3))
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=1))
    dist.all_reduce(torch.ones(3))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["late"], timedelta(seconds=35))
        return None
    error = error_of(lambda: dist.all_reduce(torch.ones(3)))
    store.set("late", "")
    return error


@pytest.mark.parametrize("machines", ["", "ab"])
def test_set_timeout_reaches_engine(machines):
    waiter, _ = run_group(given_less_time, 2, machines=machines)
    kind, _, text, seconds = waiter
    assert kind == "CollectiveTimeout", waiter
    assert ("has ranks [1]" if machines else "for 1 s") in text, text
    assert 0.9 < seconds < 15, "not the 30 s that the group was made with"


def stays_away(rank: int, size: int) -> Any:
    refused = error_of(dist.monitored_barrier)
    if refused[0] != "none":
        return refused
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["reported"], timedelta(seconds=35))
        return None
    error = error_of(
        lambda: dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    )
    store.set("reported", "")
    return error


def test_monitored_barrier_names_missing_rank():
    error, *_ = run_group(stays_away, 3)
    if error[0] == "ValueError":
        pytest.skip(f"this torch: {error[2]}")
    assert error[0] == "CollectiveTimeout", error
    assert "rank 1 (process" in error[2], error


def dies_meanwhile(rank: int, size: int, operation: str) -> Any:
    dist.barrier()
    if rank == 1:
        time.sleep(1)
        os._exit(1)
    if operation == "send":
        time.sleep(1.5)
    return error_of(lambda: DELEGATED[operation](torch.arange(4.0))), error_of(
        dist.destroy_process_group
    )


DYING = list(itertools.product(("send", "recv", "all_to_all"), ("", "ab")))


@pytest.mark.parametrize(
    ("operation", "machines"), mostly_slow(DYING, ("recv", ""), ("all_to_all", "ab"))
)
def test_gloo_calls_name_dying_rank(operation, machines):
    (error, destroyed), _ = run_group(dies_meanwhile, 2, operation, machines=machines)
    kind, _, text, seconds = error
    assert kind == "PeerLostError", (kind, text)
    assert "rank 1 (process" in text, text
    assert seconds < 10, "gloo alone takes 30 s"
    assert (destroyed[0], destroyed[3] < 10) == ("none", True), destroyed
