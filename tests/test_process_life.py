"""One rank per process: arguments, stores, two groups at once."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
from oracle import assert_bits, inputs, reduced
from process_checks import needs_linux
from rank_processes import another, free_port, on_ranks

import pyringar as pr

pytestmark = needs_linux


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "rank is None"),
        ((0,), "world_size is None"),
        ((True, 1), "rank is True"),
        ((2, 2), "rank is 2 and world_size 2, expected 0 <= rank < world_size"),
        ((-1, 2), "rank is -1 and world_size 2"),
        ((0, 0), "rank is 0 and world_size 0"),
        ((0, 2.0), "world_size is 2.0"),
    ],
)
def test_wrong_rank_or_world_size_raises(arguments, words):
    start = time.monotonic()
    with pytest.raises(pr.ArgumentError, match=words):
        pr.ProcessCommunicator(torch.distributed.HashStore(), *arguments)
    assert time.monotonic() - start < 5, "it waited for others first"


@pytest.mark.parametrize("ranks", [5, [1], [1, 1], [0, -1], [0, "1"], [0, 1, 1], [0, 2**40]])
def test_wrong_global_ranks_raise(ranks):
    with pytest.raises(
        pr.ArgumentError, match=re.escape(f"global_ranks is {ranks}, expected a list of 2 ")
    ):
        pr.ProcessCommunicator(torch.distributed.HashStore(), 0, 2, global_ranks=ranks)


def test_join_timeout_names_global_ranks():
    with pytest.raises(pr.CollectiveTimeout, match=r"rank 3 waited 0.2 s for ranks \[5\] to join"):
        pr.ProcessCommunicator(
            torch.distributed.HashStore(), 0, 2, timeout=0.2, global_ranks=[3, 5]
        )


def test_missing_store_raises(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pr.ArgumentError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        pr.ProcessCommunicator()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(pr.ArgumentError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"):
        pr.ProcessCommunicator()


def on_rank_from_environment(state, rank: int, port: int) -> float:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with pr.ProcessCommunicator() as comm, pr.ProcessCommunicator() as again:
        tensor = torch.ones(10)
        comm.all_reduce(tensor)
        again.all_reduce(tensor)
        return tensor.sum().item()


def test_torchrun_store_connects_ranks(new_rank_group):
    group = new_rank_group(2)
    port = free_port()
    for rank in range(2):
        group[rank].start(on_rank_from_environment, rank=rank, port=port)
    assert group.values() == [40.0, 40.0]


def on_rank_torch_distributed(state, rank: int, path: str) -> float:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        with pr.ProcessCommunicator() as comm:
            tensor = torch.ones(10)
            comm.all_reduce(tensor)
            dist.all_reduce(tensor)  # gloo also works while comm exists
            return tensor.sum().item()
    finally:
        dist.destroy_process_group()


def test_default_group_store_connects_ranks(new_rank_group, tmp_path):
    group = new_rank_group(2)
    for rank in range(2):
        group[rank].start(on_rank_torch_distributed, rank=rank, path=str(tmp_path / "store"))
    assert group.values() == [40.0, 40.0]


@on_ranks(2)
def test_two_communicators_at_once(state):
    k = state.world_size
    with another(state) as other:
        for turn in range(20):
            parts = inputs(1000 * turn, torch.float32, k, seed=turn)
            one, two = parts[state.rank].clone(), parts[state.rank].clone()
            # Ranks wait in different orders: calls of two communicators are independent.
            first = state.comm.all_reduce(one, async_op=True)
            second = other.all_reduce(two, async_op=True)
            for work in (first, second) if state.rank % 2 else (second, first):
                work.wait()
            assert_bits(one, reduced(parts, "sum"))
            assert_bits(two, reduced(parts, "sum"))
