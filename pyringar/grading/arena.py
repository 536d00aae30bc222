"""Lay the tensors of a call into one block of memory, shared between grader and solution or not.

The function gets tensors in memory of its own process: what its children write is not seen there,
as it would not be outside of the grader. Before and after a call they are copied from and to memory
that both processes share, to the same places.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from pyringar.grading.cases import ONE_TENSOR, Case, layouts_of

__all__ = ["Arena"]

_ALIGNMENT = 64  # bytes, as torch aligns
# Two million floats of two ranks three times (the call, the list, the tensors), and some more.
_BYTES = 96 << 20
_BYTES_PER_RANK = 1 << 20  # 65,537 floats three times, and some more


class Arena:
    """A block of memory; untouched pages cost nothing.

    Args:
        num_ranks: How many ranks most properties have.
        is_shared: With processes that fork from this one.
    """

    def __init__(self, num_ranks: int, *, is_shared: bool) -> None:
        num_bytes = _BYTES + num_ranks * _BYTES_PER_RANK
        flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE)
        self._memory = mmap.mmap(-1, num_bytes, flags)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor that lies ``offset`` bytes behind the start.

        Raises:
            ValueError: It does not lie inside.
        """
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)
        return flat.view(tuple(shape))

    @staticmethod
    def places(case: Case, turn: int) -> list[int]:
        """Return where the memory of every rank begins; the end of all stands behind them.

        Args:
            case: What is called.
            turn: Every other turn has the ranks in descending order: who adds in the order of
                addresses, or remembers them, does not get the same ones.
        """
        ranks = range(case.k) if turn % 2 else reversed(range(case.k))
        layouts = layouts_of(case)
        starts, at = [0] * case.k, 0
        for rank in [0] if case.layout == ONE_TENSOR else ranks:
            starts[rank] = at
            at = after(at, layouts[rank].base_shape(case.shape), case.dtype)
        return [*starts, at]


def after(offset: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return where the next tensor may begin, a gap behind this one."""
    end = offset + math.prod(shape) * dtype.itemsize
    return (end // _ALIGNMENT + 2) * _ALIGNMENT
