"""Write a line of JSON for each event of a pytest run as it happens, and read the lines of a run.

    pytest -p benchmarks.gpu_test_log --test-log LOG -n 8 tests

pytest writes its own reports at its end, which a run that is ended at its limit never reaches.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ERROR_LINES = 8
# After one of these every CUDA call of the process fails: cudaErrorIllegalAddress and its like.
STICKY = re.compile(
    "illegal memory access|misaligned address|illegal instruction|unspecified launch failure|"
    "launch timed out|device-side assert|hardware stack error|invalid program counter|"
    "global/shared address space|uncorrectable (?:ECC|NVLink) error"
)


# -- in pytest's processes -------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--test-log", metavar="LOG", help="write a line of JSON per event there")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Leaver())
    elif path := config.getoption("--test-log"):
        config.pluginmanager.register(_Writer(Path(path)), "gpu_test_log_writer")


class _Leaver:
    """Ends a worker after a sticky CUDA error: xdist starts another for the rest of the tests."""

    _is_lost = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._is_lost |= report.failed and STICKY.search(report.longreprtext) is not None

    def pytest_runtest_logfinish(self) -> None:
        if self._is_lost:
            os._exit(1)


class _Writer:
    """Appends events; each is in the file before the next one can happen."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(event="collected", count=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._write(event="collected", count=len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write_outcome(report.nodeid, "error", report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(event="begin", test=nodeid)

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
        self._write(event="outcome", test=test, outcome=outcome, error=error)


# -- in the process that reads it ------------------------------------------------------------------


@dataclass
class Outcomes:
    """The outcomes of a run, however it ended.

    Attributes:
        counts: Tests by outcome.
        not_passed: Test, outcome and last lines of each failure.
        running: The tests that had begun and not ended.
        num_left: The number of tests that had not begun.
    """

    counts: Counter[str] = field(default_factory=Counter)
    not_passed: list[dict[str, Any]] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    num_left: int = 0

    def in_words(self) -> str:
        """Return one line."""
        parts = [f"{number} {outcome}" for outcome, number in self.counts.items()]
        parts = parts or ["no test ended"]
        parts += [f"{self.num_left} not begun"] * bool(self.num_left)
        parts += [f"in {test.partition('::')[2] or test}" for test in self.running]
        return ", ".join(parts)


def read(path: Path) -> Outcomes:
    """Read a log, which may be absent, or end in the middle of a line."""
    found = Outcomes()
    begun: dict[str, None] = {}
    ended: set[str] = set()
    collected = 0
    for event in _events(path):
        if event["event"] == "collected":
            collected = event["count"]
        elif event["event"] == "begin":
            begun[event["test"]] = None
        else:
            ended.add(event["test"])
            found.counts[event["outcome"]] += 1
            if event["outcome"] in ("failed", "error"):
                found.not_passed.append({k: event[k] for k in ("test", "outcome", "error")})
    found.running = [test for test in begun if test not in ended]
    found.num_left = max(0, collected - len(begun))
    return found


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                break  # the process was ended while it wrote this line
    return events
