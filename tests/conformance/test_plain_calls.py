"""Which calls does the C function behind `all_reduce` take, and which the general path?

Both must reduce by the same algorithm, in the same order. Tensors that the function refuses are in
test_prepared.py and test_refused.py.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from oracle import assert_all_ranks, folded, inputs
from pairs import RankPair
from torch.fx.experimental.proxy_tensor import make_fx

import pyringar as pr


@pytest.fixture
def comm():
    with pr.ProcessCommunicator(dist.HashStore(), 0, 1) as one:
        yield one


@pytest.mark.parametrize(
    "tensor", [torch.ones(3), torch.ones(2, 3), torch.ones(()), torch.ones(4, dtype=torch.int8)]
)
def test_takes_plain_tensors(comm, tensor):
    version = tensor._version
    assert comm._run_prepared(tensor, "sum", None, None)
    assert comm._run_prepared([tensor], "mean", None, None)
    assert tensor._version == version + 2
    assert comm.stats()["exchange"]["calls"] == 2


@pytest.mark.parametrize(
    ("made", "named", "order"),
    [
        ({}, "auto", "rank"),
        ({}, "fused", "rank"),
        ({}, "ring", "ring"),
        ({"algorithm": "ring"}, None, "ring"),
        ({"algorithm": "ring"}, "ring", "ring"),
        ({"algorithm": "ring"}, "auto", "rank"),
        ({"algorithm": "ring"}, "fused", "rank"),
        ({"algorithm": "ring"}, "direct", "rank"),
        ({"order": "tree"}, "auto", "tree"),
        ({"order": "tree"}, "direct", "tree"),
        ({"order": "exact"}, "fused", "exact"),
        ({"algorithm": "naive"}, "auto", "rank"),
    ],
)
def test_named_algorithm_runs(made, named, order):
    with pr.Communicator(["cpu"] * 5, **made) as comm:
        parts = inputs(70_001, torch.float32, 5, 3)
        wanted = folded(parts, "sum", order)
        for _ in range(3):  # the third call is prepared
            tensors = [part.clone() for part in parts]
            comm.all_reduce(tensors, algorithm=named)
            assert_all_ranks(tensors, wanted, (made, named))
        lists = [[part.clone()] for part in parts]
        comm.all_reduce_coalesced(lists, algorithm=named)
        assert_all_ranks([mine[0] for mine in lists], wanted, (made, named))
        used = {"auto": "fused", None: made.get("algorithm")}.get(named, named)
        assert comm.stats()[used]["calls"] == 4
        # A ring cannot keep these orders: refused by both paths.
        if "order" in made:
            with pytest.raises(pr.ArgumentError, match="ring"):
                comm.all_reduce(tensors, algorithm="ring")


def test_call_is_traced(comm):
    def program(x):
        y = x.clone()
        comm.all_reduce(y)
        return y

    assert "pyringar" in make_fx(program, tracing_mode="real")(torch.ones(3)).code


@pytest.mark.parametrize("is_bound", [False, True])
def test_failed_call_counts_as_write(is_bound):
    versions = []

    def call(rank):
        tensor, comm = torch.ones(3), pair.comms[rank]
        reduce = comm.bind(tensor) if is_bound else lambda: comm.all_reduce(tensor)
        deadline = time.monotonic() + 20
        while rank == 1 and len(versions) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2 if rank == 0 else 0):
            with pytest.raises(pr.CollectiveTimeout):
                reduce()
            versions.append(tensor._version)  # the second call is refused at once

    with RankPair(timeout=0.5) as pair:
        pair.on_ranks(call)
    assert versions == [1, 1]


def test_both_ways_meet():
    with RankPair() as pair:
        tensors = [torch.arange(6.0), torch.ones(6, 2)[:, 0]]
        pair.all_reduce(tensors, "mean")
        assert all(t.tolist() == [0.5, 1, 1.5, 2, 2.5, 3] for t in tensors)
        with pytest.raises(pr.ArgumentError, match="ranks call different things"):
            pair.all_reduce([torch.ones(6), torch.ones(2, 3)])


def test_threads_share_a_communicator():
    def reduce(rank):
        def call():
            for _ in range(200):
                tensor = torch.ones(8)
                pair.comms[rank].all_reduce(tensor)
                totals.append(tensor[7].item())

        totals = []
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert totals == [2.0] * 400

    with RankPair() as pair:
        pair.on_ranks(reduce)
