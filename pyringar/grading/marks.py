"""The marks of many solutions: as a table, a CSV file and JSON."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyringar.errors import RingarError
from pyringar.grading.checks import CHECKS
from pyringar.grading.grader import GradeReport
from pyringar.grading.solution import Solution, printable

REQUIRED = tuple(check.name for check in CHECKS if check.verdict_on_failure == "fail")
_MAX_MESSAGE = 500


@dataclass(frozen=True)
class MarkedSolution:
    """A solution and its report, or the reason why it could not be loaded."""

    target: Solution
    report: GradeReport | None
    trouble: str = ""

    @property
    def marks(self) -> int:
        return len(REQUIRED) - len(self.report.failed) if self.report else 0

    @property
    def passed(self) -> bool:
        return self.marks == len(REQUIRED)

    @property
    def first_look_at(self) -> tuple[str, str]:
        """The property to look at first, and its failure; empty if all pass."""
        if self.report is None:
            return "loading", self.trouble
        first = self.report.first_look_at
        return (first.name, first.detail) if first else ("", "")

    def as_dict(self) -> dict[str, Any]:
        exact = {"target": str(self.target), "marks": self.marks, "out_of": len(REQUIRED)}
        if self.report is not None:
            return {**exact, **self.report.as_dict()}
        message = {"first_look_at": "loading", "error": self.trouble}
        return {**exact, "passed": False, **message, "properties": []}

    def columns(self, width: int, name_width: int) -> tuple[str, str]:
        name = printable(self.target.where)
        if len(name) > name_width:
            name = "..." + name[3 - name_width :]
        # The case, and the file again, are for those who look closer.
        first, message = self.first_look_at
        words = message.partition(" failed with " if self.report is None else ": ")
        first = f"{first}: {words[2] or words[0]}" if first else ""
        head = f"{self.marks:>2}/{len(REQUIRED)}  "
        left = width - name_width - 2 - len(head)
        return f"{name:<{name_width}}  ", head + textwrap.shorten(first, left, placeholder="...")


def write_csv(path: Path, solutions: Iterable[MarkedSolution]) -> None:
    """Write a row per solution. RingarError if the file cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    head = ["file", "function", "marks", "out_of"]
    writer.writerow([*head, *REQUIRED, "first_look_at", "message"])
    for one in solutions:
        verdicts = {p.name: p.verdict for p in one.report.properties} if one.report else {}
        name = [_cell(one.target.where), _cell(one.target.function)]
        cells = [verdicts.get(name, "fail") for name in REQUIRED]
        first, message = one.first_look_at
        message = _cell(printable(message)[:_MAX_MESSAGE])
        writer.writerow([*name, one.marks, len(REQUIRED), *cells, first, message])
    try:
        path.write_bytes(text.getvalue().encode(errors="backslashreplace"))
    except OSError as error:
        raise RingarError(
            f"--csv is '{path}', which could not be written: {error.strerror}"
        ) from error


def _cell(text: str) -> str:
    """Return a text that a spreadsheet does not read as a formula."""
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text
