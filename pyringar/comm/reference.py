"""The algorithms ``naive`` and ``sharded`` in plain torch, without engine and threads.

They are the baseline of benchmarks and the reference of tests. Any strides and any device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Most elements of an operation that torch runs only in the calling thread. Other torch threads keep
# the denormal mode of the thread that started them.
_ALONE_ELEMS = 32_767

Pieces = Callable[[Tensor], tuple[Tensor, ...]]
"""Splits a contiguous tensor into views, each for one torch operation."""


def _whole(tensor: Tensor) -> tuple[Tensor, ...]:
    return (tensor,)


def _cut(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), _ALONE_ELEMS)


@contextmanager
def default_float_mode() -> Iterator[Pieces]:
    """Turn off ``torch.set_flush_denormal`` in this thread for the block.

    Yields the function that splits tensors: into pieces that this thread computes alone if it
    flushed denormals, else into one piece.
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

    Unlike the ``allreduce`` of "Dive into Deep Learning" it writes into the caller's tensors, and
    adds 16-bit floats in fp32 and rounds once.

    Args:
        tensors: One tensor per rank, equal shapes and dtypes.
        op: ``"sum"``, ``"mean"`` (integers: towards zero), ``"max"``, ``"min"`` or ``"prod"``.
        owner: The rank whose device adds all tensors.

    Cost: ``2 (k - 1)`` copies through one device. In one memory ``6 (k - 1) N`` bytes of traffic,
    against ``2 k N`` for a fused pass: an addition reads two lines and writes one; a copy reads a
    line, loads the destination line and writes it.
    """
    world_size = len(tensors)
    if world_size == 1:
        return
    device = tensors[owner].device
    partial = wide(tensors[0].dtype)
    # Inference tensors can be written only in inference mode.
    with torch.inference_mode(), default_float_mode() as pieces:
        total = tensors[0].to(device, partial).resolve_neg().contiguous()
        if total is tensors[0] and owner != 0:
            total = total.clone()
        for tensor in tensors[1:]:
            for into, term in zip(pieces(total), pieces(tensor.to(device)), strict=True):
                fold(into, term, op)
        if op == "mean":
            divide(total, world_size, pieces)
        result = total.to(tensors[0].dtype)  # round once for all: bits of a NaN depend on strides
        for tensor in tensors:
            if tensor is not result:
                tensor.copy_(result)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the partial sums: float32 for 16-bit floats."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def divide(total: Tensor, count: int, pieces: Pieces) -> None:
    """Divide a contiguous sum by ``count`` in place; integers round towards zero."""
    for piece in pieces(total):
        if piece.is_floating_point():
            # Divide by a tensor: for a number, a GPU multiplies by the reciprocal and rounds twice.
            piece.div_(piece.new_full((), count))
        else:  # in int64: count may not fit an int8
            piece.copy_(piece.long().div_(count, rounding_mode="trunc"))


def fold(total: Tensor, part: Tensor, op: str) -> None:
    """Reduce ``part`` into ``total`` in place.

    max and min return NaN if any value is NaN. Of 0 and -0 they return the later zero.
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
    """Assign each parameter to a rank: largest first, to the rank with the fewest bytes.

    ``nbytes``: sizes of the parameters. Some rank owns the largest parameter, so the gain over a
    single owner is at most ``sum(nbytes) / max(nbytes)``.
    """
    load = [0] * world_size
    owners = [0] * len(nbytes)
    for i in sorted(range(len(nbytes)), key=lambda i: (-nbytes[i], i)):
        owners[i] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[owners[i]] += nbytes[i]
    return owners


def sharded_all_reduce(lists: Sequence[Sequence[Tensor]], op: str = "sum") -> None:
    """Reduce many parameters in place, each on the device of its owner (see `shard_owners`).

    ``lists[rank][i]`` is parameter ``i`` of a rank. Cost: the traffic of `naive_all_reduce`, but
    spread over the owners.
    """
    owners = shard_owners([t.numel() * t.element_size() for t in lists[0]], len(lists))
    for i, owner in enumerate(owners):
        naive_all_reduce([tensors[i] for tensors in lists], op, owner=owner)
