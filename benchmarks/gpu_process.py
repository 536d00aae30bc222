"""Run processes within a budget of time, on a machine where any of them may hang for ever.

A process is in a group of its own and ends at its own limit, when it has printed nothing for too
long, or with the budget. What ends it is SIGABRT, on which Python prints where every thread is, in
the middle of a CUDA call, too; then SIGKILL for the whole group. One that is stuck in the driver
may outlive that: it is left behind after 10 seconds, and noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ABORT_S = 3.0  # for printing where it is
KILL_S = 10.0
POLL_S = 0.1
LOOK_S = 2.0
LIMIT, SILENCE, BUDGET = (
    "ended at its limit",
    "silent for too long: ended",
    "ended as time was over",
)
_PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    _prctl = ctypes.CDLL(None).prctl  # looked up before a fork, after which little is allowed


class Budget:
    """The seconds that all processes have together, from now on."""

    def __init__(self, total_s: float) -> None:
        self._end = time.monotonic() + total_s

    @property
    def left_s(self) -> float:
        """The seconds that are left; 0 when they are over."""
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    Attributes:
        code: Its exit status, negative for a signal; None if it was ended here.
        why: In words, if it did not exit by itself, or could not be ended.
        seconds: From its start.
        output: What it printed, stdout and stderr together.
        by: What ended it: `LIMIT`, `SILENCE` or `BUDGET`, if one of them did.
    """

    code: int | None
    why: str
    seconds: float
    output: str
    by: str = ""


def run(
    command: Sequence[str],
    budget: Budget,
    *,
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float,
    quiet_s: float = float("inf"),
    look: Callable[[], object] = lambda: None,
) -> Ended:
    """Run a process to its end, or end it.

    Args:
        command: The program and its arguments.
        budget: Ends it, too.
        folder: Where it runs.
        environment: All its variables.
        limit_s: Most seconds.
        quiet_s: Most seconds without a word from it.
        look: Called every few seconds while it runs.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_in_the_child,
        )
        try:
            by = _wait(process, output.fileno(), budget, limit_s, quiet_s, look)
        finally:  # also when somebody ends us
            code = process.returncode
            survived = _end(process)
        seconds = time.monotonic() - begin
        output.seek(0)
        text = output.read().decode(errors="replace")
    why = f"{by}, after {seconds:.0f} s" if by else ""
    if code is not None and code < 0:
        why = f"ended by {signal_name(-code)}"
    return Ended(code, "; ".join(filter(None, (why, survived))), seconds, text, by)


def _wait(
    process: subprocess.Popen[bytes],
    output: int,
    budget: Budget,
    limit_s: float,
    quiet_s: float,
    look: Callable[[], object],
) -> str:
    """Wait for its end; or return what ends it."""
    begin = looked = heard = time.monotonic()
    size = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return ""
        now, size_now = time.monotonic(), os.fstat(output).st_size
        if size_now != size:
            size, heard = size_now, now
        if now - looked > LOOK_S:
            look()
            looked = now
        if now - begin > limit_s:
            return LIMIT
        if now - heard > quiet_s:
            return SILENCE
        if budget.left_s <= 0:
            return BUDGET


def _end(process: subprocess.Popen[bytes]) -> str:
    """End a process and its group; return a note if it does not die."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ABORT_S)
    finally:  # also where a second signal ends us meanwhile
        # And what it started: ranks, a sanitizer's process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} has not died of SIGKILL within {KILL_S:.0f} s"
    return ""


def _in_the_child() -> None:
    """Die with the parent, whatever ends that, and dump no core of gigabytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def signal_name(number: int) -> str:
    """Return SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
