"""The algorithms one can read: the book's allreduce done right, and parameters owned by ranks.

They are the baseline that benchmarks compare with, and the oracle that tests compare bits with.
Plain torch, any layout and any device; no engine, no threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# torch computes fewer elements than this in the calling thread. Its other threads keep the mode of
# the thread that started them.
_ALONE_ELEMS = 32_767

Pieces = Callable[[Tensor], tuple[Tensor, ...]]
"""Cuts a tensor into what one operation may take at a time: views, of a contiguous one."""


def _whole(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def _cut(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), _ALONE_ELEMS)


@contextmanager
def default_float_mode() -> Iterator[Pieces]:
    """Keep denormals in this thread, where ``torch.set_flush_denormal(True)`` was called before.

    Yield how to cut tensors: not at all, or, where the thread flushes denormals, into pieces that
    it computes alone. Cost else: a multiplication.
    """
    if sys.float_info.min / 2 > 0:
        yield _whole
        return
    torch.set_flush_denormal(False)
    try:
        yield _cut
    finally:
        torch.set_flush_denormal(True)


def naive_all_reduce(tensors: Sequence[Tensor], op: str = "sum", *, owner: int = 0) -> None:
    """Reduce one tensor per rank, in place: copy to one rank, add in rank order, copy back.

    The book's ``allreduce`` with its two mistakes mended: results are written into the caller's
    own tensors, and 16-bit floats are added in fp32 and rounded once.

    Args:
        tensors: One tensor per rank, equal shapes and dtypes.
        op: ``"sum"``, ``"mean"`` (integers: towards zero), ``"max"``, ``"min"`` or ``"prod"``.
        owner: The rank whose device does the work and through which everything passes.

    Cost: ``2 (k - 1)`` copies through one device; ``6 (k - 1) N`` bytes of memory traffic where
    all ranks share a memory (an addition reads two and writes one, a copy reads, allocates the
    line and writes), against ``2 k N`` for one fused pass.
    """
    world_size = len(tensors)
    if world_size == 1:
        return
    device = tensors[owner].device
    partial = wide(tensors[0].dtype)
    # Inference tensors can be written nowhere else.
    with torch.inference_mode(), default_float_mode() as pieces:
        total = tensors[0].to(device, partial).resolve_neg().contiguous()
        if total is tensors[0] and owner != 0:
            total = total.clone()
        for tensor in tensors[1:]:
            for into, term in zip(pieces(total), pieces(tensor.to(device)), strict=True):
                fold(into, term, op)
        if op == "mean":
            divide(total, world_size, pieces)
        result = total.to(tensors[0].dtype)  # once for all: how a NaN is rounded depends on strides
        for tensor in tensors:
            if tensor is not result:
                tensor.copy_(result)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sum: 16-bit floats are rounded once, at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def divide(total: Tensor, count: int, pieces: Pieces) -> None:
    """Make a contiguous sum the mean of ``count``, in place; that of integers towards zero."""
    for piece in pieces(total):
        if piece.is_floating_point():
            # By a tensor: a GPU multiplies by the reciprocal of a number, which rounds twice.
            piece.div_(piece.new_full((), count))
        else:  # as int64: count may not fit an int8
            piece.copy_(piece.long().div_(count, rounding_mode="trunc"))


def fold(total: Tensor, part: Tensor, op: str) -> None:
    """Fold ``part`` into ``total`` in place.

    A NaN wins; of zeros of both signs the later one.
    """
    if op in ("sum", "mean"):
        total.add_(part)
    elif op == "prod":
        total.mul_(part)
    else:
        part = part.to(total.dtype)
        keep = (total > part) if op == "max" else (total < part)
        if total.is_floating_point():
            keep |= total.isnan()
        torch.where(keep, total, part, out=total)


def shard_owners(nbytes: Sequence[int], world_size: int) -> list[int]:
    """Return the owner of each parameter: the largest first, each to the rank with least so far.

    ``nbytes`` are the sizes of the parameters. The busiest rank holds at least the largest
    parameter, which caps the gain over a single owner: ``sum(nbytes) / max(nbytes)``.
    """
    load = [0] * world_size
    owners = [0] * len(nbytes)
    for i in sorted(range(len(nbytes)), key=lambda i: (-nbytes[i], i)):
        owners[i] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[owners[i]] += nbytes[i]
    return owners


def sharded_all_reduce(lists: Sequence[Sequence[Tensor]], op: str = "sum") -> None:
    """Reduce many parameters, in place, each at the rank that owns it (the book's exercise).

    ``lists[rank][i]`` is parameter ``i`` of a rank. Cost: as the naive one, but the traffic through
    the busiest rank falls from all parameters to its own; see `shard_owners` for the cap.
    """
    owners = shard_owners([t.numel() * t.element_size() for t in lists[0]], len(lists))
    for i, owner in enumerate(owners):
        naive_all_reduce([tensors[i] for tensors in lists], op, owner=owner)
