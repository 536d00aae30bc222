"""Does gpu_check.py keep what is known through hangs, crashes, lost GPUs, and its own end?

Nothing here needs a GPU: stand-ins take the place of its steps, and of the programs that they run.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mostly_slow

ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(ROOT))  # last: the installed pyringar comes first

from benchmarks import gpu_check, gpu_process, gpu_steps, gpu_test_log, training_cuda  # noqa: E402
from benchmarks.bench import main as run_benchmark  # noqa: E402
from benchmarks.gpu_process import Budget  # noqa: E402
from benchmarks.gpu_steps import Checker, Plan, Step  # noqa: E402
from benchmarks.rows import Results, Row, lines_of, read  # noqa: E402

MACHINE: dict[str, Any] = {
    **{"gpu": "Stand-in 1", "compute_capability": "9.0", "cpu": "none", "cores": 2},
    **{"torch": "2.11", "date": "today", "source": "abc"},
}
ROW = Row("training_cuda", "LeNet", 1, "ringar", 1.0, 1.0, 1.0, 1.0, 1.0, 2, True)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_process, "ABORT_S", 0.3)
    monkeypatch.setattr(gpu_process, "LOOK_S", 0.1)


@pytest.fixture
def checker() -> Checker:
    return Checker(Budget(60.0), gpu_check.variables())


def plan(name: str, step: Callable[..., Step] | None = None, **more: Any) -> Plan:
    """A step that goes well, or the one given."""
    part = more.pop("part", "tests")
    limit_s = more.pop("limit_s", 20.0)
    return Plan(name, part, limit_s, step or (lambda checker, plan: Step(plan.name, "ok")), **more)


def running(code: str) -> Callable[[Checker, Plan], Step]:
    """A step that runs this Python."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return lambda checker, plan: Step.of(plan.name, checker.run(command, plan.limit_s))


def check(out: Path, plans: list[Plan], *arguments: str, **machine: Any) -> int:
    return gpu_check.main(["--out", str(out), *arguments], plans, lambda checker: MACHINE | machine)


def states(out: Path) -> dict[str, str]:
    return {step["name"]: step["state"] for step in read(out).facts["steps"]}


# -- a file of tests -------------------------------------------------------------------------------

HEAD = """
import os, signal, time
import pytest
pytestmark = pytest.mark.cuda
def test_good(): pass
"""
# Where Python's handlers do not run, as in a CUDA call that does not return: pytest-timeout's
# SIGALRM is noted there, and nothing comes of it.
HANG = (
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM}); time.sleep(1000)"
)
POISONED = """
lost = []
@pytest.fixture(autouse=True)
def cuda():
    yield
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_bad():
    lost.append(1)
def test_innocent(): pass
def test_also(): pass
"""
FILES = {
    "good": ("def test_two(): pass", "ok", "2 passed"),
    "bad": ("def test_bad(): assert 1 == 2", "FAILED", "1 passed, 1 failed"),
    "fixture": (
        "@pytest.fixture\ndef no(): 1 / 0\ndef test_bad(no): pass",
        *("FAILED", "1 passed, 1 error"),
    ),
    "expected": (
        "@pytest.mark.xfail\ndef test_x(): assert 0\n@pytest.mark.skip\ndef test_s(): pass",
        *("ok", "1 passed, 1 skipped, 1 xfailed"),
    ),
    "crash": (
        "def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)\ndef test_after(): pass",
        *("FAILED", "1 passed, 1 not begun; in test_crash; ended by SIGSEGV"),
    ),
    "exit": ("def test_exit(): os._exit(0)", "FAILED", "1 passed; in test_exit"),
    "skipped": ("pytestmark = [pytestmark, pytest.mark.skip]", "FAILED", "1 skipped"),
    "unmarked": ("pytestmark = []", "FAILED", "no test ended"),
    "syntax": ("def", "FAILED", "1 error"),
    "sticky": (
        POISONED,
        "FAILED",
        "4 passed, 3 error; sticky CUDA error since test_bad, 2 that failed later may be its doing",
    ),
}


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm: other programs use that one."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(gpu_steps, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def run_file(checker: Checker, tmp_path: Path, shared_memory: Path) -> Callable[..., Step]:
    """``run_file(name)``: the step that runs that file."""

    def call(name: str, source: str = "", budget_s: float = 60.0, limit_s: float = 60.0) -> Step:
        path = tmp_path / f"test_{name}.py"
        path.write_text(HEAD + (source or FILES[name][0]))
        checker.budget = Budget(budget_s)
        return gpu_steps.tests(checker, plan(name, limit_s=limit_s), path=str(path))

    return call


@pytest.mark.parametrize("name", mostly_slow(FILES, "good", "syntax", "fixture"))
def test_the_outcome_of_a_file(run_file: Callable[..., Step], name: str) -> None:
    _, state, note = FILES[name]
    step = run_file(name)
    assert step.state == state, step.tail
    assert step.note == note


def test_what_failed_is_told_with_its_last_lines(run_file: Callable[..., Step]) -> None:
    step = run_file("bad")
    (bad,) = step.facts["not_passed"]
    assert bad["test"].endswith("test_bad.py::test_bad")
    assert bad["error"][-1] == "E   assert 1 == 2"
    told = gpu_check.explain(step).splitlines()
    assert told[0] == f"    failed: {bad['test']}"
    assert told[-2] == "    E   assert 1 == 2"


def test_a_log_may_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    events = ['{"event": "collected", "count": 2}', '{"event": "begin", "test": "a::b"}', '{"ev']
    log.write_text("\n".join(events))
    assert gpu_test_log.read(log).in_words() == "no test ended, 1 not begun; in b"
    assert gpu_test_log.read(tmp_path / "none").in_words() == "no test ended"


@pytest.mark.slow
def test_a_file_that_is_lost_takes_no_other_along(run_file: Callable[..., Step]) -> None:
    assert [run_file(name).state for name in ("sticky", "crash", "good")] == ["FAILED"] * 2 + ["ok"]


@pytest.mark.slow  # pytest itself says nothing for seconds when others compute
def test_a_hang_costs_one_file_and_says_where_it_is(
    run_file: Callable[..., Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_steps, "QUIET_S", 10.0)
    step = run_file("hang", f"def test_hang(): {HANG}\ndef test_after(): pass")
    assert step.state == "FAILED"
    assert step.note.startswith(
        "1 passed, 1 not begun; in test_hang; silent for too long: ended, after"
    )
    assert step.facts["running"].endswith("::test_hang")
    assert "in test_hang" in step.tail.partition("Fatal Python error: Aborted")[2]
    assert run_file("good").state == "ok"


@pytest.mark.slow
def test_a_file_without_time_is_cut_off(run_file: Callable[..., Step]) -> None:
    step = run_file("hang", f"def test_hang(): {HANG}", budget_s=10.0)
    assert step.state == "cut off"
    assert step.facts["counts"]["passed"] == 1
    assert "in test_hang; ended as time was over, after" in step.note


@pytest.mark.slow
def test_a_file_that_is_slow_is_no_failure(run_file: Callable[..., Step]) -> None:
    slow = "@pytest.mark.parametrize('n', range(99))\ndef test_slow(n): time.sleep(0.2)"
    step = run_file("slow", slow, limit_s=10.0)
    assert step.state == "cut off", step.tail
    assert step.facts["counts"]["passed"] + step.facts["num_left"] in (99, 100)


def test_a_file_that_leaves_shared_memory_has_failed(
    run_file: Callable[..., Step], shared_memory: Path
) -> None:
    (shared_memory / "older").touch()
    path = str(shared_memory / "cuda.shm.0.1")
    step = run_file("leak", f"def test_leak(): open({path!r}, 'w').close()")
    assert step.state == "FAILED"
    assert step.note == f"2 passed; left in {shared_memory}: cuda.shm.0.1"
    assert step.facts["left_in_dev_shm"] == ["cuda.shm.0.1"]


def test_every_file_with_tests_that_need_a_gpu_is_a_step() -> None:
    names = {path.stem for path in (ROOT / "tests/cuda").glob("test_*.py")}
    names |= {
        p.stem for p in (ROOT / "tests").glob("test_*.py") if "pytest.mark.cuda" in p.read_text()
    }
    names -= {Path(__file__).stem}
    assert names == {plan.name for plan in gpu_steps.PLANS if plan.part == "tests"}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tests_for_a_gpu_are_right_themselves(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over CPU ranks, as far as these can stand in: a wrong test would cost time on a GPU."""
    checker.budget = Budget(1400.0)
    checker.environment["PYRINGAR_TEST_CUDA_ON_CPU"] = "1"
    monkeypatch.setattr(gpu_steps, "SHARED_MEMORY", Path("/nonexistent"))
    for path in sorted((ROOT / "tests/cuda").glob("test_*.py")):
        step = gpu_steps.tests(checker, plan(path.stem, limit_s=600.0), path=str(path))
        assert not step.facts["not_passed"], gpu_check.explain(step)
        assert step.facts["num_left"] == 0, step.note


# -- benchmarks ------------------------------------------------------------------------------------

# Takes the place of a script: what it does, `put` one of these as its results. It imports no torch.
GOALS = {"goals": [{"is_reached": True}, {"is_reached": None}]}
WRITTEN = {
    "one": Results("training_cuda", {"cpu": "none"}, rows=[ROW], facts=GOALS),
    "two": Results("training_cuda", {"cpu": "none"}, rows=[ROW, ROW], facts=GOALS),
    "wrong": Results("training_cuda", {"cpu": "none"}, rows=[replace(ROW, correct=False)]),
    "none": Results(
        *("training_cuda", {"cpu": "none"}),
        not_run=[{"what": "NCCL", "why": "Duplicate GPU"}],
    ),
}
BENCHMARK = f"""
import os, signal, sys, time
def put(name):
    with open(sys.argv[2] + ".new", "w") as file:
        file.write({ {name: lines_of(found) for name, found in WRITTEN.items()} }[name])
    os.replace(sys.argv[2] + ".new", sys.argv[2])
"""


@pytest.fixture
def measure(checker: Checker, tmp_path: Path) -> Callable[..., Step]:
    """The step of a benchmark that does this."""

    def call(code: str, limit_s: float) -> Step:
        path = tmp_path / "script.py"
        path.write_text(BENCHMARK + code)
        return gpu_steps.measure(checker, plan("training_cuda", limit_s=limit_s), str(path))

    return call


@pytest.mark.parametrize(
    ("code", "state", "note", "num_rows"),
    [
        ("put('one')", "ok", "1 rows, 1 of 2 goals", 1),
        ("put('wrong'); sys.exit(1)", "FAILED", "1 WRONG", 1),
        ("put('one'); put('two'); time.sleep(100)", "cut off", "2 rows, 1 of 2 goals; ended", 2),
        ("put('one'); os.kill(os.getpid(), signal.SIGSEGV)", "FAILED", "ended by SIGSEGV", 1),
        pytest.param(
            *("time.sleep(100)", "FAILED", "no rows; ended at its limit", 0), marks=pytest.mark.slow
        ),
        ("1 / 0", "FAILED", "no rows", 0),
        ("put('none'); sys.exit(1)", "not run", "0 rows; NCCL: Duplicate GPU", 0),
    ],
)
def test_the_outcome_of_a_benchmark(
    measure: Any, code: str, state: str, note: str, num_rows: int
) -> None:
    step = measure(code, limit_s=3.0 if "sleep" in code else 20.0)
    assert step.state == state, step.tail
    assert note in step.note
    assert len(step.rows) == num_rows


def test_training_writes_rows_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases in turns, ended in the second epoch of the second one."""
    epochs = []

    class Trainer(training_cuda.Trainer):
        def run(self) -> Any:
            epochs.append(1)
            if len(epochs) == 4:
                raise KeyboardInterrupt
            return super().run()

    monkeypatch.setattr(training_cuda, "Trainer", Trainer)
    path = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(
            training_cuda.BENCHMARK, ["--dry-run", "--only", "LeNet", "--json", str(path)]
        )
    (row,) = read(path).rows
    assert (row.case, row.rounds, row.correct) == ("LeNet", 1, True)


# -- sanitizers and profiles -----------------------------------------------------------------------


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``tool(name, printed, status)``: a program of that name on PATH."""

    def make(name: str, printed: str, end: str = "exit 0") -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n{end}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return make


@pytest.mark.parametrize(
    ("printed", "end", "state", "note"),
    [
        ("right\n========= ERROR SUMMARY: 0 errors", "exit 0", "ok", "ERROR SUMMARY: 0 errors"),
        (
            "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n"
            "=========     at ring_kernel\n========= ERROR SUMMARY: 1 error",
            *("exit 9", "FAILED", "1 error; first: Invalid __global__ read of size 4 bytes"),
        ),
        ("========= COMPUTE-SANITIZER", "sleep 100", "cut off", "ended at its limit, after"),
        pytest.param(
            "========= Error: Race reported",
            *("sleep 100", "FAILED", "first: Error: Race reported"),
            marks=pytest.mark.slow,
        ),
        ("========= Error: Device not supported", "exit 1", "not run", "Device not supported"),
        ("AssertionError: ('ring', 1)", "exit 1", "FAILED", ""),
    ],
)
def test_the_outcome_of_a_sanitizer(
    checker: Checker, tool: Any, printed: str, end: str, state: str, note: str
) -> None:
    tool("compute-sanitizer", printed, end)
    step = gpu_steps.sanitizer(checker, plan("memcheck", limit_s=2.0))
    assert step.state == state
    assert note in step.note


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","ring_kernel(RingArgs)","Duration","us","1,234.5"
"0","ring_kernel(RingArgs)","Registers Per Thread","register/thread","64"
==PROF== Disconnected"""


@pytest.mark.parametrize(
    ("printed", "end", "state", "note"),
    [
        (NCU, "exit 0", "ok", "Duration 1,234.5 us; Registers Per Thread 64 register/thread"),
        ("==WARNING== No kernels", "exit 0", "FAILED", "no launch of ring_kernel was seen"),
        ("==ERROR== ERR_NVGPUCTRPERM", "exit 1", "not run", "ERR_NVGPUCTRPERM"),
        ("==ERROR== The application returned an error code (1).", "exit 1", "FAILED", ""),
    ],
)
def test_the_outcome_of_a_profile(
    checker: Checker, tool: Any, printed: str, end: str, state: str, note: str
) -> None:
    tool("ncu", printed, end)
    step = gpu_steps.profile(checker, plan("ncu_ring"), algorithm="ring")
    assert (step.state, step.note) == (state, note)


def test_a_tool_that_is_not_there_is_no_failure(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_steps, "find_tool", lambda name: None)
    for step in (
        gpu_steps.sanitizer(checker, plan("memcheck")),
        gpu_steps.profile(checker, plan("ncu_fused"), algorithm="fused"),
    ):
        assert (step.state, step.note.split()[0]) == ("not run", "no")


# -- the whole -------------------------------------------------------------------------------------


def test_the_status_says_whether_something_failed(tmp_path: Path, capsys: Any) -> None:
    good, bad = [plan("a"), plan("b")], [plan("a"), plan("b", running("1 / 0")), plan("c")]
    assert check(tmp_path / "good", good) == 0
    assert "all well" in capsys.readouterr().out
    assert check(tmp_path / "bad", bad) == 1
    assert states(tmp_path / "bad") == {"a": "ok", "b": "FAILED", "c": "ok"}
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed
    assert "FAILED: b\n" in printed


def test_time_that_is_over_is_no_failure(tmp_path: Path, capsys: Any) -> None:
    slow = running("import time; time.sleep(100)")
    plans = [plan("a", least_s=0.1), plan("b", slow, least_s=0.1), plan("c")]
    assert check(tmp_path / "out", plans, "--total-s", "1") == 3
    assert states(tmp_path / "out") == {"a": "ok", "b": "cut off", "c": "not reached"}
    facts = read(tmp_path / "out").facts
    assert (facts["failed"], facts["unfinished"]) == ([], ["b", "c"])
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    assert "time was over: b, c; run them by --only" in printed


def test_without_a_build_nothing_else_is_begun(tmp_path: Path) -> None:
    plans = [plan("build", running("1 / 0"), part="build"), plan("a"), plan("b")]
    assert check(tmp_path / "out", plans) == 1
    assert states(tmp_path / "out") == {"build": "FAILED", "a": "not reached", "b": "not reached"}
    notes = [step["note"] for step in read(tmp_path / "out").facts["steps"]]
    assert notes[1:] == ["there is no build"] * 2


def test_a_step_that_has_begun_is_known_to_have(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def looking(checker: Checker, plan: Plan) -> Step:
        seen.append(states(tmp_path / "out"))
        return Step(plan.name, "ok")

    assert check(tmp_path / "out", [plan("a", looking), plan("b")]) == 0
    assert seen == [{"a": "cut off", "b": "not reached"}]


def test_a_step_that_raises_ends_no_other(tmp_path: Path) -> None:
    raising = plan("a", lambda checker, plan: {}["planted"])
    assert check(tmp_path / "out", [raising, plan("b")]) == 1
    assert states(tmp_path / "out") == {"a": "FAILED", "b": "ok"}


def measured(section: str, **facts: Any) -> Callable[[Checker, Plan], Step]:
    row = replace(ROW, section=section)
    return lambda checker, plan: Step(
        plan.name, "ok", facts={"section": section, **facts}, rows=[row]
    )


def test_three_commands_make_one_report(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new/folder/gpu.jsonl"
    plans = [
        plan("build", part="build"),
        plan("bits"),
        plan("training_cuda", measured("training_cuda"), part="training"),
        plan("peers_cuda", measured("peers_cuda", not_run=[]), part="benchmarks"),
        plan("memcheck", part="sanitizers"),
    ]
    assert check(out, plans, "--only", "tests") == 0
    assert list(states(out)) == ["build", "bits"]
    assert check(out, plans, "--only", "training,peers_cuda") == 0
    assert [row.section for row in read(out).rows] == ["training_cuda", "peers_cuda"]
    assert check(out, plans, "--only", "training,sanitizers", date="tomorrow") == 0
    assert set(states(out).values()) == {"ok"}
    assert list(states(out)) == [plan.name for plan in plans]
    assert [row.section for row in read(out).rows] == ["training_cuda", "peers_cuda"]
    assert "added to the 4 steps that are there" in capsys.readouterr().out


def test_a_step_that_is_not_reached_keeps_its_earlier_outcome(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    assert check(out, [plan("a")]) == 0
    assert check(out, [plan("a", least_s=100.0)], "--total-s", "50") == 3
    assert states(out) == {"a": "ok"}


def test_a_step_that_is_done_again_and_cut_off_keeps_its_earlier_outcome(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    assert check(out, [plan("a", lambda checker, plan: Step(plan.name, "ok", note="first"))]) == 0
    again = plan("a", lambda checker, plan: Step(plan.name, "cut off"))
    assert check(out, [again], commit="another") == 3
    assert [(s["state"], s["note"]) for s in read(out).facts["steps"]] == [("ok", "first")]


@pytest.mark.parametrize("changed", ["gpu", "torch", "source"])
def test_a_report_of_something_else_is_not_added_to(
    tmp_path: Path, capsys: Any, changed: str
) -> None:
    out = tmp_path / "gpu.jsonl"
    assert check(out, [plan("a")]) == 0
    before = out.read_bytes()
    assert check(out, [plan("b")], **{changed: "other"}) == 2
    assert f"{changed} is {MACHINE[changed]!r} there, 'other' here" in capsys.readouterr().out
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", '{"version": 2, "section": "x", "machine": {"cpu": 1}}'])
def test_a_file_that_is_no_report_is_not_touched(tmp_path: Path, capsys: Any, text: str) -> None:
    out = tmp_path / "gpu.jsonl"
    out.write_text(text)
    assert check(out, [plan("a")]) == 2
    assert "--out" in capsys.readouterr().out
    assert out.read_text() == text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--only build,testing", "--only: no step 'testing'; there are build, machine, tests,"),
        ("--total-s 0", "--total-s is 0, expected a positive number of seconds"),
        ("--total-s=-5", "--total-s is -5, expected"),
        ("--total-s nan", "--total-s is nan, expected"),
        ("--total-s inf", "--total-s is inf, expected"),
        ("--out=", "--out is '', expected the name of a file"),
    ],
)
def test_wrong_arguments_are_refused(capsys: Any, argv: str, words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(argv.split())
    assert words in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named_before_anything_runs(capsys: Any) -> None:
    assert check(Path("/proc/gpu.jsonl"), [plan("a")]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("nothing was run: --out: /proc/gpu.jsonl")
    assert "No such file" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_a_machine_without_a_gpu_is_told(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "gpu.jsonl"
    assert gpu_check.main(["--out", str(out)], [plan("a")]) == 2
    assert "no CUDA device here" in capsys.readouterr().out
    assert not out.exists()


def test_each_command_fits_its_time() -> None:
    """Also where everything but a file of tests takes all that it may."""
    for parts in ({"training", "benchmarks"}, {"sanitizers", "profile"}):
        limits = [plan.limit_s for plan in gpu_steps.PLANS if plan.part in parts]
        assert sum(limits) <= gpu_check.COMMAND_S <= 480


# -- ended from outside ----------------------------------------------------------------------------

SCRIPT = """
import functools, sys
sys.path.insert(0, {root!r})
from benchmarks import gpu_check, gpu_process, gpu_steps

gpu_process.LOOK_S = gpu_process.ABORT_S = 0.1
step = functools.partial(gpu_steps.measure, script={script!r})
good = lambda checker, plan: gpu_steps.Step(plan.name, "ok")
plans = [gpu_steps.Plan(name, "tests", 90.0, run)
         for name, run in (("a", good), ("training_cuda", step), ("c", good))]
sys.exit(gpu_check.main(["--out", {out!r}], plans, lambda checker: {machine!r}))
"""
HANGING = "put('two'); time.sleep(1000)"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_what_was_known_outlives_an_end_from_outside(tmp_path: Path, number: int) -> None:
    out, script, lock = tmp_path / "gpu.jsonl", tmp_path / "hangs.py", tmp_path / "lock"
    holding = f"import fcntl; held = open({str(lock)!r}, 'w'); fcntl.flock(held, fcntl.LOCK_EX)\n"
    script.write_text(holding + BENCHMARK + HANGING)
    source = SCRIPT.format(root=str(ROOT), script=str(script), out=str(out), machine=MACHINE)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not (out.exists() and read(out).rows):  # never half a report
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.send_signal(number)
            process.wait(30)
        finally:
            process.kill()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    report = read(out)
    assert states(out) == {"a": "ok", "training_cuda": "cut off", "c": "not reached"}
    assert len(report.rows) == 2
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # what it had started is gone, too
    # A later command takes over from there.
    assert check(out, [plan("training_cuda", measured("training_cuda")), plan("c")]) == 0
    assert set(states(out).values()) == {"ok"}
    assert len(read(out).rows) == 1
