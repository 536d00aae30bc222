"""reduce_scatter, all_gather, broadcast and coalesced calls, against what they must give."""

from __future__ import annotations

import pytest
import torch

import pyringar as pr

ALGORITHMS = ("fused", "direct", "ring")
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)


def random(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(-128, 128, (numel,), generator=generator).to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if parts[0].dtype == torch.bfloat16 else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_scatter_and_gather(algorithm, dtype, k):
    with pr.Communicator(["cpu"] * k, algorithm=algorithm) as comm:
        for n in (0, 1, 17, 4099, 70_001):
            inputs = [random(k * n, dtype, r) for r in range(k)]
            kept = [t.clone() for t in inputs]
            outputs = [torch.full((n,), 99, dtype=dtype) for _ in range(k)]
            comm.reduce_scatter(outputs, inputs)
            for rank in range(k):
                order = range(k) if algorithm != "ring" else [(rank + 1 + i) % k for i in range(k)]
                want = summed([inputs[r][rank * n : (rank + 1) * n] for r in order])
                assert torch.equal(outputs[rank], want), (n, rank)
                assert torch.equal(inputs[rank], kept[rank])
            gathered = [torch.full((k * n,), 99, dtype=dtype) for _ in range(k)]
            comm.all_gather(gathered, outputs)
            for rank in range(k):
                assert torch.equal(gathered[rank], torch.cat(outputs)), (n, rank)


def test_scatter_and_gather_take_any_layout():
    with pr.Communicator(["cpu"] * 2) as comm:
        inputs = [torch.arange(24.0).reshape(4, 6).t() + r for r in range(2)]  # (6, 4), permuted
        outputs = [torch.zeros(24)[::2].reshape(3, 4) for _ in range(2)]
        comm.reduce_scatter(outputs, inputs, "mean")
        flat = ((inputs[0].contiguous() + inputs[1].contiguous()) / 2).view(-1)
        assert torch.equal(outputs[0].reshape(-1), flat[:12])
        assert torch.equal(outputs[1].reshape(-1), flat[12:])


@pytest.mark.parametrize("root", [0, 1, 3])
def test_broadcast_copies_bits(root):
    with pr.Communicator(["cpu"] * 4) as comm:
        for numel in (0, 1, 1000, 200_003):
            tensors = [random(numel, torch.float32, r) for r in range(4)]
            if numel:
                tensors[root][0] = float("nan")
            want = tensors[root].clone().view(torch.int32)
            versions = [t._version for t in tensors]
            comm.broadcast(tensors, root)
            assert all(torch.equal(t.view(torch.int32), want) for t in tensors)
            for rank, tensor in enumerate(tensors):
                assert (tensor._version > versions[rank]) == (rank != root)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "sharded", "naive"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_coalesced_equals_one_by_one(algorithm, op):
    shapes = [(20, 1, 3, 3), (20,), (), (0,), (800, 128), (1,), (70_001,)]
    f32, u8 = torch.float32, torch.uint8
    dtypes = [f32, torch.float64, torch.float16, f32, torch.bfloat16, torch.int64, u8]

    def one(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        return random(torch.Size(shape).numel(), dtype, rank).reshape(shape)

    def lists():
        return [[one(s, d, r) for s, d in zip(shapes, dtypes, strict=True)] for r in range(3)]

    with pr.Communicator(["cpu"] * 3, algorithm=algorithm) as comm:
        together, alone = lists(), lists()
        comm.all_reduce_coalesced(together, op)
        for i in range(len(shapes)):
            comm.all_reduce([tensors[i] for tensors in alone], op)
            for rank in range(3):
                assert torch.equal(together[rank][i], alone[rank][i]), (i, rank)
        comm.all_reduce_coalesced([[], [], []])
