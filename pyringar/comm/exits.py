"""The end of a process: what holds threads or peers is closed at exit, and left alone after fork().

A forked child has copies of its parent's objects, but not the threads behind them. To close such a
copy, or to destroy it, would wait for these threads for ever, so the child does neither.
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

# How long calls may stand still at exit: for ranks that reach their own end a little later. A rank
# that fails without a traceback, as by sys.exit(1), keeps its peers waiting for no longer.
_GRACE_S = 5.0
_LOOK_S = 0.01


class _Living(NamedTuple):
    owner: weakref.ref[Any]
    close: _Call
    in_child: _Call | None
    abort: _Call | None
    progress: Callable[[Any], object] | None


# By id, oldest first; each change is one operation, so that a fork finds no lock held.
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

    Owners are held weakly, and closed newest first, since the newer may use the older. Without
    ``in_child`` a child made by ``os.fork`` never closes or destroys ``owner``: there it is
    `is_inherited`. Owners that wait for other processes give ``abort``. It comes before ``close``
    if an uncaught exception ends the program, or if no owner's calls move for some seconds.
    ``progress`` returns False if no such call runs, else a value that changes as calls move.
    """
    key = id(owner)
    _living[key] = _Living(
        weakref.ref(owner, lambda _: _living.pop(key, None)), close, in_child, abort, progress
    )


def never_destroy(owner: Any) -> None:
    """Leave ``owner``, and what it holds, in memory until the process is gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


@functools.cache
def empty_backward_at_exit() -> None:
    """Before the interpreter ends, drop what a backward pass that fails leaves in torch's queue.

    torch keeps it until the thread's next pass; 2.15 crashes if it drops hooks after Python's end.
    """
    atexit.register(drop_failed_backward)


def drop_failed_backward() -> None:
    """Drop what a backward pass that failed in this thread has left in torch's queue."""
    import torch

    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def is_inherited(owner: Any) -> bool:
    """Return whether ``owner`` belongs to the process that this one was forked from."""
    return id(owner) in _inherited


def close_all() -> None:
    """Close, newest first, all that `close_at_exit` knows; abort it if the program failed."""
    with contextlib.ExitStack() as newest_first:  # and all of them, whatever one raises
        newest_first.callback(_end_reading)  # no other thread may be in an engine's use of torch
        entries = [(entry.owner(), entry) for entry in list(_living.values())]
        living = [(owner, entry) for owner, entry in entries if owner is not None]
        for owner, entry in living:
            newest_first.callback(entry.close, owner)
        # Python notes what it has printed a traceback of; an interactive one goes on after it.
        has_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
        is_over = False
        try:
            is_over = not has_failed and _are_over(living)
        finally:  # also after Ctrl-C
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
        time.sleep(_LOOK_S)


def _leave_to_parent() -> None:
    for key, entry in list(_living.items()):
        alive = entry.owner()
        if alive is not None and entry.in_child is not None:
            entry.in_child(alive)
        elif alive is not None:
            never_destroy(alive)  # so that its id stays its own
            _inherited.add(key)
            del _living[key]


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
