"""Does a process that hangs, crashes or does not die cost gpu_check.py only its own time?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import gpu_check, gpu_process, gpu_steps  # noqa: E402
from benchmarks.gpu_process import Budget, Ended  # noqa: E402
from benchmarks.gpu_steps import Step  # noqa: E402


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_process, "ABORT_S", 0.3)


def has_ended(pid: int) -> bool:
    """Wait for the end of a process that may be nobody's child."""
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or ") Z " in stat.read_text():
            return True
        time.sleep(0.05)
    return False


def run(code: str, budget_s: float = 60.0, **more: Any) -> Ended:
    return gpu_process.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        Budget(budget_s),
        folder=ROOT,
        environment=gpu_check.variables(),
        **{"limit_s": 30.0, **more},
    )


STUBBORN = """
    import os, signal, subprocess, sys, time
    signals = signal.SIGTERM, signal.SIGABRT, signal.SIGINT, signal.SIGALRM
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_a_hang_that_ignores_signals_ends_at_its_limit_with_its_children() -> None:
    ended = run(STUBBORN, limit_s=2.0)
    assert ended.code is None
    assert ended.why == f"ended at its limit, after {ended.seconds:.0f} s"
    assert 2 <= ended.seconds < 6
    for pid in ended.output.split():
        assert has_ended(int(pid))


@pytest.mark.slow
def test_a_process_that_is_ended_says_where_it_was() -> None:
    ended = run("import time\ndef in_driver(): time.sleep(1000)\nin_driver()", quiet_s=4)
    assert ended.why == f"silent for too long: ended, after {ended.seconds:.0f} s"
    assert 4 <= ended.seconds < 6
    assert "in in_driver" in ended.output


@pytest.mark.slow
def test_one_that_prints_is_not_quiet() -> None:
    ended = run("import time\nfor i in range(6): time.sleep(0.8); print(i)", quiet_s=4.0)
    assert (ended.code, ended.why) == (0, "")


def test_the_end_of_the_budget_is_no_fault_of_the_process() -> None:
    ended = run("import time; time.sleep(1000)", budget_s=0.5)
    assert ended.code is None
    assert ended.by == gpu_process.BUDGET
    assert Step.of("x", ended).state == "cut off"
    ended = run("import time; time.sleep(1000)", limit_s=0.5)
    assert Step.of("x", ended).state == "FAILED"


def test_a_crash_is_named() -> None:
    ended = run("import os, signal; print('before'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (ended.code, ended.why) == (-signal.SIGSEGV, "ended by SIGSEGV")
    assert ended.output.startswith("before\nFatal Python error: Segmentation fault")


def test_a_process_that_does_not_die_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stuck in the driver; here wait() never hears of its end."""

    class Stuck(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "would wait for ever"
            time.sleep(min(timeout, 0.1))
            raise subprocess.TimeoutExpired("stuck", timeout)

        def poll(self) -> int | None:
            return None

    monkeypatch.setattr(gpu_process.subprocess, "Popen", Stuck)
    ended = run("import time; time.sleep(1000)", limit_s=0.3)
    assert ended.code is None
    assert re.fullmatch(
        r"ended at its limit, after \d s; process \d+ has not died of SIGKILL within 10 s",
        ended.why,
    )
    assert ended.seconds < 5


def test_a_second_signal_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the first one's end waits for a child that ignores what it is told."""
    seen: list[int] = []
    kill = os.killpg
    monkeypatch.setattr(
        os, "killpg", lambda group, number: (seen.append(group), kill(group, number))
    )

    def second(*_: object) -> None:
        raise SystemExit(143)

    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    monkeypatch.setattr(child, "send_signal", second)
    with pytest.raises(SystemExit):
        gpu_process._end(child)
    assert seen == [child.pid]
    assert child.wait(10) == -signal.SIGKILL


def test_json_is_found_whatever_is_printed_after_it() -> None:
    ended = run("print('{\"a\": [1]}'); import warnings; warnings.warn('unclosed')")
    assert gpu_steps.json_in(ended) == {"a": [1]}
    with pytest.raises(ValueError, match="no line of JSON"):
        gpu_steps.json_in(run("print('words')"))
