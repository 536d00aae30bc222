"""Check lists of tensors and lay them out in flat memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import DTYPES
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["check_no_overlap", "check_tensor", "describe", "views_of"]


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return where each tensor begins in flat memory, end to end."""
    views, begin = [], 0
    for tensor in tensors:
        views.append(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
    return views


def describe(tensors: Sequence[Tensor]) -> str:
    """Return words that are equal for lists of equal shapes and dtypes, else different."""
    numel = sum(tensor.numel() for tensor in tensors)
    kinds = repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
    digest = hashlib.blake2b(kinds.encode(), digest_size=4).hexdigest()
    dtype = f" {tensors[0].dtype}" if tensors else ""
    return f"{numel}{dtype} elements in {len(tensors)} tensors (shapes {digest})"


def check_tensor(name: str, tensor: Any) -> None:
    """Refuse what cannot be reduced.

    Raises:
        ArgumentError: No tensor, not on the CPU, or expanded.
        UnsupportedError: Sparse, or of another dtype.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is {kind_of(tensor)}, expected a tensor")
    if tensor.device.type != "cpu":
        raise ArgumentError(f"{name} is on {tensor.device}, expected cpu, this rank's device")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} is {tensor.layout} {tensor.dtype}, expected strided and one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    check_no_overlap(name, tensor)


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Refuse a strided tensor whose elements share addresses: there is no place for a result.

    Raises:
        ArgumentError: It is expanded.
    """
    if tensor.is_contiguous():
        return
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(
            f"{name} of shape {tuple(tensor.shape)} overlaps itself (an expanded tensor?); "
            "expected every element at its own address"
        )
