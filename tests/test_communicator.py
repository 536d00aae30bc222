"""Communicator: background work, threads, timeouts, close, leaks."""

import gc
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from case_marks import mostly_slow
from process_checks import settled, thread_ids
from torch import nn
from torch._subclasses import FakeTensorMode

import pyringar as pr
from pyringar.comm import default_group
from pyringar.comm.engine_communicator import EngineCommunicator, _interrupted


def ranks(k: int, numel: int = 1000) -> list[torch.Tensor]:
    return [torch.arange(numel, dtype=torch.float32) + r for r in range(k)]


@pytest.mark.parametrize("async_op", [False, True])
def test_call_releases_gil(async_op):
    def tick() -> None:
        for _ in range(20):
            time.sleep(0.005)
        comm._group.end_delay()

    with pr.Communicator(["cpu"] * 2) as comm, ThreadPoolExecutor(1) as threads:
        comm._group.delay_rank(1, 20.0)
        start = time.monotonic()
        ticks = threads.submit(tick)
        work = comm.all_reduce(ranks(2), algorithm="ring", async_op=async_op)
        if async_op:
            work.wait()
        assert time.monotonic() - start < 15
        ticks.result()


LATE_CALLS = {
    "ring": lambda comm: comm.all_reduce(ranks(3), algorithm="ring"),
    "background": lambda comm: comm.all_reduce(ranks(3), algorithm="ring", async_op=True).wait(10),
}


@pytest.mark.parametrize("call", LATE_CALLS)
@pytest.mark.parametrize("late", mostly_slow([0, 1, 2], 1))
def test_timeout_names_late_rank(call, late):
    with pr.Communicator(["cpu"] * 3, timeout=0.3) as comm:
        comm.all_reduce(ranks(3), algorithm="ring")
        comm._group.delay_rank(late, 1.0)
        start = time.monotonic()
        with pytest.raises(pr.CollectiveTimeout, match=rf"for rank {late}\b") as caught:
            LATE_CALLS[call](comm)
        assert 0.25 < time.monotonic() - start < 5
        assert isinstance(caught.value, TimeoutError)
        assert "ring" in str(caught.value)
        for again in (
            lambda: comm.all_reduce(ranks(3), algorithm="fused"),
            lambda: comm.all_reduce(ranks(3), async_op=True).wait(),
            lambda: comm.broadcast_coalesced([[t] for t in ranks(3)]),
        ):
            with pytest.raises(pr.CollectiveTimeout, match="failed before"):
                again()
    assert pr.allreduce(ranks(3)) is None


@pytest.mark.parametrize("in_background", [False, True])
def test_check_raises_earlier_error(in_background):
    with pr.Communicator(["cpu"] * 2, timeout=0.2) as comm:
        comm.check()
        comm._group.delay_rank(0, 1.0)
        if in_background:
            work = comm.all_reduce(ranks(2), algorithm="ring", async_op=True)
            assert settled(work.is_completed, True)
        else:
            with pytest.raises(pr.CollectiveTimeout):
                comm.all_reduce(ranks(2), algorithm="ring")
        for _ in range(2):
            with pytest.raises(pr.CollectiveTimeout, match="failed before"):
                comm.check()
    with pytest.raises(pr.RingarError, match="closed"):
        comm.check()


class BusyGroup:
    def __init__(self) -> None:
        self.is_done, self.has_raised = False, False

    def close(self) -> bool:
        if not self.has_raised:
            self.has_raised = True
            raise pr.CollectiveTimeout("the GPU has not finished its calls")
        return self.is_done


def test_close_keeps_tensors_of_running_gpu():
    for is_done in (True, False):
        comm = EngineCommunicator()
        comm._group, comm._in_flight = BusyGroup(), {"work": torch.ones(3)}
        with pytest.raises(pr.CollectiveTimeout):
            comm.close()
        comm._group.is_done = is_done
        comm.close()
        assert bool(comm._in_flight) != is_done
    kept = comm._in_flight
    del comm
    gc.collect()
    assert kept in _interrupted
    _interrupted.remove(kept)


def call_until_closed(comm: pr.Communicator, seed: int) -> int:
    """Run random collectives until the communicator is closed; return their number."""
    choice, k, bound = random.Random(seed), comm.world_size, ranks(comm.world_size)
    prepared = comm.bind(bound)
    calls = [
        lambda tensors: comm.all_reduce(tensors, algorithm="ring"),
        lambda tensors: comm.all_reduce(tensors, algorithm="direct"),
        lambda tensors: comm.all_reduce(tensors, algorithm="naive"),
        lambda tensors: comm.all_reduce(tensors, async_op=True).wait(),
        lambda tensors: comm.all_reduce_coalesced([[tensor] for tensor in tensors]),
    ]
    for count in itertools.count():
        number = choice.randrange(len(calls) + 1)
        tensors = bound if number == len(calls) else ranks(k, choice.choice([1, 5_000, 70_000]))
        for rank, tensor in enumerate(bound):
            tensor.copy_(ranks(k)[rank])
        wanted = sum(tensor.double() for tensor in tensors)
        try:
            prepared() if number == len(calls) else calls[number](tensors)
        except pr.RingarError as error:
            if "closed" not in str(error):
                raise
            return count
        assert all(torch.equal(tensor.double(), wanted) for tensor in tensors), (seed, number)
    return 0


@pytest.mark.parametrize("rounds", mostly_slow([5, 200], 5))
def test_close_ends_calls_of_threads(rounds):
    choice = random.Random(7)
    for number in range(rounds):
        comm = pr.Communicator(["cpu"] * choice.randint(1, 4))
        with ThreadPoolExecutor(4) as threads:
            works = [threads.submit(call_until_closed, comm, 4 * number + i) for i in range(4)]
            time.sleep(0.02 + 0.1 * choice.random())
            comm.close()
            assert sum(work.result() for work in works) > 0


def test_closed_communicator_leaves_no_thread():
    pr.allreduce(ranks(2, 2_000_000))
    torch.zeros(10).sum()
    before = thread_ids()

    def new_threads() -> set[str]:
        return thread_ids() - before

    for end in ("close", "garbage", "close"):
        comm = pr.Communicator(["cpu"] * 4)
        comm.all_reduce(ranks(4, 500_000), async_op=True).wait()  # too large for the calling thread
        comm.all_reduce(ranks(4), algorithm="ring")
        assert new_threads()
        if end == "close":
            comm.close()
        del comm
        gc.collect()
        assert settled(new_threads, set()) == set()


@pytest.mark.parametrize(
    ("devices", "made"),
    [
        (["cuda:1", "cpu"], ["cuda:1", "cpu"]),
        (["cuda:0", "meta"], ["cuda:0", "cpu"]),  # the call refuses the meta tensor
        (["cpu", "cpu"], None),
    ],
)
def test_allreduce_reuses_gpu_communicator(monkeypatch, devices, made):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    make = mock.Mock(side_effect=lambda devices, order: mock.Mock(devices=devices))
    monkeypatch.setattr(default_group, "Communicator", make)
    default = default_group._Default()
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(2, device=device) for device in devices]
        found = default.communicator(tensors)
        assert (found and found.devices) == made
        parameters = [nn.Parameter(tensor) for tensor in tensors]
        assert default.communicator(parameters) is found
