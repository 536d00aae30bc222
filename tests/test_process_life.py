"""One rank per process: refused arguments, stores, and what close, fork and exit leave behind."""

from __future__ import annotations

import gc
import os
import socket
import time

import pytest
import torch
from process_checks import (
    mapped_memories,
    needs_linux,
    open_memories,
    settled,
    thread_ids,
)
from ranks import another, connect, on_ranks

import pyringar as pr
from pyringar.comm.shared_tensors import shared_empty

pytestmark = needs_linux

# -- wrong arguments: nothing is changed and no rank is told ---------------------------------------


def refusals(comm) -> list:
    """(call, words of the error); conformance/test_refused.py has what all transports refuse."""
    good = torch.ones(4)
    k = comm.world_size
    return [
        (lambda: comm.all_reduce(good, algorithm="fused"), "algorithm is 'fused', expected one of"),
        (lambda: comm.all_reduce(good, algorithm="ring"), "algorithm is 'ring'.*take 'auto'"),
        (lambda: comm.all_reduce(3), r"all_reduce: tensor is (a|an)? ?(3|int)"),
        (lambda: comm.all_reduce([good, None]), r"tensors\[1\] is"),
        (lambda: comm.all_reduce_coalesced(good), "tensors is a Tensor, expected a list"),
        (lambda: comm.bind_coalesced(good), "bind_coalesced: tensors is a Tensor, expected a list"),
        (lambda: comm.broadcast(good, k), f"root is {k}, expected a rank from 0 to {k - 1}"),
        (lambda: comm.new_group([]), r"ranks is \[\], expected different ranks"),
        (lambda: comm.new_group([0, 0]), r"ranks is \[0, 0\], expected different ranks"),
        (lambda: comm.new_group([k]), rf"ranks is \[{k}\], expected ranks from 0 to {k - 1}"),
        (lambda: comm.new_group([True]), r"ranks is \[True\]"),
        (lambda: comm.new_group(0), "ranks is 0, expected"),
        (lambda: comm.new_group([[0]]), r"ranks is \[\[0\]\]"),
    ]


@on_ranks(2)
def test_wrong_arguments_raise(state):
    for call, words in refusals(state.comm):
        with pytest.raises((pr.ArgumentError, pr.UnsupportedError), match=words):
            call()
    # Nobody was told: the next call is the next call.
    tensor = torch.ones(5)
    state.comm.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((5,), float(state.world_size)))


def test_wrong_constructor_arguments_raise(store_port):
    store = connect(store_port)

    def refused(words: str, *arguments, **options) -> None:
        start = time.monotonic()
        with pytest.raises(pr.ArgumentError, match=words):
            pr.ProcessCommunicator(*arguments, **options)
        assert time.monotonic() - start < 5, "it waited for others first"

    refused("store is 5, expected a torch.distributed.Store", 5, 0, 1)
    refused("rank is None", store)
    refused("world_size is None", store, 0)
    refused("rank is True", store, True, 1)
    refused("rank is '0'", store, "0", 1)
    refused("rank is 2 and world_size 2, expected 0 <= rank < world_size", store, 2, 2)
    refused("rank is -1 and world_size 2", store, -1, 2)
    refused("rank is 0 and world_size 0", store, 0, 0)
    refused("world_size is 2.0", store, 0, 2.0)
    refused("rank is 0 and world_size 2 without a store", None, 0, 2)
    refused("algorithm is 'fused', expected one of auto, direct", store, 0, 1, algorithm="fused")
    refused("order is None", store, 0, 1, order=None)
    refused("name is 3, expected", store, 0, 1, name=3)
    with pytest.raises(pr.UnsupportedError, match="take 'auto' or 'direct'"):
        pr.ProcessCommunicator(store, 0, 1, algorithm="ring")


# -- where ranks find each other -------------------------------------------------------------------


def test_no_store_raises(monkeypatch):
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_store_of_torchrun(new_crew):
    crew = new_crew(2)
    port = free_port()
    for rank in range(2):
        crew[rank].start(on_rank_from_environment, rank=rank, port=port)
    assert crew.values() == [40.0, 40.0]


def on_rank_torch_distributed(state, rank: int, path: str) -> float:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        with pr.ProcessCommunicator() as comm:
            tensor = torch.ones(10)
            comm.all_reduce(tensor)
            dist.all_reduce(tensor)  # beside it
            return tensor.sum().item()
    finally:
        dist.destroy_process_group()


def test_store_of_torch_distributed(new_crew, tmp_path):
    """A file store, with gloo at work beside us."""
    crew = new_crew(2)
    for rank in range(2):
        crew[rank].start(on_rank_torch_distributed, rank=rank, path=str(tmp_path / "store"))
    assert crew.values() == [40.0, 40.0]


# -- closing ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_closed_communicator_refuses_calls(state):
    comm = another(state)
    tensor = torch.ones(100_000)
    work = comm.all_reduce(tensor, async_op=True)
    bound = comm.bind(tensor)
    comm.close()
    comm.close()
    assert work.is_completed()
    assert torch.equal(tensor, torch.full((100_000,), float(state.world_size)))
    two, four = torch.ones(2), torch.ones(4)
    calls = (
        lambda: comm.all_reduce(two),
        lambda: comm.all_reduce(two, async_op=True),
        lambda: comm.all_reduce_coalesced([two]),
        lambda: comm.reduce_scatter(two, four),
        lambda: comm.all_gather(four, two),
        lambda: comm.broadcast(two),
        lambda: comm.barrier(),
        lambda: comm.bind(two),
        lambda: comm.bind_coalesced([two]),
        lambda: comm.register(shared_empty(3)),
        bound,
    )
    for call in calls:
        with pytest.raises(pr.RingarError, match="closed"):
            call()
    assert torch.equal(two, torch.ones(2))


@on_ranks(2)
def test_dropped_communicators_leave_nothing(state):
    """Communicators come and go, closed or dropped; what they held goes too."""

    first = thread_ids()

    def held() -> tuple[int, set[str], list[str]]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), thread_ids() - first, mapped_memories()

    before = held()
    for turn in range(8):
        comm = another(state)
        assert open_memories() == [], "not sealed"
        comm.all_reduce(torch.ones(100), async_op=True).wait()
        if turn % 2:
            comm.close()
        del comm
    after = settled(held, before)
    assert after == before, f"{before} before, {after} now"
