"""The marks of many solutions: as a table, a CSV file and JSON."""

from __future__ import annotations

import csv
import io
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.errors import ArgumentError, RingarError
from pyringar.grading.checks import CHECKS
from pyringar.grading.grader import GradeReport
from pyringar.grading.solution import Solution, printable

REQUIRED = tuple(check.name for check in CHECKS if check.verdict_on_failure == "fail")
OUT_OF = 100
_LAST = ("first_look_at", "message", "imports", "remark")
_HEAD = ("file", "function", "marks", "out_of", "costs", *REQUIRED, *_LAST)
_MAX_MESSAGE = 500
_FEEDBACK_COLUMNS = 100
_NOT_INSTALLED = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True)
class MarkedSolution:
    """A solution and its report, or the reason why it could not be loaded."""

    target: Solution
    report: GradeReport | None
    trouble: str = ""

    @property
    def marks(self) -> int:
        return self.report.points if self.report else 0

    @property
    def passed(self) -> bool:
        return self.report is not None and self.report.passed

    @property
    def missing_modules(self) -> set[str]:
        """Names of modules that are not installed here."""
        remark = self.report.remark if self.report else ""
        return set(_NOT_INSTALLED.findall(f"{self.trouble} {remark}"))

    @property
    def feedback(self) -> str:
        """The full report, or the reason why there is none."""
        if self.report is not None:
            return f"{self.report.text(_FEEDBACK_COLUMNS)}\n"
        reason = textwrap.fill(f"nothing was graded: {printable(self.trouble)}", _FEEDBACK_COLUMNS)
        return f"{reason}\n\nmark: 0 of {OUT_OF}\n"

    def write_feedback(self, folder: str, name: str) -> None:
        """Write ``FOLDER/NAME.txt``; ``name`` may be a path, whose root and ``..`` are left out."""
        parts = [part for part in Path(f"{name}.txt").parts if part not in ("/", "..")]
        path = Path(folder, *parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.feedback, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise RingarError(
                f"--feedback is '{folder}': '{path}' could not be written: {error.strerror}"
            ) from error

    @property
    def first_look_at(self) -> tuple[str, str]:
        """Name and text of the first failed property; two empty texts if all pass."""
        if self.report is None:
            return "loading", self.trouble
        first = self.report.first_look_at
        return (first.name, first.detail) if first else ("", "")

    def as_dict(self) -> dict[str, Any]:
        exact = {"target": str(self.target), "marks": self.marks, "out_of": OUT_OF}
        exact["imports"] = self.target.imports
        if self.report is not None:
            return {**exact, **self.report.as_dict()}
        message = {"first_look_at": "loading", "error": self.trouble}
        exact["costs"] = {"loading": OUT_OF}
        return {**exact, "passed": False, **message, "properties": []}

    def line(self, width: int, name_width: int) -> str:
        """Return the row of the table, of at most ``width`` columns."""
        name = printable(self.target.where)
        if len(name) > name_width:
            start = (name_width - 3) // 2
            name = f"{name[:start]}...{name[start + 3 - name_width :]}"
        first, message = self.first_look_at
        # Omit the file's name, which is in the first column.
        words = message.partition(" failed with ") if self.report is None else (message, "", "")
        is_unstable = self.report is not None and first and self.report[first].verdict == "unstable"
        if first:
            first += f"{' (unstable)' if is_unstable else ''}: {words[2] or words[0]}"
        head = f"{name:<{name_width}}  {self.marks:>3}/{OUT_OF}  "
        left = max(width - len(head), len("..."))
        return (head + textwrap.shorten(first, left, placeholder="...")).rstrip()

    @property
    def row(self) -> list[str]:
        """The cells of the CSV file."""
        verdicts = {p.name: p.verdict for p in self.report.properties} if self.report else {}
        first, message = self.first_look_at
        costs = self.report.costs if self.report else {"loading": OUT_OF}
        remark = self.report.remark if self.report else ""
        return [
            *_names(self.target),
            str(self.marks),
            str(OUT_OF),
            "; ".join(f"{name} {cost}" for name, cost in costs.items()),
            *(verdicts.get(name, "fail") for name in REQUIRED),
            first,
            _cell(printable(message)[:_MAX_MESSAGE]),
            _cell(printable("; ".join(self.target.imports))[:_MAX_MESSAGE]),
            _cell(printable(remark)[:_MAX_MESSAGE]),
        ]


class MarksFile:
    """Writes a CSV file, a row per solution; it is named ``FILE.csv.part`` until complete."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.path, self.part = path, path.with_name(f"{path.name}.part")
        self._linked_path = os.path.realpath(path)
        if self.part.exists() and not resume:
            raise ArgumentError(
                f"--csv is '{path}', but '{self.part}' has the rows of a grading that did not end: "
                "go on with --resume, or remove it"
            )
        if path.exists() and not resume:
            raise ArgumentError(
                f"--csv is '{path}', which exists: add rows to it with --resume, or name another "
                "file"
            )
        before = next((p for p in (self.part, path) if resume and p.exists()), None)
        self.rows = _complete_rows(before) if before else []

    def has(self, target: Solution) -> bool:
        return _names(target) in [row[:2] for row in self.rows]

    @property
    def num_passed(self) -> int:
        passes = ["pass"] * len(REQUIRED)
        return sum(row[5 : 5 + len(REQUIRED)] == passes for row in self.rows)

    def begin(self) -> None:
        self._write("wb", [_HEAD, *self.rows])

    def add(self, one: MarkedSolution) -> None:
        self.rows.append(one.row)
        self._write("ab", self.rows[-1:])

    def complete(self) -> None:
        """Write all rows to the final file, since a solution may have changed the partial file."""
        self.begin()
        os.replace(self.part, self._linked_path)

    def _write(self, mode: str, rows: Iterable[Iterable[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows)
        try:
            with self.part.open(mode) as file:
                file.write(text.getvalue().encode(errors="backslashreplace"))
        except OSError as error:
            raise RingarError(
                f"--csv is '{self.path}': '{self.part}' could not be written: {error.strerror}"
            ) from error


def _complete_rows(path: Path) -> list[list[str]]:
    """Return the complete rows of a file, without a last row that the grader did not finish."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        head, *rows = csv.reader(io.StringIO(text, newline=""))
    except UnicodeDecodeError as error:
        raise ArgumentError(f"--resume: '{path}' is not UTF-8: save it as CSV UTF-8") from error
    except (OSError, ValueError, csv.Error) as error:
        raise ArgumentError(f"--resume: '{path}' cannot be read: {error}") from error
    if head[0].startswith("file;"):
        raise ArgumentError(f"--resume: '{path}' is separated by ';': save it with commas")
    if head != list(_HEAD):
        raise ArgumentError(f"--resume: '{path}' has other columns than this pyringar writes")
    if rows and not text.endswith("\n"):
        rows.pop()
    return [row for row in rows if len(row) == len(_HEAD)]


def _names(target: Solution) -> list[str]:
    names = (target.where, target.function)
    return [_cell(name).encode(errors="backslashreplace").decode() for name in names]


def _cell(text: str) -> str:
    """Return the text, changed if a spreadsheet would read it as a formula."""
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text
