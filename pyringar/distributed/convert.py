"""Tensors that the engine does not take as they are, as tensors that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyringar.errors import UnsupportedError

__all__ = ["NATIVE", "StandIn", "as_bytes", "for_copy", "for_reduction"]

NATIVE = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )
)

# Summed in the wider type and narrowed once: integers wrap as they would have.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_WIDER |= {
    getattr(torch, name): torch.float32
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
}
# On the bytes 0 and 1.
_BOOL_OPS = {"sum": "max", "prod": "min", "max": "max", "min": "min", "band": "min", "bor": "max"}
_COMPLEX_OPS = ("sum", "mean")
_UINT64_OPS = ("sum", "prod", "band", "bor", "bxor")  # the same bits as of int64


class StandIn(NamedTuple):
    """What the engine gets instead of a tensor."""

    tensor: Tensor
    op: str
    finish: Callable[[], object] | None  # copies the result back, if it is not there already


def for_reduction(tensor: Tensor, op: str) -> StandIn:
    """A tensor of one of :data:`NATIVE` that reduces to what ``tensor`` should.

    Args:
        tensor: On the CPU, strided.
        op: Of :data:`pyringar.call.OPS`, or ``"band"``, ``"bor"``, ``"bxor"``.

    Raises:
        UnsupportedError: There is none for this dtype and op.
    """
    tensor = tensor.detach()
    dtype = tensor.dtype
    if dtype in NATIVE:
        return StandIn(tensor, op, None)
    if dtype in _WIDER and not (dtype.is_floating_point and op[0] == "b"):
        wide = tensor.to(_WIDER[dtype])
        return StandIn(wide, op, lambda: tensor.copy_(wide))
    if dtype is torch.bool and op != "mean":
        return StandIn(tensor.view(torch.uint8), _BOOL_OPS.get(op, op), None)
    if dtype is torch.uint64 and op in _UINT64_OPS:
        return StandIn(tensor.view(torch.int64), op, None)
    if dtype.is_complex and op in _COMPLEX_OPS:
        return StandIn(torch.view_as_real(tensor), op, None)
    raise UnsupportedError(f"backend ringar cannot reduce {dtype} with {op}")


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, one more dimension; the first ones are as they were."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.unsqueeze(-1).view(torch.uint8)


def for_copy(tensor: Tensor, *, is_written: bool) -> tuple[Tensor, Callable[[], object] | None]:
    """A tensor of one of :data:`NATIVE` with the same bytes, and what copies them back."""
    tensor = tensor.detach()
    if tensor.dtype in NATIVE:
        return tensor, None
    whole = tensor.contiguous()
    if whole.data_ptr() == tensor.data_ptr() or not is_written:
        return as_bytes(whole), None
    return as_bytes(whole), lambda: tensor.copy_(whole)
