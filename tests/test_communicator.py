"""Life of a communicator: background work, threads, deadlines, closing, forking, leaks."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from cases import mostly_slow
from process_checks import exit_code_of, settled, thread_ids
from torch import nn
from torch._subclasses import FakeTensorMode

import pyringar as pr
from pyringar.comm import default_group
from pyringar.comm.base import EngineCommunicator, _interrupted


def ranks(k: int, numel: int = 1000) -> list[torch.Tensor]:
    return [torch.arange(numel, dtype=torch.float32) + r for r in range(k)]


linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")


# -- background work -------------------------------------------------------------------------------


def test_work_runs_in_order_and_sync_calls_wait_for_it():
    with pr.Communicator(["cpu"] * 2) as comm:
        tensors = ranks(2, 300_000)
        want = tensors[0] + tensors[1]
        works = [comm.all_reduce(tensors, async_op=True) for _ in range(5)]
        comm.all_reduce(tensors)  # the sixth
        assert torch.equal(tensors[0], want * 32)
        for work in works:
            assert work.wait() is True
            assert work.is_completed()
            assert work.exception() is None


def test_dropped_work_keeps_its_tensors():
    with pr.Communicator(["cpu"] * 2) as comm:
        for _ in range(50):
            comm.all_reduce([torch.ones(200_000) for _ in range(2)], async_op=True)
            gc.collect(0)
    assert pr.allreduce(ranks(2)) is None


def test_close_ends_what_was_submitted():
    comm = pr.Communicator(["cpu"] * 3)
    tensors = ranks(3, 500_000)
    want = sum(t.clone() for t in tensors)
    work = comm.all_reduce(tensors, algorithm="ring", async_op=True)
    comm.close()
    assert work.is_completed()
    assert torch.equal(tensors[1], want)
    comm.close()  # again is fine


def test_a_failure_in_the_background_surfaces_in_wait():
    with pr.Communicator(["cpu"] * 3, timeout=0.2) as comm:
        comm._group.delay_rank(1, 1.0)
        work = comm.all_reduce(ranks(3), algorithm="ring", async_op=True)
        with pytest.raises(pr.CollectiveTimeout, match="rank 1"):
            work.wait(10)
        assert isinstance(work.exception(), pr.CollectiveTimeout)


def test_wait_has_its_own_timeout():
    with pr.Communicator(["cpu"] * 2) as comm:
        comm._group.delay_rank(1, 20.0)
        work = comm.all_reduce(ranks(2), algorithm="direct", async_op=True)
        with pytest.raises(TimeoutError, match=r"0\.01 s"):
            work.wait(0.01)
        comm._group.end_delay()
        assert work.wait() is True


@pytest.mark.parametrize("async_op", [False, True])
def test_other_threads_run_meanwhile(async_op):
    """The GIL is released: it is another thread that ends what the call waits for."""

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


# -- threads of the caller's -----------------------------------------------------------------------


def test_many_threads_share_one_communicator():
    def work(seed: int) -> None:
        for i in range(40):
            algorithm = ("fused", "ring", "direct")[(seed + i) % 3]
            tensors = [torch.full((1 + 997 * (i % 7),), float(seed + r)) for r in range(3)]
            comm.all_reduce(tensors, algorithm=algorithm)
            assert all(torch.all(t == 3 * seed + 3) for t in tensors), f"{seed} {i} {algorithm}"

    with pr.Communicator(["cpu"] * 3) as comm, ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_communicators_do_not_trip_over_each_other():
    def work(k: int) -> None:
        with pr.Communicator(["cpu"] * k) as comm:
            for _ in range(30):
                tensors = ranks(k, 50_000)
                want = sum(t.clone() for t in tensors)
                comm.all_reduce(tensors, algorithm="direct")
                assert all(torch.equal(t, want) for t in tensors)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, (2, 3, 4)))


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("late", mostly_slow([0, 1, 2], 1))
def test_a_late_rank_is_named_and_the_communicator_refuses(algorithm, late):
    with pr.Communicator(["cpu"] * 3, timeout=0.3) as comm:
        comm.all_reduce(ranks(3), algorithm=algorithm)
        comm._group.delay_rank(late, 1.0)
        start = time.monotonic()
        with pytest.raises(pr.CollectiveTimeout, match=rf"for rank {late}\b") as caught:
            comm.all_reduce(ranks(3), algorithm=algorithm)
        assert 0.25 < time.monotonic() - start < 5
        assert isinstance(caught.value, TimeoutError)
        assert algorithm in str(caught.value)
        with pytest.raises(pr.CollectiveTimeout, match="failed before"):
            comm.all_reduce(ranks(3), algorithm="fused")
        with pytest.raises(pr.CollectiveTimeout, match="failed before"):
            comm.all_reduce(ranks(3), async_op=True).wait()
    assert pr.allreduce(ranks(3)) is None


def test_rooted_calls_name_a_late_rank():
    with pr.Communicator(["cpu"] * 2, algorithm="direct", timeout=0.2) as comm:
        comm._group.delay_rank(1, 1.0)
        tensors = ranks(2, 8)
        with pytest.raises(pr.CollectiveTimeout, match=r"reduce: .*rank 0 waited .* for rank 1"):
            comm.reduce(torch.empty(8), tensors)
        for call in (
            lambda: comm.reduce_coalesced([torch.empty(8)], [[t] for t in tensors]),
            lambda: comm.broadcast_coalesced([[t] for t in tensors]),
        ):
            with pytest.raises(pr.CollectiveTimeout, match="failed before"):
                call()


# -- closing, forking, leaking ---------------------------------------------------------------------


def test_a_closed_communicator_refuses_everything():
    comm = pr.Communicator(["cpu"] * 2)
    comm.close()
    two, four = ranks(2, 2), ranks(2, 4)
    calls = (
        lambda: comm.all_reduce(two),
        lambda: comm.all_reduce(two, algorithm="naive"),
        lambda: comm.all_reduce(two, async_op=True),
        lambda: comm.all_reduce_coalesced([[t] for t in two]),
        lambda: comm.reduce_scatter(two, four),
        lambda: comm.all_gather(four, two),
        lambda: comm.broadcast(two),
        lambda: comm.broadcast_coalesced([[t] for t in two]),
        lambda: comm.reduce(two[0], two),
        lambda: comm.reduce_coalesced(two[:1], [[t] for t in two]),
        lambda: comm.bind(two),
        lambda: comm.bind_coalesced([[t] for t in two]),
    )
    for call in calls:
        with pytest.raises(pr.RingarError, match="closed"):
            call()
    assert torch.equal(two[0], ranks(2, 2)[0])


@pytest.mark.parametrize("in_background", [False, True])
def test_check_tells_of_a_failure(in_background):
    """Also of one that nobody has waited for."""
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
    """The group of a GPU that is not done with its calls when it is closed."""

    def __init__(self) -> None:
        self.is_done, self.has_told = False, False

    def close(self) -> bool:
        if not self.has_told:
            self.has_told = True
            raise pr.CollectiveTimeout("the GPU has not come to the end of its calls")
        return self.is_done


def test_tensors_stay_until_a_gpu_is_done_with_them():
    """Whoever hears that it is not may let go of them: the GPU writes them all the same."""
    comm = EngineCommunicator()
    comm._group, comm._in_flight = BusyGroup(), {"work": torch.ones(3)}
    with pytest.raises(pr.CollectiveTimeout):
        comm.close()
    comm.close()
    assert comm._in_flight
    kept = comm._in_flight
    del comm
    gc.collect()
    assert kept in _interrupted
    _interrupted.remove(kept)
    comm = EngineCommunicator()
    comm._group, comm._in_flight = BusyGroup(), {"work": torch.ones(3)}
    with pytest.raises(pr.CollectiveTimeout):
        comm.close()
    comm._group.is_done = True
    comm.close()
    assert not comm._in_flight


@linux
def test_threads_end_with_the_communicator():
    pr.allreduce(ranks(2, 2_000_000))
    torch.zeros(10).sum()
    before = thread_ids()

    def new_threads() -> set[str]:
        return thread_ids() - before

    for _ in range(3):
        comm = pr.Communicator(["cpu"] * 4)
        comm.all_reduce(ranks(4, 500_000), async_op=True).wait()  # too large to be done at once
        comm.all_reduce(ranks(4), algorithm="ring")
        assert new_threads()
        comm.close()
        assert settled(new_threads, set()) == set()
    comm = pr.Communicator(["cpu"] * 4)
    comm.all_reduce(ranks(4), algorithm="direct")
    del comm
    gc.collect()
    assert settled(new_threads, set()) == set()


@linux
@pytest.mark.slow
def test_memory_does_not_grow():
    def resident_kib() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    tensors = ranks(4)
    with pr.Communicator(["cpu"] * 4) as comm:

        def use(times: int) -> None:
            for _ in range(times):
                comm.all_reduce(tensors, "max")
                comm.all_reduce(tensors, "max", async_op=True).wait()
                comm.all_reduce(tensors, "max", algorithm="direct", async_op=True).wait()

        use(1000)
        before = resident_kib()
        use(3000)
        assert resident_kib() - before < 4096
    for _ in range(200):
        pr.Communicator(["cpu"] * 2).close()
    assert resident_kib() - before < 8192


@pytest.mark.parametrize(
    ("devices", "made"),
    [
        (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        (["cuda:1", "cpu"], ["cuda:1", "cpu"]),
        (["cuda:0", "meta"], ["cuda:0", "cpu"]),  # refused by its name, as a tensor of rank 1
        (["cpu", "cpu"], None),
        (["xpu:0", "xpu:0"], None),
    ],
)
def test_allreduce_keeps_a_communicator_of_gpus(monkeypatch, devices, made):
    """With fake tensors: no GPU is needed."""
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12: threads and fork
def test_after_fork_the_child_is_told_and_allreduce_works():
    comm = pr.Communicator(["cpu"] * 2)
    comm.all_reduce(ranks(2), algorithm="ring")
    comm.all_reduce(ranks(2), async_op=True).wait()
    pr.allreduce(ranks(2, 1_000_000))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                comm.all_reduce(ranks(2))
            except pr.RingarError as error:
                tensors = ranks(2, 1000)
                pr.allreduce(tensors)
                right = torch.equal(tensors[0], ranks(2)[0] + ranks(2)[1])
                status = 0 if "fork" in str(error) and right else 2
            del comm
            gc.collect()
        finally:
            os._exit(status)
    assert exit_code_of(child) == 0
    comm.all_reduce(ranks(2), algorithm="ring")  # the parent goes on
    comm.close()
