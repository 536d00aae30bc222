"""``pyringar check``: grade somebody's allreduce, property by property."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pyringar.errors import ArgumentError
from pyringar.grading.grader import check_allreduce

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Grade an allreduce function, property by property. This runs the code that it
grades, in this process and with your rights: its file is imported, its
function called. Grade a stranger's in a container or as a user of its own."""
_EPILOG = """\
FUNCTION is called with a list of tensors, one per rank, like the book's allreduce(data), and must
leave their sum in every one of them. Exit status: 0 all required properties pass, 1 one fails,
2 the function cannot be loaded or a device is not there.

examples:
  pyringar check solution.py:allreduce
  pyringar check pyringar:allreduce --devices cpu,cpu,cpu,cpu
"""


class _CannotLoadError(Exception):
    """The target names no function that can be called; says why."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check`` to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="run an allreduce function and grade it, property by property",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", metavar="MODULE:FUNCTION", help="or path/to/file.py:FUNCTION; what to grade"
    )
    parser.add_argument(
        "--devices",
        metavar="LIST",
        type=lambda text: text.split(","),
        help="comma-separated, one per rank (default: 8 CPU ranks)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the function, grade it, print the report."""
    # What the graded code prints must not end up inside the report.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            report = check_allreduce(_load(args.target), args.devices)
        except (_CannotLoadError, ArgumentError) as error:
            print(f"pyringar check: {error}", file=sys.stderr)
            return 2
    if args.json:
        print(json.dumps({"target": args.target, **report.as_dict()}, indent=2))
    else:
        print(report)
    return 0 if report.passed else 1


def _load(target: str) -> Callable[..., Any]:
    """Return the function that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` names."""
    where, colon, path = target.rpartition(":")
    if not colon or not where or not path:
        raise _CannotLoadError(
            f"{target!r} is not MODULE:FUNCTION, such as solution:allreduce, nor FILE.py:FUNCTION"
        )
    found: Any = _import(where)
    for name in path.split("."):
        if not hasattr(found, name):
            names = [n for n in dir(found) if n[0] != "_" and callable(getattr(found, n))]
            callables = ", ".join(names) or "nothing"
            raise _CannotLoadError(f"{where} has no {path!r}; what can be called: {callables}")
        found = getattr(found, name)
    if not callable(found):
        raise _CannotLoadError(f"{target} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _import(where: str) -> ModuleType:
    """Import a module by name (the current directory counts) or from a file."""
    is_file = where.endswith(".py") or os.sep in where
    if is_file and not Path(where).is_file():
        raise _CannotLoadError(f"there is no file {where!r} (current directory: {Path.cwd()})")
    if is_file and not where.endswith(".py"):
        raise _CannotLoadError(f"{where!r} is not a Python file (.py)")
    sys.path.insert(0, str(Path(where).resolve().parent) if is_file else str(Path.cwd()))
    try:
        return _import_file(Path(where)) if is_file else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == where.split(".")[0]:
            raise _CannotLoadError(
                f"there is no module {where!r} in the current directory or installed"
            ) from error
        # The importer's own frames say nothing; a SyntaxError brings its file and line itself.
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename[0] != "<"]
        at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
        raise _CannotLoadError(
            f"importing {where} failed with {type(error).__name__}: {error}{at}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    # Not under a name that is taken: a solution may be called torch.py.
    name = path.stem if path.stem not in sys.modules else f"checked_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no importer takes {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
