"""Every exception pyringar raises on purpose, and nothing else.

All derive from `RingarError`, and each also from the built-in class that
callers already catch for that kind of mistake.
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
    """Base of all pyringar errors; raised itself when an object is used in a wrong state."""


class ArgumentError(RingarError, ValueError):
    """An argument is wrong. Names it, its value and what was expected; nothing was changed."""


class UnsupportedError(RingarError, NotImplementedError):
    """The request makes sense, but no engine here can do it; nothing was changed."""


class BuildError(RingarError):
    """The native engine could not be built or loaded. Says what was tried and what to do."""


class CompilerNotFoundError(BuildError):
    """No usable compiler. Says what was looked for and what to install."""


class CudaError(RingarError):
    """A CUDA call failed. Names the call, the device and the driver's own words."""


class CollectiveTimeout(RingarError, TimeoutError):  # noqa: N818
    """A rank made no progress for the timeout, or all ranks wait. Names who waited for whom."""


class PeerLostError(RingarError):
    """A peer rank is gone. Names its rank, host, process and last operation."""
