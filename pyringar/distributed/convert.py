"""Stand-ins for tensors whose dtype or layout the engine does not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyringar.comm.arguments import DTYPES, REDUCE_OPS
from pyringar.comm.plain_group import check_no_overlap
from pyringar.errors import UnsupportedError

Copy = tuple[Tensor, Tensor]  # destination, source

NATIVE = frozenset(DTYPES)

SUM = dist.ReduceOp.SUM
# Reductions that the engine lacks: ranks gather the tensors and reduce them locally.
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
_OP_NAMES = [(getattr(dist.ReduceOp, theirs), ours) for theirs, ours in REDUCE_OPS.items()]
_OP_NAMES += [(getattr(dist.ReduceOp, name.upper()), name) for name in BITWISE]

# Dtype to the wider dtype of its sums, which are narrowed once. Integers wrap to the same bits.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_WIDER |= dict.fromkeys(_FLOAT8, torch.float32)
# Op on bool tensors to the op on their bytes, which are 0 or 1.
_BOOL_OPS = {"sum": "max", "prod": "min", "max": "max", "min": "min", "band": "min", "bor": "max"}
_COMPLEX_OPS = ("sum", "mean")
_UINT64_OPS = ("sum", "prod", "band", "bor", "bxor")  # ops that give the same bits as on int64


def reduction_name(reduce_op: Any, operation: str) -> str:
    for theirs, ours in _OP_NAMES:
        if reduce_op == theirs:
            return ours
    raise UnsupportedError(
        f"{operation}: backend ringar does not know {getattr(reduce_op, 'op', reduce_op)}"
    )


class Described(NamedTuple):
    """Description of a call, which ranks compare: operation, number of elements, dtype."""

    call: str
    numel: int
    dtype: str

    @classmethod
    def of(cls, call: str, tensor: Tensor) -> Described:
        return cls(call, tensor.numel(), str(tensor.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.call} of {self.numel} {self.dtype} elements"


class StandIn(NamedTuple):
    """A tensor and op that the engine takes in place of another tensor and op.

    ``after`` is the copy (original, stand-in) after the call; before the call the caller copies the
    other way. None: both tensors share memory.
    """

    tensor: Tensor
    op: str
    after: Copy | None = None


def has_plain_memory(tensor: Tensor) -> bool:
    """Return False for a lazily negated or conjugated view, whose memory holds other values."""
    return not (tensor.is_neg() or tensor.is_conj())


def count_changes(tensors: Sequence[Tensor]) -> None:
    """Increase version counters now, so that autograd dates the write to the start of the call."""
    torch.autograd.graph.increment_version(tensors)


def copy_all(copies: Sequence[Copy]) -> None:
    """Copy without changing version counters; destinations may be inference tensors."""
    for target, source in copies:
        # Convert first: a converting copy_() loses the sign of negated targets, and changes NaNs.
        if not (target.is_contiguous() and has_plain_memory(target)):
            source = source.to(target.dtype)
        target.data.copy_(source)


def for_reduction(tensor: Tensor, op: str) -> StandIn:
    """Return a stand-in with a dtype in `NATIVE` for a tensor to reduce.

    ArgumentError for an expanded tensor; UnsupportedError for an impossible dtype and op.
    """
    check_no_overlap("tensor", tensor)
    tensor = tensor.detach()
    dtype = tensor.dtype
    is_possible = not (dtype.is_floating_point and op in BITWISE)
    if dtype in NATIVE and is_possible:
        return StandIn(tensor, op)
    if dtype in _WIDER and is_possible:
        wide = torch.empty_like(tensor, dtype=_WIDER[dtype])
        return StandIn(wide, op, (tensor, wide))
    if dtype is torch.bool and op != "mean":
        return StandIn(tensor.view(torch.uint8), _BOOL_OPS.get(op, op))
    if dtype is torch.uint64 and op in _UINT64_OPS:
        return StandIn(tensor.view(torch.int64), op)
    if dtype.is_complex and op in _COMPLEX_OPS:
        if has_plain_memory(tensor):
            return StandIn(torch.view_as_real(tensor), op)
        whole = tensor.new_empty(tensor.shape)
        return StandIn(torch.view_as_real(whole), op, (tensor, whole))
    raise UnsupportedError(f"backend ringar cannot reduce {dtype} with {op}")


def as_bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.unsqueeze(-1).view(torch.uint8)


def for_copy(tensor: Tensor, *, apart: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return a stand-in with a dtype in `NATIVE` for a tensor to send or receive.

    The second result backs the stand-in: copy ``tensor`` into it before a send, or out of it after
    a receive. None if the stand-in and ``tensor`` share memory, which ``apart`` prevents.
    """
    data, whole = tensor.detach(), None
    is_native = tensor.dtype in NATIVE
    if apart or not (is_native or (data.is_contiguous() and has_plain_memory(data))):
        data = whole = tensor.new_empty(tensor.shape)
    return (data if is_native else as_bytes(data)), whole
