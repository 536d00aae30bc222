"""Ctrl-C between two steps of a training run instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Records the first SIGINT or SIGTERM in ``asked`` while a block runs; a second acts at once.

    Only Python's default handlers are replaced, and only in the main thread. If ``is_on`` is
    False, no handler is replaced.
    """

    def __init__(self, is_on: bool) -> None:
        self.asked: int | None = None
        self._is_on = is_on
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        if self._is_on and threading.current_thread() is threading.main_thread():
            for number, default in (
                (signal.SIGINT, signal.default_int_handler),
                (signal.SIGTERM, signal.SIG_DFL),
            ):
                if signal.getsignal(number) is default:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
        if kind is None and self.asked is not None:
            self.stop()

    def stop(self) -> None:
        """Raise the exception that ends the program as the signal would have done."""
        if self.asked == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self.asked = number
            self.stop()
        self.asked = number
