"""A collective call as plain data, passed from the public methods to a transport."""

from __future__ import annotations

from typing import Any, NamedTuple

_REDUCING = {"all_reduce", "all_reduce_coalesced", "reduce", "reduce_coalesced", "reduce_scatter"}
_WITH_INPUTS = {"reduce", "reduce_coalesced", "reduce_scatter", "all_gather"}
WITH_ROOT = {"broadcast", "broadcast_coalesced", "reduce", "reduce_coalesced"}
WITHOUT_ALGORITHM = {"broadcast", "broadcast_coalesced", "barrier"}


class CollectiveCall(NamedTuple):
    """A collective call with checked arguments; the tensors are not checked yet.

    Attributes:
        operation: Name of the method. A group with one local rank gets ``"all_reduce"`` for
            ``all_reduce_coalesced``, with a list as ``outputs``.
        outputs: Destination tensors; ``[]`` for a barrier. List groups: one entry per rank. One
            local rank: its tensor, or a list of its tensors.
        inputs: Source tensors; None if the call works in place.
        op: Name of the reduction, such as ``"sum"``.
        algorithm: Algorithm that runs; never ``"auto"``.
        order: Order of additions: ``"rank"``, ``"tree"`` or ``"exact"``.
        root: Source rank of a broadcast, destination rank of a reduce.
    """

    operation: str
    outputs: Any
    inputs: Any = None
    op: str = "sum"
    algorithm: str = "direct"
    order: str = "rank"
    root: int = 0

    @property
    def is_reduction(self) -> bool:
        """Whether the operation uses ``op``."""
        return self.operation in _REDUCING

    @property
    def has_inputs(self) -> bool:
        """Whether the operation uses ``inputs``."""
        return self.operation in _WITH_INPUTS

    @property
    def has_root(self) -> bool:
        """Whether the operation uses ``root``."""
        return self.operation in WITH_ROOT

    def words(self) -> tuple[str, ...]:
        """Return the operation, then its reduction and algorithm if it has them."""
        op = (self.op,) if self.is_reduction else ()
        algorithm = () if self.operation in WITHOUT_ALGORITHM else (self.algorithm,)
        return (self.operation, *op, *algorithm)

    def __str__(self) -> str:
        if self.is_reduction:
            return f"{self.operation} ({self.op})"
        return f"{self.operation} from rank {self.root}" if self.has_root else self.operation


def tensors_of(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]
