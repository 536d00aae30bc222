"""GPU: replays of CUDA graphs with captured calls."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import gpu
import pytest
import torch
from oracle import assert_bits, expected, reduced, same_bits

import pyringar as pr

pytestmark = [*gpu.needed, gpu.only]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", ["fused", "direct"])
def test_graph_replays_all_reduce(make_ranks, algorithm, dtype, is_async):
    comm = make_ranks(4)
    tensors = gpu.zeros(comm, 20_011, dtype=dtype)
    others = gpu.placed(comm, gpu.drawn(999, torch.int32, 4))

    def call():
        work = comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)
        if is_async:
            work.wait()

    graph = gpu.captured(call)
    for replay in range(10):
        parts = [part.roll(replay) for part in gpu.drawn(20_011, dtype, 4)]
        gpu.copy_all(tensors, parts)
        graph.replay()
        if replay % 3 == 0:
            comm.all_reduce(others, algorithm=algorithm, async_op=is_async)
        gpu.assert_ranks(tensors, expected(parts, "sum", algorithm), f"{algorithm} replay {replay}")


def test_captured_calls_keep_tensors(make_ranks):
    comm = make_ranks(2)
    tensors = gpu.zeros(comm, 100)
    graph = gpu.captured(lambda: comm.all_reduce(tensors, async_op=True).wait())
    torch.cuda.synchronize()
    assert len(comm._in_flight) >= 1, "held until a call outside of the capture"
    work = comm.all_reduce(gpu.zeros(comm, 10), async_op=True)
    torch.cuda.synchronize()
    assert work.is_completed()
    assert not comm._in_flight
    graph.replay()


def test_graph_replays_every_collective(make_ranks):
    comm = make_ranks(2)
    shapes = [(3, 5), (1000,), (64, 3)]
    lists = gpu.placed(comm, gpu.lists_of(shapes, (torch.float32,), 2))
    bases, gathered = gpu.zeros(comm, 100), gpu.zeros(comm, 200)
    total, copies = torch.zeros_like(bases[1]), gpu.placed(comm, lists)

    def calls():
        comm.all_reduce_coalesced(lists, "mean")
        comm.all_reduce([base[::2] for base in bases])
        comm.broadcast([base[50:60] for base in bases], root=1)
        comm.all_gather(gathered, bases)
        comm.reduce(total[::2], [base[1::2] for base in bases], "max", root=1)
        comm.reduce(total[1::2], [base[::2] for base in bases], "sum", root=1)
        comm.reduce_coalesced(copies[0], lists, "max")
        comm.broadcast_coalesced(copies, 0)

    graph = gpu.captured(calls)
    for replay in range(3):
        inputs = gpu.lists_of(shapes, (torch.float32,), 2, seed=replay)
        parts = [part.roll(replay) for part in gpu.drawn(100, torch.float32, 2)]
        for targets, sources in zip([*lists, bases], [*inputs, parts], strict=True):
            gpu.copy_all(targets, sources)
        graph.replay()
        gpu.assert_lists(lists, inputs, "mean", "fused")
        wanted = [part.clone() for part in parts]
        for part in wanted:
            part[::2] = reduced([each[::2] for each in parts], "sum")
        wanted[0][50:60] = wanted[1][50:60]
        gpu.assert_ranks(gathered, torch.cat(wanted), f"replay {replay}")
        assert_bits(total[::2].cpu(), reduced([part[1::2] for part in wanted], "max"))
        assert_bits(total[1::2].cpu(), reduced([part[::2] for part in wanted], "sum"))
        means = [[tensor.cpu() for tensor in mine] for mine in lists]
        gpu.assert_lists(copies, means, "max", "fused")


def test_graph_outlives_communicator(make_ranks):
    comm = make_ranks(2)
    tensors, others = gpu.zeros(comm, 20_011), gpu.zeros(comm, 20_011)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_reduce(tensors)
        with pytest.raises(pr.UnsupportedError, match="cannot be captured"):
            comm.all_reduce(tensors, algorithm="ring")
    for replay in range(4):
        parts = [part.roll(replay) for part in gpu.drawn(20_011, torch.float32, 2)]
        gpu.copy_all(tensors, parts)
        if replay < 3:
            gpu.copy_all(others, parts)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                comm.all_reduce(others, algorithm="ring")
        else:
            comm.close()
        graph.replay()
        torch.cuda.synchronize()
        gpu.assert_ranks(tensors, expected(parts, "sum", "fused"), f"replay {replay}")
        if replay < 3:
            gpu.assert_ranks(others, expected(parts, "sum", "ring"), f"beside replay {replay}")


def test_capture_allows_calls_in_threads(make_ranks):
    comm = make_ranks(2)
    tensors = gpu.ones(comm, 1000)
    work = comm.all_reduce(tensors, async_op=True)
    graph = torch.cuda.CUDAGraph()

    def others():
        work.is_completed()
        with make_ranks(2) as other:
            other.all_reduce(gpu.ones(other, 100), algorithm="ring")

    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side), ThreadPoolExecutor(1) as pool:
        here = torch.zeros(10, device=tensors[0].device)
        pool.submit(others).result(60)
        here.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert here.tolist() == [1] * 10


def step(networks, batches, bucketer):
    for network in networks:
        network.zero_grad()
    losses = [network(x).square().sum() for network, x in zip(networks, batches, strict=True)]
    torch.autograd.backward(losses)
    bucketer.wait()
    with torch.no_grad():
        for network in networks:
            for param in network.parameters():
                param.sub_(param.grad, alpha=0.001)


@pytest.mark.parametrize("overlap", [False, True])
def test_graph_step_equals_eager_step(make_ranks, device, overlap):
    torch.manual_seed(5)
    layers = torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    replayed = pr.replicate(torch.nn.Sequential(*layers).to(device), [device] * 3)
    batches = [torch.zeros(32, 16, device=device) for _ in replayed]
    options = {"bucket_cap_mb": 1e-4, "overlap": overlap}  # a small cap: several buckets
    with pr.GradientBucketer(replayed, comm=make_ranks(3), **options) as bucketer:
        graph = gpu.captured(lambda: step(replayed, batches, bucketer))
        assert len(bucketer.buckets) > 1
        eager = copy.deepcopy(list(replayed))  # copy after the warm-up, which changes parameters
        with pr.GradientBucketer(eager, comm=make_ranks(3), **options) as other:
            for replay in range(3):
                for batch in batches:
                    batch.normal_()
                graph.replay()
                step(eager, batches, other)
                for first, second in zip(replayed, eager, strict=True):
                    for p, q in zip(first.parameters(), second.parameters(), strict=True):
                        assert same_bits(p.grad, q.grad), f"gradients of replay {replay}"
                        assert same_bits(p, q), f"parameters after replay {replay}"
