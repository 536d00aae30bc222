"""Threads of the library's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pyringar.errors import RingarError

__all__ = ["start_thread"]


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon: whoever starts it says when it ends.

    Raises:
        RingarError: The system has no thread left.
    """
    thread = threading.Thread(target=target, args=args, name=f"pyringar {name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise RingarError(
            f"cannot start the thread 'pyringar {name}': {error}; the limit is that of the user "
            "(`ulimit -u`) or of the container (pids.max)"
        ) from error
    return thread
