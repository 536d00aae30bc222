"""Handle of a background collective."""

from __future__ import annotations

import math
from typing import Any

from pyringar.errors import ArgumentError, CollectiveTimeout


class Work:
    """Handle of a background collective, returned by ``async_op=True``.

    Do not read, write or resize the tensors before the collective ends. After ``resize_``,
    ``untyped_storage().resize_()``, ``share_memory_()`` or ``torch.multiprocessing`` the engine
    would write to freed memory. You may drop the `Work`, the tensors and the lists.
    """

    def __init__(self, native: Any, in_flight: dict[Any, object], *call: str) -> None:
        self._native = native
        self._in_flight = in_flight
        self._call = call  # operation, reduction and algorithm, for messages

    def is_completed(self) -> bool:
        """Return whether the collective has ended or failed. Never blocks."""
        if self._native is None:
            return True
        done = bool(self._native.is_completed())
        if done:
            self._in_flight.pop(self._native, None)
        return done

    def exception(self) -> BaseException | None:
        """Return the error of the collective. None while it runs or if it succeeded."""
        return None if self._native is None else self._native.exception()

    def finished_ns(self) -> int:
        """Return the end time by ``time.perf_counter_ns``; 0 while the call runs, and on GPUs."""
        finished: int = self._native.finished_ns() if self._native is not None else 0
        return finished

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the collective ends; other Python threads run meanwhile.

        Args:
            timeout: Seconds. None: wait until the collective ends, or fails by the communicator's
                timeout. Ignored if one process drives several GPUs: the host does not wait.

        Returns:
            True.

        An exception from a signal handler, such as KeyboardInterrupt, ends the wait within 0.2 s.
        It also fails a `ProcessCommunicator` on all ranks; calls of a `Communicator` continue.

        Raises:
            RingarError: The error of the collective.
            ArgumentError: ``timeout`` is not a number of seconds.
            CollectiveTimeout: The collective still runs after ``timeout``. It names the cause.
        """
        if self._native is None:
            return True
        seconds = math.inf if timeout is None else timeout
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
            raise ArgumentError(f"wait: timeout is {seconds!r}, expected seconds, 0 or more")
        if not self._native.wait(float(seconds)):
            raise CollectiveTimeout(
                f"wait: not done after {seconds:g} s, and goes on: {self._native.describe()}"
            )
        self.is_completed()  # releases the tensors if no GPU uses them
        return True

    def __repr__(self) -> str:
        state = "done"
        if self._native is not None and not self._native.is_completed():
            state = "pending"
        elif error := self.exception():
            state = f"failed: {type(error).__name__}: {error}"
        return f"Work({', '.join((*self._call, state))})"
