"""All-reduce as torch operators, which torch.compile and torch.export keep in their graphs.

``pyringar::all_reduce_`` works in place, ``pyringar::all_reduce`` returns new tensors. Lists of
several ranks are concatenated. The argument ``comm`` is the handle of a communicator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.autograd import forward_ad

from pyringar.choices import kind_of
from pyringar.comm.arguments import SHARED_MEMORY_HINT, op_name
from pyringar.comm.handles import communicator_of
from pyringar.errors import ArgumentError, UnsupportedError

# num_lists: the number of lists of equal length in `tensors`; 0: one tensor per rank.
_ARGUMENTS = "int num_lists, str op, str? algorithm, str? order, str comm"
_WITH_GRADIENT = ("sum", "mean")


def reduce(
    handle: str,
    tensors: Sequence[Tensor],
    op: Any,
    algorithm: str | None,
    order: str | None,
    *,
    num_lists: int = 0,
    in_place: bool = True,
) -> list[Tensor]:
    """Reduce by a torch operator; return the tensors that hold the results.

    ``tensors``: one tensor per rank, or ``num_lists`` lists, concatenated.
    """
    given = list(tensors)
    for i, tensor in enumerate(given):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"all_reduce: tensors[{i}] is {kind_of(tensor)}, expected a tensor: graphs "
                "hold nothing else"
            )
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for tensor in given
    ):
        raise UnsupportedError("all_reduce: pyringar knows no derivatives in forward mode")
    arguments = num_lists, op_name(op), algorithm, order, handle
    if in_place:
        torch.ops.pyringar.all_reduce_(given, *arguments)
        return given
    results: list[Tensor] = torch.ops.pyringar.all_reduce(given, *arguments)
    return results


@torch.library.custom_op(
    "pyringar::all_reduce", mutates_args=(), schema=f"(Tensor[] tensors, {_ARGUMENTS}) -> Tensor[]"
)
def _reduced(
    tensors: list[Tensor],
    num_lists: int,
    op: str,
    algorithm: str | None,
    order: str | None,
    comm: str,
) -> list[Tensor]:
    found = communicator_of(comm)
    results = [tensor.detach().clone() for tensor in tensors]
    call = found.all_reduce_coalesced if num_lists > 0 else found.all_reduce
    call(_in_lists(results, num_lists), op, algorithm=algorithm, order=order)
    return results


def _in_lists(tensors: list[Tensor], num_lists: int) -> list[Any]:
    if num_lists == 0:
        return tensors
    length = len(tensors) // num_lists
    return [tensors[rank * length : (rank + 1) * length] for rank in range(num_lists)]


@_reduced.register_fake
def _(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    _keep_order_in_inductor()
    return [torch.empty_like(tensor) for tensor in tensors]


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = inputs[1:]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Reduce the gradients of all ranks' results, since each depends on every input."""
    op = ctx.arguments[1]
    if op not in _WITH_GRADIENT:
        raise UnsupportedError(
            f"all_reduce: op is {op!r}, through which pyringar knows no gradient; it does through "
            f"{' and '.join(map(repr, _WITH_GRADIENT))}"
        )
    return _reduced(grads, *ctx.arguments), *[None for _ in ctx.arguments]


_reduced.register_autograd(_backward, setup_context=_keep_arguments)

# Ranks match calls by their order: a graph may not reorder calls, or drop a call whose results this
# rank does not use.
torch.library._register_effectful_op("pyringar::all_reduce", EffectType.ORDERED)


@functools.cache
def _lower_in_order(inductor: Any) -> None:
    """Replace inductor's lowering of the ordered operator, which does not keep the order.

    That lowering names buffers in torch 2.11 and 2.14, but the scheduler looks for operations.
    """
    operator = torch.ops.pyringar.all_reduce.default

    def lower(*arguments: Any) -> Any:
        created = inductor.ir.EffectfulKernel.create(operator, *arguments)
        return [inductor.TensorBox.create(result) for result in created]

    inductor.register_lowering(operator, type_promotion_kind=None)(lower)


def _keep_order_in_inductor() -> None:
    # Not imported here: if inductor compiles this graph, it is already in sys.modules.
    inductor = sys.modules.get("torch._inductor.lowering")
    if inductor is not None:
        _lower_in_order(inductor)


# The in-place operator calls all_reduce: graphs order only operators that write no argument.
_library: Any = torch.library.Library("pyringar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"all_reduce_(Tensor(a!)[] tensors, {_ARGUMENTS}) -> ()", tags=torch.Tag.pt2_compliant_tag
)


def _write(tensors: list[Tensor], num_lists: int, *arguments: Any) -> None:
    """Reduce by `all_reduce` and copy back. Check gradients and shared memory while tracing."""
    operation = "all_reduce_coalesced" if num_lists else "all_reduce"

    def name(i: int) -> str:
        length = len(tensors) // max(num_lists, 1)
        return f"lists[{i // length}][{i % length}]" if num_lists else f"tensors[{i}]"

    for i, tensor in enumerate(tensors):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ArgumentError(
                f"{operation}: {name(i)} requires grad, and autograd would not see this in-place "
                f"change; take pyringar.ops.{operation}, torch.no_grad(), or .detach()"
            )
        for j in range(i):
            if _has_same_start(tensor, tensors[j]):
                raise ArgumentError(
                    f"{operation}: {name(i)} shares memory with {name(j)}; {SHARED_MEMORY_HINT}"
                )
    results = torch.ops.pyringar.all_reduce(tensors, num_lists, *arguments)
    for tensor, result in zip(tensors, results, strict=True):
        tensor.copy_(result)


def _has_same_start(one: Tensor, other: Tensor) -> bool:
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    return bool(one.numel() > 0 and one.storage_offset() == other.storage_offset())


_library.impl("all_reduce_", _write, "CompositeImplicitAutograd")
torch.fx.node.has_side_effect(torch.ops.pyringar.all_reduce_.default)
