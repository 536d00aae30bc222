"""Load the graded function, and name the line of its file where an error arose."""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import linecache
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from pyringar.grading.source_code import code_parts, is_code_file, noted_imports

_MAX_WORDS = 500  # maximum characters of an exception's message
_STUBS = ("display", "get_ipython")
_PART_OF_LIMIT = 0.8  # fraction of the timeout that the import may take


class CannotLoadError(Exception):
    """The solution has no function that can be called."""


@dataclass(frozen=True)
class Solution:
    """The function to grade, and the file or module that defines it.

    ``where`` is a module's name, or a file that ends in ``.py`` or ``.ipynb``. ``function`` is a
    name in it, such as ``Ring.run``. ``source``: the content of the file, read before any solution
    runs. ``trouble``: the reason why the file could not be read. ``helpers``: the path and content
    of every module of the same folder that it imports and that is not graded.
    """

    where: str
    function: str
    source: bytes | None = None
    trouble: str = ""
    helpers: tuple[tuple[str, bytes], ...] = ()

    @property
    def is_file(self) -> bool:
        return is_code_file(self.where)

    @property
    def imports(self) -> list[str]:
        """Names of pyringar and torch.distributed in the code and its helper modules."""
        files = [(self.where, self.source or b""), *self.helpers]
        return sorted({name for file in files for name in noted_imports(*file)})

    def __str__(self) -> str:
        return f"{self.where}:{self.function}"


def function_name(fn: Callable[..., Any]) -> str:
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    module = getattr(fn, "__module__", None)
    return f"{module}.{name}" if module else name


def printable(text: str) -> str:
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def load(solution: Solution, import_limit_s: float) -> tuple[Callable[..., Any], str]:
    """Return the function, and a remark if its file failed after the function was defined."""
    if solution.trouble:
        raise CannotLoadError(f"{solution.where} cannot be read: {solution.trouble}")
    found, error = _import(solution, import_limit_s)
    for name in solution.function.split("."):
        if not hasattr(found, name):
            raise CannotLoadError(
                f"importing {solution.where} failed with {error}"
                if error
                else f"{solution.where} has no {solution.function!r}; it has: "
                f"{', '.join(_callables(found)) or 'no function'}"
            )
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise CannotLoadError(f"{solution} is a value of type {kind}, not a function")
    function: Callable[..., Any] = found
    return function, f"another line failed: {error}" if error else ""


def _callables(module: Any) -> list[str]:
    """Return the callables defined in a module; if there are none, all callables in it."""
    names = [n for n in dir(module) if n[0] != "_" and callable(getattr(module, n, None))]
    home = getattr(module, "__name__", None)
    own = [n for n in names if getattr(getattr(module, n), "__module__", None) == home]
    return own or [n for n in names if n not in _STUBS]


def _import(solution: Solution, limit_s: float) -> tuple[Any, str]:
    """Return the module, and the first error while its file ran, or ""."""
    where = solution.where
    folder = Path(where).resolve().parent if solution.is_file else Path.cwd()
    sys.path.insert(0, str(folder))
    with _import_limit(limit_s):
        if solution.is_file:
            return _run_file(solution)
        try:
            return importlib.import_module(where), ""
        except BaseException as error:  # also SystemExit of sys.exit()
            if isinstance(error, ModuleNotFoundError) and error.name == where.split(".")[0]:
                words = f"there is no module {where!r} in the current directory or installed"
                raise CannotLoadError(words) from error
            words = _import_words(error, None)
            raise CannotLoadError(f"importing {where} failed with {words}") from error


def _run_file(solution: Solution) -> tuple[ModuleType, str]:
    """Run a file or a notebook; continue after a failed statement."""
    path = Path(solution.where).resolve()
    # A solution named torch.py must not replace the module torch.
    name = path.stem if path.stem not in sys.modules else f"checked_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__dict__.update(get_ipython=_IPythonStub, display=_IPythonStub())
    sys.modules[name] = module  # dataclasses look up their module
    source = path.read_bytes() if solution.source is None else solution.source
    try:
        parts = code_parts(str(path), source)
    except ValueError as error:
        raise CannotLoadError(f"{solution.where} cannot be read: {error}") from error
    first_error = ""
    for part, code in parts:
        if isinstance(code, str):  # tracebacks and inspect.getsource read code from linecache
            lines = code.splitlines(keepends=True)
            linecache.cache[part] = (len(code), None, lines, part)
        for statement in _statements(code, part):
            try:
                # Annotations are not evaluated: they may name a module that is not installed.
                flags = __future__.annotations.compiler_flag
                exec(compile(statement, part, "exec", flags, dont_inherit=True), module.__dict__)
            except BaseException as error:  # also SystemExit of sys.exit()
                first_error = first_error or _import_words(error, str(path))
                if isinstance(error, ImportTimeoutError):
                    return module, first_error
    return module, first_error


def _statements(code: str | bytes, name: str) -> list[ast.Module | str | bytes]:
    """Return the top-level statements; all code if unreadable."""
    try:
        return [ast.Module([node], []) for node in ast.parse(code, name).body]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [code]


class _IPythonStub:
    """Replaces IPython's shell: every method exists and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self

    def __call__(self, *args: object, **options: object) -> None: ...


class ImportTimeoutError(BaseException):
    """The file ran too long. A BaseException, so `except Exception` does not catch it."""


@contextlib.contextmanager
def _import_limit(seconds: float) -> Iterator[None]:
    """Raise ImportTimeoutError in the file before the grader kills the process.

    So the function is graded even if a later cell of its notebook trains a network.
    """
    seconds *= _PART_OF_LIMIT

    def raise_timeout(number: int, frame: object) -> NoReturn:
        raise ImportTimeoutError(f"no end within {seconds:g} s")

    signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _import_words(error: BaseException, own_file: str | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    return error_words(error, own_file)


def error_words(error: BaseException, own_file: str | None) -> str:
    """Return ``KIND: MESSAGE at FILE:LINE``; prefer a line in ``own_file`` or its cells."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename]
    own = [f for f in frames if own_file and f.filename.startswith(own_file)]
    # Omit frames of the grader and of the import system.
    here = os.path.dirname(__file__)
    others = [f for f in frames if f.filename[0] != "<" and os.path.dirname(f.filename) != here]
    at = (own or others)[-1:]
    where = f" at {at[0].filename}:{at[0].lineno}" if at else ""
    message = f": {str(error)[:_MAX_WORDS]}" if str(error) else ""
    return f"{type(error).__name__}{message}{where}"


def call_words(error: BaseException, fn: Callable[..., Any]) -> str:
    """Return `error_words` for a failed call; for wrong arguments with the line of ``def``."""
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    if not isinstance(code, CodeType):
        return error_words(error, None)
    frames = traceback.extract_tb(error.__traceback__)
    words = error_words(error, code.co_filename)
    if isinstance(error, TypeError) and len(frames) == 1:
        return f"{words} (called as fn(data)) at {code.co_filename}:{code.co_firstlineno}"
    return words
