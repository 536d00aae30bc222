"""Arithmetic in plain torch as the engine does it: denormals kept, whatever the thread has set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# torch computes fewer elements than this in the calling thread. Its other threads have the mode of
# the thread that started them, and nobody can ask or change it.
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

    Yields how to cut tensors that are computed with: not at all as a rule, and into pieces that
    this thread computes alone where it flushes denormals otherwise.

    Cost: a multiplication, if the thread keeps them anyway.
    """
    if sys.float_info.min / 2 > 0:
        yield _whole
        return
    torch.set_flush_denormal(False)
    try:
        yield _cut
    finally:
        torch.set_flush_denormal(True)
