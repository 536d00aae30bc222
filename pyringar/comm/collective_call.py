"""One collective call as plain data, as the public methods hand it to a transport."""

from __future__ import annotations

from typing import Any, NamedTuple

_REDUCING = {"all_reduce", "all_reduce_coalesced", "reduce", "reduce_coalesced", "reduce_scatter"}
_WITH_INPUTS = {"reduce", "reduce_coalesced", "reduce_scatter", "all_gather"}
WITH_ROOT = {"broadcast", "broadcast_coalesced", "reduce", "reduce_coalesced"}
WITHOUT_ALGORITHM = {"broadcast", "broadcast_coalesced", "barrier"}


class CollectiveCall(NamedTuple):
    """One collective call, whose arguments but the tensors were checked.

    Attributes:
        operation: Name of the method. A group with one local rank gets ``"all_reduce"`` for
            ``all_reduce_coalesced``, with a list as ``outputs``.
        outputs: Tensors that the call writes or reduces in place; ``[]`` for a barrier. List
            groups: one entry per rank. One local rank: its tensor, or a list of its tensors.
        inputs: Tensors that the call reads; None if it works in place.
        op: Name of the reduction, such as ``"sum"``.
        algorithm: Algorithm that runs; never ``"auto"``.
        order: Order of additions: ``"rank"``, ``"tree"`` or ``"exact"``.
        root: Rank that sends or receives.
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
        """Whether ``op`` counts."""
        return self.operation in _REDUCING

    @property
    def has_inputs(self) -> bool:
        """Whether ``inputs`` count."""
        return self.operation in _WITH_INPUTS

    @property
    def has_root(self) -> bool:
        """Whether ``root`` counts."""
        return self.operation in WITH_ROOT

    def words(self) -> tuple[str, ...]:
        """Return the operation, and the reduction and algorithm if they count."""
        op = (self.op,) if self.is_reduction else ()
        algorithm = () if self.operation in WITHOUT_ALGORITHM else (self.algorithm,)
        return (self.operation, *op, *algorithm)

    def __str__(self) -> str:
        if self.is_reduction:
            return f"{self.operation} ({self.op})"
        return f"{self.operation} from rank {self.root}" if self.has_root else self.operation


def tensors_of(given: Any) -> list[Any]:
    """Return one local rank's tensor, or its list of tensors, as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [given]
