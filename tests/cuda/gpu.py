"""Helpers of GPU tests. PYRINGAR_TEST_CUDA_ON_CPU=1 runs most GPU tests on CPU ranks."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch
from oracle import assert_all_ranks, expected, random

ON_CPU = os.environ.get("PYRINGAR_TEST_CUDA_ON_CPU") == "1"
NUM_GPUS = torch.cuda.device_count()

# Marks: `needed` of every GPU test file, `only` of tests on real GPUs, `two` of tests on two GPUs.
needed = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_CPU and NUM_GPUS == 0, reason="needs a CUDA device"),
]
only = pytest.mark.skipif(ON_CPU, reason="cannot run on CPU ranks")
two = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, here: {NUM_GPUS}")

# Offsets of tensors from an aligned address, in elements. Rank r uses entry r modulo the length.
ALIGNED = (0,)
SHIFTED = (1,)  # kernels process single elements, then aligned vectors
MIXED = (0, 1, 3, 2)  # no common alignment: kernels use no vectors
ALIGNMENTS = (ALIGNED, SHIFTED, MIXED)
POOL_ROWS, POOL_ELEMS = 16, 40_000
GUARD_BYTES = 256
SLEEP_CYCLES = 200_000_000  # about 0.1 s


@functools.cache
def pool(dtype):
    return torch.stack([random(POOL_ELEMS, dtype, 100 + row) for row in range(POOL_ROWS)])


def drawn(numel, dtype, world_size):
    """Return one flat random tensor per rank, with different values on every rank."""
    begins = [numel % 61 + rank // POOL_ROWS for rank in range(world_size)]
    return [pool(dtype)[i % POOL_ROWS, at : at + numel] for i, at in enumerate(begins)]


def lists_of(shapes, dtypes, world_size, seed=0):
    return [
        [
            random(math.prod(shape), dtypes[i % len(dtypes)], 31 * i + rank + seed).view(shape)
            for i, shape in enumerate(shapes)
        ]
        for rank in range(world_size)
    ]


def placed(comm, parts):
    return [
        [tensor.to(device, copy=True) for tensor in part]
        if isinstance(part, list)
        else part.to(device, copy=True)
        for part, device in zip(parts, comm.devices, strict=True)
    ]


def zeros(comm, *shape, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype, device=device) for device in comm.devices]


def ones(comm, *shape):
    return [tensor.add_(1) for tensor in zeros(comm, *shape)]


def copy_all(targets, sources):
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def assert_ranks(tensors, wanted, context=""):
    assert_all_ranks([tensor.cpu() for tensor in tensors], wanted, context)


def assert_lists(lists, parts, op, algorithm):
    for i, columns in enumerate(zip(*parts, strict=True)):
        wanted = expected([part.reshape(-1) for part in columns], op, algorithm)
        got = [tensors[i].reshape(-1) for tensors in lists]
        assert_ranks(got, wanted, f"{algorithm} {op} tensor {i} {tuple(columns[0].shape)}")


def captured(function):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


class GuardedRanks:
    """The tensors of all ranks in one buffer, with guard bytes between the tensors."""

    def __init__(self, parts, device, shifts=ALIGNED):
        self._dtype = parts[0].dtype
        item = self._dtype.itemsize
        self._bytes = parts[0].numel() * item
        row = (self._bytes + max(shifts) * item + 2 * GUARD_BYTES + 255) // 256 * 256
        self._begins = [
            rank * row + GUARD_BYTES + shifts[rank % len(shifts)] * item
            for rank in range(len(parts))
        ]
        self._before = torch.full((len(parts) * row,), 0xA5, dtype=torch.uint8)
        copy_all(self._views(self._before), parts)
        self._buffer = self._before.to(device, copy=True)
        self.tensors = self._views(self._buffer)

    def _views(self, buffer):
        return [buffer[at : at + self._bytes].view(self._dtype) for at in self._begins]

    def check(self, wanted, context):
        after = self._buffer.cpu()
        assert_all_ranks(self._views(after), wanted, context)
        for at in self._begins:
            self._before[at : at + self._bytes] = after[at : at + self._bytes]
        assert torch.equal(self._before, after), f"{context}: memory around a tensor was written"


def check(comm, parts, op, algorithm, shifts=ALIGNED):
    ranks = GuardedRanks(parts, comm.devices[0], shifts)
    assert comm.all_reduce(ranks.tensors, op, algorithm=algorithm) is None
    context = f"{algorithm} {op} {parts[0].dtype} k={len(parts)} n={parts[0].numel()} {shifts}"
    ranks.check(expected(parts, op, algorithm), context)
