"""Are ranks in processes told, in words, that their dtypes or reductions differ?

The calls of `ProcessCommunicator`, and those of the backend ``ringar`` above it, which hands the
engine other tensors for dtypes that the engine does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import K, RankPair

import pyringar as pr
from pyringar.distributed.collectives import Collectives
from pyringar.distributed.waits import Completer

Call = Callable[[Any, torch.Tensor, Any], Any]

# Each with a tensor of four elements and an op.
REDUCTIONS: dict[str, Call] = {
    "all_reduce": lambda comm, x, op: comm.all_reduce(x, op),
    "async": lambda comm, x, op: comm.all_reduce(x, op, async_op=True).wait(),
    "all_reduce_coalesced": lambda comm, x, op: comm.all_reduce_coalesced([x, x.clone()], op),
    "bind": lambda comm, x, op: comm.bind(x, op)(),
    "reduce_scatter": lambda comm, x, op: comm.reduce_scatter(x[:2], x.clone(), op),
}
COPIES: dict[str, Call] = {
    "broadcast": lambda comm, x, _: comm.broadcast(x),
    "all_gather": lambda comm, x, _: comm.all_gather(x, x[:2].clone()),
}
GROUP_REDUCTIONS: dict[str, Call] = {
    "all_reduce": lambda group, x, op: group.allreduce([x], op),
    "all_reduce_coalesced": lambda group, x, op: group.allreduce_coalesced([x, x.clone()], op),
    "reduce": lambda group, x, op: group.reduce([x], op),
    "reduce_scatter": lambda group, x, op: group.reduce_scatter_single(x[:2], x.clone(), op),
    "uneven reduce_scatter": lambda group, x, op: group.reduce_scatter(
        [x[: group._comm.rank + 1]], [[x[:1].clone(), x[:2].clone()]], op
    ),
}
GROUP_COPIES: dict[str, Call] = {
    "broadcast": lambda group, x, _: group.broadcast([x], 0),
    "all_gather": lambda group, x, _: group.all_gather_single(x, x[:2].clone()),
    "all_gather into a list": lambda group, x, _: group.allgather(
        [[x[:2], x[2:]]], [x[:2].clone()]
    ),
}

DTYPES = (("float16", "bfloat16"), ("int32", "float32"), ("int8", "uint8"))
OTHER_DTYPES = (
    ("int16", "int32"),
    ("uint16", "int16"),
    ("uint32", "int64"),
    ("uint64", "int64"),
    ("bool", "uint8"),
    ("complex64", "float32"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float32"),
    ("int16", "bfloat16"),
)
OPS = (("float32", "sum", "max"), ("float16", "sum", "mean"), ("int64", "min", "prod"))
OTHER_OPS = (
    ("int16", "sum", "max"),
    ("int16", "sum", "bor"),
    ("int32", "band", "bxor"),
    ("int32", "band", "sum"),
    ("bool", "sum", "max"),
    ("bool", "sum", "bor"),
    ("bool", "band", "min"),
    ("uint64", "sum", "prod"),
    ("float8_e5m2", "sum", "mean"),
)


class Group(Collectives):
    """The backend's calls over a communicator, without a torch process group."""

    def __init__(self, comm: pr.ProcessCommunicator) -> None:
        self._comm = comm
        self._completer = Completer("of a test")
        self._batch = None


def reduce_op(name: str) -> Any:
    return getattr(dist.ReduceOp, {"mean": "AVG", "prod": "PRODUCT"}.get(name, name.upper()))


def wait_for(work: Any) -> None:
    if work is not None:
        work.wait()


def errors_of(call: Call, dtypes: list[str], ops: list[str], *, is_group: bool) -> list[str]:
    with RankPair() as pair:

        def run(rank: int) -> str:
            tensor = torch.arange(4).to(getattr(torch, dtypes[rank]))
            before = tensor.clone()
            own = Group(pair.comms[rank]) if is_group else pair.comms[rank]
            op = reduce_op(ops[rank]) if is_group else ops[rank]
            with pytest.raises(pr.ArgumentError) as raised:
                wait_for(call(own, tensor, op))
            assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
            return str(raised.value)

        return pair.on_ranks(run)


ENTRIES = pytest.mark.parametrize("is_group", [False, True], ids=["communicator", "backend"])


def check_dtypes(dtypes: tuple[str, str], *, is_group: bool) -> None:
    calls = GROUP_REDUCTIONS | GROUP_COPIES if is_group else REDUCTIONS | COPIES
    for name, call in calls.items():
        for text in errors_of(call, list(dtypes), ["sum"] * K, is_group=is_group):
            assert all(f" {dtype} elements" in text for dtype in dtypes), (name, text)


def check_ops(dtype: str, ops: tuple[str, str], *, is_group: bool) -> None:
    for name, call in (GROUP_REDUCTIONS if is_group else REDUCTIONS).items():
        for text in errors_of(call, [dtype] * K, list(ops), is_group=is_group):
            assert all(f"({op})" in text for op in ops), (name, text)


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@ENTRIES
def test_dtypes_are_compared(dtypes, is_group):
    check_dtypes(dtypes, is_group=is_group)


@pytest.mark.parametrize("dtypes", OTHER_DTYPES, ids="-".join)
def test_dtypes_of_stand_ins_are_compared(dtypes):
    check_dtypes(dtypes, is_group=True)


@pytest.mark.parametrize(("dtype", "first", "second"), OPS)
@ENTRIES
def test_ops_are_compared(dtype, first, second, is_group):
    check_ops(dtype, (first, second), is_group=is_group)


@pytest.mark.parametrize(("dtype", "first", "second"), OTHER_OPS)
def test_ops_of_stand_ins_are_compared(dtype, first, second):
    check_ops(dtype, (first, second), is_group=True)
