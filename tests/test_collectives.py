"""Do all collectives but all_reduce, and coalesced calls, give what they must?"""

from __future__ import annotations

import pytest
import torch
from oracle import (
    DTYPES,
    NATIVE,
    OPS,
    assert_bits,
    bits,
    expected,
    random,
    same_bits,
)

import pyringar as pr
from pyringar.choices import ORDERS

SHAPES = [(20, 1, 3, 3), (20,), (), (0,), (800, 128), (1,), (70_001,)]
MIXED = [torch.float32, torch.float64, torch.float16, torch.float32, torch.bfloat16]
MIXED += [torch.int64, torch.uint8]


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


def mixed_lists(world_size: int, seed: int = 0) -> list[list[torch.Tensor]]:
    """``lists[rank][i]`` of all shapes and dtypes."""
    return [
        [
            random(torch.Size(shape).numel(), dtype, seed + rank).reshape(shape)
            for shape, dtype in zip(SHAPES, MIXED, strict=True)
        ]
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("algorithm", ["fused", "direct", "auto"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_reduce_has_all_reduce_bits(make_comm, algorithm, order, k):
    comm = make_comm(k, algorithm=algorithm)
    ops = OPS[:2] if order == "exact" else OPS
    for number, n in enumerate((0, 1, 17, 4099) if order == "exact" else (0, 1, 17, 4099, 70_001)):
        dtype, op = DTYPES[(number + k) % len(DTYPES)], ops[(number * k) % len(ops)]
        inputs, root = randoms(n, dtype, k), (number + 1) % k
        wanted = expected(inputs, op, algorithm, order)
        everywhere = [t.clone() for t in inputs]
        comm.all_reduce(everywhere, op, order=order)
        kept = [t.clone() for t in inputs]
        versions = [t._version for t in inputs]
        output = torch.full((n,), 99, dtype=dtype)
        assert comm.reduce(output, inputs, op, root=root, order=order) is None
        context = f"{dtype} {op} root {root} of {k}, {n} elements"
        assert_bits(output, wanted, context)
        assert same_bits(output, everywhere[root]), context
        assert all(map(same_bits, inputs, kept)), context
        assert [t._version for t in inputs] == versions
        assert output._version == 1
        comm.reduce(inputs[root], inputs, op, root=root, order=order)
        kept[root] = everywhere[root]
        assert all(map(same_bits, inputs, kept)), f"in place, {context}"
        assert [t._version > v for t, v in zip(inputs, versions, strict=True)] == [
            rank == root for rank in range(k)
        ]


def test_reduce_in_place_of_view(comm_of):
    """The root's input under another name, as ``detach()`` gives it, is reduced in place."""
    inputs = [torch.full((5,), 2.0**rank, requires_grad=True) for rank in range(3)]
    comm_of(3).reduce(inputs[1].detach(), inputs, root=1)
    assert [t.tolist() for t in inputs] == [[1] * 5, [7] * 5, [4] * 5]


@pytest.mark.parametrize("algorithm", ["fused", "direct"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("root", [0, 2])
def test_reduce_coalesced_equals_one_by_one(make_comm, algorithm, is_async, root):
    comm = make_comm(3, algorithm=algorithm)
    lists = mixed_lists(3)
    kept = [[t.clone() for t in tensors] for tensors in lists]
    outputs = [torch.empty_like(t) for t in lists[0]]
    outputs[3:5] = lists[root][3:5]  # in place
    work = comm.reduce_coalesced(outputs, lists, "mean", root=root, async_op=is_async)
    if is_async:
        assert repr(work).startswith(f"Work(reduce_coalesced, mean, {algorithm}, ")
        work.wait()
    assert comm.stats()[algorithm]["calls"] == 1
    for i, output in enumerate(outputs):
        alone = torch.empty_like(output)
        comm.reduce(alone, [tensors[i] for tensors in kept], "mean", root=root)
        assert_bits(output.view(-1), alone.view(-1), f"tensor {i}")
    for rank, tensors in enumerate(lists):
        for i, tensor in enumerate(tensors):
            if (rank, i) not in {(root, 3), (root, 4)}:
                assert same_bits(tensor, kept[rank][i]), f"input {i} of rank {rank}"
    comm.reduce_coalesced([], [[], [], []])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("root", [0, 1, 3])
def test_broadcast_coalesced_copies_bits(make_comm, is_async, root):
    comm = make_comm(4)
    lists = mixed_lists(4)
    wanted = [t.clone() for t in lists[root]]
    versions = [[t._version for t in tensors] for tensors in lists]
    work = comm.broadcast_coalesced(lists, root, async_op=is_async)
    if is_async:
        work.wait()
    assert comm.stats()["fused"]["calls"] == 1
    for rank, tensors in enumerate(lists):
        assert all(map(same_bits, tensors, wanted)), f"rank {rank}"
        written = [t._version > v for t, v in zip(tensors, versions[rank], strict=True)]
        assert written == [rank != root] * len(SHAPES)
    comm.broadcast_coalesced([[], [], [], []])


def test_rooted_calls_after_timeout():
    """A late rank ends a direct reduction with an error that names both ranks."""
    with pr.Communicator(["cpu"] * 2, algorithm="direct", timeout=0.2) as comm:
        comm._group.delay_rank(1, 1.0)
        tensors = randoms(8, torch.float32, 2)
        with pytest.raises(pr.CollectiveTimeout, match=r"reduce: .*rank 0 waited .* for rank 1"):
            comm.reduce(torch.empty(8), tensors)
        for call in (
            lambda: comm.reduce_coalesced([torch.empty(8)], [[t] for t in tensors]),
            lambda: comm.broadcast_coalesced([[t] for t in tensors]),
        ):
            with pytest.raises(pr.CollectiveTimeout, match="failed before"):
                call()


@pytest.mark.parametrize("algorithm", [*NATIVE, "sharded", "naive"])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_coalesced_equals_one_by_one(make_comm, algorithm, op):
    together = mixed_lists(3)
    alone = [[tensor.clone() for tensor in tensors] for tensors in together]
    comm = make_comm(3, algorithm=algorithm)
    comm.all_reduce_coalesced(together, op)
    for i in range(len(SHAPES)):
        comm.all_reduce([tensors[i] for tensors in alone], op)
        assert all(same_bits(together[rank][i], alone[rank][i]) for rank in range(3)), i
    comm.all_reduce_coalesced([[], [], []])
