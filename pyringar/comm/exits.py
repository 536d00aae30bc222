"""Cleanup at process exit and after fork().

At exit, objects with threads or peers are closed. A forked child has copies of these objects, but
not their threads. Closing or destroying a copy would wait for ever, so the child does neither.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pyringar.engine.load import loaded_cuda_engine, loaded_engine

_Call = Callable[[Any], object]

# At exit, running calls are aborted after this time without progress: other ranks may exit later. A
# rank that fails without a traceback, for example by sys.exit(1), delays its peers by this time.
_GRACE_S = 5.0
_POLL_S = 0.01


class _Living(NamedTuple):
    owner: weakref.ref[Any]
    close: _Call
    in_child: _Call | None
    abort: _Call | None
    progress: Callable[[Any], object] | None


# Owners by id, oldest first. No lock, which a fork could leave held: each change is atomic.
_living: dict[int, _Living] = {}
_inherited: set[int] = set()


def close_at_exit(
    owner: Any,
    close: _Call,
    in_child: _Call | None = None,
    *,
    abort: _Call | None = None,
    progress: Callable[[Any], object] | None = None,
) -> None:
    """Call ``close(owner)`` before the interpreter ends, unless ``owner`` was deleted.

    Owners are held weakly and closed newest first, since a newer owner may use an older one.

    Args:
        owner: The object to close.
        close: Called with ``owner``.
        in_child: Called with ``owner`` in a forked child. None: the child never closes or destroys
            ``owner``, and `is_inherited` returns True.
        abort: For owners that wait for other processes: called before ``close`` if an exception
            ends the program, or if no call of any owner makes progress for some seconds.
        progress: Returns False if no call runs, else a value that changes while calls progress.
    """
    key = id(owner)
    _living[key] = _Living(
        weakref.ref(owner, lambda _: _living.pop(key, None)), close, in_child, abort, progress
    )


def never_destroy(owner: Any) -> None:
    """Keep ``owner`` in memory until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


@functools.cache
def empty_backward_at_exit() -> None:
    """Register `drop_failed_backward` at exit.

    torch 2.15 crashes if it destroys hooks of a failed backward pass after the interpreter's end.
    """
    atexit.register(drop_failed_backward)


def drop_failed_backward() -> None:
    """Clear torch's queue of a backward pass that failed in this thread.

    torch clears it only at the start of the thread's next backward pass.
    """
    import torch

    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def is_inherited(owner: Any) -> bool:
    """Return whether ``owner`` belongs to the parent process of this forked child."""
    return id(owner) in _inherited


def close_all() -> None:
    """Close all registered owners, newest first; abort them if the program failed."""
    with contextlib.ExitStack() as newest_first:  # runs all callbacks, even after an exception
        newest_first.callback(_end_reading)  # runs last: waits for threads that use torch
        entries = [(entry.owner(), entry) for entry in list(_living.values())]
        living = [(owner, entry) for owner, entry in entries if owner is not None]
        for owner, entry in living:
            newest_first.callback(entry.close, owner)
        # sys.last_value: the uncaught exception. An interactive Python continues after it.
        has_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
        is_over = False
        try:
            is_over = not has_failed and _are_over(living)
        finally:  # also after KeyboardInterrupt
            for owner, entry in living if not is_over else ():
                if entry.abort is not None:
                    newest_first.callback(entry.abort, owner)


def _end_reading() -> None:
    for engine in (loaded_engine(), loaded_cuda_engine()):
        if engine is not None:
            engine.end_reading()


def _are_over(living: Sequence[tuple[Any, _Living]]) -> bool:
    last: list[object] = []
    ends = 0.0
    while True:
        now = [entry.progress(owner) for owner, entry in living if entry.progress is not None]
        if not any(now):
            return True
        if now != last:
            last, ends = now, time.monotonic() + _GRACE_S
        elif time.monotonic() > ends:
            return False
        time.sleep(_POLL_S)


def _leave_to_parent() -> None:
    for key, entry in list(_living.items()):
        alive = entry.owner()
        if alive is not None and entry.in_child is not None:
            entry.in_child(alive)
        elif alive is not None:
            never_destroy(alive)  # so that no other object gets its id
            _inherited.add(key)
            del _living[key]


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
