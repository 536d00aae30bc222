"""Memory shared between the grader and a solution, and where a call's tensors lie in it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from pyringar.grading.cases import Case, layouts_of

_ALIGNMENT = 64  # bytes, as torch aligns
# Two million floats of two ranks three times (the call, the list, the tensors), and some more.
_BYTES = 96 << 20
_BYTES_PER_RANK = 1 << 20  # 65,537 floats three times, and some more


class Arena:
    """A block of memory, shared with processes that fork from this one.

    Untouched pages cost nothing. Most properties have ``num_ranks`` ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._memory = mmap.mmap(-1, _BYTES + num_ranks * _BYTES_PER_RANK)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor at an offset in bytes; ValueError if it does not fit."""
        numel = math.prod(shape)
        if numel == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset)
        return flat.view(tuple(shape))

    @staticmethod
    def places(case: Case, turn: int) -> list[int]:
        """Return where the memory of every rank begins, and after the last one where all end.

        Every other turn has the ranks in descending order: a function that adds in the order of
        addresses, or remembers addresses, does not meet the same ones.
        """
        ranks = range(case.k) if turn % 2 else reversed(range(case.k))
        layouts = layouts_of(case)
        starts, at = [0] * case.k, 0
        for rank in ranks:
            starts[rank] = at
            at = after(at, layouts[rank].base_shape(case.shape), case.dtype)
        return [*starts, at]


def after(offset: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return where the next tensor may begin, a gap behind this one."""
    end = offset + math.prod(shape) * dtype.itemsize
    return (end // _ALIGNMENT + 2) * _ALIGNMENT
