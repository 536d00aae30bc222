"""Arrays of other libraries as tensors that share their memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from pyringar.errors import ArgumentError

__all__ = ["as_tensor", "as_tensors", "is_array"]


def is_array(value: Any) -> bool:
    """Return whether it is no tensor, but something that `as_tensor` takes."""
    return not isinstance(value, Tensor) and (
        hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    )


def as_tensor(array: Any) -> Tensor:
    """Return a tensor on the memory of ``array``: CuPy's, NumPy's, any that speaks DLPack.

    Args:
        array: An object with ``__dlpack__`` or ``__cuda_array_interface__``.

    Raises:
        ArgumentError: It is read-only, or describes itself wrongly.
        BufferError, RuntimeError: What the array's library or torch says of one that cannot be
            shared, such as a dtype without an equal.

    On a GPU a call runs in order with torch's current stream; order the streams of other libraries
    with that one yourself.

    Cost: nothing is copied. Source: the Python array API's data interchange.
    """
    for name in ("__array_interface__", "__cuda_array_interface__"):
        interface = getattr(array, name, None)
        if interface is None:
            continue
        try:
            _, is_read_only = interface["data"]
            shape = interface["shape"]
        except (KeyError, TypeError, ValueError):
            raise ArgumentError(
                f"the {type(array).__name__}'s {name} is {interface!r}, expected a dict with "
                "'shape' and 'data': (address, is_read_only)"
            ) from None
        if is_read_only:  # torch would write to it nevertheless
            raise ArgumentError(
                f"the {type(array).__name__} of shape {shape} is read-only; expected one that can "
                "be written (a copy?)"
            )
    if hasattr(array, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(array)
    return torch.as_tensor(array)  # on the device that its memory is on


def as_tensors(values: Iterable[Any]) -> list[Any]:
    """Return a list with a tensor for every array; what is neither stays as it is."""
    return [as_tensor(value) if is_array(value) else value for value in values]
