"""On a GPU: are the bits right, for every algorithm, dtype, size, alignment, layout and list?"""

from __future__ import annotations

import random as pyrandom

import gpu
import pytest
import torch
from oracle import (
    DTYPES,
    FLOATS,
    NATIVE,
    OPS,
    expected,
    inputs,
)
from torch import nn

import pyringar as pr
from pyringar.parallel.shards import check_replicas_equal
from pyringar.train import lenet_params, resnet18

pytestmark = gpu.needed


def tile_elems(dtype):
    """What a block of the fused kernel takes at a time."""
    return 256 * (2 if dtype.itemsize == 1 else 4) * 16 // dtype.itemsize


def edge_sizes(dtype, world_size):
    """Nothing, less than one each, and around vectors, ring pieces, and tiles of the kernels."""
    pack, tile = 16 // dtype.itemsize, tile_elems(dtype)
    edges = [1, world_size, pack, 2 * pack, 256 * world_size, tile, 2 * tile]
    near = {edge + off for edge in edges for off in (-1, 0, 1)}
    return sorted({0, 37, 257, tile + pack + 1} | near)


@pytest.mark.parametrize("world_size", [*range(1, 9), 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_sizes_and_alignments(ranks_of, algorithm, dtype, world_size):
    for numel in edge_sizes(dtype, world_size):
        parts = gpu.drawn(numel, dtype, world_size)
        for shifts in gpu.ALIGNMENTS:
            gpu.check(ranks_of(world_size), parts, "sum", algorithm, shifts)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_more_tiles_than_blocks(ranks_of, algorithm):
    parts = [part.repeat(9) for part in inputs(2_000_003, torch.float32, 2)]
    gpu.check(ranks_of(2), parts, "sum", algorithm)


def test_many_ranks(make_ranks):
    """Past 96 ranks pointers move from the small table of a launch to the large one."""
    for world_size in (9, 11, 17, 33, 64, 100):
        parts = inputs(1031, torch.bfloat16, world_size)
        comm = make_ranks(world_size)
        gpu.check(comm, parts, "mean", "fused", gpu.APART)
        if world_size <= 33:
            gpu.check(comm, parts, "sum", "ring", gpu.APART)


@gpu.only
@pytest.mark.parametrize(
    ("world_size", "algorithm", "words"),
    [(641, "fused", r"641 ranks .*640"), (65, "ring", "65 ranks")],
)
def test_more_ranks_than_a_launch_takes(make_ranks, world_size, algorithm, words):
    comm = make_ranks(world_size)
    with pytest.raises(pr.UnsupportedError, match=words):
        comm.all_reduce(gpu.ones(comm, 1), algorithm=algorithm)


# -- layouts and lists -----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("algorithm", NATIVE)
def test_gradients_of_a_network(ranks_of, algorithm, world_size):
    for params in (lenet_params(), resnet18().to("meta").parameters()):
        shapes = [p.shape if p.numel() < 300_000 else (999, 101) for p in params]
        parts = gpu.lists_of(shapes, (torch.float32,), world_size)
        lists = gpu.placed(ranks_of(world_size), parts)
        ranks_of(world_size).all_reduce_coalesced(lists, "mean", algorithm=algorithm)
        gpu.assert_lists(lists, parts, "mean", algorithm)


@pytest.mark.parametrize(
    ("num_tensors", "world_size"), [(24, 4), (25, 2), (121, 2), (1000, 4), (50, 16)]
)
def test_more_tensors_than_a_launch_takes(ranks_of, num_tensors, world_size):
    """Around the small table's 24 tensors, past the large one's 120, past its 640 pointers."""
    shapes = [(1 + 7 * i % 90,) for i in range(num_tensors)]
    dtypes = (torch.float32, torch.float32, torch.bfloat16) if num_tensors > 500 else FLOATS[1:2]
    parts = gpu.lists_of(shapes, dtypes, world_size)
    lists = gpu.placed(ranks_of(world_size), parts)
    ranks_of(world_size).all_reduce_coalesced(lists, algorithm="fused")
    gpu.assert_lists(lists, parts, "sum", "fused")


# -- endurance -------------------------------------------------------------------------------------


class Call:
    def __init__(self, generator, comm):
        self.algorithm = generator.choice(NATIVE)
        self.op = generator.choice(OPS)
        dtype = generator.choice(DTYPES)
        numel = int(2 ** generator.uniform(0, 13.5)) - 1
        self.parts = gpu.drawn(numel, dtype, comm.world_size)
        self.ranks = gpu.Ranks(self.parts, comm.devices[0], generator.choice(gpu.ALIGNMENTS))
        self.what = f"{self.algorithm} {self.op} {dtype} n={numel}"

    def judge(self, context):
        wanted = expected(self.parts, self.op, self.algorithm)
        self.ranks.check(wanted, f"{context}: {self.what}")


def test_ten_thousand_calls(make_ranks):
    generator = pyrandom.Random(3)
    comm = make_ranks(4)
    for begin in range(0, 10_000, 100):
        calls = [Call(generator, comm) for _ in range(100)]
        for call in calls:
            comm.all_reduce(call.ranks.tensors, call.op, algorithm=call.algorithm)
        for number, call in enumerate(calls, begin):
            call.judge(f"call {number}")


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
