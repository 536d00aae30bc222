"""Python's own things that a process has once: streams, warnings, variables; a rank has its own."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import inspect
import logging
import operator
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from pyringar.cluster.ranks import Rank, current
from pyringar.cluster.state import Environment

__all__ = [
    "PARTS",
    "refill",
    "replace",
    "start_waited_for_threads",
    "take_environment",
    "take_loggers",
    "take_threads",
]

_posixsubprocess: Any = importlib.import_module("_posixsubprocess")
_ENV = 5  # the place of the environment among fork_exec's arguments
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


# Loggers that have handlers or filters, or that a rank has set up, as they were before the run.
_loggers: dict[logging.Logger, Any] = {}


_settings_of = operator.itemgetter("level", "propagate", "disabled", "handlers", "filters")


def _copied(settings: Any) -> Any:
    *flags, handlers, filters = settings
    return (*flags, list(handlers), list(filters))


def _read_logging() -> Any:
    module: Any = logging
    changed = {
        logger: _copied(settings)
        for logger, before in list(_loggers.items())
        if (settings := _settings_of(vars(logger))) != before
    }
    disabled = module.root.manager.disable
    return disabled, module.getLogRecordFactory(), module._handlerList[:], changed


def _write_logging(saved: Any) -> None:
    module: Any = logging
    disabled, factory, module._handlerList[:], changed = saved
    if disabled != module.root.manager.disable:
        module.disable(disabled)
    module.setLogRecordFactory(factory)
    for logger, before in list(_loggers.items()):
        settings = changed.get(logger, before)
        if settings != _settings_of(vars(logger)):
            level, logger.propagate, logger.disabled, logger.handlers[:], logger.filters[:] = (
                settings
            )
            logger.setLevel(level)


# What a process has only once: how to read it, and how to set it.
PARTS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: (sys.stdout, sys.stderr), _write_streams),
    (_read_warnings, _write_warnings),
    (_read_logging, _write_logging),
    (lambda: builtins.print, lambda function: setattr(builtins, "print", function)),
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


def take_loggers(undo: contextlib.ExitStack) -> None:
    """Let what is set up of loggers be a rank's own."""
    _loggers.clear()
    # Their lists may be cleared in place, which nothing notes; but for torch's, some forty: to look
    # at these in every turn takes as long as all the rest.
    for name, logger in {"": logging.root, **logging.root.manager.loggerDict}.items():
        if isinstance(logger, logging.PlaceHolder) or name.startswith(("torch", "c10d")):
            continue
        if logger.handlers or logger.filters:
            _loggers[logger] = _copied(_settings_of(vars(logger)))

    def note(logger: Any) -> None:
        if current() is not None and logger not in _loggers and isinstance(logger, logging.Logger):
            _loggers[logger] = _copied(_settings_of(vars(logger)))

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name in vars(self):  # or it is being made
            note(self)
        object.__setattr__(self, name, value)

    undo.callback(delattr, logging.Logger, "__setattr__")
    cast("Any", logging.Logger).__setattr__ = set_attribute
    for owner, name in (
        *((logging.Logger, "addHandler"), (logging.Logger, "removeHandler")),
        *((logging.Filterer, "addFilter"), (logging.Filterer, "removeFilter")),
    ):
        own = getattr(owner, name)

        @functools.wraps(own)
        def change(self: Any, value: Any, own: Callable[..., Any] = own) -> None:
            note(self)
            own(self, value)

        replace(undo, owner, name, change)


def start_waited_for_threads() -> None:
    """Have threads that this one starts be no daemons, unless the program says so."""
    thread: Any = threading.current_thread()
    thread._daemonic = False


def _is_of_pool(thread: Any) -> bool:
    """Return whether a thread is one of concurrent.futures': Python ends them by other means."""
    modules = type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", None)
    return any(str(module).startswith("concurrent.futures.") for module in modules)


def take_threads(
    undo: contextlib.ExitStack, as_rank: Callable[[Rank, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Let threads that a rank's program starts be the rank's, and what it gives to pools.

    Args:
        undo: Puts back.
        as_rank: Returns a function that runs as a rank's, whatever thread calls it.
    """
    own, own_submit = threading.Thread.start, ThreadPoolExecutor.submit

    def start(self: Any) -> None:
        rank = current()
        if rank is None or _is_of_pool(self):
            own(self)  # pools may outlive the rank, and are used by others
            return
        is_waited_for, run = not self.daemon, self.run

        def run_once() -> None:
            vars(self).pop("run")  # who calls it again means the thread's own
            self._daemonic = not is_waited_for
            as_rank(rank, run)()

        self.run = run_once
        self._daemonic = True  # the rank waits for it, and not the process, which could not end it
        own(self)
        if is_waited_for:
            rank.helpers = [*filter(threading.Thread.is_alive, rank.helpers), self]

    def submit(self: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        rank = current()
        if rank is None:
            return own_submit(self, fn, *args, **kwargs)
        future = own_submit(self, as_rank(rank, fn), *args, **kwargs)
        rank.tasks.add(future)
        future.add_done_callback(rank.tasks.discard)
        return future

    replace(undo, threading.Thread, "start", start)
    replace(undo, ThreadPoolExecutor, "submit", submit)


def take_environment(undo: contextlib.ExitStack) -> None:
    """Let ``os.environ`` be a rank's own, also of processes that a rank starts."""
    environ: Any = os.environ
    outside: dict[Any, Any] = environ._data
    mine = Environment(outside, lambda: getattr(current(), "environment", None))

    def put_back() -> None:
        environ._data = os.environb._data = outside  # type: ignore[attr-defined]
        for key in mine.changed:  # Python has set the process's, too
            os.putenv(key, outside[key]) if key in outside else os.unsetenv(key)

    undo.callback(put_back)
    environ._data = os.environb._data = mine  # type: ignore[attr-defined]
    own = subprocess.Popen.__init__
    names = list(inspect.signature(own).parameters)[1:]

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        if current() is not None and given.get("env") is None and "env" not in names[: len(args)]:
            kwargs["env"] = dict(os.environ)
        own(self, *args, **kwargs)

    replace(undo, subprocess.Popen, "__init__", init)
    fork_exec = _posixsubprocess.fork_exec

    def start(*args: Any) -> int:
        if current() is not None and args[_ENV] is None:
            variables = [os.fsencode(f"{key}={value}") for key, value in os.environ.items()]
            args = (*args[:_ENV], variables, *args[_ENV + 1 :])
        return int(fork_exec(*args))

    replace(undo, _posixsubprocess, "fork_exec", start)  # of multiprocessing
