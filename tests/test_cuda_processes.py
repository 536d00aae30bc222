"""Ranks in processes with tensors on GPUs: bits, streams, errors and killed ranks.

All tests but the first carry the marker `cuda`. Functions named ``on_rank_...`` run in the ranks
(see rank_processes.py). `tests/test_cuda_emulated.py` tests the C++ code without a GPU.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from call_cases import SHARES, CallSpec, Operand
from oracle import same_bits
from rank_processes import new_name, rank_groups
from transports import check_on_rank

import pyringar as pr
from pyringar import errors
from pyringar.engine import load

WORLD_SIZES = (2, 3)


def limit_bytes(name: str) -> int:
    limits: dict[str, int] = load.cuda_engine().limits()
    return limits[name]


def num_gpus() -> int:
    return torch.cuda.device_count()


def on_rank_join_mixed(state: SimpleNamespace, name: str) -> list[str]:
    torch.cuda.device_count = lambda: 1
    load.cuda_engine = load.engine
    device = "cuda:0" if state.rank == 1 else None
    try:
        pr.ProcessCommunicator(
            state.store, state.rank, state.world_size, name=name, device=device, timeout=20
        )
    except errors.ArgumentError as error:
        return [str(error)]
    return ["no error"]


def test_mixed_device_types_raise(new_rank_group):
    group = new_rank_group(2)
    group.join()
    for [text] in group.run(on_rank_join_mixed, name=new_name()):
        assert "device is a cpu device for rank 0 (process " in text, text
        assert "a cuda device for rank 1 (process " in text, text
        assert "could not make the group" not in text, text


def gpu(test):
    test = pytest.mark.timeout(120)(pytest.mark.cuda(test))
    return pytest.mark.skipif(num_gpus() == 0, reason="no CUDA device here")(test)


@pytest.fixture(scope="module")
def gpu_rank_group_of():
    load.cuda_engine()  # compile before the ranks start
    with rank_groups(device="cuda:0", timeout=60) as get:
        yield get


@pytest.fixture
def new_gpu_rank_group(new_rank_group):
    load.cuda_engine()

    def make(world_size: int, **options):
        group = new_rank_group(world_size)
        group.join(device="cuda:0", **options)
        return group

    return make


def on_rank_streams(state) -> None:
    parts = [torch.full((200_000,), float(rank + 1)) for rank in range(state.world_size)]
    total = sum(range(1, state.world_size + 1))
    side = torch.cuda.Stream()
    for round_ in range(20):
        stream = side if round_ % 3 == 0 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            mine = torch.zeros(200_000, device="cuda")
            torch.cuda._sleep(2_000_000 * ((state.rank + round_) % 3))
            mine.add_(parts[state.rank].to("cuda", non_blocking=True))
            if round_ % 2:
                work = state.comm.all_reduce(mine, async_op=True)
                assert work.wait()
                assert work.exception() is None
            else:
                state.comm.all_reduce(mine)
            result = mine * 2
            assert result.unique().tolist() == [2 * total], round_


@gpu
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_follows_streams(gpu_rank_group_of, world_size):
    gpu_rank_group_of(world_size).run(on_rank_streams)


@gpu
@pytest.mark.skipif(num_gpus() < 2, reason=f"needs two CUDA devices, here: {num_gpus()}")
def test_two_gpus_give_right_bits(new_rank_group):
    group = new_rank_group(2)
    name = new_name()
    for rank in range(2):
        group[rank].start(on_rank_join_own_gpu, port=group.port, rank=rank, name=name)
    for outcome in group.outcomes():
        assert outcome.error is None, outcome.trace
    sizes = (1000, limit_bytes("process_slot") // 4 + 1)
    calls = [
        CallSpec(entry, 2, (Operand(torch.float32, (2 * numel,)),), by_communicator=True)
        for entry in ("all_reduce", "broadcast", *SHARES)
        for numel in sizes
    ]
    group.run(check_on_rank, calls=calls)


def on_rank_join_own_gpu(state, port: int, rank: int, name: str) -> None:
    from rank_processes import join

    torch.cuda.set_device(rank)
    join(state, port, rank, 2, name, device="cuda")


def on_rank_reduce(state, numel: int = 1000) -> bool:
    state.mine = torch.full((numel,), float(state.rank), device="cuda")
    state.comm.all_reduce(state.mine)
    torch.cuda.synchronize()
    return same_bits(state.mine.cpu(), torch.full((numel,), float(sum(range(state.world_size)))))


def assert_all_fail(group, ranks, error, *words, within_s=60.0):
    for outcome in group.outcomes(ranks):
        assert outcome.error == error, outcome
        assert all(word in outcome.text for word in words), outcome.text
        assert outcome.seconds < within_s


@gpu
@pytest.mark.parametrize("is_large", [False, True])
def test_killed_gpu_rank_raises_peer_lost(new_gpu_rank_group, is_large):
    numel = 3 * limit_bytes("process_slot") if is_large else 1000
    group = new_gpu_rank_group(3, timeout=30.0)
    assert group.run(on_rank_reduce, numel=numel) == [True] * 3
    group[1].kill()
    group.start(on_rank_reduce, [0, 2], numel=numel)
    culprit = f"rank 1 (process {group[1].pid}"
    assert_all_fail(group, [0, 2], "PeerLostError", culprit, within_s=5)
    # The surviving processes can make a new group.
    group.join([0, 2], device="cuda:0")
    assert group.run(on_rank_reduce, [0, 2]) == [True, True]


def on_rank_enqueue(state, busy_s: float) -> None:
    state.mine = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(int(busy_s * 1.5e9))
    state.comm.all_reduce(state.mine)


def on_rank_synchronize(state) -> None:
    torch.cuda.synchronize()


@gpu
def test_killed_busy_rank_releases_streams(new_gpu_rank_group):
    """Streams of the survivors wait for a call that the killed rank's GPU never runs."""
    group = new_gpu_rank_group(3, timeout=20.0)
    group.run(on_rank_reduce)
    group[0].start(on_rank_enqueue, busy_s=0)
    group[1].start(on_rank_enqueue, busy_s=20)
    group[2].start(on_rank_enqueue, busy_s=0)
    for outcome in group.outcomes():
        assert outcome.error is None, outcome.trace
        assert outcome.seconds < 5, "the host waited for the GPU"
    group[1].kill()
    group.start(on_rank_synchronize, [0, 2])
    for outcome in group.outcomes([0, 2], within_s=40):
        assert outcome.error is None, outcome.trace


def on_rank_set_allocator(state) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def on_rank_expandable(state) -> bool:
    mine = torch.ones(3_000_000, device="cuda")
    state.comm.all_reduce(mine)
    assert mine.unique().tolist() == [state.world_size]
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


@gpu
def test_expandable_segments_are_reduced(new_rank_group):
    group = new_rank_group(2)
    load.cuda_engine()
    group.run(on_rank_set_allocator)
    group.join(device="cuda:0")
    assert group.run(on_rank_expandable) == [True] * 2, "torch ignored PYTORCH_CUDA_ALLOC_CONF"
