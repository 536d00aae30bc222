"""P1-P6 on a GPU: the same calls, the same bits, and streams, graphs and deadlines besides.

Needs a CUDA device; several where a test says so. With ``PYRINGAR_TEST_CUDA_ON_CPU=1`` the tests
run over CPU ranks instead, but for those about streams, graphs and the device: a trial of the tests
themselves on a machine that has no GPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import os
import random as pyrandom
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from oracle import (
    DTYPES,
    FLOATS,
    NATIVE,
    OPS,
    assert_all_ranks,
    assert_bits,
    expected,
    inputs,
    positional,
    random,
    reduced,
    same_bits,
)

import pyringar as pr
from pyringar.engine import load

ON_CPU = os.environ.get("PYRINGAR_TEST_CUDA_ON_CPU") == "1"
NUM_GPUS = torch.cuda.device_count()
ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not ON_CPU and NUM_GPUS == 0, reason="no CUDA device here"),
]
gpu_only = pytest.mark.skipif(ON_CPU, reason="about the device, not the arithmetic")
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, here: {NUM_GPUS}")

WORLD_SIZES = (*range(1, 9), 16)
# Ways to lie in memory, as offsets in elements of one rank after the other.
ALIGNED = (0,)
ALIKE = (1,)  # vectors, after a head
APART = (0, 1, 3, 2)  # no common alignment: element by element
ALIGNMENTS = (ALIGNED, ALIKE, APART)
POOL_ELEMS = 40_000
GUARD_BYTES = 256
SLEEP_CYCLES = 200_000_000  # a tenth of a second of a GPU's clock

LENET = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]


def resnet18_shapes():
    """All 76 parameters' shapes: convolutions with their biases and normalizations."""
    shapes, channels = [(64, 1, 3, 3), (64,), (64,), (64,)], 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            narrow = channels if block == 0 else width
            shapes += [(width, narrow, 3, 3), (width,), (width, width, 3, 3), (width,)]
            shapes += [(width, narrow, 1, 1), (width,)] if stage > 0 and block == 0 else []
            shapes += [(width,)] * 4
        channels = width
    return [*shapes, (10, 512), (10,)]


# -- ranks on the device ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def device():
    """Where the ranks are."""
    return "cpu" if ON_CPU else "cuda:0"


@pytest.fixture
def make_ranks(device):
    """``make_ranks(k, **kwargs)``: a communicator of k ranks on the device, closed afterwards."""
    with contextlib.ExitStack() as stack:
        yield lambda k, **kwargs: stack.enter_context(pr.Communicator([device] * k, **kwargs))


@pytest.fixture(scope="session")
def ranks_of(device):
    """``ranks_of(k)``: one communicator of k ranks for all tests that leave it as it was."""
    made = {}
    with contextlib.ExitStack() as stack:

        def get(k):
            if k not in made:
                made[k] = stack.enter_context(pr.Communicator([device] * k))
            return made[k]

        yield get


@functools.cache
def pool(dtype):
    """Random values for 16 ranks, drawn once: drawing takes longer than reducing."""
    return torch.stack([random(POOL_ELEMS, dtype, 100 + rank) for rank in range(16)])


def drawn(numel, dtype, world_size):
    """One flat tensor per rank out of the pool, elsewhere for every size."""
    begin = numel % 61
    return [pool(dtype)[rank, begin : begin + numel] for rank in range(world_size)]


class Ranks:
    """A tensor per rank in one buffer with guard bytes between: one copy there, one back."""

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
        for view, part in zip(self._views(self._before), parts, strict=True):
            view.copy_(part)
        self._buffer = self._before.clone() if device == "cpu" else self._before.to(device)
        self.tensors = self._views(self._buffer)

    def _views(self, buffer):
        return [buffer[at : at + self._bytes].view(self._dtype) for at in self._begins]

    def check(self, wanted, context):
        """All ranks have these bits, and no byte around them was touched."""
        after = self._buffer.cpu()
        assert_all_ranks(self._views(after), wanted, context)
        for at in self._begins:
            self._before[at : at + self._bytes] = after[at : at + self._bytes]
        assert torch.equal(self._before, after), f"{context}: written outside of the tensors"


def check(comm, parts, op, algorithm, shifts=ALIGNED):
    ranks = Ranks(parts, comm.devices[0].type, shifts)
    assert comm.all_reduce(ranks.tensors, op, algorithm=algorithm) is None
    context = f"{algorithm} {op} {parts[0].dtype} k={len(parts)} n={parts[0].numel()} {shifts}"
    ranks.check(expected(parts, op, algorithm), context)


def on(device, parts):
    return [part.clone() if device == "cpu" else part.to(device) for part in parts]


def lists_of(shapes, dtypes, world_size, seed=0):
    """``lists[rank][i]`` on the CPU, dtypes in turn."""
    return [
        [
            random(math.prod(shape), dtypes[i % len(dtypes)], 31 * i + rank + seed).view(shape)
            for i, shape in enumerate(shapes)
        ]
        for rank in range(world_size)
    ]


def assert_lists(lists, parts, op, algorithm):
    """Every tensor of every rank against the oracle on the flat parts."""
    for i, columns in enumerate(zip(*parts, strict=True)):
        wanted = expected([part.reshape(-1) for part in columns], op, algorithm)
        got = [tensors[i].cpu().reshape(-1) for tensors in lists]
        assert_all_ranks(got, wanted, f"{algorithm} {op} tensor {i} {tuple(columns[0].shape)}")


def edge_sizes(dtype, world_size):
    """Nothing, less than one each, and around vectors, ring pieces, and tiles of the kernels."""
    pack = 16 // dtype.itemsize
    tile = 256 * (2 if dtype.itemsize == 1 else 4) * pack
    piece = 256 * world_size
    edges = [1, world_size, pack, 2 * pack, piece, tile, 2 * tile]
    near = {edge + off for edge in edges for off in (-1, 0, 1)}
    return sorted({0, 37, 257, tile + pack + 1} | {size for size in near if size >= 0})


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_sizes_and_alignments(ranks_of, algorithm, dtype, world_size):
    for numel in edge_sizes(dtype, world_size):
        parts = drawn(numel, dtype, world_size)
        for shifts in ALIGNMENTS:
            check(ranks_of(world_size), parts, "sum", algorithm, shifts)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ops(ranks_of, dtype, op):
    tile = 256 * (2 if dtype.itemsize == 1 else 4) * 16 // dtype.itemsize
    for world_size in (1, 2, 3, 5, 8):
        for numel in (257, tile + 3):
            parts = drawn(numel, dtype, world_size)
            for algorithm in NATIVE:
                check(ranks_of(world_size), parts, op, algorithm, ALIKE)
                check(ranks_of(world_size), parts, op, algorithm, APART)


@pytest.mark.parametrize("algorithm", ["naive", "sharded"])
def test_plain_torch_algorithms(ranks_of, algorithm):
    for dtype in DTYPES:
        check(ranks_of(3), drawn(257, dtype, 3), "sum", algorithm)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_positions(ranks_of, algorithm):
    """Integers that name position and rank: an element in the wrong place has the wrong sum."""
    for dtype in DTYPES:
        for world_size in (2, 5):
            parts = [positional(30_011, dtype, rank) for rank in range(world_size)]
            check(ranks_of(world_size), parts, "sum", algorithm, APART)


@pytest.mark.parametrize("world_size", [2, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_a_million_elements(ranks_of, algorithm, dtype, world_size):
    """The grid's loop and the ring's slots go round several times."""
    parts = inputs(2**20 + 3, dtype, world_size)
    check(ranks_of(world_size), parts, "mean", algorithm, ALIGNED)
    check(ranks_of(world_size), parts, "sum", algorithm, APART)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_more_tiles_than_blocks(ranks_of, algorithm):
    """More than 4096 tiles, and pieces by the dozen for every channel of the ring."""
    parts = [part.repeat(9) for part in inputs(2_000_003, torch.float32, 2)]
    check(ranks_of(2), parts, "sum", algorithm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_and_gpu_agree_in_rank_order(comm_of, ranks_of, device, dtype):
    """P4 between engines: infinities, subnormals, signed zeros and all; NaN is as good as NaN."""
    for world_size in (2, 3, 8):
        parts = drawn(20_011, dtype, world_size)
        for op in OPS:
            on_cpu = on("cpu", parts)
            comm_of(world_size).all_reduce(on_cpu, op, order="rank")
            for algorithm in ("fused", "direct"):
                on_gpu = on(device, parts)
                ranks_of(world_size).all_reduce(on_gpu, op, algorithm=algorithm, order="rank")
                got = [tensor.cpu() for tensor in on_gpu]
                assert_all_ranks(got, on_cpu[0], f"{algorithm} {op} {dtype} k={world_size}")


@pytest.mark.parametrize("algorithm", NATIVE)
def test_subnormals_survive(ranks_of, device, algorithm):
    for dtype in FLOATS:
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        tensors = [torch.full((67,), tiny, dtype=torch.float64).to(dtype).to(device)] * 3
        tensors = [tensor.clone() for tensor in tensors]
        ranks_of(3).all_reduce(tensors, algorithm=algorithm)
        wanted = torch.full((67,), 3 * tiny, dtype=torch.float64).to(dtype)
        assert_bits(tensors[2].cpu(), wanted, f"{algorithm} {dtype}")


@pytest.mark.parametrize("algorithm", NATIVE)
def test_same_bits_in_every_run(ranks_of, device, algorithm):
    parts = inputs(300_007, torch.float32, 5)
    first = None
    for _ in range(10):
        tensors = on(device, parts)
        ranks_of(5).all_reduce(tensors, algorithm=algorithm)
        first = tensors[0] if first is None else first
        assert all(same_bits(tensor, first) for tensor in tensors)


def test_many_ranks(make_ranks):
    """Past 96 ranks pointers move from the small table of a launch to the large one."""
    for world_size in (17, 33, 64, 100):
        parts = inputs(1031, torch.bfloat16, world_size)
        comm = make_ranks(world_size)
        check(comm, parts, "mean", "fused", APART)
        if world_size <= 33:
            check(comm, parts, "sum", "ring", APART)


@gpu_only
def test_more_ranks_than_a_launch_takes(make_ranks, device):
    with pytest.raises(pr.UnsupportedError, match=r"2861 ranks .*2860"):
        make_ranks(2861).all_reduce([torch.ones(1, device=device) for _ in range(2861)])
    tensors = [torch.ones(1, device=device) for _ in range(65)]
    with pytest.raises(pr.UnsupportedError, match="65 ranks"):
        make_ranks(65).all_reduce(tensors, algorithm="ring")


# -- layouts and lists -----------------------------------------------------------------------------


LAYOUTS = {
    "channels_last": lambda base: base.view(6, 5, 7, 4).permute(0, 3, 1, 2),
    "transposed": lambda base: base.view(28, 30).t(),
    "every other": lambda base: base[::2],
    "inner columns": lambda base: base.view(20, 42)[:, 5:30],
    "one column": lambda base: base.view(84, 10)[:, 3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_layouts(ranks_of, device, algorithm, layout):
    """Elements between those of a view stay what they are."""
    view_of = LAYOUTS[layout]
    for dtype in (torch.float32, torch.float16, torch.int64):
        parts = drawn(840, dtype, 3)
        bases = on(device, parts)
        ranks_of(3).all_reduce([view_of(base) for base in bases], algorithm=algorithm)
        is_dense = layout in ("channels_last", "transposed")
        flats = [part if is_dense else view_of(part).reshape(-1) for part in parts]
        wanted = expected(flats, "sum", algorithm)
        for base, part in zip(bases, parts, strict=True):
            after = part.clone()
            target = after if is_dense else view_of(after)
            target.copy_(wanted.view(target.shape))
            assert_bits(base.cpu(), after, f"{algorithm} {dtype} {layout}")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("algorithm", NATIVE)
def test_all_gradients_of_a_network_at_once(ranks_of, device, algorithm, world_size):
    for shapes in (LENET, resnet18_shapes()):
        small = [shape if math.prod(shape) < 300_000 else (999, 101) for shape in shapes]
        parts = lists_of(small, (torch.float32,), world_size)
        lists = [on(device, tensors) for tensors in parts]
        ranks_of(world_size).all_reduce_coalesced(lists, "mean", algorithm=algorithm)
        assert_lists(lists, parts, "mean", algorithm)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_lists_of_all_dtypes(ranks_of, device, algorithm, op):
    shapes = [(n,) for n in (0, 1, 5, 257, 4099, 33, 0, 1000, 7, 8193, 2)] * 3
    parts = lists_of(shapes, DTYPES, 3)
    lists = [on(device, tensors) for tensors in parts]
    ranks_of(3).all_reduce_coalesced(lists, op, algorithm=algorithm)
    assert_lists(lists, parts, op, algorithm)


@pytest.mark.parametrize(("num_tensors", "world_size"), [(24, 4), (25, 2), (1000, 4), (250, 16)])
def test_more_tensors_than_a_launch_takes(ranks_of, device, num_tensors, world_size):
    """Around the small table's 24 tensors, past the large one's 390, past its 2860 pointers."""
    shapes = [(1 + 7 * i % 90,) for i in range(num_tensors)]
    dtypes = (torch.float32, torch.float32, torch.bfloat16) if num_tensors > 500 else FLOATS[1:2]
    parts = lists_of(shapes, dtypes, world_size)
    lists = [on(device, tensors) for tensors in parts]
    ranks_of(world_size).all_reduce_coalesced(lists, algorithm="fused")
    assert_lists(lists, parts, "sum", "fused")


def test_lists_of_odd_views(ranks_of, device):
    """Misaligned, strided and dense tensors in one call; empty lists are fine."""
    parts = [drawn(840, torch.float32, 4)[rank] for rank in range(4)]
    bases = on(device, parts)
    lists = [[base[1:400], base[401:600:3], base[601:]] for base in bases]
    ranks_of(4).all_reduce_coalesced(lists)
    for where in (slice(1, 400), slice(401, 600, 3), slice(601, None)):
        wanted = reduced([part[where] for part in parts], "sum")
        assert_all_ranks([base[where].cpu() for base in bases], wanted, where)
    assert all(same_bits(b[:1].cpu(), p[:1]) for b, p in zip(bases, parts, strict=True))
    ranks_of(4).all_reduce_coalesced([[] for _ in range(4)])


# -- the other collectives -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_reduce_scatter(make_ranks, device, algorithm, dtype):
    for world_size in (1, 2, 5):
        comm = make_ranks(world_size, algorithm=algorithm)
        for numel in (0, 1, 7, 1027):
            parts = drawn(world_size * numel, dtype, world_size)
            ins, outs = on(device, parts), on(device, [part[:numel] for part in parts])
            comm.reduce_scatter(outs, ins, "mean")
            wanted = expected(parts, "mean", algorithm)
            for rank, out in enumerate(outs):
                context = f"{algorithm} {dtype} k={world_size} n={numel} rank {rank}"
                assert_bits(out.cpu(), wanted[rank * numel : (rank + 1) * numel], context)
                assert same_bits(ins[rank].cpu(), parts[rank]), f"{context}: input changed"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_all_gather(make_ranks, device, algorithm, dtype):
    for world_size in (1, 2, 5):
        comm = make_ranks(world_size, algorithm=algorithm)
        for numel in (0, 1, 7, 1027):
            parts = drawn(numel, dtype, world_size)
            ins = on(device, parts)
            outs = [torch.zeros(world_size * numel, dtype=dtype, device=device) for _ in parts]
            comm.all_gather(outs, ins)
            wanted = torch.cat(parts)
            assert all(same_bits(out.cpu(), wanted) for out in outs), (algorithm, dtype, numel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast(ranks_of, device, dtype):
    for world_size in (1, 2, 5):
        for root in range(world_size):
            for numel in (0, 1, 17, 9001):
                parts = drawn(numel, dtype, world_size)
                ranks = Ranks(parts, device, APART)
                ranks_of(world_size).broadcast(ranks.tensors, root)
                ranks.check(parts[root], f"{dtype} root {root}")


@pytest.mark.parametrize("algorithm", NATIVE)
def test_bind(ranks_of, device, algorithm):
    parts = drawn(5003, torch.float32, 4)
    tensors = on(device, parts)
    bound = ranks_of(4).bind(tensors, "mean", algorithm=algorithm)
    for _ in range(3):
        versions = [tensor._version for tensor in tensors]
        bound()
        assert all(t._version > v for t, v in zip(tensors, versions, strict=True))
        parts = [expected(parts, "mean", algorithm)] * 4
    assert_all_ranks([tensor.cpu() for tensor in tensors], parts[0], algorithm)


# -- the book's call, the grader, what ran ---------------------------------------------------------


def test_allreduce_is_the_books(device):
    for world_size in (1, 2, 5, 8):
        for numel in (0, 1, 1009):
            parts = inputs(numel, torch.float32, world_size)
            data = on(device, parts)
            same, pointers = list(data), [tensor.data_ptr() for tensor in data]
            assert pr.allreduce(data) is None
            assert all(a is b for a, b in zip(data, same, strict=True))
            assert [tensor.data_ptr() for tensor in data] == pointers
            assert_all_ranks([tensor.cpu() for tensor in data], reduced(parts, "sum"))


def test_the_grader_passes_it(device):
    report = pr.check_allreduce(pr.allreduce, devices=[device] * 8)
    assert report.passed, str(report)


def test_autograd_notices(ranks_of, device):
    tensors = [torch.ones(5, device=device) for _ in range(2)]
    before = [tensor._version for tensor in tensors]
    ranks_of(2).all_reduce(tensors)
    assert all(t._version > v for t, v in zip(tensors, before, strict=True))
    weight = torch.ones(5, device=device, requires_grad=True)
    loss = (weight * tensors[0]).sum()
    pr.allreduce(tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_plan_topology_and_stats(make_ranks, device):
    comm = make_ranks(4)
    assert comm.topology.is_one_memory
    assert comm.plan(2**20).algorithm == "fused"
    assert comm.is_capturable is (device != "cpu")
    tensors = [torch.ones(256, device=device) for _ in range(4)]
    for algorithm in (None, "fused", "ring", "naive"):
        comm.all_reduce(tensors, algorithm=algorithm)
    stats = comm.stats()
    assert {name: row["calls"] for name, row in stats.items()} == {
        "fused": 2,
        "ring": 1,
        "naive": 1,
    }
    assert stats["fused"]["bytes"] == 2 * 1024


# -- refusals --------------------------------------------------------------------------------------


@gpu_only
def test_tensors_on_the_wrong_device(ranks_of, comm_of, device):
    mixed = [torch.ones(3, device=device), torch.ones(3)]
    with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] is on cpu, expected cuda:0"):
        ranks_of(2).all_reduce(mixed)
    with pytest.raises(pr.ArgumentError, match=r"tensors\[0\] is on cuda:0, expected cpu"):
        comm_of(2).all_reduce(mixed)
    assert mixed[0].tolist() == mixed[1].tolist() == [1, 1, 1]


@gpu_only
def test_a_device_that_is_not_there():
    with pytest.raises(pr.ArgumentError, match=r"cuda:99.*not on this machine.*cuda:0"):
        pr.Communicator(["cuda:0", "cuda:99"])


def test_tensors_that_require_grad(ranks_of, device):
    tensors = [torch.ones(3, device=device, requires_grad=True) for _ in range(2)]
    with pytest.raises(pr.ArgumentError, match=r"tensors\[0\] requires grad"):
        ranks_of(2).all_reduce(tensors)
    with torch.no_grad():
        ranks_of(2).all_reduce(tensors)
    assert tensors[1].tolist() == [2, 2, 2]


def test_tensors_that_share_memory(ranks_of, device):
    base = torch.zeros(20, device=device)
    for tensors in ([base, base], [base[:11], base[9:]]):
        tensors = [tensor[:11] for tensor in tensors]
        with pytest.raises(pr.ArgumentError, match=r"tensors\[1\] shares memory with tensors\[0\]"):
            ranks_of(2).all_reduce(tensors)
    ranks_of(2).all_reduce([base[::2], base[1::2]])
    with pytest.raises(pr.ArgumentError, match="overlaps itself"):
        ranks_of(2).all_reduce([base[:1].expand(5), torch.ones(1, device=device).expand(5)])


def test_ranks_that_disagree(ranks_of, device):
    one = torch.ones(4, device=device)
    for other, what in [(one[:3], "shape"), (one.double(), "dtype"), (None, "NoneType")]:
        with pytest.raises(pr.ArgumentError, match=what):
            ranks_of(2).all_reduce([one, other.clone() if other is not None else other])
    assert one.tolist() == [1, 1, 1, 1]


def test_a_closed_communicator_refuses(make_ranks, device):
    comm = make_ranks(2)
    tensors = [torch.ones(3, device=device) for _ in range(2)]
    bound = comm.bind(tensors)
    comm.all_reduce(tensors, algorithm="ring")
    comm.close()
    comm.close()
    for call in (bound, lambda: comm.all_reduce(tensors), lambda: comm.broadcast(tensors)):
        with pytest.raises(pr.RingarError, match="closed"):
            call()
    assert tensors[0].tolist() == [2, 2, 2]


# -- streams ---------------------------------------------------------------------------------------


def a_stream(name):
    return torch.cuda.default_stream() if name == "default" else torch.cuda.Stream()


@gpu_only
@pytest.mark.parametrize("stream", ["default", "side"])
@pytest.mark.parametrize("algorithm", NATIVE)
@pytest.mark.parametrize("is_async", [False, True])
def test_producer_call_consumer(make_ranks, device, algorithm, stream, is_async):
    """The producer is late and the consumer early; only the stream's order makes it right."""
    comm = make_ranks(3)
    parts = drawn(30_011, torch.float32, 3)
    sources = on(device, parts)
    with torch.cuda.stream(a_stream(stream)) as _:
        tensors = [torch.zeros_like(source) for source in sources]
        results = [torch.zeros_like(source) for source in sources]
        comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)  # the first one allocates
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        for tensor, source in zip(tensors, sources, strict=True):
            tensor.copy_(source)
        work = comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)
        if is_async:
            assert not work.is_completed()
            assert work.wait() is True
        for tensor, result in zip(tensors, results, strict=True):
            result.copy_(tensor)
            tensor.fill_(-1)
        assert not torch.cuda.current_stream().query(), "the host has waited"
        torch.cuda.current_stream().synchronize()
    if is_async:
        assert work.is_completed()
        assert work.exception() is None
    wanted = expected(parts, "sum", algorithm)
    assert_all_ranks([result.cpu() for result in results], wanted, f"{algorithm} {stream}")


@gpu_only
def test_strided_tensors_in_the_background(make_ranks, device):
    """Their copies there and back are torch's; all have to be in order, too."""
    comm = make_ranks(2)
    parts = drawn(4000, torch.float32, 2)
    bases = [torch.zeros(4000, device=device) for _ in parts]
    sources = on(device, parts)
    torch.cuda._sleep(SLEEP_CYCLES)
    for base, source in zip(bases, sources, strict=True):
        base.copy_(source)
    comm.all_reduce([base[::2] for base in bases], async_op=True).wait()
    results = [base[::2].clone() for base in bases]
    wanted = reduced([part[::2] for part in parts], "sum")
    assert_all_ranks([result.cpu() for result in results], wanted)
    odd = [part[1::2] for part in parts]
    assert all(same_bits(b[1::2].cpu(), o) for b, o in zip(bases, odd, strict=True))


@gpu_only
def test_dropped_work_keeps_its_tensors(make_ranks, device):
    comm = make_ranks(2)
    numel = 2**20
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    tensors = [torch.ones(numel, device=device) for _ in range(2)]
    taken = {tensor.data_ptr() for tensor in tensors}
    watched = [weakref.ref(tensor) for tensor in tensors]
    comm.all_reduce(tensors, async_op=True)
    del tensors
    gc.collect()
    others = [torch.zeros(numel, device=device) for _ in range(4)]
    assert taken.isdisjoint(other.data_ptr() for other in others), "its memory was given away"
    torch.cuda.synchronize()
    assert all((other == 0).all() for other in others)
    comm.all_reduce(others[:2], async_op=True)
    gc.collect()
    assert all(reference() is None for reference in watched), "held after it was done"


@gpu_only
def test_work_completes_without_being_waited_for(make_ranks, device):
    comm = make_ranks(2)
    tensors = [torch.ones(1000, device=device) for _ in range(2)]
    work = comm.all_reduce(tensors, async_op=True)
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert work.wait() is True
    assert (tensors[1] == 2).all()


def run_threads(functions):
    """Run them all at once and raise the first error."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("is_shared", [False, True])
def test_threads(make_ranks, device, is_shared):
    """Four threads with a stream each; a communicator each, or one for all of them."""
    shared = make_ranks(3)

    def work(number):
        generator = pyrandom.Random(number)
        comm = shared if is_shared else make_ranks(3)
        stream = contextlib.nullcontext() if ON_CPU else torch.cuda.stream(torch.cuda.Stream())
        with stream:
            for _ in range(60):
                algorithm, dtype = generator.choice(NATIVE), generator.choice(DTYPES)
                check(comm, drawn(generator.randrange(9000), dtype, 3), "sum", algorithm, APART)

    run_threads([functools.partial(work, number) for number in range(4)])


@gpu_only
def test_rings_of_many_communicators_side_by_side(make_ranks, device):
    """On streams of their own, enqueued before any has run: none may wait for another for ever."""
    comms = [make_ranks(4, timeout=10.0) for _ in range(6)]
    parts = inputs(200_003, torch.float32, 4)
    streams = [torch.cuda.Stream() for _ in comms]
    tensors = [on(device, parts) for _ in comms]
    torch.cuda.synchronize()
    for _ in range(2):
        for comm, stream, mine in zip(comms, streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                comm.all_reduce(mine, "max", algorithm="ring")
    torch.cuda.synchronize()
    wanted = expected(parts, "max", "ring")
    for mine in tensors:
        assert_all_ranks([tensor.cpu() for tensor in mine], wanted)


# -- CUDA graphs -----------------------------------------------------------------------------------


def captured(function):
    """A graph of ``function``, after one call of it outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@gpu_only
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", NATIVE)
def test_graph(make_ranks, device, algorithm, dtype, is_async):
    """Ten replays with other inputs; calls outside the graph between them change nothing."""
    comm = make_ranks(4)
    tensors = [torch.zeros(20_011, dtype=dtype, device=device) for _ in range(4)]
    others = on(device, drawn(999, torch.int32, 4))

    def call():
        work = comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)
        if is_async:
            work.wait()

    graph = captured(call)
    for replay in range(10):
        parts = [part.roll(replay) for part in drawn(20_011, dtype, 4)]
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part)
        graph.replay()
        if replay % 3 == 0:
            comm.all_reduce(others, algorithm=algorithm, async_op=is_async)
        wanted = expected(parts, "sum", algorithm)
        assert_all_ranks([t.cpu() for t in tensors], wanted, f"{algorithm} replay {replay}")


@gpu_only
def test_graph_of_many_calls(make_ranks, device):
    """Lists, strided tensors and the other collectives, one after the other in one graph."""
    comm = make_ranks(2)
    shapes = [(3, 5), (1000,), (64, 3)]
    zeros = [[torch.zeros(shape, device=device) for shape in shapes] for _ in range(2)]
    bases = [torch.zeros(100, device=device) for _ in range(2)]
    gathered = [torch.zeros(200, device=device) for _ in range(2)]

    def calls():
        comm.all_reduce_coalesced(zeros, "mean")
        comm.all_reduce([base[::2] for base in bases])
        comm.broadcast([base[50:60] for base in bases], root=1)
        comm.all_gather(gathered, bases)

    graph = captured(calls)
    for replay in range(3):
        lists = lists_of(shapes, (torch.float32,), 2, seed=replay)
        parts = [part.roll(replay) for part in drawn(100, torch.float32, 2)]
        for mine, theirs in zip([*zeros, bases], [*lists, parts], strict=True):
            for target, source in zip(mine, theirs, strict=True):
                target.copy_(source)
        graph.replay()
        assert_lists(zeros, lists, "mean", "fused")
        wanted = [part.clone() for part in parts]
        for part in wanted:
            part[::2] = reduced([each[::2] for each in parts], "sum")
        wanted[0][50:60] = wanted[1][50:60]
        for target in gathered:
            assert_bits(target.cpu(), torch.cat(wanted), f"replay {replay}")


def small_network(device):
    torch.manual_seed(5)
    layers = torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    return torch.nn.Sequential(*layers).to(device)


def step_of(comm, replicas, batches, algorithm):
    """One step of gradient descent on all replicas, gradients averaged between them."""

    def step():
        for replica, (x, y) in zip(replicas, batches, strict=True):
            ((replica(x) - y) ** 2).mean().backward()
        grads = [[p.grad for p in replica.parameters()] for replica in replicas]
        comm.all_reduce_coalesced(grads, "mean", algorithm=algorithm)
        with torch.no_grad():
            for replica in replicas:
                for p in replica.parameters():
                    p.sub_(p.grad, alpha=0.05)
                    p.grad.zero_()

    return step


@gpu_only
@pytest.mark.parametrize("algorithm", NATIVE)
def test_graph_of_a_training_step(make_ranks, device, algorithm):
    comm = make_ranks(2)
    replicas = [small_network(device) for _ in range(2)]
    batches = [(torch.zeros(32, 16, device=device), torch.zeros(32, 4, device=device))] * 2
    batches = [tuple(tensor.clone() for tensor in batch) for batch in batches]
    graph = captured(step_of(comm, replicas, batches, algorithm))
    eager = copy.deepcopy(replicas)
    eager_step = step_of(comm, eager, batches, algorithm)
    for number in range(10):
        for rank, batch in enumerate(batches):
            generator = torch.Generator().manual_seed(10 * number + rank)
            for tensor in batch:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        graph.replay()
        eager_step()
    for ours, theirs in zip(replicas, eager, strict=True):
        for p, q, first in zip(
            ours.parameters(), theirs.parameters(), replicas[0].parameters(), strict=True
        ):
            torch.testing.assert_close(p, q)
            assert same_bits(p, first), "replicas differ"


def bucketed_step(replicas, batches, bucketer):
    """Forward, backward with gradients reduced in buckets while it runs, and descent."""

    def step():
        losses = []
        for replica, (x, y) in zip(replicas, batches, strict=True):
            replica.zero_grad()
            losses.append(((replica(x) - y) ** 2).sum())
        torch.autograd.backward(losses)
        bucketer.wait()
        with torch.no_grad():
            for replica in replicas:
                for p in replica.parameters():
                    p.sub_(p.grad, alpha=0.001)

    return step


@gpu_only
@pytest.mark.parametrize("overlap", [False, True])
def test_graph_of_a_step_with_buckets(make_ranks, device, overlap):
    """Three replays with other inputs have the bits of three eager steps, gradients included."""
    batches = [[torch.zeros(32, n, device=device) for n in (16, 4)] for _ in range(3)]
    ours = [small_network(device) for _ in batches]
    options = {"bucket_cap_mb": 3e-4, "first_bucket_mb": 1e-4, "overlap": overlap}  # three buckets
    with (
        pr.GradientBucketer(ours, comm=make_ranks(3), **options) as bucketer,
        contextlib.ExitStack() as stack,
    ):
        graph = captured(bucketed_step(ours, batches, bucketer))
        assert len(bucketer.buckets) > 1
        theirs = copy.deepcopy(ours)  # with the parameters that the warm-up has left
        other = stack.enter_context(pr.GradientBucketer(theirs, comm=make_ranks(3), **options))
        eager_step = bucketed_step(theirs, batches, other)
        for replay in range(3):
            for rank, batch in enumerate(batches):
                generator = torch.Generator().manual_seed(10 * replay + rank)
                for tensor in batch:
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
            graph.replay()
            eager_step()
            for mine, yours in zip(ours, theirs, strict=True):
                for p, q in zip(mine.parameters(), yours.parameters(), strict=True):
                    assert same_bits(p.grad, q.grad), f"gradients of replay {replay}"
                    assert same_bits(p, q), f"parameters after replay {replay}"


@gpu_only
def test_a_first_ring_inside_a_capture_is_refused(make_ranks, device):
    comm = make_ranks(2)
    tensors = [torch.ones(100, device=device) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with (  # noqa: PT012
        pytest.raises(pr.RingarError, match=r"all_reduce: the first call .*before the capture"),
        torch.cuda.graph(graph),
    ):
        tensors[0].add_(0)
        comm.all_reduce(tensors, algorithm="ring")
    comm.all_reduce(tensors, algorithm="ring")
    assert tensors[1].tolist() == [2] * 100


# -- a rank that does not come ---------------------------------------------------------------------


@gpu_only
@pytest.mark.parametrize("withheld", [0, 2])
def test_a_withheld_rank_is_a_timeout(make_ranks, device, withheld):
    comm = make_ranks(4, timeout=0.5, algorithm="ring")
    tensors = [torch.ones(10_000, device=device) for _ in range(4)]
    comm.all_reduce(tensors)
    torch.cuda.synchronize()
    comm._group.withhold_rank(withheld)
    started = time.monotonic()
    comm.all_reduce(tensors)  # it is found out later
    torch.cuda.synchronize()
    assert 0.4 < time.monotonic() - started < 3.0
    who = r"all_reduce: rank \d \(cuda:0\) waited 0.5 s for rank \d \(cuda:0\)"
    with pytest.raises(pr.CollectiveTimeout, match=who + r" to \w+ at step \d of 6"):
        comm.all_reduce(tensors)
    with pytest.raises(pr.CollectiveTimeout, match="failed before"):
        comm.all_reduce(tensors, algorithm="fused")
    comm.close()
    for algorithm in NATIVE:
        check(make_ranks(4), drawn(9001, torch.float32, 4), "sum", algorithm)


@gpu_only
def test_a_late_rank_in_the_background(make_ranks, device):
    comm = make_ranks(3, timeout=0.5, algorithm="ring")
    tensors = [torch.ones(100, device=device) for _ in range(3)]
    comm.all_reduce(tensors)
    comm._group.withhold_rank(1)
    work = comm.all_reduce(tensors, async_op=True)
    torch.cuda.synchronize()
    assert work.is_completed()
    assert isinstance(work.exception(), pr.CollectiveTimeout)
    with pytest.raises(pr.RingarError, match="at step"):
        work.wait()


@gpu_only
def test_nothing_is_left_behind(device):
    """P6: communicators give their device memory back."""

    def one():
        with pr.Communicator([device] * 4) as comm:
            tensors = [torch.ones(1000, device=device) for _ in range(4)]
            comm.all_reduce(tensors, algorithm="ring", async_op=True).wait()

    one()
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(20):
        one()
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert before - after < 16 * 2**20


# -- mixed memories --------------------------------------------------------------------------------


@pytest.fixture
def mixed(device):
    """One rank in the host's memory, two on the device."""
    with pr.Communicator(["cpu", device, device]) as comm:
        yield comm


def on_mixed(comm, parts):
    return [part.clone().to(where) for part, where in zip(parts, comm.devices, strict=True)]


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_memories(mixed, dtype):
    for numel in (0, 1, 1009, 30_000):
        for op in OPS:
            parts = drawn(numel, dtype, 3)
            tensors = on_mixed(mixed, parts)
            mixed.all_reduce(tensors, op)
            wanted = reduced(parts, op)
            assert_all_ranks([t.cpu() for t in tensors], wanted, f"{op} {dtype} {numel}")


@gpu_only
def test_mixed_memories_take_lists_and_all_collectives(mixed):
    parts = lists_of([(3, 5), (700,), (0,), (64, 3)], (torch.float32, torch.float16), 3)
    lists = [[t.to(where) for t in ts] for ts, where in zip(parts, mixed.devices, strict=True)]
    lists = [[t.clone() for t in tensors] for tensors in lists]
    mixed.all_reduce_coalesced(lists, "mean")
    assert_lists(lists, parts, "mean", "direct")
    flat = drawn(300, torch.float32, 3)
    outs = on_mixed(mixed, [part[:100] for part in flat])
    mixed.reduce_scatter(outs, on_mixed(mixed, flat))
    assert_bits(torch.cat([out.cpu() for out in outs]), reduced(flat, "sum"))
    whole = on_mixed(mixed, [torch.zeros(300)] * 3)
    mixed.all_gather(whole, on_mixed(mixed, [part[:100] for part in flat]))
    assert_all_ranks([t.cpu() for t in whole], torch.cat([part[:100] for part in flat]))
    tensors = on_mixed(mixed, flat)
    mixed.broadcast(tensors, root=1)
    assert_all_ranks([t.cpu() for t in tensors], flat[1])


@gpu_only
def test_mixed_memories_and_layouts_streams_and_threads(mixed):
    parts = drawn(2000, torch.float32, 3)
    bases = on_mixed(mixed, [torch.zeros(2000)] * 3)
    sources = on_mixed(mixed, parts)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        for base, source in zip(bases, sources, strict=True):
            base.copy_(source)
        work = mixed.all_reduce([base[::2] for base in bases], async_op=True)
        work.wait()
        got = [base[::2].cpu() for base in bases]
    assert_all_ranks(got, reduced([part[::2] for part in parts], "sum"))


@gpu_only
def test_what_mixed_memories_refuse(mixed):
    tensors = on_mixed(mixed, [torch.ones(4)] * 3)
    with pytest.raises(pr.ArgumentError, match="fused"):
        mixed.all_reduce(tensors, algorithm="fused")
    with pytest.raises(pr.UnsupportedError, match="host's memory"):
        mixed.all_reduce(tensors, algorithm="ring")
    assert not mixed.is_capturable
    mixed.all_reduce(tensors)
    assert tensors[0].tolist() == [3, 3, 3, 3]


# -- other libraries' arrays -----------------------------------------------------------------------


@gpu_only
def test_cupy_arrays(ranks_of):
    """Reduced where they lie."""
    cupy = pytest.importorskip("cupy")
    for name in ("float64", "float32", "float16", "int8", "uint8", "int32", "int64"):
        parts = drawn(1009, getattr(torch, name), 3)
        for algorithm in NATIVE:
            arrays = [cupy.asarray(part.numpy()) for part in parts]
            ranks_of(3).all_reduce(arrays, algorithm=algorithm)
            got = [torch.from_numpy(cupy.asnumpy(array)) for array in arrays]
            assert_all_ranks(got, expected(parts, "sum", algorithm), f"{algorithm} {name}")


@gpu_only
def test_cupy_arrays_beside_tensors_and_in_lists(ranks_of, device):
    cupy = pytest.importorskip("cupy")
    pair = [cupy.arange(6, dtype=cupy.float32), torch.ones(6, device=device)]
    ranks_of(2).all_reduce(pair)
    assert cupy.asnumpy(pair[0]).tolist() == pair[1].tolist() == [1, 2, 3, 4, 5, 6]
    lists = [[cupy.ones(3, dtype=cupy.int32), cupy.ones(2)] for _ in range(2)]
    ranks_of(2).all_reduce_coalesced(lists)
    assert [array.tolist() for array in lists[1]] == [[2, 2, 2], [2, 2]]
    data = [cupy.ones(3, dtype=cupy.float32) for _ in range(3)]
    pr.allreduce(data)
    assert data[2].tolist() == [3, 3, 3]


class Interface:
    """An array that knows nothing but the CUDA array interface."""

    def __init__(self, tensor):
        self._tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


@gpu_only
def test_the_cuda_array_interface(ranks_of, device):
    tensors = on(device, drawn(100, torch.float32, 2))
    wanted = reduced(drawn(100, torch.float32, 2), "sum")
    ranks_of(2).all_reduce([Interface(tensor) for tensor in tensors])
    assert_all_ranks([tensor.cpu() for tensor in tensors], wanted)


# -- endurance -------------------------------------------------------------------------------------


class Call:
    """One call with its own ranks, made first and judged later."""

    def __init__(self, generator, comm, device):
        self.algorithm = generator.choice(NATIVE)
        self.op = generator.choice(OPS)
        dtype = generator.choice(DTYPES)
        numel = int(2 ** generator.uniform(0, 13.5)) - 1
        self.parts = drawn(numel, dtype, comm.world_size)
        self.ranks = Ranks(self.parts, device, generator.choice(ALIGNMENTS))
        self.what = f"{self.algorithm} {self.op} {dtype} n={numel}"

    def judge(self, context):
        wanted = expected(self.parts, self.op, self.algorithm)
        self.ranks.check(wanted, f"{context}: {self.what}")


def test_ten_thousand_calls(make_ranks, device):
    """One communicator, no pause within a batch, every call checked."""
    generator = pyrandom.Random(3)
    comm = make_ranks(4)
    batch = 100
    for begin in range(0, 10_000, batch):
        calls = [Call(generator, comm, device) for _ in range(batch)]
        for call in calls:
            comm.all_reduce(call.ranks.tensors, call.op, algorithm=call.algorithm)
        for number, call in enumerate(calls, begin):
            call.judge(f"call {number}")


# -- several devices -------------------------------------------------------------------------------


PLACES = [(0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0)]


def gpus(places):
    return [f"cuda:{place}" for place in places]


@two_gpus
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "auto"])
def test_between_devices(algorithm, dtype, places):
    k = len(places)
    with pr.Communicator(gpus(places), algorithm=algorithm) as comm:
        for numel in (0, 1, 3, 257, 30_011):
            for op in OPS:
                parts = drawn(numel, dtype, k)
                tensors = on_mixed(comm, parts)
                comm.all_reduce(tensors, op)
                ran = comm.plan(numel * dtype.itemsize).algorithm
                context = f"{ran} {op} {dtype} {places} n={numel}"
                wanted = expected(parts, op, ran)
                assert_all_ranks([tensor.cpu() for tensor in tensors], wanted, context)


@two_gpus
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_lists_between_devices(algorithm):
    with pr.Communicator(gpus((0, 1, 1))) as comm:
        parts = lists_of([(1 + 7 * i % 90,) for i in range(500)], (torch.float32,), 3)
        lists = [on(str(where), ts) for ts, where in zip(parts, comm.devices, strict=True)]
        comm.all_reduce_coalesced(lists, algorithm=algorithm)
        assert_lists(lists, parts, "sum", algorithm)


@two_gpus
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_streams_of_several_devices(algorithm, is_async, current):
    """The default streams of all devices wait, whichever device is the current one."""
    parts = drawn(30_011, torch.float32, 2)
    with pr.Communicator(gpus((0, 1))) as comm, torch.cuda.device(current):
        tensors = on_mixed(comm, [torch.zeros_like(part) for part in parts])
        sources = on_mixed(comm, parts)
        comm.all_reduce(tensors, algorithm=algorithm)
        for late in (0, 1):
            for i in range(2):
                torch.cuda.synchronize(i)
            with torch.cuda.device(late):
                torch.cuda._sleep(SLEEP_CYCLES)
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source)
            work = comm.all_reduce(tensors, algorithm=algorithm, async_op=is_async)
            if is_async:
                work.wait()
            results = [tensor.clone() for tensor in tensors]
            wanted = expected(parts, "sum", algorithm)
            assert_all_ranks([result.cpu() for result in results], wanted, f"late: {late}")


@two_gpus
def test_mixed_memories_beside_a_device_that_is_not_current():
    parts = drawn(5003, torch.float32, 3)
    with pr.Communicator(["cpu", "cuda:1", "cuda:1"]) as comm, torch.cuda.device(0):
        tensors = on_mixed(comm, parts)
        comm.all_reduce(tensors)
        assert_all_ranks([tensor.cpu() for tensor in tensors], reduced(parts, "sum"))


@two_gpus
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_withheld_device_is_a_timeout(algorithm):
    with pr.Communicator(gpus((0, 1)), timeout=0.5) as comm:
        tensors = on_mixed(comm, [torch.ones(1000)] * 2)
        comm.all_reduce(tensors, algorithm=algorithm)
        comm._group.withhold_rank(1)
        comm.all_reduce(tensors, algorithm=algorithm)
        for i in range(2):
            torch.cuda.synchronize(i)
        with pytest.raises(pr.CollectiveTimeout, match=r"cuda:0.* waited 0.5 s for .*cuda:1"):
            comm.all_reduce(tensors, algorithm=algorithm)


@two_gpus
def test_peers_are_probed():
    with pr.Communicator(gpus((0, 1))) as comm:
        links = load.cuda_engine().peer_links([0, 1])
        assert [link[:2] for link in links] == [(0, 1), (1, 0)]
        assert all(can_access or not delivers for _, _, can_access, delivers in links)
        assert comm._group.has_peers() is all(delivers for *_, delivers in links)


EXPANDABLE = """
import torch, pyringar as pr
parts = [torch.arange(30_011.0) + rank for rank in range(2)]
with pr.Communicator(["cuda:0", "cuda:1"]) as comm:
    for algorithm in ("direct", "ring"):
        tensors = [part.to(f"cuda:{rank}") for rank, part in enumerate(parts)]
        comm.all_reduce(tensors, algorithm=algorithm)
        assert all(torch.equal(t.cpu(), parts[0] + parts[1]) for t in tensors), algorithm
print("right")
"""


@two_gpus
def test_expandable_segments():
    """Memory that no peer can see goes through buffers of our own."""
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE],
        env={**os.environ, **setting, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"
