"""Are several machines with GPUs one group? NCCL needs a GPU for each rank."""

from __future__ import annotations

import os

import oracle
import pytest
import torch
from ranks import Crew

import pyringar as pr
from pyringar.distributed import HierarchicalCommunicator
from pyringar.engine import load

needs_two_gpus = [
    pytest.mark.cuda,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU per rank"),
]
MACHINES = ["ab", "aabb"]


def reduced_as_rank(rank, world_size, store, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    device = torch.device("cuda", rank)
    found = []
    with HierarchicalCommunicator(store, rank, world_size, timeout=60.0, device=device) as comm:
        for round_, dtype in enumerate(oracle.DTYPES):
            with torch.cuda.stream(torch.cuda.Stream(device)):
                mine = torch.zeros(70_001, dtype=dtype, device=device)
                torch.cuda._sleep(2_000_000 * ((rank + round_) % 3))
                mine.copy_(oracle.random(70_001, dtype, rank), non_blocking=True)
                work = comm.all_reduce(mine, "mean" if round_ % 2 else "max", async_op=True)
                assert work.wait()
                found.append(mine.clone().cpu())
        comm.broadcast(mine, 1)
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(pr.UnsupportedError, match="CUDA graph"):
            comm.all_reduce(mine)
    return found


@pytest.mark.parametrize(
    "machines", [pytest.param(machines, marks=needs_two_gpus) for machines in MACHINES]
)
def test_sums_on_gpus_have_promised_bits(machines, monkeypatch):
    if torch.cuda.device_count() < len(machines):
        pytest.skip(f"NCCL wants a GPU per rank, here: {torch.cuda.device_count()}")
    monkeypatch.setattr(oracle, "machines", machines)
    load.cuda_engine()  # compiled once, here
    with Crew(len(machines)) as crew:
        answers = crew.check(reduced_as_rank, machines, timeout_s=100)
    for round_, dtype in enumerate(oracle.DTYPES):
        parts = [oracle.random(70_001, dtype, rank) for rank in range(len(machines))]
        wanted = oracle.reduced(parts, "mean" if round_ % 2 else "max")
        oracle.assert_all_ranks([found[round_] for found in answers], wanted, dtype)


class OnHost:
    """Stands for NCCL: an all-to-all of lists, over the column's gloo."""

    def __init__(self, gloo) -> None:
        self._gloo = gloo

    def alltoall(self, outputs, inputs, options):
        begun = [
            begin([tensor.view(-1)], node, 1)
            for begin, tensors in ((self._gloo.recv, outputs), (self._gloo.send, inputs))
            for node, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        return self._Work(begun)

    class _Work:
        def __init__(self, begun) -> None:
            self._begun = begun

        def wait(self) -> None:
            for work in self._begun:
                work.wait()


def stood_for_as_rank(rank, world_size, store, machines):
    os.environ["PYRINGAR_NODE_ID"] = machines[rank]
    with HierarchicalCommunicator(store, rank, world_size, timeout=20.0) as comm:
        column = comm._column
        if column._gloo is not None:
            column._nccl = OnHost(column._gloo)
            exchange = column.exchange
            column.exchange = lambda sent, received: (
                exchange(sent, received)
                if sent and next(iter(sent.values())).dtype is torch.uint8
                else column._exchange_on_gpu(sent, received)
            )
        mine, parts = oracle.random(4001, torch.float32, rank), torch.empty(4000)
        comm.all_reduce(mine)
        comm.all_gather(parts, mine[:1000])
        column._nccl = None
        return mine, parts


@pytest.mark.parametrize("machines", ["aabb", "abbb", "abcd"])
def test_nccl_is_given_what_gloo_is(machines, monkeypatch):
    monkeypatch.setattr(oracle, "machines", machines)
    with Crew(4) as crew:
        answers = crew.check(stood_for_as_rank, machines)
    wanted = oracle.reduced([oracle.random(4001, torch.float32, rank) for rank in range(4)], "sum")
    oracle.assert_all_ranks([mine for mine, _ in answers], wanted)
    oracle.assert_all_ranks([parts for _, parts in answers], wanted[:1000].repeat(4))


def differ_as_rank(rank, world_size, store):
    os.environ["PYRINGAR_NODE_ID"] = "ab"[rank]
    device = "cuda:0" if rank == 0 else None
    with pytest.raises(pr.ArgumentError) as error:
        HierarchicalCommunicator(store, rank, world_size, timeout=20.0, device=device)
    return str(error.value)


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device here")
@pytest.mark.cuda
def test_gpus_are_on_all_machines_or_none():
    with Crew(2) as crew:
        for text in crew.check(differ_as_rank):
            assert "expected GPUs for all ranks, or for none" in text
