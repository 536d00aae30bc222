"""GPU calls: exact bits for all sizes and alignments, errors, array interfaces, torch.compile."""

from __future__ import annotations

import subprocess
import sys

import gpu
import pytest
import torch
from oracle import DTYPES, FLOATS, NATIVE, expected, inputs, reduced
from torch import nn

import pyringar as pr
from pyringar.parallel.shards import check_replicas_equal

pytestmark = gpu.needed


def edge_sizes(dtype, world_size):
    """Return sizes near multiples of a vector, of a ring piece and of a kernel tile."""
    pack = 16 // dtype.itemsize
    tile = 256 * (2 if dtype.itemsize == 1 else 4) * pack  # elements per step of a fused block
    edges = [1, world_size, pack, 2 * pack, 256 * world_size, tile, 2 * tile]
    near = {edge + off for edge in edges for off in (-1, 0, 1)}
    return sorted({0, 37, 257, tile + pack + 1} | near)


@pytest.mark.parametrize("world_size", [*range(1, 9), 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_sizes_and_alignments_are_exact(ranks_of, algorithm, dtype, world_size):
    for numel in edge_sizes(dtype, world_size):
        parts = gpu.drawn(numel, dtype, world_size)
        for shifts in gpu.ALIGNMENTS:
            gpu.check(ranks_of(world_size), parts, "sum", algorithm, shifts)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_more_tiles_than_blocks_are_reduced(ranks_of, algorithm):
    parts = [part.repeat(9) for part in inputs(2_000_003, torch.float32, 2)]
    gpu.check(ranks_of(2), parts, "sum", algorithm)


def test_many_ranks_are_bit_exact(make_ranks):
    """Above 96 ranks a launch uses the large pointer table."""
    for world_size in (9, 11, 17, 33, 64, 100):
        parts = inputs(1031, torch.bfloat16, world_size)
        comm = make_ranks(world_size)
        gpu.check(comm, parts, "mean", "fused", gpu.MIXED)
        if world_size <= 33:
            gpu.check(comm, parts, "sum", "ring", gpu.MIXED)


@gpu.only
@pytest.mark.parametrize(
    ("world_size", "algorithm", "words"),
    [(641, "fused", r"641 ranks .*640"), (65, "ring", "65 ranks")],
)
def test_too_many_ranks_raise(make_ranks, world_size, algorithm, words):
    comm = make_ranks(world_size)
    with pytest.raises(pr.UnsupportedError, match=words):
        comm.all_reduce(gpu.ones(comm, 1), algorithm=algorithm)


@pytest.mark.parametrize(
    ("num_tensors", "world_size"), [(24, 4), (25, 2), (121, 2), (1000, 4), (50, 16)]
)
def test_many_tensors_need_several_launches(ranks_of, num_tensors, world_size):
    """One launch has a table of 24 tensors, or a large table of 120 tensors or 640 pointers."""
    shapes = [(1 + 7 * i % 90,) for i in range(num_tensors)]
    dtypes = (torch.float32, torch.float32, torch.bfloat16) if num_tensors > 500 else FLOATS[1:2]
    parts = gpu.lists_of(shapes, dtypes, world_size)
    lists = gpu.placed(ranks_of(world_size), parts)
    ranks_of(world_size).all_reduce_coalesced(lists, algorithm="fused")
    gpu.assert_lists(lists, parts, "sum", "fused")


def test_grader_passes_on_gpu(device):
    """Use a new interpreter: a process that has used CUDA cannot use it after fork()."""
    command = ["-m", "pyringar", "check", "pyringar:allreduce", "--timeout", "60"]
    devices = ["--devices", f"{device},{device},cpu"]
    done = subprocess.run([sys.executable, *command, *devices], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@gpu.only
def test_wrong_device_raises(ranks_of, comm_of, device):
    mixed = [torch.ones(3, device=device), torch.ones(3)]
    with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] is on cpu, expected cuda:0"):
        ranks_of(2).all_reduce(mixed)
    with pytest.raises(pr.ArgumentError, match=r"tensors\[0\] is on cuda:0, expected cpu"):
        comm_of(2).all_reduce(mixed)
    assert mixed[0].tolist() == mixed[1].tolist() == [1, 1, 1]
    with pytest.raises(pr.ArgumentError, match=r"cuda:99.*not on this machine.*cuda:0"):
        pr.Communicator(["cuda:0", "cuda:99"])


class Interface:
    def __init__(self, tensor):
        self._tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@gpu.only
@pytest.mark.parametrize("has_cupy", [False, True])
def test_cuda_array_interface_is_accepted(ranks_of, has_cupy):
    wrap = pytest.importorskip("cupy").asarray if has_cupy else Interface
    for name in ("float64", "float32", "float16", "int8", "uint8", "int32", "int64"):
        parts = gpu.drawn(1009, getattr(torch, name), 3)
        for algorithm in NATIVE:
            tensors = gpu.placed(ranks_of(3), parts)
            ranks_of(3).all_reduce([wrap(tensor) for tensor in tensors], algorithm=algorithm)
            gpu.assert_ranks(tensors, expected(parts, "sum", algorithm), f"{algorithm} {name}")


def test_compiled_calls_stay_in_one_graph(ranks_of):
    comm = ranks_of(2)
    parts = gpu.drawn(1000, torch.float32, 2)
    tensors = gpu.placed(comm, parts)

    def function(x, y):
        first, second = pr.ops.all_reduce(comm, [x * 2, y * 2])
        comm.all_reduce([x, y])
        return first + 1, second + 1

    results = torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors)
    gpu.assert_ranks(tensors, reduced(parts, "sum"))
    doubled = reduced([2 * part for part in parts], "sum")
    gpu.assert_ranks(list(results), doubled + 1)


def test_sharded_step_ignores_rank_count(device):
    module = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 3))
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(1)).to(device)
    shards = x.split(8)
    found = []
    for k in (1, 2, 4, 8):
        replicas = pr.replicate(module, [device] * k)
        with pr.ShardedStep(replicas, 8) as step:
            loss = step(lambda net, shard: net(shards[shard]).square().sum())
        for net in replicas:
            grads = [param.grad for param in net.parameters()]
            found.append([t.cpu() for t in (loss, *grads, *net.buffers())])
    check_replicas_equal(found)
