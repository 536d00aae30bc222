"""Threads that wait for gloo's messages.

Gloo lets a message be waited for once: a second wait is for another message. Its wait hears of no
signal, and one that times out breaks off all others. So the one wait is done by a thread of ours,
and whoever wants to know its end waits for that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pyringar.comm.threads import Latch, start_thread

__all__ = ["Message", "Waiters"]

# How long close() waits for threads whose waits were broken off.
_GRACE_S = 1.0


class Waiters:
    """Threads that wait, as many as waits are under way at once.

    Each use is one step, so that a signal handler may come in between.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle: list[None] = []  # one entry for each thread that no call was promised to
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], object]) -> None:
        """Call ``call``, which raises nothing, in a thread that waits for nothing else.

        Raises:
            RingarError: A thread is needed and cannot start.
        """
        try:
            self._idle.pop()
        except IndexError:
            self._threads.append(start_thread("messages", self._run))
        self._calls.put(call)

    def is_busy(self) -> bool:
        """Return whether a call runs."""
        return len(self._idle) < len(self._threads)

    def close(self) -> None:
        """End the threads; what they wait for must have been broken off."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(_GRACE_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # its tensor is let go
            self._idle.append(None)


class Message:
    """A message's end, for any number of threads, and handlers that interrupt them, to wait for.

    ``wait`` blocks until it has ended, or raises what it failed with; ``waiters`` call it once,
    when somebody waits here.
    """

    def __init__(self, waiters: Waiters, wait: Callable[[], object]) -> None:
        self._waiters = waiters
        self._waits = [wait]  # taken by the one thread that waits, however often it was asked to
        self._is_asked_for = False
        self._end = Latch()
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._end.is_open

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, after at most so many seconds."""
        if not self._is_asked_for:
            self._waiters.submit(self._run)
            self._is_asked_for = True
        return self._end.wait(seconds)

    def _run(self) -> None:
        try:
            wait = self._waits.pop()
        except IndexError:
            return
        try:
            wait()
        except Exception as error:
            self.error = error.with_traceback(None)  # which would hold this, and this the error
        self._end.open()
