"""Load the function to be graded, and name the line of its file where an error arose."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_MAX_WORDS = 500  # of an exception's message


class CannotLoadError(Exception):
    """The target names no callable function."""


@dataclass(frozen=True)
class Solution:
    """A function to grade.

    ``where`` is a file that ends in ``.py``, or a module's name. ``function`` is the name in there,
    such as ``Ring.run``. ``source``: the file's content before the first solution ran. ``trouble``:
    why the file could not be read.
    """

    where: str
    function: str
    source: bytes | None = None
    trouble: str = ""

    @property
    def is_file(self) -> bool:
        return self.where.endswith(".py")

    def __str__(self) -> str:
        return f"{self.where}:{self.function}"


def function_name(fn: Callable[..., Any]) -> str:
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    module = getattr(fn, "__module__", None)
    return f"{module}.{name}" if module else name


def printable(text: str) -> str:
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def load(target: Solution) -> Callable[..., Any]:
    if target.trouble:
        raise CannotLoadError(f"{target.where} cannot be read: {target.trouble}")
    found: Any = _import(target)
    for name in target.function.split("."):
        if not hasattr(found, name):
            raise CannotLoadError(
                f"{target.where} has no {target.function!r}; what can be called: "
                f"{', '.join(_callables(found)) or 'nothing'}"
            )
        found = getattr(found, name)
    if not callable(found):
        raise CannotLoadError(f"{target} is a value of type {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _callables(module: Any) -> list[str]:
    """Return the callables that a module defines, or all of its callables if it defines none."""
    names = [n for n in dir(module) if n[0] != "_" and callable(getattr(module, n, None))]
    home = getattr(module, "__name__", None)
    own = [n for n in names if getattr(getattr(module, n), "__module__", None) == home]
    return own or names


def _import(target: Solution) -> ModuleType:
    where = target.where
    folder = Path(where).resolve().parent if target.is_file else Path.cwd()
    sys.path.insert(0, str(folder))
    try:
        return _import_file(target) if target.is_file else importlib.import_module(where)
    except BaseException as error:  # sys.exit() in a solution, too
        if isinstance(error, ModuleNotFoundError) and error.name == where.split(".")[0]:
            raise CannotLoadError(
                f"there is no module {where!r} in the current directory or installed"
            ) from error
        if isinstance(error, SyntaxError) and error.filename:
            words = f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
            raise CannotLoadError(f"importing {where} failed with {words}") from error
        own = str(Path(where).resolve()) if target.is_file else None
        words = error_words(error, own)
        raise CannotLoadError(f"importing {where} failed with {words}") from error


def _import_file(target: Solution) -> ModuleType:
    path = Path(target.where).resolve()
    # Not under a name that is taken: a solution may be called torch.py.
    name = path.stem if path.stem not in sys.modules else f"checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"no importer takes {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    source = path.read_bytes() if target.source is None else target.source
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def error_words(error: BaseException, own_file: str | None) -> str:
    """Return ``KIND: MESSAGE at FILE:LINE``, with the line in ``own_file`` if it is known."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename]
    own = [f for f in frames if f.filename == own_file]
    # The grader's own frames and the importer's say nothing.
    here = os.path.dirname(__file__)
    others = [f for f in frames if f.filename[0] != "<" and os.path.dirname(f.filename) != here]
    at = (own or others)[-1:]
    where = f" at {at[0].filename}:{at[0].lineno}" if at else ""
    message = f": {str(error)[:_MAX_WORDS]}" if str(error) else ""
    return f"{type(error).__name__}{message}{where}"


def call_words(error: BaseException, fn: Callable[..., Any]) -> str:
    """Return `error_words` of a call; the signature's line for an error before the body."""
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    if not isinstance(code, CodeType):
        return error_words(error, None)
    frames = traceback.extract_tb(error.__traceback__)
    words = error_words(error, code.co_filename)
    if isinstance(error, TypeError) and len(frames) == 1:
        return f"{words} (called as fn(data)) at {code.co_filename}:{code.co_firstlineno}"
    return words
