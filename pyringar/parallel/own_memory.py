"""Gives gradients memory of their own.

Backward of ``p.view(...)`` and similar functions returns a view of the gradient of the result.
torch stores that view as ``p.grad``, even if another ``grad`` or the rest of backward uses the
memory. A reduction in place would corrupt both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Private to torch. tests/test_shared_gradients.py fails if it is gone or counts differently.
_count_users: Any = torch._C._storage_Use_Count
_ALONE = 2  # the tensor, and the temporary storage object of the call


def give_own_memory(param: Tensor) -> None:
    """Copy the gradient of a parameter if other tensors use its memory.

    A gradient with ``_is_view()`` is part of a buffer of the user, and stays there.
    """
    grad = param.grad
    if grad is None or grad.layout is not torch.strided or grad._is_view():
        return
    if _count_users(grad.untyped_storage()._cdata) > _ALONE:
        param.grad = grad.clone()
