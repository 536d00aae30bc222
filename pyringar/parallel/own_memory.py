"""Gradients that share memory with other tensors, and how they get memory of their own.

What backward computes for ``p.view(...)``, ``p.unsqueeze(0)`` and the like is the gradient of the
result in another shape, in the same memory. Torch keeps that as ``p.grad``, also where backward
goes on to read it, or where another parameter's ``grad`` lies there, too. Whoever writes to such a
``grad`` changes the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["give_own_memory"]

# Private to torch: where it is gone or counts otherwise, tests/test_shared_gradients.py fails.
_count_users: Any = torch._C._storage_Use_Count
_ALONE = 2  # the tensor, and what asks


def give_own_memory(param: Tensor) -> None:
    """Copy the gradient that backward has left of a parameter if others use its memory.

    A view that torch knows as one is not from backward: it is part of a buffer of the user's, and
    stays there.

    Cost: a microsecond or less, and the copy.
    """
    grad = param.grad
    if grad is None or grad.layout is not torch.strided or grad._is_view():
        return
    if _count_users(grad.untyped_storage()._cdata) > _ALONE:
        param.grad = grad.clone()
