"""The handle of a collective that runs in the background."""

from __future__ import annotations

import math
from typing import Any

from pyringar.errors import ArgumentError, CollectiveTimeout


class Work:
    """A collective that runs in the background, returned by ``async_op=True``.

    Until it is done do not read or write its tensors, nor resize or share their memory: after
    ``resize_``, ``untyped_storage().resize_()``, ``share_memory_()`` or ``torch.multiprocessing``
    the engine writes to freed memory. You may drop the work, the tensors and the lists.
    """

    def __init__(self, native: Any, in_flight: dict[Any, object], *call: str) -> None:
        self._native = native
        self._in_flight = in_flight
        self._call = call  # its name, reduction and algorithm, as far as it has them

    def is_completed(self) -> bool:
        """Return whether it is done, successfully or not. Never blocks."""
        if self._native is None:
            return True
        done = bool(self._native.is_completed())
        if done:
            self._in_flight.pop(self._native, None)
        return done

    def exception(self) -> BaseException | None:
        """Return the error it ended with; None while it runs and when all went well."""
        return None if self._native is None else self._native.exception()

    def finished_ns(self) -> int:
        """Return when it ended (``time.perf_counter_ns``); 0 while it runs and on GPUs."""
        finished: int = self._native.finished_ns() if self._native is not None else 0
        return finished

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is done; other Python threads run meanwhile.

        Args:
            timeout: Seconds; None waits until the collective ends, well or by the communicator's
                own timeout, which counts for each call. It has no meaning for ranks on GPUs in one
                process: the host does not wait for them.

        Returns:
            True.

        An exception from a signal handler, such as KeyboardInterrupt, ends the wait within 0.2 s,
        and fails a `ProcessCommunicator` on all ranks. Ranks of one process go on.

        Raises:
            RingarError: The collective's own error, if it failed.
            ArgumentError: ``timeout`` is no number of seconds.
            CollectiveTimeout: It still runs after ``timeout``; the message says what it waits for.
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
        self.is_completed()  # releases the tensors, unless a GPU still uses them
        return True

    def __repr__(self) -> str:
        state = "done"
        if self._native is not None and not self._native.is_completed():
            state = "pending"
        elif error := self.exception():
            state = f"failed: {type(error).__name__}: {error}"
        return f"Work({', '.join((*self._call, state))})"
