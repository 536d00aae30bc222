"""Copy and reduce the tensors of all ranks, which lie in one memory, for collectives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.arguments import OPS
from pyringar.distributed.convert import for_reduction
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["all_reduce", "check_alike", "check_reducible", "clones", "copy", "parts", "reduced"]

_BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def check_reducible(tensors: Sequence[Tensor], op: str) -> None:
    """Refuse a dtype that cannot be reduced with ``op``.

    Raises:
        UnsupportedError: Names both.
    """
    for tensor in tensors:
        dtype, is_strided = tensor.dtype, tensor.layout is torch.strided
        if not is_strided and op != "sum":
            raise UnsupportedError(f"op is {op!r}, expected 'sum' for a tensor of {tensor.layout}")
        if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
            raise UnsupportedError(f"op is {op!r}, expected a dtype of integers, not {dtype}")
        if is_strided:
            for_reduction(torch.empty(0, dtype=dtype), op)


def check_alike(target: Tensor, source: Tensor) -> None:
    """Refuse tensors of other numbers of elements, or dtypes."""
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise ArgumentError(
            f"a tensor of {source.numel()} elements of {source.dtype} is for one of "
            f"{target.numel()} of {target.dtype}; expected the same"
        )


def copy(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of as many elements, which correspond by index."""
    check_alike(target, source)
    if target.data_ptr() != source.data_ptr() or target.device != source.device:
        target.copy_(source if source.shape == target.shape else source.reshape(target.shape))


def clones(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return copies of lists of tensors, one copy of a tensor that stands in several."""
    distinct = {id(tensor): tensor for row in rows for tensor in row}
    copies = {key: tensor.clone() for key, tensor in distinct.items()}
    return [[copies[id(tensor)] for tensor in row] for row in rows]


def parts(tensor: Tensor, number: int) -> Sequence[Tensor]:
    """Return so many equal parts of a contiguous tensor, flat."""
    return torch.split(tensor.view(-1), [tensor.numel() // number] * number)


def all_reduce(engine: Any, tensors: Sequence[Tensor], op: str) -> None:
    """Reduce one tensor per rank into all of them: in rank order, rounded once.

    Args:
        engine: Returns the communicator for ranks on these devices.
        tensors: As many elements of one dtype on each rank, in any layout without overlap.
        op: Of the engine, or ``"band"``, ``"bor"``, ``"bxor"``.
    """
    if tensors[0].layout is not torch.strided:
        total = reduce(torch.add, tensors)
        for tensor in tensors:
            tensor.copy_(total)
        return
    stand_ins = [for_reduction(tensor, op) for tensor in tensors]
    for stand_in in stand_ins:
        if stand_in.after is not None:
            into, out = stand_in.after
            out.copy_(into)
    wide = [stand_in.tensor for stand_in in stand_ins]
    first = wide[0]
    if stand_ins[0].op not in OPS:
        total = reduce(_BITWISE[op], [t.reshape(first.shape) for t in wide])
        for tensor in wide:
            copy(tensor, total)
    else:
        alike = [t if t.shape == first.shape else t.reshape(first.shape) for t in wide]
        engine(alike).all_reduce(alike, stand_ins[0].op)
        for tensor, result in zip(wide, alike, strict=True):
            copy(tensor, result)
    for stand_in in stand_ins:
        if stand_in.after is not None:
            stand_in.after[0].copy_(stand_in.after[1])


def reduced(engine: Any, tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return the reduction of one tensor per rank, which stay as they are."""
    copies = [tensor.clone() for tensor in tensors]
    all_reduce(engine, copies, op)
    return copies[0]
