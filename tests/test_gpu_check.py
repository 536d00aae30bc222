"""gpu_check.py: hangs, crashes and signals do not lose the results of its steps.

These tests need no GPU: small Python programs replace the commands of the steps.
"""

from __future__ import annotations

import fcntl
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import CheckStep
from benchmarks.rows import Results, Row, read, text_of

ROW = Row("training_cuda", "LeNet", 1, "ringar", 1.0, 1.0, 1.0, 1.0, 2, True)


@pytest.fixture(autouse=True)
def _cpu_ranks(monkeypatch):
    monkeypatch.setattr(gpu_check, "ABORT_S", 10.0)
    monkeypatch.setenv("PYRINGAR_TEST_CUDA_ON_CPU", "1")


def python(name, code, judge=lambda step: None, limit_s=60.0):
    return CheckStep(name, [sys.executable, "-c", textwrap.dedent(code)], limit_s, judge)


def run(*steps):
    gpu_check.run_stage(steps, gpu_check.variables(), lambda: None)
    return list(steps)


def states(out):
    return {step["name"]: step["state"] for step in read(out).facts["steps"]}


SIGNALLED = "ended by a signal to gpu_check.py"
# Blocks the signal of pytest-timeout, as a hanging CUDA call does.
HANG = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); "
HANG += "time.sleep(1000)"


@pytest.mark.parametrize(
    ("code", "state", "note"),
    [
        ("pass", "ok", ""),
        ("1 / 0", "FAILED", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "FAILED", "ended by SIGSEGV"),
        (HANG, "cut off", "killed at its time limit"),
    ],
    ids=["ok", "error", "crash", "hang"],
)
def test_process_end_sets_step_state(code, state, note):
    (step,) = run(python("a", code, limit_s=2.0))
    assert (step.state, step.note) == (state, note), step.output
    assert ("Fatal Python error: Aborted" in step.output) == (code == HANG)


@pytest.mark.slow
def test_time_limit_kills_child_processes(tmp_path):
    lock = tmp_path / "lock"
    child = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, 2); "
    child += "print('held', file=f, flush=True); time.sleep(1000)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    run(python("a", parent, limit_s=4.0))
    assert lock.read_text() == "held\n"
    deadline = time.monotonic() + 10.0  # a killed process may take a while to exit
    with lock.open() as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "the child process still runs"
                time.sleep(0.05)


def test_interrupt_keeps_outcomes():
    def interrupt():
        raise KeyboardInterrupt

    steps = [python("a", "pass"), python("b", HANG)]
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_stage(steps, gpu_check.variables(), interrupt)
    assert [(s.state, s.note) for s in steps] == [("ok", ""), ("cut off", SIGNALLED)]


def test_judge_error_fails_one_step():
    a, b = run(python("a", "pass", judge=lambda step: {}["planted"]), python("b", "pass"))
    assert (a.state, a.note, b.state) == ("FAILED", "KeyError: 'planted'", "ok")


# `mark.cuda` instead of the full name, so that gpu_check.py does not select this file.
HEAD = "import os, signal, time\nimport pytest\nfrom pytest import mark\npytestmark = mark.cuda\n"
HEAD += "def test_good(): pass\n"
CRASH = "def test_bad(): os.kill(os.getpid(), signal.SIGSEGV)\ndef test_after(): pass"
HANGS = f"def test_bad(): {HANG}\ndef test_after(): pass"
EXPECTED = "@mark.xfail\ndef test_x(): assert 0\n@mark.skip\ndef test_s(): pass"
FILES = {
    "good": ("def test_two(): pass", "ok", {"passed": 2}),
    "bad": ("def test_bad(): assert 1 == 2", "FAILED", {"passed": 1, "failed": 1}),
    "expected": (EXPECTED, "ok", {"passed": 1, "skipped": 1, "xfail": 1}),
    "crash": (CRASH, "FAILED", {"passed": 2, "failed": 1}),
    "hang": (HANGS, "FAILED", {"passed": 2, "failed": 1}),
    "skipped": ("pytestmark = [pytestmark, mark.skip]", "FAILED", {"skipped": 1}),
    "syntax": ("def", "FAILED", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_pytest_output_sets_step_state(tmp_path, monkeypatch, name):
    source, state, counts = FILES[name]
    (tmp_path / "test_it.py").write_text(HEAD + source)
    monkeypatch.setattr(gpu_check, "TEST_S", 5)
    monkeypatch.setattr(gpu_check, "test_files", lambda: [str(tmp_path / "test_it.py")])
    step = gpu_check.plan(tmp_path, is_trial=True)[1][0]
    step.command[step.command.index("-n") + 1] = "1"
    run(step)
    assert (step.state, step.facts["counts"]) == (state, counts), step.output
    failed = {failure["test"].rpartition("::")[2] for failure in step.facts["failures"]}
    assert failed == ({"test_bad"} if "test_bad" in source else set())
    assert name != "bad" or "    E   assert 1 == 2" in gpu_check.last_lines([step])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_gpu_tests_pass_on_cpu_ranks(tmp_path):
    step = gpu_check.plan(tmp_path, is_trial=True)[1][0]
    run(step)
    assert step.state == "ok", gpu_check.last_lines([step])


MACHINE = {"cpu": "none"}
GOOD = Results("training_cuda", MACHINE, rows=[ROW])
WRONG = Results("training_cuda", MACHINE, rows=[replace(ROW, correct=False)])
NOT_RUN = Results("training_cuda", MACHINE, not_run=[{"what": "NCCL", "why": "Duplicate GPU"}])


@pytest.mark.parametrize(
    ("results", "code", "state", "note"),
    [
        (GOOD, 0, "ok", "1 rows"),
        (WRONG, 1, "FAILED", "1 rows; 1 WRONG"),
        (GOOD, None, "cut off", "1 rows"),
        (NOT_RUN, 0, "not run", "0 rows"),
    ],
)
def test_benchmark_rows_set_step_state(tmp_path, results, code, state, note):
    (tmp_path / "rows").write_text(text_of(results))
    step = CheckStep("a", [], 1.0, gpu_check.judge_rows, file=tmp_path / "rows", code=code)
    gpu_check.judge(step)
    assert (step.state, step.note) == (state, note)


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","ring_kernel(RingArgs)","Duration","us","1,234.5"
"0","ring_kernel(RingArgs)","Registers Per Thread","register/thread","64"
==PROF== Disconnected"""
INVALID = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n"
TOOLS = [
    ("memcheck", "========= ERROR SUMMARY: 0 errors", 0, "ok", "ERROR SUMMARY: 0 errors"),
    ("memcheck", INVALID, None, "FAILED", "first: Invalid __global__ read of size 4 bytes"),
    ("memcheck", "Error: Device not supported", 1, "not run", ""),
    ("ncu_ring", NCU, 0, "ok", "Duration 1,234.5 us; Registers Per Thread 64 register/thread"),
    ("ncu_ring", "==WARNING== No kernels", 0, "FAILED", "ncu profiled no launch of the kernel"),
    ("ncu_ring", "==ERROR== ERR_NVGPUCTRPERM", 1, "not run", "ERR_NVGPUCTRPERM"),
]


@pytest.mark.parametrize(("name", "printed", "code", "state", "note"), TOOLS)
def test_tool_output_sets_step_state(name, printed, code, state, note):
    judge = gpu_check.judge_profile if name == "ncu_ring" else gpu_check.judge_sanitizer
    step = CheckStep(name, [], 1.0, judge, code=code, output=printed)
    gpu_check.judge(step)
    assert (step.state, step.note) == (state, note)


def check(out, *stages, argv=()):
    return gpu_check.main(["--out", str(out), *argv], lambda folder, is_trial: list(stages))


def test_gpu_check_reports_all_steps(tmp_path, capsys):
    assert check(tmp_path / "new/good", [python("a", "pass")]) == 0
    assert capsys.readouterr().out.endswith("all steps passed\n")
    (tmp_path / "rows").write_text(text_of(GOOD))
    row = python("training_cuda", "pass", judge=gpu_check.judge_rows)
    row.file = tmp_path / "rows"
    assert check(tmp_path / "bad", [python("a", "1 / 0"), python("b", "pass")], [row]) == 1
    report = read(tmp_path / "bad")
    assert states(tmp_path / "bad") == {"a": "FAILED", "b": "ok", "training_cuda": "ok"}
    assert report.rows == [ROW]
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed
    assert printed.endswith("FAILED: a\n")
    assert check(tmp_path / "out", [python("build", "1 / 0")], [python("a", "pass")]) == 1
    assert states(tmp_path / "out") == {"build": "FAILED", "a": "not reached"}
