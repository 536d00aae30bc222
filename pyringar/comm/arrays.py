"""Arrays of NumPy and of the CUDA array interface as tensors that share their memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.errors import ArgumentError

_IMMUTABLE = ("jax", "jaxlib")  # their interface does not say so


def is_array(value: Any) -> bool:
    """Return whether it is no tensor, but something that `as_tensor` takes."""
    return _is_numpy(value) or (
        not isinstance(value, Tensor) and hasattr(value, "__cuda_array_interface__")
    )


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def as_tensor(array: Any, name: str = "array") -> Tensor:
    """Return a tensor on the memory of ``array``: NumPy's, CuPy's or Numba's.

    Args:
        array: A ``numpy.ndarray``, or an object with ``__cuda_array_interface__``.
        name: What messages call it.

    Raises:
        ArgumentError: It is read-only or immutable, or torch cannot share it: negative strides,
            another byte order, a dtype that torch does not have.

    On a GPU calls run in order with torch's current stream; order other streams with that one.
    """
    interface = "__array_interface__" if _is_numpy(array) else "__cuda_array_interface__"
    try:
        is_read_only = getattr(array, interface)["data"][1]
        if is_read_only or type(array).__module__.partition(".")[0] in _IMMUTABLE:
            raise ValueError("it is read-only")
        return torch.as_tensor(array)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} is {kind_of(array)} whose memory torch cannot share and write: {error}; "
            "expected a writable copy of numbers, such as numpy.ascontiguousarray(array).copy()"
        ) from error


def as_tensors(values: Iterable[Any], name: str = "tensors") -> list[Any]:
    """Return a list with a tensor for every array; what is neither stays as it is."""
    return [
        as_tensor(value, f"{name}[{i}]") if is_array(value) else value
        for i, value in enumerate(values)
    ]
