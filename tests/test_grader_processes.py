"""A graded solution cannot change the grader or the verdict on the next solution."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from pyringar.grading import grader, remote, worker
from pyringar.grading.checks import CHECKS
from pyringar.grading.remote import grade
from pyringar.grading.solution import CannotLoadError, Solution

GOOD = """
def good(data):
    for t in data[1:]:
        data[0][:] += t
    for t in data[1:]:
        t[:] = data[0]
"""
TIMEOUT_S, SHORT_S = 20.0, 0.3


@pytest.fixture(autouse=True)
def few_properties(monkeypatch):
    monkeypatch.setattr(grader, "CHECKS", CHECKS[:1])
    monkeypatch.setattr(worker, "MEMORY_BYTES", 200 << 20)


@pytest.fixture
def import_has_time(monkeypatch):
    load = remote._Process.load

    def patient(process):
        process._timeout_s = TIMEOUT_S
        return load(process)

    monkeypatch.setattr(remote._Process, "load", patient)


def graded(code: str, timeout_s: float = TIMEOUT_S, show=lambda text: None):
    source = (GOOD + textwrap.dedent(code)).encode()
    return grade(
        Solution("/nowhere/solution.py", "allreduce", source), ["cpu"] * 4, timeout_s, show
    )


# -- right solutions with side effects --------------------------------------------------------

HARMLESS = {
    "nothing else": "allreduce = good",
    "threads that live on": """
        import threading, time
        def allreduce(data):
            threading.Thread(target=time.sleep, args=(1000,)).start()
            good(data)""",
    "a child forked by the import": """
        import os
        os.fork()
        allreduce = good""",
    "torch's settings": """
        import torch
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(7)
        torch.set_grad_enabled(False)
        allreduce = good""",
    "closed streams": """
        import os, sys
        sys.stdout.close()
        os.closerange(0, 3)
        allreduce = good""",
}


@pytest.mark.parametrize("code", HARMLESS.values(), ids=HARMLESS)
def test_solution_side_effects_are_isolated(code):
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    assert graded(code).passed
    assert (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()) == before


# -- hostile solutions ----------------------------------------------------------------------------

PASSES = "every rank  pass      all other ranks end with it too"
HOSTILE = {
    "exits": ("import os\ndef allreduce(data): os._exit(0)", "the process ended with status 0"),
    "ends its group": ("import os\ndef allreduce(data): os.killpg(0, 9)", "was ended by SIGKILL"),
    "kills its parent": (
        "import os\ndef allreduce(data): os.kill(os.getppid(), 9)",
        "the process killed its parent process",
    ),
    "kills its parent and lives on": (
        """
        import ctypes, os
        def allreduce(data):
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
            os.kill(os.getppid(), 9)
            good(data)""",
        "the process killed its parent process",
    ),
    "kills all its ancestors": (
        """
        import os, signal
        def allreduce(data):
            pid = os.getppid()
            while pid > 1:
                parent = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
                os.kill(pid, signal.SIGKILL)
                pid = parent
            good(data)""",
        "the process killed its parent process",
    ),
    "stops its parent and exits": (
        "import os\ndef allreduce(data): os.kill(os.getppid(), 19); os._exit(0)",
        "the process closed the grader's files",
    ),
    "fills memory": (
        """
        def allreduce(data):
            held = []
            while True:
                held.append(bytearray(b"x") * (1 << 24))""",
        "raises MemoryError at /nowhere/solution.py:11",
    ),
    "prints a verdict": (f"def allreduce(data): print({PASSES!r})", "still holds its own values"),
    "writes nonsense to all files": (
        """
        import os
        def allreduce(data):
            for fd in range(3, 4096):
                try: os.write(fd, b"rubbish\\n")
                except OSError: pass""",
        "the process sent an answer that is not the grader",
    ),
    "patches torch and the grader": (
        """
        import torch
        from pyringar.grading import checks, grader, remote
        torch.equal = torch.allclose = lambda *a: True
        torch.Tensor.__eq__ = lambda *a: True
        torch.Tensor.all = lambda *a: torch.ones(())
        checks._wrong_value = grader.judge_all = remote._Remote = None
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
    "drives the terminal": (
        "def allreduce(data): raise ValueError('\\x1b[2J\\n\\x00\\u202e' + 'y' * 10**6)",
        "raises ValueError: \\x1b[2J \\x00\\u202eyyy",
    ),
}


@pytest.mark.parametrize(("code", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_solution_fails(code, words):
    report = graded(code)
    assert [p.verdict for p in report.properties] == ["fail"], str(report)
    assert words in report["sum"].detail
    assert len(report["sum"].detail) < 1200
    assert graded("allreduce = good").passed


def test_grading_kills_solution_child_processes():
    code = """
        import os, time
        if os.fork() == 0:
            print(os.getpid())
            time.sleep(1000)
        time.sleep(0.1)
        allreduce = good"""
    shown = []
    assert graded(code, TIMEOUT_S, shown.append).passed
    deadline = time.monotonic() + 5
    while is_running(int(b"".join(shown))):
        assert time.monotonic() < deadline
        time.sleep(0.01)


NEVER_ANSWERS = {
    "loops": "def allreduce(data):\n    while True: pass",
    "stops itself": "import os\ndef allreduce(data): os.kill(os.getpid(), 19)",
    "prints for ever": "def allreduce(data):\n    while True: print('x' * 100_000)",
}


@pytest.mark.parametrize("code", NEVER_ANSWERS.values(), ids=NEVER_ANSWERS)
def test_hanging_solution_times_out(import_has_time, code):
    began = time.monotonic()
    shown = []
    report = graded(code, SHORT_S, shown.append)
    assert [p.verdict for p in report.properties] == ["timeout"]
    assert report["sum"].detail.startswith("no answer within 0.3 s (k=2, numel=840")
    assert time.monotonic() - began < 15


def test_deadline_applies_per_property(import_has_time, monkeypatch):
    monkeypatch.setattr(grader, "CHECKS", [c for c in CHECKS if c.name in ("sum", "sizes", "list")])
    code = """
        import time
        def allreduce(data):
            time.sleep(0.4 if data[0].numel() < 99 else 0)
            good(data)"""
    verdicts = {p.name: p.verdict for p in graded(code, 1.0).properties}
    assert verdicts == {"sum": "pass", "list": "pass", "sizes": "timeout"}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("while True: pass", "ImportTimeoutError: no end within 1.6 s at /nowhere/solution.py:7"),
        ("import os; os._exit(3)", "in the import the process ended with status 3"),
        ("raise SystemExit('no')", "failed with SystemExit: no at /nowhere/solution.py:7"),
        ("import os; os.fork()", "has no 'allreduce'; it has: good"),
        ("x = (1,", "SyntaxError: '(' was never closed at /nowhere/solution.py:7"),
        ("allreduce = 3", "is a value of type int, not a function"),
    ],
)
def test_import_error_is_explained(code, words):
    timeout_s = 2.0 if "while" in code else TIMEOUT_S  # the import may take 1.6 s
    with pytest.raises(CannotLoadError) as caught:
        graded(code, timeout_s)
    assert words in str(caught.value)
    assert str(Path(remote.__file__).parent) not in str(caught.value)


def test_function_before_failed_line_is_graded():
    report = graded("allreduce = good\nprint(undefined)")
    assert report.passed
    assert "NameError: name 'undefined' is not defined at /nowhere/solution.py:8" in report.remark


def test_function_before_endless_line_is_graded():
    report = graded("allreduce = good\nwhile True: pass", 2.0)
    assert report.passed
    assert "ImportTimeoutError: no end within 1.6 s at /nowhere/solution.py:8" in report.remark


def test_supervisor_exits_after_grader_dies():
    process = subprocess.Popen(
        [sys.executable, "-c", GRADE_AND_DIE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    supervisor, solution = map(int, process.communicate(timeout=60)[0].split())
    deadline = time.monotonic() + 10
    for pid in (supervisor, solution):
        while is_running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


# Grades a solution, and kills the grader when the solution prints.
GRADE_AND_DIE = """
import os
from pyringar.grading.remote import grade
from pyringar.grading.solution import Solution
code = b"import os, time; print(os.getppid(), os.getpid()); time.sleep(100)"
def show(text):
    os.write(1, text)
    os.kill(os.getpid(), 9)
grade(Solution("x.py", "f", code), ["cpu"], 60.0, show)
"""


def is_running(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_solution_output_is_shown():
    shown = []
    code = "import os\nos.system('echo one')\nprint('two')\nallreduce = good"
    assert graded(code, TIMEOUT_S, shown.append).passed
    assert b"".join(shown) == b"one\ntwo\n"


def test_solution_cannot_use_grader_files(tmp_path):
    with (tmp_path / "secret").open("w") as file:
        code = f"import os\ndef allreduce(data): os.fstat({file.fileno()})"
        assert "raises OSError: [Errno 9]" in graded(code)["sum"].detail


def test_address_dependent_order_is_not_repeatable(monkeypatch):
    monkeypatch.setattr(grader, "CHECKS", [c for c in CHECKS if c.name == "repeatable"])
    code = """
        def allreduce(data):
            total = sum(sorted(data, key=lambda t: t.data_ptr()))
            for t in data: t.copy_(total)"""
    assert not graded(code).passed


# -- threads of the grader -------------------------------------------------------------------------


def test_solution_waits_for_no_grader_thread(monkeypatch):
    monkeypatch.setattr(grader, "CHECKS", [c for c in CHECKS if c.name == "sizes"])

    def grade_two() -> None:
        torch.set_num_threads(2)
        assert graded("allreduce = good").passed
        assert torch.get_num_threads() == 2
        threads = "import torch\ntorch.set_num_threads(2)\nallreduce = good"
        results.append(graded(threads))

    before = torch.get_num_threads()
    results = []
    thread = threading.Thread(target=grade_two)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert results[0].passed, str(results[0])
