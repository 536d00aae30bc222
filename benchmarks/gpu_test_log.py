"""Write a line for every event of a pytest run as it happens, and read what a run has left.

    pytest -p benchmarks.gpu_test_log --test-log LOG FILE

pytest's own reports are written at its end, which a run that hangs or crashes never comes to.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
ERROR_LINES = 8
# After one of these every CUDA call of the process fails: cudaErrorIllegalAddress and its like.
STICKY = re.compile(
    "illegal memory access|misaligned address|illegal instruction|unspecified launch failure|"
    "launch timed out|device-side assert|hardware stack error|invalid program counter|"
    "global/shared address space|uncorrectable (?:ECC|NVLink) error"
)


# -- in pytest's process ---------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--test-log", metavar="LOG", help="write a line of JSON per event there")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--test-log")
    if path:
        config.pluginmanager.register(_Writer(Path(path)))


class _Writer:
    """Appends events; each is in the file before the next one can happen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write(event="start")

    def _write(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(event="collected", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write_outcome(report.nodeid, "error", report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="begin", test=nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(event="end", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if report.passed else "xfailed"
        elif report.failed and report.when != "call":
            outcome = "error"
        if report.when == "call" or not report.passed:
            text = report.longreprtext if report.failed else ""
            self._write_outcome(report.nodeid, outcome, text)

    def _write_outcome(self, test: str, outcome: str, text: str) -> None:
        error = text.strip().splitlines()[-ERROR_LINES:]
        is_sticky = STICKY.search(text) is not None
        self._write(event="outcome", test=test, outcome=outcome, error=error, is_sticky=is_sticky)


# -- in the process that reads it ------------------------------------------------------------------


@dataclass
class Outcomes:
    """Counts what a run has come to, however it ended.

    Attributes:
        counts: Tests by outcome.
        not_passed: Test, outcome and last lines of what failed.
        running: The test that had begun and not ended.
        num_left: How many had not begun.
        sticky: The first test that met an error after which CUDA is lost to the process.
        num_after: How many failed after that one.
    """

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    not_passed: list[dict[str, Any]] = field(default_factory=list)
    running: str | None = None
    num_left: int = 0
    sticky: str | None = None
    num_after: int = 0

    def in_words(self) -> str:
        """Say it in a line."""
        parts = [f"{number} {outcome}" for outcome, number in self.counts.items() if number]
        parts = parts or ["no test ended"]
        parts += [f"{self.num_left} not begun"] * bool(self.num_left)
        text = ", ".join(parts)
        if self.running:
            text += f"; in {_name(self.running)}"
        if self.sticky:
            text += f"; sticky CUDA error since {_name(self.sticky)}"
            text += f", {self.num_after} that failed later may be its doing" * bool(self.num_after)
        return text


def read(path: Path) -> Outcomes:
    """Read a log, whose last line may be half there, or which may not be there."""
    found = Outcomes()
    begun = collected = 0
    for event in _events(path):
        if event["event"] == "collected":
            collected = event["count"]
        elif event["event"] == "begin":
            begun += 1
            found.running = event["test"]
        elif event["event"] == "end":
            found.running = None
        elif event["event"] == "outcome":
            _take(found, event)
    found.num_left = max(0, collected - begun)
    return found


def _take(found: Outcomes, event: dict[str, Any]) -> None:
    found.counts[event["outcome"]] += 1
    if event["outcome"] not in ("failed", "error"):
        return
    found.not_passed.append({key: event[key] for key in ("test", "outcome", "error")})
    if found.sticky:
        found.num_after += 1
    elif event["is_sticky"]:
        found.sticky = event["test"]


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                break  # it was writing this
    return events


def _name(test: str) -> str:
    return test.partition("::")[2] or test
