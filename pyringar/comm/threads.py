"""Threads of the library's own, and how to wait for them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyringar.errors import RingarError


class Latch:
    """Opens once. Threads wait, and signal handlers that interrupt these waits.

    Waiters of a `threading.Event` hold its lock for a moment. A handler that runs then, and waits
    for the event's setter, would never end.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let all go that wait. Call once."""
        self.is_open = True
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Return whether it is open, after at most so many seconds."""
        ends = time.monotonic() + seconds
        while not self.is_open and (left := ends - time.monotonic()) > 0:
            # Not for longer: an interrupt may come before the lock is given back.
            if self._lock.acquire(timeout=min(left, 1.0)):
                self._lock.release()
        return self.is_open


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon: whoever starts it says when it ends.

    Raises:
        RingarError: The system has no thread left.
    """
    thread = threading.Thread(target=target, args=args, name=f"pyringar {name}", daemon=True)
    with starting_thread(thread.name):
        thread.start()
    return thread


@contextmanager
def starting_thread(name: str) -> Iterator[None]:
    """Raise a RingarError where Python says that the system has no thread left."""
    try:
        yield
    except RuntimeError as error:
        raise RingarError(
            f"cannot start the thread '{name}': {error}; the limit is that of the user "
            "(`ulimit -u`) or of the container (pids.max)"
        ) from error


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Delay handlers of signals until the block ends: an exception would lose a new thread.

    Raises:
        BaseException: That of the block, else of the first handler. All handlers run before.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = signal.valid_signals() if is_main else ()
    handlers = {n: handler for n in numbers if callable(handler := signal.getsignal(n))}
    came: list[int] = []
    errors: list[BaseException] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        left = list(handlers.items())
        while left or came:
            try:
                while left:  # a handler that is there again may raise in this loop
                    signal.signal(*left[-1])
                    left.pop()
                while came:
                    signal.raise_signal(came.pop(0))
            except BaseException as error:
                errors.append(error)
    if errors:
        raise errors[0]
