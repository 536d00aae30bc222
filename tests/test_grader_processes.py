"""Whatever a graded solution does, are the grader and the next solution as before?"""

from __future__ import annotations

import errno
import os
import signal
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from pyringar.grading import grader, remote
from pyringar.grading.checks import CHECKS
from pyringar.grading.processes import Family, children
from pyringar.grading.remote import Limits, grade
from pyringar.grading.solution import CannotLoadError, Target

GOOD = """
def good(data):
    for t in data[1:]:
        data[0][:] += t
    for t in data[1:]:
        t[:] = data[0]
"""
LIMITS = Limits(timeout_s=20, memory_bytes=200 << 20)
SHORT = Limits(timeout_s=0.3, memory_bytes=200 << 20)


@pytest.fixture(autouse=True)
def few_properties(monkeypatch):
    """One: what is tried here is what lies around it."""
    monkeypatch.setattr(grader, "CHECKS", CHECKS[:1])


@pytest.fixture
def import_has_time(monkeypatch):
    """Whatever the limits say, which are for the calls then."""
    load = remote._Process.load

    def patient(process):
        process._limits = LIMITS
        return load(process)

    monkeypatch.setattr(remote._Process, "load", patient)


@pytest.fixture(autouse=True)
def nobody_stays():
    before = children()
    yield
    assert children() == before


def graded(code: str, limits: Limits = LIMITS, show=lambda text: None, file="/nowhere/solution.py"):
    source = (GOOD + textwrap.dedent(code)).encode()
    return grade(Target(file, "allreduce", source), ["cpu"] * 4, limits, show)


# -- solutions that are right, and do something besides --------------------------------------------

HARMLESS = {
    "nothing else": "allreduce = good",
    "threads that live on": """
        import threading, time
        def allreduce(data):
            threading.Thread(target=time.sleep, args=(1000,)).start()
            good(data)""",
    "a child that lives on": """
        import os, time
        def allreduce(data):
            if os.fork() == 0:
                time.sleep(1000)
            good(data)""",
    "an orphan in a session of its own": """
        import os, time
        def allreduce(data):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(1000)
                os._exit(0)
            good(data)""",
    "a child that does it, too": """
        import os
        def allreduce(data):
            os.fork()
            good(data)""",
    "children that have ended": """
        import os, time
        for _ in range(70):
            os.fork() or os._exit(0)
        time.sleep(0.2)
        allreduce = good""",
    "torch's settings": """
        import torch
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(7)
        torch.set_grad_enabled(False)
        allreduce = good""",
    "its streams are closed": """
        import os, sys
        sys.stdout.close()
        os.closerange(0, 3)
        allreduce = good""",
    "ignores signals": """
        import signal
        for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        allreduce = good""",
}


@pytest.mark.parametrize("code", HARMLESS.values(), ids=HARMLESS)
def test_what_is_done_besides_does_no_harm(code):
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    assert graded(code).passed
    assert (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()) == before


# -- solutions that end, or try to get a verdict ---------------------------------------------------

PASSES = "every rank  pass      all other ranks end with it too"
HOSTILE = {
    "exits": ("import os\ndef allreduce(data): os._exit(0)", "the process ended with status 0"),
    "sys.exit": ("def allreduce(data): raise SystemExit(0)", "raises SystemExit: 0 at "),
    "is interrupted": ("def allreduce(data): raise KeyboardInterrupt", "raises KeyboardInterrupt"),
    "crashes": (
        "import ctypes\ndef allreduce(data): ctypes.string_at(0)",
        "the process was ended by SIGSEGV",
    ),
    "ends its group": (
        "import os\ndef allreduce(data): os.killpg(0, 9)",
        "the process was ended by SIGKILL",
    ),
    "becomes another program": (
        "import os\ndef allreduce(data): os.execv('/bin/true', ['true'])",
        "the process ended with status 0",
    ),
    "fills memory": (
        """
        def allreduce(data):
            held = []
            while True:
                held.append(bytearray(b"x") * (1 << 24))""",
        "the process used more than 200 MiB of memory and was ended",
    ),
    "fills its child's memory": (
        """
        import os
        def allreduce(data):
            if os.fork() == 0:
                held = []
                while len(held) < 100:
                    held.append(bytearray(b"x") * (1 << 24))
            os.wait()""",
        "the process used more than 200 MiB of memory and was ended",
    ),
    "forks for ever": (
        "import os\ndef allreduce(data):\n    while True: os.fork()",
        "the process started more than 64 processes and was ended",
    ),
    "prints a verdict": (f"def allreduce(data): print({PASSES!r})", "still holds its own values"),
    "writes nonsense to all files": (
        """
        import os
        def allreduce(data):
            for fd in range(3, 4096):
                try: os.write(fd, b"rubbish\\n")
                except OSError: pass""",
        "the process answered what makes no sense",
    ),
    "answers in the grader's words": (
        """
        import json, os, sys
        def allreduce(data):
            frame = sys._getframe()
            while "token" not in frame.f_locals.get("request", {}):
                frame = frame.f_back
            ranks = [{"rank": rank} for rank in range(len(data))]
            answer = {"returned": None, "given": [None] * len(data), "data": ranks}
            line = json.dumps({"token": frame.f_locals["request"]["token"], **answer})
            for fd in range(3, 4096):
                try: os.write(fd, line.encode() + b"\\n")
                except OSError: pass""",
        "still holds its own values",
    ),
    "names memory that is not there": (
        """
        from pyringar.grading import worker
        worker._Things.add = lambda self, found: {"at": 1 << 39}
        def allreduce(data): data[0] = None""",
        "the process answered what makes no sense",
    ),
    "patches torch and the grader": (
        """
        import torch
        from pyringar.grading import checks, grader, remote
        torch.equal = torch.allclose = lambda *a: True
        torch.Tensor.__eq__ = lambda *a: True
        torch.Tensor.all = lambda *a: torch.ones(())
        checks._wrong_value = grader._judge = remote._Remote = None
        def allreduce(data): pass""",
        "still holds its own values",
    ),
    "writes a huge file": (
        """
        import tempfile
        def allreduce(data):
            with tempfile.TemporaryFile() as file:
                file.truncate(1 << 40)""",
        "raises OSError: [Errno 27] File too large at /nowhere/solution.py:11",
    ),
    "compiled without a name": (
        "exec(compile('def allreduce(data): 1 / 0', '', 'exec'))",
        "raises ZeroDivisionError: division by zero",
    ),
    "drives the terminal": (
        "def allreduce(data): raise ValueError('\\x1b[2J\\n\\x00\\u202e' + 'y' * 10**6)",
        "raises ValueError: \\x1b[2J \\x00\\u202eyyy",
    ),
}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name == "forks for ever"))
        for name, case in HOSTILE.items()
    ],
)
def test_a_solution_gets_the_verdict_that_it_earns(code, words):
    report = graded(code)
    assert [p.verdict for p in report.properties] == ["fail"], str(report)
    assert words in report["sum"].detail
    assert len(report["sum"].detail) < 1200
    assert graded("allreduce = good").passed


# Each call is over before it is time to look.
LITTLE_BY_LITTLE = {
    "memory": (
        """
        held = []
        def allreduce(data):
            held.append(bytearray(b"x") * (40 << 20))
            good(data)""",
        "the process used more than 200 MiB of memory and was ended",
    ),
    "memory of a program that it starts": (
        """
        import subprocess, sys
        code = "x = bytearray(b'x') * (230 << 20); print(flush=True); import time; time.sleep(99)"
        command = [sys.executable, "-ISc", code]
        def allreduce(data):
            subprocess.Popen(command, stdout=subprocess.PIPE).stdout.readline()
            good(data)""",
        "the process used more than 200 MiB of memory and was ended",
    ),
    "processes": (
        """
        import subprocess
        def allreduce(data):
            for _ in range(8):
                subprocess.Popen(["sleep", "1000"])
            good(data)""",
        "the process started more than 64 processes and was ended",
    ),
}


@pytest.mark.parametrize(("code", "words"), LITTLE_BY_LITTLE.values(), ids=LITTLE_BY_LITTLE)
def test_limits_hold_for_what_many_fast_calls_take(monkeypatch, code, words):
    monkeypatch.setattr(grader, "CHECKS", [c for c in CHECKS if c.name in ("sum", "ranks")])
    assert words in str(graded(code).failed[0].detail)


NEVER_ANSWERS = {
    "loops": "def allreduce(data):\n    while True: pass",
    "sleeps": "import time\ndef allreduce(data): time.sleep(1000)",
    "stops itself": "import os\ndef allreduce(data): os.kill(os.getpid(), 19)",
    "prints for ever": "def allreduce(data):\n    while True: print('x' * 100_000)",
    "floods the grader": """
        import os
        def allreduce(data):
            while True:
                for fd in range(3, 4096):
                    try: os.write(fd, b"{}\\n" * 10_000)
                    except OSError: pass""",
}


@pytest.mark.parametrize("code", NEVER_ANSWERS.values(), ids=NEVER_ANSWERS)
def test_who_never_answers_is_ended(import_has_time, code):
    began = time.monotonic()
    shown = []
    report = graded(code, SHORT, shown.append)
    assert [p.verdict for p in report.properties] == ["timeout"]
    assert report["sum"].detail.endswith("positional values: no answer within 0.3 s")
    assert time.monotonic() - began < 15


def test_a_deadline_is_for_one_property(import_has_time, monkeypatch):
    """The next one gets a new process, and all of the time."""
    monkeypatch.setattr(grader, "CHECKS", [c for c in CHECKS if c.name in ("sum", "sizes", "list")])
    code = "def allreduce(data):\n    while data[0].numel() == 0: pass\n    good(data)"
    verdicts = {p.name: p.verdict for p in graded(code, Limits(2, 1 << 30)).properties}
    assert verdicts == {"sum": "pass", "list": "pass", "sizes": "timeout"}


def null_bytes() -> Exception:
    try:
        compile("\0", "", "exec")
    except (SyntaxError, ValueError) as error:
        return error
    raise AssertionError("Python compiles null bytes")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("while True: pass", "the import did not end within 0.3 s"),
        ("import os; os._exit(3)", "in the import the process ended with status 3"),
        ("raise SystemExit('no')", "failed with SystemExit: no at /nowhere/solution.py:7"),
        ("import os; os.fork()", "has no 'allreduce'; what can be called: good"),
        ("x = (1,", "SyntaxError: '(' was never closed at /nowhere/solution.py:7"),
        ("import torch\nfrom torch import no", "at /nowhere/solution.py:8"),
        # What Python itself raises: a ValueError before 3.11.4.
        (
            "x = '\x00'",
            f"{type(null_bytes()).__name__}: source code string cannot contain null bytes",
        ),
        ("allreduce = 3", "is a value of type int, not a function"),
    ],
)
def test_a_solution_that_cannot_be_loaded_says_where(code, words):
    limits = SHORT if "while" in code else LIMITS
    with pytest.raises(CannotLoadError) as caught:
        graded(code, limits)
    assert words in str(caught.value)
    assert str(Path(remote.__file__).parent) not in str(caught.value)


def test_prints_are_shown_and_no_verdict():
    shown = []
    assert graded(
        "import os\nos.system('echo one')\nprint('two')\nallreduce = good", LIMITS, shown.append
    ).passed
    assert b"".join(shown) == b"one\ntwo\n"


def test_neither_memory_nor_files_of_the_grader_are_the_solutions(tmp_path):
    """Its open files are closed there, and what a child writes into the tensors is not seen."""
    with (tmp_path / "secret").open("w") as file:
        code = f"import os\ndef allreduce(data):\n    good(data)\n    os.fstat({file.fileno()})"
        assert "raises OSError: [Errno 9]" in graded(code)["sum"].detail
    code = """
        import os
        def allreduce(data):
            if os.fork() == 0:
                good(data)
                os._exit(0)
            os.wait()"""
    assert "still holds its own values" in graded(code)["sum"].detail


def test_who_adds_in_the_order_of_addresses_is_not_repeatable(monkeypatch):
    monkeypatch.setattr(grader, "CHECKS", [c for c in CHECKS if c.name == "repeatable"])
    code = """
        def allreduce(data):
            total = sum(sorted(data, key=lambda t: t.data_ptr()))
            for t in data: t.copy_(total)"""
    assert not graded(code).passed


# -- the grader's own process ----------------------------------------------------------------------


def test_threads_of_the_grader_are_not_waited_for_by_a_solution(monkeypatch):
    """OpenMP has a pool for every thread that computes: here a new one, whatever ran before."""
    monkeypatch.setattr(grader, "CHECKS", [c for c in CHECKS if c.name == "sizes"])

    def grade_two() -> None:
        torch.set_num_threads(2)
        assert graded("allreduce = good").passed
        assert torch.get_num_threads() == 2
        threads = "import torch\ntorch.set_num_threads(2)\nallreduce = good"
        results.append(graded(threads, Limits(10, 1 << 30)))

    before = torch.get_num_threads()
    results = []
    thread = threading.Thread(target=grade_two)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert results[0].passed, str(results[0])


def test_a_fork_that_fails_is_said_of_its_solution(monkeypatch):
    before = os.listdir("/proc/self/fd")

    def no_more():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_more)
    with pytest.raises(CannotLoadError, match=r"be started: Resource temporarily unavailable$"):
        graded("allreduce = good")
    assert os.listdir("/proc/self/fd") == before


def test_nobody_stays_after_a_second_interrupt(monkeypatch):
    end, interrupts = Family.end, []

    def interrupted(family):
        interrupts.append(1)
        if len(interrupts) == 1:
            raise KeyboardInterrupt
        end(family)

    monkeypatch.setattr(Family, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        graded("allreduce = good")
    assert len(interrupts) == 2


def test_ignored_children_are_graded():
    """Some shells and servers start programs so."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert graded("allreduce = good").passed
        report = graded("import os\ndef allreduce(data): os._exit(0)")
        assert "the process ended instead of answering" in report["sum"].detail
    finally:
        signal.signal(signal.SIGCHLD, before)
