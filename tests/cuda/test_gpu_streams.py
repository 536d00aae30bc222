"""GPU: the order of calls on streams, in the background and in threads; failures; close."""

from __future__ import annotations

import contextlib
import gc
import random as pyrandom
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import gpu
import pytest
import torch
from oracle import DTYPES, NATIVE, expected, inputs, reduced, same_bits
from process_checks import least_growth

import pyringar as pr

pytestmark = gpu.needed


@gpu.only
@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize("algorithm", NATIVE)
@pytest.mark.parametrize("is_async", [False, True])
def test_call_keeps_stream_order(make_ranks, algorithm, stream, is_async):
    """The input copy starts late, so the result is right only if the call follows the stream."""
    comm = make_ranks(3)
    parts = gpu.drawn(30_011, torch.float32, 3)
    sources = gpu.placed(comm, parts)
    here = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    with torch.cuda.stream(here):
        tensors, results = gpu.zeros(comm, 30_011), gpu.zeros(comm, 30_011)
        comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)  # allocates buffers
        torch.cuda.synchronize()
        torch.cuda._sleep(gpu.SLEEP_CYCLES)
        gpu.copy_all(tensors, sources)
        work = comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)
        if is_async:
            assert not work.is_completed()
            assert work.wait() is True
        gpu.copy_all(results, tensors)
        for tensor in tensors:
            tensor.fill_(-1)
        assert not here.query(), "the call made the host wait"
        here.synchronize()
    if is_async:
        assert work.is_completed()
        assert work.exception() is None
    gpu.assert_ranks(results, expected(parts, "sum", algorithm), f"{algorithm} {stream}")


@gpu.only
@pytest.mark.parametrize("algorithm", NATIVE)
def test_close_waits_for_background_calls(make_ranks, algorithm):
    comm = make_ranks(2)
    tensors = gpu.placed(comm, gpu.drawn(2**20, torch.float32, 2))
    torch.cuda._sleep(gpu.SLEEP_CYCLES)
    work = comm.all_reduce(tensors, algorithm=algorithm, async_op=True)
    assert not work.is_completed()
    comm.close()
    assert work.is_completed()


@gpu.only
def test_dropped_work_keeps_its_tensors(make_ranks):
    comm = make_ranks(2)
    numel = 2**20
    torch.cuda.synchronize()
    torch.cuda._sleep(gpu.SLEEP_CYCLES)
    tensors = [torch.ones(numel, device=device) for device in comm.devices]
    taken = {tensor.data_ptr() for tensor in tensors}
    watched = [weakref.ref(tensor) for tensor in tensors]
    comm.all_reduce(tensors, async_op=True)
    del tensors
    gc.collect()
    others = [*gpu.zeros(comm, numel), *gpu.zeros(comm, numel)]
    assert taken.isdisjoint(other.data_ptr() for other in others), "memory still in use was reused"
    torch.cuda.synchronize()
    assert all((other == 0).all() for other in others)
    comm.all_reduce(others[:2], async_op=True)
    gc.collect()
    assert all(reference() is None for reference in watched), "held after the call was done"


@pytest.mark.parametrize("is_shared", [False, True])
def test_threads_get_exact_bits(make_ranks, is_shared):
    shared = make_ranks(3)

    def work(number):
        generator = pyrandom.Random(number)
        comm = shared if is_shared else make_ranks(3)
        stream = contextlib.nullcontext() if gpu.ON_CPU else torch.cuda.stream(torch.cuda.Stream())
        with stream:
            for _ in range(60):
                algorithm, dtype = generator.choice(NATIVE), generator.choice(DTYPES)
                parts = gpu.drawn(generator.randrange(9000), dtype, 3)
                gpu.check(comm, parts, "sum", algorithm, gpu.MIXED)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, number) for number in range(4)]:
            done.result()


@gpu.only
def test_rings_of_many_communicators_finish(make_ranks):
    comms = [make_ranks(4, timeout=10.0) for _ in range(6)]
    parts = inputs(200_003, torch.float32, 4)
    streams = [torch.cuda.Stream() for _ in comms]
    tensors = [gpu.placed(comm, parts) for comm in comms]
    torch.cuda.synchronize()
    for _ in range(2):
        for comm, stream, mine in zip(comms, streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                comm.all_reduce(mine, "max", algorithm="ring")
    torch.cuda.synchronize()
    for mine in tensors:
        gpu.assert_ranks(mine, expected(parts, "max", "ring"))


@gpu.only
@pytest.mark.parametrize("withheld", [0, 2])
def test_withheld_rank_times_out(make_ranks, withheld):
    comm = make_ranks(4, timeout=0.5, algorithm="ring")
    tensors = gpu.ones(comm, 10_000)
    comm.all_reduce(tensors)
    torch.cuda.synchronize()
    comm._group.withhold_rank(withheld)
    started = time.monotonic()
    comm.all_reduce(tensors)  # no error yet: a later call raises the timeout
    torch.cuda.synchronize()
    assert 0.4 < time.monotonic() - started < 3.0
    waiting = r"all_reduce: rank \d \(cuda:0\) waited 0.5 s for rank \d \(cuda:0\)"
    with pytest.raises(pr.CollectiveTimeout, match=waiting + r" to \w+ at step \d of 6"):
        comm.all_reduce(tensors)
    with pytest.raises(pr.CollectiveTimeout, match="failed before"):
        comm.all_reduce(tensors, algorithm="fused")
    comm.close()
    for algorithm in NATIVE:
        gpu.check(make_ranks(4), gpu.drawn(9001, torch.float32, 4), "sum", algorithm)


@gpu.only
def test_close_raises_late_timeout(make_ranks):
    def late(comm):
        comm._group.withhold_rank(1)
        comm.all_reduce(gpu.ones(comm, 100), algorithm="ring")

    with (
        pytest.raises(pr.CollectiveTimeout, match="for rank 1"),
        make_ranks(3, timeout=0.5) as comm,
    ):
        late(comm)
    comm = make_ranks(3, timeout=0.5)
    late(comm)
    torch.cuda.synchronize()
    with pytest.raises(pr.CollectiveTimeout, match="for rank 1"):
        comm.check()
    comm.close()
    with pytest.raises(ValueError, match="in the block"), make_ranks(3, timeout=0.5) as comm:  # noqa: PT012
        late(comm)
        raise ValueError("in the block")


@gpu.only
@pytest.mark.parametrize("wait", ["device", "close"])
def test_abort_ends_waits(make_ranks, wait):
    comm = make_ranks(3, timeout=60)
    comm._group.withhold_rank(1)
    started = time.monotonic()
    comm.all_reduce(gpu.ones(comm, 10_000), algorithm="ring")
    other = threading.Timer(0.5, comm.abort)
    other.start()
    if wait == "close":
        comm.close()
    else:
        torch.cuda.synchronize()
    assert time.monotonic() - started < 10
    other.join()
    with pytest.raises(pr.RingarError, match="aborted"):
        comm.all_reduce(gpu.ones(comm, 10))


class Late(torch.autograd.Function):
    """Identity with a slow backward, on the stream that ran the forward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(gpu.SLEEP_CYCLES)
        return grad * 1


@gpu.only
def test_bucketer_waits_for_backward_streams(make_ranks, device):
    torch.manual_seed(3)
    replicas = pr.replicate(torch.nn.Linear(64, 64, bias=False), [device] * 2)
    inputs = [torch.randn(8, 64, device=device) for _ in replicas]
    wanted = reduced([(x.sum(0).expand(64, 64)).cpu() for x in inputs], "sum")
    torch.cuda.synchronize()
    with pr.GradientBucketer(replicas, comm=make_ranks(2)) as bucketer:
        for number in (1, 2):  # the second step adds to the gradients of the first
            losses = []
            for replica, x in zip(replicas, inputs, strict=True):
                with torch.cuda.stream(torch.cuda.Stream()):
                    out = torch.nn.functional.linear(x, replica.weight)
                    losses.append(Late.apply(out).sum())
            for loss in losses:
                loss.backward()
            bucketer.wait()
            got = [replica.weight.grad.cpu() for replica in replicas]
            torch.testing.assert_close(got[0], wanted * number)
            assert same_bits(got[0], got[1])


@gpu.only
def test_close_frees_device_memory(device):
    free = []
    for _ in range(6):
        for _ in range(10):
            with pr.Communicator([device] * 4) as comm:
                comm.all_reduce(gpu.ones(comm, 1000), algorithm="ring", async_op=True).wait()
            torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert least_growth(free) < 8 * 2**20, free
