"""Check lists of tensors and lay them out in flat memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import DTYPES
from pyringar.comm.reference import wide
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["check_no_overlap", "check_tensor", "describe", "own_bytes", "pack", "views_of"]


def views_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return where each tensor begins in flat memory, end to end."""
    views, begin = [], 0
    for tensor in tensors:
        views.append(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
    return views


def pack(
    tensors: Sequence[Tensor],
) -> list[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]:
    """Copy tensors end to end into flat memory, one for each dtype; 16-bit floats as float32.

    Args:
        tensors: What is copied, all on one device.

    Returns:
        Of each dtype the flat memory, where each tensor lies in it, and these tensors.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(wide(tensor.dtype), []).append(tensor)
    packed: list[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]] = []
    for dtype, mine in by_dtype.items():
        numel = sum(tensor.numel() for tensor in mine)
        flat = torch.empty(numel, dtype=dtype, device=mine[0].device)
        views = views_of(flat, mine)
        for view, tensor in zip(views, mine, strict=True):
            view.copy_(tensor)
        packed.append((flat, views, mine))
    return packed


def own_bytes(tensor: Tensor, *, filled: bool) -> Tensor:
    """Return flat memory beside a tensor's, as many bytes; torch does not count that it is written.

    Args:
        filled: With what the tensor holds.
    """
    data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if filled:
        data.copy_(tensor.data)
    return data.view(-1).view(torch.uint8)


def describe(tensors: Sequence[Tensor], *, with_shapes: bool = True) -> str:
    """Return words that are equal for lists of equal sizes, or shapes, and dtypes, else different.

    Args:
        tensors: The list.
        with_shapes: Whether other shapes of equal size are different.
    """
    numel = sum(tensor.numel() for tensor in tensors)
    kinds = repr([(tuple(t.shape) if with_shapes else t.numel(), t.dtype) for t in tensors])
    digest = hashlib.blake2b(kinds.encode(), digest_size=4).hexdigest()
    dtype = f" {tensors[0].dtype}" if tensors else ""
    shapes = "shapes" if with_shapes else "sizes"
    return f"{numel}{dtype} elements in {len(tensors)} tensors ({shapes} {digest})"


def check_tensor(name: str, tensor: Any, device: torch.device, *, is_written: bool = True) -> None:
    """Refuse what cannot be reduced, or, if it is not written, moved.

    Raises:
        ArgumentError: No tensor, not on ``device``, expanded, or autograd would miss the change.
        UnsupportedError: Sparse, or of another dtype.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is {kind_of(tensor)}, expected a tensor")
    if tensor.device != device:
        raise ArgumentError(f"{name} is on {tensor.device}, expected {device}, this rank's device")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} is {tensor.layout} {tensor.dtype}, expected strided and one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    if not is_written:
        return
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ArgumentError(
            f"{name} requires grad, and autograd would not see this in-place change; call it under "
            "torch.no_grad(), or pass .detach()"
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
