"""Start of daemon threads, and waits that signal handlers may interrupt."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyringar.errors import RingarError


class Latch:
    """An event that is set once, safe to wait for in signal handlers.

    A waiter of `threading.Event` briefly holds its lock. A signal handler that interrupts it and
    waits for the setting thread would deadlock.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Wake all waiters. Call once."""
        self.is_open = True
        self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait until open, at most ``seconds``; return whether it is open."""
        ends = time.monotonic() + seconds
        while not self.is_open and (left := ends - time.monotonic()) > 0:
            # At most 1 s: a signal may interrupt another waiter before it releases the lock.
            if self._lock.acquire(timeout=min(left, 1.0)):
                self._lock.release()
        return self.is_open


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread. The caller must end it.

    Raises:
        RingarError: The system's limit of threads is reached.
    """
    thread = threading.Thread(target=target, args=args, name=f"pyringar {name}", daemon=True)
    with starting_thread(thread.name):
        thread.start()
    return thread


@contextmanager
def starting_thread(name: str) -> Iterator[None]:
    """Turn Python's error at the limit of threads into a RingarError."""
    try:
        yield
    except RuntimeError as error:
        raise RingarError(
            f"cannot start the thread '{name}': {error}; the limit is that of the user "
            "(`ulimit -u`) or of the container (pids.max)"
        ) from error


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Delay signal handlers until the block ends, so that no exception interrupts it.

    Raises:
        BaseException: The exception of the block, else of the first handler. All handlers run.
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
                while left:  # a restored handler may raise in this loop
                    signal.signal(*left[-1])
                    left.pop()
                while came:
                    signal.raise_signal(came.pop(0))
            except BaseException as error:
                errors.append(error)
    if errors:
        raise errors[0]
