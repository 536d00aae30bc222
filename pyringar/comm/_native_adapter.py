"""Give today's native groups the interface of one `run`; to be deleted with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyringar.comm.base_communicator import decline

__all__ = ["NativeAdapter"]


class NativeAdapter:
    """A native group with the methods run, bind, check_call and prepared."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def run(
        self,
        operation: str,
        outputs: Any,
        inputs: Any,
        op: str,
        algorithm: str,
        order: str,
        root: int,
        in_flight: Any,
        after: Any = None,
        what: str = "",
    ) -> Any:
        """Run a call, or submit it if there is a dict of works in flight."""
        method = getattr(self._native, operation)
        if not hasattr(self._native, "check_coalesced"):
            arguments = {
                "all_reduce": (outputs, op, order, in_flight, what),
                "reduce_scatter": (outputs, inputs, op, order, in_flight),
                "all_gather": (outputs, inputs, in_flight, what),
                "broadcast": (outputs, root, in_flight, what),
                "barrier": (in_flight,),
            }[operation]
        elif operation.startswith("all_reduce"):
            arguments = (outputs, op, algorithm, order, in_flight)
            arguments += () if after is None else (after,)
        elif operation == "reduce_scatter":
            arguments = (outputs, inputs, op, algorithm, order, in_flight)
        elif operation.startswith("reduce"):
            arguments = (outputs, inputs, op, algorithm, order, root, in_flight)
        elif operation == "all_gather":
            arguments = (outputs, inputs, algorithm, in_flight)
        else:
            arguments = (outputs, root, in_flight)
        return method(*arguments)

    def bind(
        self, operation: str, tensors: Any, op: str, algorithm: str, order: str
    ) -> Callable[[], None]:
        """Bind an all_reduce."""
        bound: Callable[[], None]
        if not hasattr(self._native, "check_coalesced"):
            bound = self._native.bind(tensors, op, order)
        elif operation == "all_reduce":
            bound = self._native.bind(tensors, op, algorithm, order)
        else:
            bound = self._native.bind_coalesced(tensors, op, algorithm, order)
        return bound

    def check_call(self, operation: str, tensors: Any) -> None:
        """Check arguments, then wait for the turn."""
        is_list = operation == "all_reduce"
        (self._native.check if is_list else self._native.check_coalesced)(tensors)

    def prepared(self, algorithm: str, order: str) -> Callable[..., bool]:
        """Return the fast path."""
        if not hasattr(self._native, "plain_all_reduce"):
            return decline
        fast: Callable[..., bool] = self._native.plain_all_reduce(order)
        return fast
