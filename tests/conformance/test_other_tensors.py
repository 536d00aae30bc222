"""Dtypes and tensors that torch.distributed supports and the engine does not."""

import functools
import itertools
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from promises import promise
from running import outcome_of
from torch import Tensor
from transports import REDUCE_OPS

import pyringar as pr

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.bool, torch.int16, torch.complex64, torch.complex128, *FLOAT8)
NATIVE = (torch.float32, torch.int32)  # for torch calls that no communicator method has
BITS = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
N = 24


def values(dtype: torch.dtype, rank: int, numel: int = N) -> Tensor:
    if dtype.is_complex:
        flat = oracle.random(2 * numel, dtype.to_real(), rank, specials=False)
        return torch.view_as_complex(flat.view(-1, 2))
    whole = oracle.positional(numel, torch.int32, rank)
    if dtype is torch.bool:
        return (whole + rank) % 3 == 0  # + rank: otherwise all ranks have equal values
    return (whole / 8).to(dtype) if dtype in FLOAT8 else whole.to(dtype)


def wanted(parts: list[Tensor], op: str) -> Tensor:
    dtype = parts[0].dtype
    if dtype is torch.bool:
        found = torch.stack(parts)
        return found.all(0) if op in ("min", "prod") else found.any(0)
    if dtype.is_complex:
        flat = [torch.view_as_real(part).reshape(-1) for part in parts]
        return torch.view_as_complex(oracle.reduced(flat, op).view(-1, 2))
    wide = torch.float32 if dtype.is_floating_point else torch.int32
    return oracle.reduced([part.to(wide) for part in parts], op).to(dtype)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype is torch.bool:
        return ("sum", "max", "min", "prod")
    return ("sum", "mean") if dtype.is_complex else oracle.OPS


def assert_equal(actual: Tensor, expected: Tensor, context: object) -> None:
    actual = actual.contiguous()
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    elif actual.dtype in (torch.bool, *FLOAT8):
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    oracle.assert_bits(actual, expected, context)


def finish(call: Any, how: str, *arguments: Any) -> None:
    work = call(*arguments, async_op=how != "sync")
    if how == "future":
        work.get_future().wait()
    elif how == "async":
        work.wait()


def spread(tensor: Tensor) -> Tensor:
    return torch.stack([tensor] * 2, 1)[:, 0]


def reduce_dtype(state, dtype: torch.dtype) -> None:
    rank, k = state.rank, state.world_size
    parts = [values(dtype, r) for r in range(k)]
    ways = itertools.cycle(("sync", "async", "future"))
    own = slice(N // k * rank, N // k * (rank + 1))
    for op in ops_of(dtype):
        how, total, of_torch = next(ways), wanted(parts, op), REDUCE_OPS[op]
        for place in (Tensor.clone, spread):
            mine, part = place(parts[rank]), place(parts[rank][own])
            finish(dist.all_reduce, how, mine, of_torch)
            finish(dist.reduce_scatter_tensor, how, part, place(parts[rank]), of_torch)
            assert_equal(mine, total, (dtype, op, how, place))
            assert_equal(part, total[own], (dtype, op, how, place, "reduce_scatter"))
        finish(dist.reduce, how, root := parts[rank].clone(), k - 1, of_torch)
        assert_equal(root, total if rank == k - 1 else parts[rank], (dtype, op, how, "reduce"))
        rows = [parts[rank][: r + 1] for r in range(k)]
        dist.reduce_scatter(part := rows[rank].clone(), rows, of_torch)
        assert_equal(part, wanted([p[: rank + 1] for p in parts], op), (dtype, op, "uneven"))
    uneven = [part[: 2 * r + 1] for r, part in enumerate(parts)]
    for how in ("sync", "async", "future"):
        for place in (Tensor.clone, spread):
            mine, into = place(parts[rank]), place(torch.cat([parts[rank]] * k))
            finish(dist.broadcast, how, mine, k - 1)
            assert_equal(mine, parts[k - 1], (dtype, how, place, "broadcast"))
            finish(dist.all_gather_into_tensor, how, into, place(parts[rank]))
            assert_equal(into, torch.cat(parts), (dtype, how, place, "all_gather"))
        into = torch.cat([parts[rank]] * k)
        finish(dist.all_gather_into_tensor, how, into, into[N * rank : N * rank + N])
        assert_equal(into, torch.cat(parts), (dtype, how, "all_gather in place"))
        outs = [torch.empty_like(part) for part in uneven]
        finish(dist.all_gather, how, outs, spread(uneven[rank]))
        assert_equal(torch.cat(outs), torch.cat(uneven), (dtype, how, "uneven"))
    if dtype in (torch.bool, torch.int16, torch.int32):
        for (op, fold), place in itertools.product(BITS.items(), (Tensor.clone, spread)):
            dist.all_reduce(mine := place(parts[rank]), op)
            assert torch.equal(mine, functools.reduce(fold, parts)), (dtype, op)


@promise("dtypes-other")
@pytest.mark.parametrize("dtype", [*DTYPES, *NATIVE], ids=str)
def test_dtypes_without_kernel_are_reduced(transport, dtype):
    for k in {1, 2, 4} & {*transport.world_sizes}:
        transport.on_ranks(k, reduce_dtype, dtype=dtype)


def reduce_grad_and_sparse(state) -> None:
    rank, k = state.rank, state.world_size
    mine = (torch.arange(5.0) + rank).requires_grad_()
    for how in ("sync", "async", "future"):
        total = sum(torch.arange(5.0) + r for r in range(k))
        with torch.no_grad():
            mine.copy_(torch.arange(5.0) + rank)
        finish(dist.all_reduce, how, mine)
        assert torch.equal(mine.detach(), total)
    dist.all_gather([torch.empty(0) for _ in range(k)], torch.empty(0))
    scalars = [torch.empty(()) for _ in range(k)]
    dist.all_gather(scalars, torch.tensor(float(rank)))
    assert [scalar.item() for scalar in scalars] == list(range(k))
    sparse = torch.sparse_coo_tensor([[rank]], [1.0 + rank], (k,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0 + r for r in range(k)]


@promise("requires-grad", "sparse")
def test_leaf_and_sparse_tensors_are_reduced(transport):
    for k in {1, 3} & {*transport.world_sizes}:
        transport.on_ranks(k, reduce_grad_and_sparse)


# Shapes of ranks 0 and 1; elements correspond by index.
SHAPES = (((), (1,)), ((4,), (2, 2)), ((2, 6), (6, 2)), ((3, 1, 2), (1, 6)))


def reduce_shapes(state) -> None:
    for shapes, dtype in itertools.product(SHAPES, (torch.float32, torch.int16)):
        shape = shapes[state.rank]
        numel = torch.Size(shape).numel()
        parts = [oracle.positional(numel, dtype, r) for r in range(2)]
        for call, wanted in (
            (dist.all_reduce, parts[0] + parts[1]),
            (lambda x: dist.all_reduce_coalesced([x]), parts[0] + parts[1]),
            (lambda x: dist.broadcast(x, 1), parts[1]),
        ):
            mine = parts[state.rank].clone().view(shape)
            call(mine)
            assert mine.shape == torch.Size(shape)
            assert torch.equal(mine.reshape(-1), wanted), (shapes, dtype)


@promise("layouts-differ", only=("launch", "backend"))
def test_shapes_may_differ_between_ranks(transport):
    transport.on_ranks(2, reduce_shapes)


# Each row: a call, the dtype of rank 0, the dtype of rank 1. DIFFERENT_OPS: a dtype, two ops.
DIFFERENT_DTYPES = (
    ("reduce", "int16", "int32"),
    ("reduce_scatter", "uint16", "int16"),
    ("broadcast", "uint32", "int64"),
    ("all_gather", "uint64", "int64"),
    ("all_reduce", "bool", "uint8"),
    ("reduce", "complex64", "float32"),
    ("reduce_scatter", "float8_e4m3fn", "float8_e5m2"),
    ("all_gather", "int16", "bfloat16"),
)
DIFFERENT_OPS = (
    ("all_reduce", "int16", "sum", "max"),
    ("reduce", "int16", "sum", "bor"),
    ("reduce_scatter", "int32", "band", "bxor"),
    ("all_reduce", "bool", "sum", "max"),
    ("reduce", "bool", "band", "min"),
    ("reduce_scatter", "uint64", "sum", "prod"),
    ("all_reduce", "float8_e5m2", "sum", "avg"),
)
OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "max", "min", "avg")}
OPS |= {"prod": dist.ReduceOp.PRODUCT}
OPS |= {name: getattr(dist.ReduceOp, name.upper()) for name in ("bor", "band", "bxor")}
CALLS = {
    "all_reduce": lambda x, op: dist.all_reduce(x, op),
    "reduce": lambda x, op: dist.reduce(x, 0, op),
    "reduce_scatter": lambda x, op: dist.reduce_scatter_tensor(x[:2].clone(), x, op),
    "broadcast": lambda x, _: dist.broadcast(x, 0),
    "all_gather": lambda x, _: dist.all_gather_into_tensor(x, x[:2].clone()),
}


def differ(state, call: str, dtypes: tuple[str, str], ops: tuple[str, str]) -> tuple[str, str]:
    tensor = torch.arange(4).to(getattr(torch, dtypes[state.rank]))
    before = tensor.clone()
    told = outcome_of(lambda: CALLS[call](tensor, OPS[ops[state.rank]]))
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)), "it was written"
    return told.error, told.text


def check_differ(transport: Any, call: str, dtypes: Any, ops: Any, words: Any) -> None:
    for error, text in transport.on_new_ranks(2, differ, call=call, dtypes=dtypes, ops=ops):
        assert error == "ArgumentError", text
        assert all(word in text for word in words), text


@promise("mismatch", only=("launch", "backend"))
@pytest.mark.parametrize(("call", "first", "second"), DIFFERENT_DTYPES)
def test_different_dtypes_between_ranks_raise(transport, call, first, second):
    check_differ(transport, call, (first, second), ("sum", "sum"), (first, second))


@promise("mismatch", only=("launch", "backend"))
@pytest.mark.parametrize(("call", "dtype", "first", "second"), DIFFERENT_OPS)
def test_different_ops_between_ranks_raise(transport, call, dtype, first, second):
    words = first, second.replace("avg", "mean")
    check_differ(transport, call, (dtype, dtype), (first, second), words)


def refuse_ops(state) -> None:
    for dtype, op in (
        (torch.complex64, dist.ReduceOp.MAX),
        (torch.float8_e5m2, dist.ReduceOp.BOR),
        (torch.float32, dist.ReduceOp.BAND),
        (torch.bool, dist.ReduceOp.AVG),
    ):
        with pytest.raises(pr.UnsupportedError, match=f"cannot reduce {dtype} with"):
            dist.reduce(torch.ones(3).to(dtype), 0, op)
    dist.barrier()


@promise("dtypes-other")
def test_unsupported_reductions_raise(transport):
    transport.on_ranks(2, refuse_ops)


def refuse_overlaps(state) -> None:
    k = state.world_size
    for wrong in (torch.ones(1, 3).expand(2, 3), torch.ones(6).as_strided((2, 3), (1, 1))):
        for call in (
            lambda wrong=wrong: dist.reduce(wrong, 0),
            lambda wrong=wrong: dist.all_gather_into_tensor(wrong, torch.ones(6 // k)),
            lambda wrong=wrong: dist.reduce_scatter_tensor(wrong, torch.ones(6 * k)),
        ):
            with pytest.raises(pr.ArgumentError, match="overlaps itself"):
                call()
    dist.barrier()


@promise("reduce", "all_gather", "reduce_scatter", only=("launch", "backend"))
def test_overlapping_outputs_raise(transport):
    transport.on_ranks(2, refuse_overlaps)
