"""Exceptions of pyringar.

All derive from `RingarError`. Most also derive from the built-in class for that kind of error.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BuildError",
    "CollectiveTimeout",
    "CompilerNotFoundError",
    "CudaError",
    "PeerLostError",
    "RingarError",
    "UnsupportedError",
]


class RingarError(RuntimeError):
    """Base of all pyringar errors. Raised itself if an object is in the wrong state."""


class ArgumentError(RingarError, ValueError):
    """Wrong argument: names the argument, its value and the expected value. Nothing has changed."""


class UnsupportedError(RingarError, NotImplementedError):
    """Valid request that this engine or machine does not support. Nothing has changed."""


class BuildError(RingarError):
    """Failed build or load of the native engine: names the failed step and a remedy."""


class CompilerNotFoundError(BuildError):
    """Missing compiler: names the places searched and the package to install."""


class CudaError(RingarError):
    """Failed CUDA call: names the call, the device and the driver's message."""


class CollectiveTimeout(RingarError, TimeoutError):  # noqa: N818
    """Timeout of a rank, or deadlock of all ranks: names the waiting and the awaited rank."""


class PeerLostError(RingarError):
    """Lost peer: names its rank, host, process and last operation."""
