"""Tensors that share the memory of NumPy or CUDA arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.errors import ArgumentError

_IMMUTABLE = ("jax", "jaxlib")  # their array interface does not say that arrays are read-only


def is_array(value: Any) -> bool:
    """Return whether `as_tensor` accepts ``value``. False for tensors."""
    return _is_numpy(value) or (
        not isinstance(value, Tensor) and hasattr(value, "__cuda_array_interface__")
    )


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def as_tensor(array: Any, name: str = "array") -> Tensor:
    """Return a tensor that shares the memory of a NumPy, CuPy or Numba array.

    Args:
        array: A ``numpy.ndarray``, or an object with ``__cuda_array_interface__``.
        name: The name of the argument in messages.

    Raises:
        ArgumentError: The array is read-only or immutable, or torch cannot share it: negative
            strides, another byte order, a dtype that torch does not have.

    On a GPU calls run on torch's current stream. Synchronise other streams with it.
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
    """Return ``values`` with arrays replaced by tensors. Other values stay unchanged."""
    return [
        as_tensor(value, f"{name}[{i}]") if is_array(value) else value
        for i, value in enumerate(values)
    ]
