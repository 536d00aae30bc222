"""Communicators whose calls run in the C++ engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pyringar.comm import exits  # noqa: F401  registers the exit handler
from pyringar.comm.background_work import Work
from pyringar.comm.base_communicator import LATE_ERRORS, PLAIN_ALGORITHMS, BaseCommunicator
from pyringar.comm.collective_call import CollectiveCall
from pyringar.comm.handles import handle_of

logger = logging.getLogger(__name__)

# Tensors that the engine may still write after a signal interrupted a communicator's close().
_interrupted: list[dict[Any, object]] = []


class EngineCommunicator(BaseCommunicator):
    """Base of communicators whose calls run in an engine group."""

    _group: Any
    # Maps each running engine work to its tensors; the engine adds them before it returns.
    # There is no lock: a signal handler or a fork may interrupt any step.
    _in_flight: dict[Any, object]

    def _use(self, group: Any, settings: str) -> None:
        """Set the engine group. ``settings``: text of all settings that change results."""
        self._group = group
        self._in_flight = {}
        if self._default[0] not in PLAIN_ALGORITHMS:
            self._run_prepared = group.prepared(self._default, self._resolve("auto", None))
        self._handle = handle_of(self, settings)

    def _run(
        self, call: CollectiveCall, *, async_op: bool = False, what: object = ""
    ) -> Work | None:
        if call.algorithm in PLAIN_ALGORITHMS:
            return self._run_plain(call, async_op)
        if not async_op:
            self._group.run(call)
            return None
        native = self._group.run(call, self._in_flight, None, str(what))
        return self._begun(native, call)

    def _run_plain(self, call: CollectiveCall, async_op: bool) -> Work | None:
        """Run a call by an algorithm written in plain torch."""
        raise NotImplementedError

    def _begun(self, native: Any, call: CollectiveCall) -> Work:
        """Wrap an engine work in a `Work`; release the tensors of completed works."""
        # list() is atomic. tuple() may run the garbage collector, and other threads could remove
        # works meanwhile.
        for other in list(self._in_flight):
            if other.is_completed():
                self._in_flight.pop(other, None)
        return Work(native, self._in_flight, *call.words())

    def _bind_call(self, call: CollectiveCall) -> Callable[[], None]:
        bound: Callable[[], None] = self._group.bind(
            call.operation, call.outputs, call.op, call.algorithm, call.order
        )
        return bound

    def _stats(self) -> dict[str, dict[str, float]]:
        stats: dict[str, dict[str, float]] = self._group.stats()
        return stats

    def _close(self) -> None:
        self._is_closed = True
        try:
            is_done = self._group.close()
        except LATE_ERRORS:  # close() raises them once; the last calls may still run
            if self._group.close():
                self._in_flight.clear()
            raise
        if is_done:
            self._in_flight.clear()

    def __del__(self) -> None:
        # Background work must end before its tensors are released.
        if hasattr(self, "_in_flight"):
            try:
                self.close()
            except LATE_ERRORS as error:
                logger.error("a communicator was deleted without close(), and %s", error)
            finally:
                if self._in_flight:  # the engine or a GPU still uses the tensors
                    _interrupted.append(self._in_flight)
