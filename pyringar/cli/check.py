"""``pyringar check``: grade an allreduce function, or a folder of solutions."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyringar.cli.parser import add_json_option, add_options, check_output_path
from pyringar.cli.status_line import STATUS, duration
from pyringar.errors import ArgumentError

# Not imported for `--help`: the grader imports torch, which takes seconds.
if TYPE_CHECKING:
    from pyringar.grading.marks import MarkedSolution
    from pyringar.grading.solution import Solution

_DESCRIPTION = """\
Grade the allreduce functions of a class, property by property. This runs the
code that it grades, with your rights, each solution in a separate process.
Grade the code of strangers in a container: docs/grading.md has the command."""
_EPILOG = """\
FUNCTION is called with a list of tensors, one per rank, like the book's
allreduce(data), and must write their sum into every tensor. A DIR stands for
all *.py and *.ipynb in it and in its folders, except hidden files and folders,
and modules without FUNCTION that other files of their folder import.
The code cells of a notebook run in order, without lines that begin with % or !.

Exit status: 0 all required properties pass, 1 one fails, 2 wrong arguments
(a missing device or file, or a single solution that cannot be loaded; with
--csv or --feedback it has 0 marks instead), 130 interrupted.

examples:
  pyringar check solution.py:allreduce
  pyringar check pyringar:allreduce --devices cpu,cpu,cpu,cpu
  pyringar check submissions/ --csv marks.csv
  pyringar check submissions/ --csv marks.csv --resume
  pyringar check submissions/ --feedback reports/
"""
_DEFAULT_RANKS = 8
_MIN_NAME = 32
_MAX_NAMES = 5  # of ignored files
_MAX_SHOWN_BYTES = 1 << 16  # maximum output that is shown per solution

_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "function": (
        "the function of a FILE or DIR without :FUNCTION",
        {"metavar": "NAME", "default": "allreduce"},
    ),
    "devices": (
        f"comma-separated, one per rank (default: {_DEFAULT_RANKS} CPU ranks)",
        {"metavar": "LIST", "type": lambda text: text.split(",")},
    ),
    "timeout": (
        "limit of the import, and of all calls of a property",
        {"metavar": "SECONDS", "type": float, "default": 10},
    ),
    "csv": (
        "write a row per solution, to FILE.csv.part until all are graded",
        {"metavar": "FILE"},
    ),
    "feedback": (
        "write the report of each solution to a text file in DIR",
        {"metavar": "DIR"},
    ),
    "resume": (
        "keep the rows of the CSV file and grade the other solutions",
        {"action": "store_true"},
    ),
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
        help="FILE.py, FILE.ipynb, FILE.py:FUNCTION, MODULE:FUNCTION or DIR",
    )
    parser.set_defaults(devices=["cpu"] * _DEFAULT_RANKS)
    add_options(parser, _OPTIONS)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if not (args.timeout > 0 and math.isfinite(args.timeout)):
        raise ArgumentError(f"--timeout is {args.timeout:g}, expected a positive number")
    if args.resume and (args.json or not args.csv):
        raise ArgumentError("--resume needs --csv, and does not go with --json")
    targets = _targets(args)
    path = check_output_path("--csv", args.csv, ".csv") if args.csv else None
    if args.feedback is not None:
        _make_folder(args.feedback)
    if path or args.feedback or len(args.targets) > 1 or os.path.isdir(args.targets[0]):
        return _grade_class(targets, path, args)
    return _grade_one(targets[0], args)


def _make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        words = f"--feedback is '{path}', but this folder cannot be made: {error.strerror}"
        raise ArgumentError(words) from error


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
    from pyringar.grading.marks import REQUIRED, MarksFile
    from pyringar.grading.remote import check_worker_devices
    from pyringar.grading.solution import printable

    file = MarksFile(path, args.resume) if path else None
    check_worker_devices(args.devices, args.timeout)
    stream = sys.stderr if args.json else sys.stdout
    say = functools.partial(print, file=stream, flush=True)
    width = shutil.get_terminal_size().columns
    left = [target for target in targets if not (file and file.has(target))]
    if file:
        file.begin()
        if file.rows:
            num = len(file.rows)
            say(f"{printable(str(path))} has {num} solution{'s' * (num != 1)} already")
    longest = max(len("solution"), *(len(printable(t.where)) for t in targets))
    name_width = min(longest, max(_MIN_NAME, width * 2 // 5))
    say(f"{'solution':<{name_width}}    marks  first look at")
    functions: dict[str, set[str]] = defaultdict(set)  # of each file
    for target in targets:
        functions[target.where].add(target.function)
    marked: list[MarkedSolution] = []
    begin_s = time.monotonic()
    try:
        for target in left:
            progress = _progress(len(marked), len(left), begin_s)
            with STATUS.elapsed(f"{progress}; grading {printable(target.where)}"):
                one = _marked(target, args)
            marked.append(one)
            if args.feedback:
                is_alone = functions[target.where] == {target.function}
                name = target.where if is_alone else str(target).replace(":", ".")
                one.write_feedback(args.feedback, name)
            say(one.line(width, name_width))
            if file:
                file.add(one)
    except BaseException:
        if file:
            num = len(file.rows)
            rest = f"has {num} row{'s' * (num != 1)}; go on with --resume"
            print(f"{printable(str(file.part))} {rest}", file=sys.stderr)
        raise
    num, num_passed = len(marked), sum(one.passed for one in marked)
    if file:
        file.complete()
        num, num_passed = len(file.rows), file.num_passed
    if args.json:
        solutions = [one.as_dict() for one in marked]
        print(json.dumps({"passed": num_passed == num, "solutions": solutions}, indent=2))
    rows = f"; {printable(str(path))} has a row for each" if path else ""
    say(
        f"\n{_not_installed(marked)}{num_passed} of {num} pass all {len(REQUIRED)} properties{rows}"
    )
    return 0 if num_passed == num else 1


def _marked(target: Solution, args: argparse.Namespace) -> MarkedSolution:
    from pyringar.grading.marks import MarkedSolution
    from pyringar.grading.remote import grade
    from pyringar.grading.solution import CannotLoadError

    try:
        return MarkedSolution(target, grade(target, args.devices, args.timeout))
    except CannotLoadError as error:
        return MarkedSolution(target, None, str(error))


def _not_installed(marked: list[MarkedSolution]) -> str:
    """Return a line about the modules that solutions import and that are not installed."""
    nums = Counter(name for one in marked for name in sorted(one.missing_modules))
    texts = [f"{name} ({n} solution{'s' * (n != 1)})" for name, n in nums.most_common()]
    return f"not installed here: {', '.join(texts)}\n" if texts else ""


def _progress(done: int, total: int, begin_s: float) -> str:
    text = f"{done} of {total} done"
    if not done:
        return text
    left_s = (time.monotonic() - begin_s) / done * (total - done)
    return f"{text}, about {duration(left_s)} left"


def shower(prog: str) -> Callable[[bytes], None]:
    left = _MAX_SHOWN_BYTES

    def show(text: bytes) -> None:
        nonlocal left
        if left <= 0:
            return
        sys.stderr.write(text[:left].decode(errors="backslashreplace"))
        left -= len(text)
        if left <= 0:
            sys.stderr.write(f"\n{prog}: the rest of its output is not shown\n")

    return show


def _targets(args: argparse.Namespace) -> list[Solution]:
    """Read all files before the first solution runs, because a solution may change files."""
    targets: list[Solution] = []
    for text in args.targets:
        if os.path.isdir(text):
            targets += _folder_targets(text, args.function)
        else:
            targets.append(target_of(text, args.function))
    return targets


def _folder_targets(folder: str, function: str) -> list[Solution]:
    """Read the solutions in a folder and its folders; name the other files on stderr."""
    from pyringar.grading.source_code import helpers, is_code_file

    files = sorted(_files(folder))
    others = [file for file in files if not is_code_file(file)]
    read = {file: _file_target(file, function) for file in files if is_code_file(file)}
    if not read:
        raise ArgumentError(f"there is no *.py or *.ipynb in the folder '{folder}'")
    targets: list[Solution] = []
    for _, names in itertools.groupby(sorted(read, key=os.path.dirname), os.path.dirname):
        found = helpers({name: read[name].source or b"" for name in names}, function)
        for name, its_helpers in found.items():
            sources = tuple((helper, read[helper].source or b"") for helper in sorted(its_helpers))
            targets.append(dataclasses.replace(read[name], helpers=sources))
    targets.sort(key=lambda target: target.where)
    imported = sorted(read.keys() - {target.where for target in targets})
    _name_ignored(folder, others, imported)
    return targets


def _name_ignored(folder: str, others: list[str], imported: list[str]) -> None:
    from pyringar.grading.solution import printable

    def some(files: list[str]) -> str:
        names = [printable(os.path.relpath(file, folder)) for file in files[:_MAX_NAMES]]
        return ", ".join([*names, "..."] if len(files) > _MAX_NAMES else names)

    num = len(others)
    are = "files that are" if num != 1 else "file that is"
    texts = [f"{num} {are} no .py or .ipynb: {some(others)}"] if others else []
    texts += [f"imported by other files: {some(imported)}"] if imported else []
    if texts:
        print(f"ignored: {'; '.join(texts)}", file=sys.stderr)


def _files(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise ArgumentError(f"the folder '{error.filename}' cannot be read: {error.strerror}")

    for where, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        for name in files:
            if name[0] != ".":
                yield os.path.normpath(os.path.join(where, name))


def target_of(text: str, function: str) -> Solution:
    """Return the solution that a text names; ``function`` is for a text without ``:FUNCTION``."""
    from pyringar.grading.solution import Solution
    from pyringar.grading.source_code import is_code_file

    where, _, name = text.rpartition(":")
    if os.path.isfile(text) or is_code_file(text):
        where, name = text, function
    elif not where or not name:
        raise ArgumentError(
            f"{text!r} is not MODULE:FUNCTION, such as solution:allreduce, nor FILE.py:FUNCTION, "
            "nor a folder"
        )
    if not is_code_file(where) and os.sep not in where and not os.path.isfile(where):
        return Solution(where, name)
    if not os.path.isfile(where):
        raise ArgumentError(f"there is no file {where!r} (current directory: {Path.cwd()})")
    if not is_code_file(where):
        raise ArgumentError(f"{where!r} is not a Python file (.py) or a notebook (.ipynb)")
    return _file_target(where, name)


def _file_target(path: str, function: str) -> Solution:
    from pyringar.grading.solution import Solution

    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe might never end
        return Solution(path, function, trouble="it is no regular file")
    try:
        return Solution(path, function, Path(path).read_bytes())
    except OSError as error:
        return Solution(path, function, trouble=error.strerror or str(error))
