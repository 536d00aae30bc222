"""Run a script or a module as the ``__main__`` of each rank."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pyringar.cluster.rank_threads import current
from pyringar.errors import ArgumentError


class _MainOfRank(ModuleType):
    """Delegates to the current rank's ``__main__``; outside ranks to the process's ``__main__``."""

    def __init__(self, outside: ModuleType) -> None:
        object.__setattr__(self, "_of_rank", lambda: getattr(current(), "main", None) or outside)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_of_rank")(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_of_rank")(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_of_rank")(), name)


@contextlib.contextmanager
def as_program(target: str, argv: list[str], *, is_module: bool) -> Iterator[Callable[[], None]]:
    """Return a function that runs a script as ``__main__`` of the calling rank.

    ``target`` is a file or the name of a module. While the context is open, ``sys.argv`` and
    ``sys.path`` are those of the script. ArgumentError if it does not exist.
    """
    spec = _spec_of(target) if is_module else None
    path = os.path.abspath(target) if spec is None else str(spec.origin)
    source = _source_of(path, target)
    compile(source, path, "exec", dont_inherit=True)  # raise a SyntaxError here, not on every rank
    folder = os.getcwd() if is_module else os.path.dirname(path)

    def program() -> None:
        main = ModuleType("__main__")
        main.__file__ = path
        main.__spec__ = spec
        main.__package__ = None if spec is None else spec.parent
        vars(main)["__builtins__"] = __builtins__
        rank = current()
        if rank is None:  # this rank is a process
            sys.modules["__main__"] = main
        else:
            rank.main = main
        # Compile per rank: torch.compile stores its results on the code object.
        exec(compile(source, path, "exec", dont_inherit=True), vars(main))

    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [target if spec is None else path, *argv]
    sys.path.insert(0, folder)
    sys.modules["__main__"] = _MainOfRank(before[2])
    try:
        yield program
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def _source_of(path: str, name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ArgumentError(f"script is '{name}', expected a Python file: {why}") from error


def _spec_of(name: str) -> ModuleSpec:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        spec = None
    finally:
        del sys.path[0]
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ArgumentError(f"script is '{name}', expected a module that can be run")
    return spec
