"""All-reduce as operators of torch's, which torch.compile and torch.export keep in their graphs.

``pyringar::all_reduce_`` writes its tensors, ``pyringar::all_reduce`` returns new ones. Lists of
ranks stand end to end, and a graph knows a communicator by its handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyringar.comm.arguments import op_name
from pyringar.comm.base import communicator_of
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["reduce"]

# num_lists: how many lists of one length `tensors` are; 0: it is what all_reduce takes.
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
    """Reduce tensors by an operator.

    Args:
        handle: The communicator's.
        tensors: What its ``all_reduce`` takes, or ``num_lists`` lists end to end.
        op: What its ``all_reduce`` takes.
        algorithm: The same.
        order: The same.
        num_lists: How many lists ``tensors`` are; 0: they are no lists.
        in_place: Write the results to ``tensors``; False: to new tensors.

    Returns:
        Where the results are.
    """
    given = list(tensors)
    if forward_ad._current_level >= 0 and any(map(_is_dual, given)):
        raise UnsupportedError("all_reduce: pyringar knows no derivatives in forward mode")
    arguments = num_lists, op_name(op), algorithm, order, handle
    if in_place:
        torch.ops.pyringar.all_reduce_(given, *arguments)
        return given
    results: list[Tensor] = torch.ops.pyringar.all_reduce(given, *arguments)
    return results


def _is_dual(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _run(
    tensors: list[Tensor],
    num_lists: int,
    op: str,
    algorithm: str | None,
    order: str | None,
    comm: str,
) -> None:
    found = communicator_of(comm)
    if num_lists == 0:
        found.all_reduce(tensors, op, algorithm=algorithm, order=order)
        return
    length = len(tensors) // num_lists
    lists = [tensors[rank * length : (rank + 1) * length] for rank in range(num_lists)]
    found.all_reduce_coalesced(lists, op, algorithm=algorithm, order=order)


# -- in place --------------------------------------------------------------------------------------

# Not a custom_op: written tensors that require grad would pass, and gradients would be wrong.
_library: Any = torch.library.Library("pyringar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"all_reduce_(Tensor(a!)[] tensors, {_ARGUMENTS}) -> ()", tags=torch.Tag.pt2_compliant_tag
)


def _write(tensors: list[Tensor], num_lists: int, *arguments: Any) -> None:
    """Refuse what `_run` would, already while a graph is made: there nothing requires grad."""
    for i, tensor in enumerate(tensors):
        if torch.is_grad_enabled() and tensor.requires_grad:
            length = len(tensors) // max(num_lists, 1)
            what = f"lists[{i // length}][{i % length}]" if num_lists else f"tensors[{i}]"
            raise ArgumentError(
                f"all_reduce: {what} requires grad, and autograd would not see this in-place "
                "change; take pyringar.ops.all_reduce, torch.no_grad(), or .detach()"
            )
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.pyringar.all_reduce_(tensors, num_lists, *arguments)
    for tensor in tensors:  # which autograd may have saved; the engine counts only where it runs
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


_library.impl("all_reduce_", _run, "CompositeExplicitAutograd")
_library.impl("all_reduce_", _write, "Autograd")
torch.library.register_fake("pyringar::all_reduce_", lambda *_: None, lib=_library)


# -- in new tensors --------------------------------------------------------------------------------


@torch.library.custom_op(
    "pyringar::all_reduce",
    mutates_args=(),
    schema=f"(Tensor[] tensors, {_ARGUMENTS}) -> Tensor[]",
)
def _reduced(tensors: list[Tensor], *arguments: Any) -> list[Tensor]:
    results = [tensor.detach().clone() for tensor in tensors]
    _run(results, *arguments)
    return results


@_reduced.register_fake
def _(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = inputs[1:]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Reduce the gradients of all results: every tensor of every rank is part of each."""
    op = ctx.arguments[1]
    if op not in _WITH_GRADIENT:
        raise UnsupportedError(
            f"op is {op!r}, through which pyringar knows no gradient; it does through "
            f"{' and '.join(map(repr, _WITH_GRADIENT))}"
        )
    return _reduced(grads, *ctx.arguments), *[None for _ in ctx.arguments]


_reduced.register_autograd(_backward, setup_context=_keep_arguments)

# Other ranks may wait for a call whose results this one does not use: no graph drops it.
for _operator in (torch.ops.pyringar.all_reduce, torch.ops.pyringar.all_reduce_):
    torch.fx.node.has_side_effect(_operator.default)
