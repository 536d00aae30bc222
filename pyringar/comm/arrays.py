"""Arrays of other libraries as tensors that share their memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.utils.dlpack
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.errors import ArgumentError

# Their arrays are immutable, and DLPack capsules of them do not say so.
_IMMUTABLE = ("jax", "jaxlib", "tensorflow", "mlx")
# NumPy's dtypes that torch has, in its array interface.
_DTYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_OTHER_ORDER = ">" if sys.byteorder == "little" else "<"


def is_array(value: Any) -> bool:
    """Return whether it is no tensor, but something that `as_tensor` takes."""
    return not isinstance(value, Tensor) and (
        hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    )


def as_tensor(array: Any, name: str = "array") -> Tensor:
    """Return a tensor on the memory of ``array``: CuPy's, NumPy's, any that speaks DLPack.

    Args:
        array: An object with ``__dlpack__`` or ``__cuda_array_interface__``.
        name: What messages call it.

    Raises:
        ArgumentError: It is read-only or a copy, its strides are negative, its dtype has no equal
            in torch, its library cannot share it, or it describes itself wrongly.

    On a GPU a call runs in order with torch's current stream; order the streams of other libraries
    with that one yourself.

    Cost: nothing is copied. Source: the Python array API's data interchange.
    """
    checked = _Checked(array, f"{name} is {kind_of(array)}")
    checked.check_interfaces()
    if hasattr(array, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(checked)
    return torch.as_tensor(array)  # on the device that its memory is on


def as_tensors(values: Iterable[Any], name: str = "tensors") -> list[Any]:
    """Return a list with a tensor for every array; what is neither stays as it is."""
    return [
        as_tensor(value, f"{name}[{i}]") if is_array(value) else value
        for i, value in enumerate(values)
    ]


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """The DLManagedTensorVersioned of DLPack 1."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_READ_ONLY, _COPIED = 1, 2  # flags of it
_memory_of = ctypes.pythonapi.PyCapsule_GetPointer
_memory_of.argtypes, _memory_of.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_has_name = ctypes.pythonapi.PyCapsule_IsValid
_has_name.argtypes, _has_name.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int


class _Checked:
    """An array whose DLPack capsules are checked before torch reads them."""

    def __init__(self, array: Any, what: str) -> None:
        self._array = array
        self._what = what  # begins every message

    def check_interfaces(self) -> None:
        """Raise ArgumentError for what the array's NumPy or CUDA interface shows."""
        for kind in type(self._array).__mro__:
            library = kind.__module__.split(".")[0]
            if library in _IMMUTABLE:
                self._refuse(f"of {library}, which is immutable", "a copy: np.array(array)")
        for name in ("__array_interface__", "__cuda_array_interface__"):
            interface = getattr(self._array, name, None)
            if interface is not None:
                self._check_interface(name, interface)

    def _check_interface(self, name: str, interface: Any) -> None:
        try:
            _, is_read_only = interface["data"]
            shape, strides = interface["shape"], interface.get("strides")
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ArgumentError(
                f"{self._what} whose {name} is {interface!r}, expected a dict with "
                "'shape' and 'data': (address, is_read_only)"
            ) from None
        if is_read_only:  # torch would write to it nevertheless
            self._refuse_read_only(shape)
        if name == "__array_interface__":
            self._check_dtype(interface.get("typestr", ""))
        self._check_strides(shape, strides)

    def _check_dtype(self, typestr: str) -> None:
        if typestr[1:] not in _DTYPES:
            self._refuse(f"of dtype {typestr!r}", "numbers of one dtype that torch has")
        if typestr[0] == _OTHER_ORDER:
            self._refuse(
                f"of dtype {typestr!r}, whose byte order is not this machine's",
                "array.astype(array.dtype.newbyteorder('='))",
            )

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        try:
            capsule = self._array.__dlpack__(**options)
        except BufferError as error:
            raise ArgumentError(
                f"{self._what} that cannot be shared: {error}; expected a copy"
            ) from error
        if _has_name(capsule, b"dltensor_versioned"):
            managed = _Versioned.from_address(_memory_of(capsule, b"dltensor_versioned"))
            tensor, flags = managed.tensor, managed.flags
        elif _has_name(capsule, b"dltensor"):
            tensor, flags = _DLTensor.from_address(_memory_of(capsule, b"dltensor")), 0
        else:
            return capsule
        shape = tuple(tensor.shape[: tensor.ndim])
        if flags & _READ_ONLY:
            self._refuse_read_only(shape)
        if flags & _COPIED:
            self._refuse(
                f"of shape {shape} that DLPack shows as a copy, where results would be lost",
                "memory that can be shared",
            )
        self._check_strides(shape, tensor.strides[: tensor.ndim] if tensor.strides else None)
        return capsule

    def _check_strides(self, shape: Sequence[int], strides: Sequence[int] | None) -> None:
        if strides is None or 0 in shape:
            return
        used = [step for n, step in zip(shape, strides, strict=True) if n > 1]
        if any(step < 0 for step in used):
            self._refuse(
                f"of shape {tuple(shape)} with negative strides {tuple(strides)}",
                "a copy without: np.ascontiguousarray(array)",
            )

    def _refuse_read_only(self, shape: Any) -> NoReturn:
        self._refuse(
            f"of shape {tuple(shape)} that is read-only", "one that can be written (a copy?)"
        )

    def _refuse(self, why: str, expected: str) -> NoReturn:
        raise ArgumentError(f"{self._what} {why}; expected {expected}")
