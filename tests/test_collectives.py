"""Do reduce_scatter, all_gather, broadcast and coalesced calls give what they must?"""

from __future__ import annotations

import pytest
import torch
from oracle import NATIVE, assert_bits, bits, expected, random, same_bits


def randoms(numel: int, dtype: torch.dtype, world_size: int) -> list[torch.Tensor]:
    return [random(numel, dtype, rank) for rank in range(world_size)]


@pytest.mark.parametrize("algorithm", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_scatter_and_gather(make_comm, algorithm, dtype, k):
    comm = make_comm(k, algorithm=algorithm)
    for n in (0, 1, 17, 4099, 70_001):
        inputs = randoms(k * n, dtype, k)
        kept = [t.clone() for t in inputs]
        outputs = [torch.full((n,), 99, dtype=dtype) for _ in range(k)]
        comm.reduce_scatter(outputs, inputs)
        # The ring adds up part r in the order in which all_reduce adds chunk r.
        assert_bits(torch.cat(outputs), expected(kept, "sum", algorithm))
        assert all(map(same_bits, inputs, kept))
        gathered = [torch.full((k * n,), 99, dtype=dtype) for _ in range(k)]
        comm.all_gather(gathered, outputs)
        assert all(same_bits(tensor, torch.cat(outputs)) for tensor in gathered)


def test_scatter_and_gather_take_any_layout(comm_of):
    inputs = [torch.arange(24.0).reshape(4, 6).t() + r for r in range(2)]  # (6, 4), permuted
    outputs = [torch.zeros(24)[::2].reshape(3, 4) for _ in range(2)]
    comm_of(2).reduce_scatter(outputs, inputs, "mean")
    flat = ((inputs[0].contiguous() + inputs[1].contiguous()) / 2).view(-1)
    assert torch.equal(outputs[0].reshape(-1), flat[:12])
    assert torch.equal(outputs[1].reshape(-1), flat[12:])


@pytest.mark.parametrize("root", [0, 1, 3])
def test_broadcast_copies_bits(comm_of, root):
    for numel in (0, 1, 1000, 200_003):
        tensors = randoms(numel, torch.float32, 4)
        if numel:
            tensors[root][0] = float("nan")
        want = bits(tensors[root]).clone()
        versions = [t._version for t in tensors]
        comm_of(4).broadcast(tensors, root)
        assert all(torch.equal(bits(t), want) for t in tensors)
        for rank, tensor in enumerate(tensors):
            assert (tensor._version > versions[rank]) == (rank != root)


@pytest.mark.parametrize("algorithm", [*NATIVE, "sharded", "naive"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_coalesced_equals_one_by_one(make_comm, algorithm, op):
    shapes = [(20, 1, 3, 3), (20,), (), (0,), (800, 128), (1,), (70_001,)]
    f32, u8 = torch.float32, torch.uint8
    dtypes = [f32, torch.float64, torch.float16, f32, torch.bfloat16, torch.int64, u8]
    together = [
        [
            random(torch.Size(shape).numel(), dtype, rank).reshape(shape)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        for rank in range(3)
    ]
    alone = [[tensor.clone() for tensor in tensors] for tensors in together]
    comm = make_comm(3, algorithm=algorithm)
    comm.all_reduce_coalesced(together, op)
    for i in range(len(shapes)):
        comm.all_reduce([tensors[i] for tensors in alone], op)
        assert all(same_bits(together[rank][i], alone[rank][i]) for rank in range(3)), i
    comm.all_reduce_coalesced([[], [], []])
