"""``pyringar check``: grade an allreduce, or a class of them, property by property."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyringar.cli.parser import add_json_option, add_options, check_output_path
from pyringar.errors import ArgumentError

# The grader imports torch, for which `--help` need not wait.
if TYPE_CHECKING:
    from pyringar.grading.solution import Solution

_DESCRIPTION = """\
Grade an allreduce function, or those of a class, property by property. This
runs the code that it grades, with your rights, each solution in a process of
its own. Grade a stranger's in a container or as a user of its own."""
_EPILOG = """\
FUNCTION is called with a list of tensors, one per rank, like the book's
allreduce(data), and must leave their sum in every one of them. A DIR stands
for all *.py in it and in its folders, except hidden files and folders.

Exit status: 0 all required properties pass, 1 one fails, 2 wrong arguments
(a device or a file that is not there; the only solution cannot be loaded and
there is no --csv, in which that is a row with 0 marks).

examples:
  pyringar check solution.py:allreduce
  pyringar check pyringar:allreduce --devices cpu,cpu,cpu,cpu
  pyringar check submissions/ --csv marks.csv
"""
_DEFAULT_RANKS = 8
_WIDTH = 80
_MAX_NAME = 32
_MAX_SHOWN_BYTES = 1 << 16  # of what a solution prints

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "function": (
        "the function in a FILE or DIR that names none",
        {"metavar": "NAME", "default": "allreduce"},
    ),
    "devices": (
        f"comma-separated, one per rank (default: {_DEFAULT_RANKS} CPU ranks)",
        {"metavar": "LIST", "type": lambda text: text.split(",")},
    ),
    "timeout": (
        "for the import, and for all calls of a property",
        {"metavar": "SECONDS", "type": float, "default": 10},
    ),
    "csv": ("write a row per solution to FILE.csv", {"metavar": "FILE"}),
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="grade an allreduce function, or a class of them, property by property",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="+",
        help="FILE.py, FILE.py:FUNCTION, MODULE:FUNCTION or DIR; what to grade",
    )
    parser.set_defaults(devices=["cpu"] * _DEFAULT_RANKS)
    add_options(parser, _OPTIONS)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if not (args.timeout > 0 and math.isfinite(args.timeout)):
        raise ArgumentError(f"--timeout is {args.timeout:g}, expected a positive number")
    targets = _targets(args)
    path = check_output_path("--csv", args.csv, ".csv") if args.csv else None
    if path or len(args.targets) > 1 or os.path.isdir(args.targets[0]):
        return _grade_class(targets, path, args)
    return _grade_one(targets[0], args)


def _grade_one(target: Solution, args: argparse.Namespace) -> int:
    from pyringar.grading.remote import grade
    from pyringar.grading.solution import CannotLoadError

    try:
        report = grade(target, args.devices, args.timeout, shower("pyringar check"))
    except CannotLoadError as error:
        raise ArgumentError(f"nothing was graded: {error}") from error
    if args.json:
        print(json.dumps({"target": str(target), **report.as_dict()}, indent=2))
    else:
        print(report)
    return 0 if report.passed else 1


def _grade_class(targets: list[Solution], path: Path | None, args: argparse.Namespace) -> int:
    from pyringar.grading.marks import REQUIRED, MarkedSolution, write_csv
    from pyringar.grading.remote import grade
    from pyringar.grading.solution import CannotLoadError, printable

    stream = sys.stderr if args.json else sys.stdout
    say = functools.partial(print, end="", file=stream, flush=True)
    name_width = min(_MAX_NAME, max(len("solution"), *(len(printable(t.where)) for t in targets)))
    say(f"{'solution':<{name_width}}  marks  first look at\n")
    marked: list[MarkedSolution] = []
    for target in targets:
        say(MarkedSolution(target, None).columns(_WIDTH, name_width)[0])
        try:
            one = MarkedSolution(target, grade(target, args.devices, args.timeout))
        except CannotLoadError as error:
            one = MarkedSolution(target, None, str(error))
        except KeyboardInterrupt:
            say("\n")
            raise
        marked.append(one)
        say(one.columns(_WIDTH, name_width)[1].rstrip() + "\n")
    num_passed = sum(one.passed for one in marked)
    all_passed = num_passed == len(marked)
    rows = ""
    if path:
        write_csv(path, marked)
        rows = f"; {printable(str(path))} has a row for each"
    if args.json:
        solutions = [one.as_dict() for one in marked]
        print(json.dumps({"passed": all_passed, "solutions": solutions}, indent=2))
    say(f"\n{num_passed} of {len(marked)} pass all {len(REQUIRED)} properties{rows}\n")
    return 0 if all_passed else 1


def shower(prog: str) -> Callable[[bytes], None]:
    left = _MAX_SHOWN_BYTES

    def show(text: bytes) -> None:
        nonlocal left
        if left <= 0:
            return
        sys.stderr.write(text[:left].decode(errors="backslashreplace"))
        left -= len(text)
        if left <= 0:
            sys.stderr.write(f"\n{prog}: the rest of what it prints is not shown\n")

    return show


def _targets(args: argparse.Namespace) -> list[Solution]:
    """Read all files now: a solution may write into the file of the next one."""
    targets: list[Solution] = []
    for text in args.targets:
        if os.path.isdir(text):
            files = sorted(_python_files(text))
            if not files:
                raise ArgumentError(f"there is no *.py in the folder '{text}'")
            targets += [_file_target(file, args.function) for file in files]
        else:
            targets.append(target_of(text, args.function))
    return targets


def _python_files(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise ArgumentError(f"the folder '{error.filename}' cannot be read: {error.strerror}")

    for where, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        for name in files:
            if name.endswith(".py") and name[0] != ".":
                yield os.path.normpath(os.path.join(where, name))


def target_of(text: str, function: str) -> Solution:
    """Return the target that a text names; ``function`` is for a text without a function."""
    from pyringar.grading.solution import Solution

    where, _, name = text.rpartition(":")
    if os.path.isfile(text) or text.endswith(".py"):
        where, name = text, function
    elif not where or not name:
        raise ArgumentError(
            f"{text!r} is not MODULE:FUNCTION, such as solution:allreduce, nor FILE.py:FUNCTION, "
            "nor a folder"
        )
    if not where.endswith(".py") and os.sep not in where and not os.path.isfile(where):
        return Solution(where, name)
    if not os.path.isfile(where):
        raise ArgumentError(f"there is no file {where!r} (current directory: {Path.cwd()})")
    if not where.endswith(".py"):
        raise ArgumentError(f"{where!r} is not a Python file (.py)")
    return _file_target(where, name)


def _file_target(path: str, function: str) -> Solution:
    from pyringar.grading.solution import Solution

    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe might never end
        return Solution(path, function, trouble="it is no regular file")
    try:
        return Solution(path, function, Path(path).read_bytes())
    except OSError as error:
        return Solution(path, function, trouble=error.strerror or str(error))
