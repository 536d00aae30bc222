"""Tensors in memory that other processes can map: reduced where they lie, without copies."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.engine import load
from pyringar.errors import ArgumentError

__all__ = ["check_one_size", "memory_of", "remove_region", "shared_empty"]

# By address, for as long as some tensor keeps it.
_memories: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def shared_empty(
    shape: int | Sequence[int] | torch.Size, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a CPU tensor that `ProcessCommunicator.register` can show to other processes.

    Args:
        shape: As for ``torch.empty``; one allocation for many parameters is a flat tensor and views
            of it.
        dtype: Any of torch's.

    Returns:
        A contiguous tensor. It holds zeros; its memory has no name, belongs to this process, and
        goes when the last tensor in it, here and in other processes, has gone.

    Raises:
        ArgumentError: A wrong shape, or one of 2^63 bytes or more.
        RingarError: The memory could not be allocated, for instance because the machine has less
            left; says how much was asked for.
        UnsupportedError: This is not Linux.
    """
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is {dtype!r}, expected a torch.dtype")
    sizes = (shape,) if isinstance(shape, int) else shape
    is_shape = isinstance(sizes, (list, tuple)) and not any(
        isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes
    )
    numel = math.prod(sizes) if is_shape else 0
    nbytes = max(1, numel * dtype.itemsize)
    if not is_shape or nbytes >= 2**63:
        raise ArgumentError(f"shape is {shape!r}, expected sizes, 0 or more, of less than 2^63 B")
    sizes = tuple(sizes)
    memory = load.engine().SharedMemory(nbytes, "a shared tensor")
    _memories[memory.address] = memory
    if numel == 0:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel).view(sizes)


def memory_of(tensor: Tensor) -> Any:
    """Return the shared memory in which a tensor's storage lies, or None."""
    return _memories.get(tensor.untyped_storage().data_ptr())


def check_one_size(nbytes: Sequence[int]) -> None:
    """Refuse to register tensors whose memory is not of one size on all ranks, or not shared."""
    for rank, mine in enumerate(nbytes):
        if mine == 0 or mine != nbytes[0]:
            raise ArgumentError(
                f"register: the tensor of rank {rank} lies in {mine} bytes of shared memory, that "
                f"of rank 0 in {nbytes[0]}; expected tensors of shared_empty() of one size on all "
                "ranks"
            )


def remove_region(group: weakref.ref[Any], region: int) -> None:
    """Unmap what other ranks' memory a group has mapped for a tensor, if there is the group."""
    alive = group()
    if alive is not None:
        alive.remove_region(region)
