"""The end of a process: what holds threads or peers is closed at exit, and left alone after fork().

A forked child has copies of its parent's objects, but not the threads behind them. To close such a
copy, or to destroy it, would wait for these threads for ever, so the child does neither.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["close_at_exit", "is_inherited", "never_destroy"]

_Call = Callable[[Any], object]

# By id, in the order in which they were made; each change is one operation, so that a fork finds no
# lock held.
_living: dict[int, tuple[weakref.ref[Any], _Call, _Call | None, _Call | None]] = {}
_inherited: set[int] = set()


def close_at_exit(
    owner: Any, close: _Call, in_child: _Call | None = None, *, abort: _Call | None = None
) -> None:
    """Call ``close(owner)`` before the interpreter ends, unless ``owner`` is gone by then.

    The newest is closed first: what uses another was made after it.

    Args:
        owner: Held weakly.
        close: Takes ``owner``; may be called again.
        in_child: Takes ``owner`` in a child made by ``os.fork``, which may then use it. Without it
            the child never closes or destroys ``owner``: there it is :func:`is_inherited`.
        abort: Called first where an exception that nobody caught ends the program: ``close`` would
            wait for ranks that may wait for what this one does not do any more.
    """
    key = id(owner)
    _living[key] = (
        weakref.ref(owner, lambda _: _living.pop(key, None)),
        close,
        in_child,
        abort,
    )


def never_destroy(owner: Any) -> None:
    """Leave ``owner``, and what it holds, in memory until the process is gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def is_inherited(owner: Any) -> bool:
    """Whether ``owner`` belongs to the process that this one was forked from."""
    return id(owner) in _inherited


def _close_all() -> None:
    with contextlib.ExitStack() as newest_first:  # and all of them, whatever one raises
        living = [(owner(), close, abort) for owner, close, _, abort in list(_living.values())]
        for owner, close, _ in living:
            if owner is not None:
                newest_first.callback(close, owner)
        # Python notes what it has printed a traceback of; an interactive one goes on after it.
        if getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"):
            for owner, _, abort in living:
                if owner is not None and abort is not None:
                    newest_first.callback(abort, owner)


def _leave_to_parent() -> None:
    for key, (owner, _, in_child, _) in list(_living.items()):
        if (alive := owner()) is None:
            continue
        if in_child is not None:
            in_child(alive)
            continue
        never_destroy(alive)  # so that its id stays its own
        _inherited.add(key)
        del _living[key]


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
