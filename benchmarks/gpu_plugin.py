"""What gpu_check.py adds to pytest: pytest -p benchmarks.gpu_plugin.

A failure is printed at once: pytest prints it at its end, which a killed run never reaches. After a
sticky CUDA error every CUDA call of the process fails, so the worker exits, and pytest-xdist starts
another worker for the rest of the tests.
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
    config.pluginmanager.register(_Leaver() if is_worker else _Printer())


class _Printer:
    """Prints the end of each failure: ``FAILURE OF`` and the test, then indented lines."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = report.longreprtext.strip().splitlines()[-ERROR_LINES:]
            print("", f"FAILURE OF {report.nodeid}", *(f"    {line}" for line in lines), sep="\n")


class _Leaver:
    """Ends a worker after a sticky CUDA error."""

    _is_lost = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._is_lost |= report.failed and STICKY.search(report.longreprtext) is not None

    def pytest_runtest_logfinish(self) -> None:
        if self._is_lost:
            os._exit(1)
