"""Pytest plugin of gpu_check.py: pytest -p benchmarks.gpu_plugin.

The plugin prints a failure at once, since a killed pytest never prints its summary. It also ends a
pytest-xdist worker after a sticky CUDA error, because all later CUDA calls of that process fail.
pytest-xdist then starts a new worker for the remaining tests.
"""

from __future__ import annotations

import os
import re

import pytest

ERROR_LINES = 8
STICKY = re.compile(
    "illegal memory access|misaligned address|illegal instruction|unspecified launch failure|"
    "launch timed out|device-side assert|hardware stack error|invalid program counter|"
    "global/shared address space|uncorrectable (?:ECC|NVLink) error"
)


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(_WorkerExit() if is_worker else _FailurePrinter())


class _FailurePrinter:
    """Prints ``FAILURE OF`` and the test, then the last lines of the error, indented."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = report.longreprtext.strip().splitlines()[-ERROR_LINES:]
            print("", f"FAILURE OF {report.nodeid}", *(f"    {line}" for line in lines), sep="\n")


class _WorkerExit:
    """Ends a worker after a sticky CUDA error."""

    _is_lost = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._is_lost |= report.failed and STICKY.search(report.longreprtext) is not None

    def pytest_runtest_logfinish(self) -> None:
        if self._is_lost:
            os._exit(1)
