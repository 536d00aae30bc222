"""Python's own things that a process has once: streams, warnings, variables; a rank has its own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

from pyringar.cluster.ranks import current
from pyringar.cluster.state import Environment

__all__ = ["PARTS", "refill", "replace", "take_environment"]

# What warnings.catch_warnings sets, and puts back, besides the filters.
_WARNINGS = ("showwarning", "_showwarnmsg_impl")


def _write_streams(saved: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = saved


def _read_warnings() -> list[Any]:
    filters: Any = warnings.filters
    return [filters, list(filters), *(getattr(warnings, name) for name in _WARNINGS)]


def _write_warnings(saved: list[Any]) -> None:
    module: Any = warnings
    filters, content, *others = saved
    module.filters = filters
    if filters != content:  # simplefilter() changes the list that is there
        filters[:] = content
    for name, value in zip(_WARNINGS, others, strict=True):
        setattr(module, name, value)
    # Or Python would go on as it last decided for a line.
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):  # until, and from, Python 3.14
        if hasattr(module, name):
            with getattr(module, "_lock", contextlib.nullcontext()):
                getattr(module, name)()
            break


# What a process has only once: how to read it, and how to set it.
PARTS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: (sys.stdout, sys.stderr), _write_streams),
    (_read_warnings, _write_warnings),
    (lambda: list(sys.argv), lambda argv: sys.argv.__setitem__(slice(None), argv)),
)


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute, until ``undo`` ends."""
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def refill(own: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Give a dictionary that others hold a new content."""
    if own != new:
        own.clear()
        own.update(new)


def take_environment(undo: contextlib.ExitStack) -> None:
    """Let ``os.environ`` be a rank's own, also of processes that a rank starts."""
    environ: Any = os.environ
    outside: dict[Any, Any] = environ._data
    mine = Environment(outside, lambda: getattr(current(), "environment", None))

    def put_back() -> None:
        environ._data = outside
        for key in mine.changed:  # Python has set the process's, too
            os.putenv(key, outside[key]) if key in outside else os.unsetenv(key)

    undo.callback(put_back)
    environ._data = mine
    own = subprocess.Popen.__init__
    names = list(inspect.signature(own).parameters)[1:]

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if current() is not None and dict(zip(names, args, strict=False)).get("env") is None:
            kwargs["env"] = kwargs.get("env") or dict(os.environ)
        own(self, *args, **kwargs)

    replace(undo, subprocess.Popen, "__init__", init)
