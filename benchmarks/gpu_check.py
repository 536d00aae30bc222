"""Check a machine with a GPU in 5 to 6 minutes, and write one report.

    python benchmarks/gpu_check.py --out DIR/gpu.jsonl
    python benchmarks/gpu_check.py --only training_cuda,ncu_ring
    python benchmarks/gpu_check.py --dry-run                               # print the steps
    PYRINGAR_TEST_CUDA_ON_CPU=1 python benchmarks/gpu_check.py             # try it without a GPU

Order of the steps: build the engines; run the GPU tests and the sanitizers in parallel; run each
benchmark alone; profile two kernels. Each step is a process group with a time limit, so a hang, a
crash or a lost CUDA context ends only that step. The report is a results file, rewritten after each
step. Its first line holds the outcome of all steps, and each further line a benchmark case.

Needs torch, pybind11, ninja, filelock, a C++ compiler, nvcc, pytest, pytest-xdist and
pytest-timeout, but no network and no installed pyringar. Exit status: 0, or 1 if a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe_host, num_cores
from benchmarks.rows import Results, Row, read, write

ROOT = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")
OK, FAILED, CUT_OFF, NOT_RUN, NOT_REACHED = "ok", "FAILED", "cut off", "not run", "not reached"
ON_CPU = "PYRINGAR_TEST_CUDA_ON_CPU"
TEST_S = 60  # time limit of a test without its own limit
ABORT_S, KILL_S, POLL_S = 3.0, 10.0, 0.1
PRINTED_FAILURES, PRINTED_LINES, PRINTED_COLUMNS = 8, 15, 140
BENCHMARKS_S = {"allreduce_cuda": 70.0, "training_cuda": 120.0, "peers_cuda": 70.0}
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
NCU_SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis")
NCU_METRICS = ("Duration", "DRAM Throughput", "Registers Per Thread", "Achieved Occupancy")


@dataclass
class CheckStep:
    """A process to run, with its time limit and its outcome.

    Attributes:
        command: The program and its arguments; empty if the program is not installed.
        limit_s: Seconds after which the process is killed.
        judge: Reads the output or the file of the process, and completes the outcome.
        file: File that the process writes and ``judge`` reads.
        code: Exit status; None if gpu_check.py killed the process.
        note: One line about the outcome.
        output: Stdout and stderr of the process.
        facts: JSON values that ``judge`` extracted.
    """

    name: str
    command: list[str]
    limit_s: float
    judge: Callable[[CheckStep], None]
    variables: dict[str, str] = field(default_factory=dict)
    file: Path | None = None
    state: str = NOT_REACHED
    seconds: float = 0.0
    code: int | None = None
    note: str = ""
    output: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add_note(self, *notes: str) -> None:
        """Append the nonempty notes."""
        self.note = "; ".join(filter(None, (self.note, *notes)))

    @property
    def tail(self) -> str:
        """The end of the output, unless the state is ok."""
        return "" if self.state == OK else self.output[-20_000:]

    @property
    def summary(self) -> str:
        """The name, the state, the seconds and the note in one line."""
        return f"{self.name:<15} {self.state:<11} {self.seconds:>6.1f} s  {self.note}".rstrip()


def plan(folder: Path, *, is_trial: bool) -> list[list[CheckStep]]:
    """Return the stages. The steps of a stage run in parallel."""
    runs = [sys.executable, "benchmarks/gpu_runs.py"]

    def benchmark(name: str) -> CheckStep:
        out = folder / name
        effort = "--dry-run" if is_trial else "--quick"
        command = [sys.executable, "benchmarks/run_all.py", name, effort, "--out", str(out)]
        return CheckStep(name, command, BENCHMARKS_S[name], judge_rows, file=out / f"{name}.jsonl")

    def tool(step: CheckStep, program: str, options: Sequence[str], *run: str) -> CheckStep:
        path = None if is_trial else find_tool(program)
        if path is None:
            step.state, step.note = NOT_RUN, "no GPU" if is_trial else f"no {program}"
        else:
            step.command = [path, *options, *runs, *run]
        return step

    def sanitizer(name: str) -> CheckStep:
        step = CheckStep(name, [], 110.0, judge_sanitizer, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        options = ["--tool", name, "--error-exitcode", "9"]
        return tool(step, "compute-sanitizer", options, "reduce")

    def profile(algorithm: str) -> CheckStep:
        options = ["--csv", "--clock-control", "none", "-k", f"regex:{algorithm}"]
        options += ["--launch-skip", "2", "--launch-count", "1"]
        options += [word for name in NCU_SECTIONS for word in ("--section", name)]
        step = CheckStep(f"ncu_{algorithm}", [], 40.0, judge_profile)
        return tool(step, "ncu", options, "launch", algorithm)

    # Clear addopts, which are for the whole suite. pytest-timeout must use a thread, because a
    # hanging CUDA call lets no signal handler run.
    tests = [sys.executable, "-m", "pytest", *test_files(), "-m", "cuda", "-o", "addopts="]
    tests += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu_plugin", "-v", "--tb=no"]
    tests += [f"--timeout={TEST_S}", "--timeout-method=thread"]
    tests += ["-n", str(max(2, num_cores() - 5)), "--dist", "worksteal"]
    tests_s = 600.0 if is_trial else 110.0
    return [
        [CheckStep("build", [*runs, "build"], 150.0, judge_build)],
        [CheckStep("tests", tests, tests_s, judge_tests), *map(sanitizer, SANITIZERS)],
        *([benchmark(name)] for name in BENCHMARKS_S),
        [profile("fused")],
        [profile("ring")],
    ]


def test_files() -> list[str]:
    marker = re.compile(r"pytest\.mark\.cuda|gpu\.needed")
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if marker.search(file.read_text())]


def find_tool(name: str) -> str | None:
    """Find a program in PATH, CUDA_HOME or /usr/local/cuda."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    places = [str(Path(home, "bin", name)) for home in homes if home]
    return next(filter(None, map(shutil.which, (name, *places))), None)


@contextlib.contextmanager
def process_of(step: CheckStep, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a step in a new process group; at the block's end kill the group, judge the step."""
    with tempfile.TemporaryFile() as output:
        begin = time.monotonic()
        step.note = "ended by a signal to gpu_check.py"
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=environment | step.variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            step.code = process.poll()
            step.add_note(kill(process))
            step.seconds = round(time.monotonic() - begin, 1)
            output.seek(0)
            step.output = output.read().decode(errors="replace")
            judge(step)


def kill(process: subprocess.Popen[bytes]) -> str:
    """Kill a process group. SIGABRT makes Python print its stacks, even in a CUDA call.

    Returns:
        A note if the process survived SIGKILL, which happens inside the GPU driver; else "".
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ABORT_S)
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} survived SIGKILL for {KILL_S:.0f} s"
    return ""


def run_stage(
    steps: Sequence[CheckStep], environment: dict[str, str], save: Callable[[], None]
) -> None:
    """Run steps in parallel; after each step save the report and print its summary."""
    with contextlib.ExitStack() as processes:
        begin, running = time.monotonic(), []
        for step in steps:
            own = processes.enter_context(contextlib.ExitStack())
            running.append((step, own, own.enter_context(process_of(step, environment))))
        while running:
            time.sleep(POLL_S)
            seconds = time.monotonic() - begin
            for item in list(running):
                step, own, process = item
                if process.poll() is not None or seconds > step.limit_s:
                    step.note = "" if process.poll() is not None else "killed at its time limit"
                    own.close()
                    running.remove(item)
                    save()
                    print(step.summary, flush=True)


def judge(step: CheckStep) -> None:
    """Set the state of a step from its exit status, then from its output."""
    step.state = OK if step.code == 0 else CUT_OFF if step.code is None else FAILED
    if step.code is not None and step.code < 0:
        step.add_note(f"ended by {signal.Signals(-step.code).name}")
    try:
        step.judge(step)
    except Exception as error:  # unreadable output fails only this step
        step.state = FAILED
        step.add_note(f"{type(error).__name__}: {error}")


def judge_build(step: CheckStep) -> None:
    if step.state == OK:
        step.facts = {"machine": json.loads(step.output.splitlines()[-1])}


def judge_tests(step: CheckStep) -> None:
    """Count the test outcomes that pytest-xdist and gpu_plugin.py printed."""
    ended = re.findall(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (.+?) *$", step.output, re.M)
    begun = re.findall(r"^(\S+::.+?) *$", step.output, re.M)
    failures = re.findall(r"^FAILURE OF (.+)\n((?: {4}.*\n)*)", step.output, re.M)
    counts = Counter(outcome.lower() for outcome, _ in ended)
    running = sorted(set(begun) - {test for _, test in ended})
    step.facts = {"counts": dict(counts), "running": running}
    step.facts["failures"] = [{"test": test, "error": error} for test, error in failures]
    step.add_note(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
    step.add_note(f"in {', '.join(running)}" if running else "")
    if failures or (step.state == OK and not counts["passed"]):
        step.state = FAILED


def judge_leftovers(step: CheckStep, before: set[str]) -> None:
    """Fail the step `tests` if it left a file in /dev/shm."""
    if step.command and (left := sorted(shared_memory() - before)):
        step.state, step.facts["left_in_dev_shm"] = FAILED, left
        step.add_note(f"left in {SHARED_MEMORY}: {', '.join(left)}")


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def judge_rows(step: CheckStep) -> None:
    """Read the results file of a benchmark, which may be incomplete."""
    results = read(step.file or Path())
    step.rows = results.rows
    step.facts = {"not_run": results.not_run, "failed": results.failed}
    step.add_note(f"{len(results.rows)} rows")
    if results.wrong or results.failed:
        step.state = FAILED
        step.add_note(f"{len(results.wrong)} WRONG" if results.wrong else "")
        step.add_note(*(f"{item['what']}: {item['why']}" for item in results.failed))
    elif results.not_run and not step.rows:
        step.state = NOT_RUN


def judge_sanitizer(step: CheckStep) -> None:
    step.add_note(*re.findall(r"\w+ SUMMARY: .*", step.output)[-1:])
    found = re.findall(r"^========= ((?!COMPUTE-SANITIZER|.*SUMMARY)\S.*)", step.output, re.M)
    step.add_note(f"first: {found[0]}" if found else "")
    if "Device not supported" in step.output:
        step.state = NOT_RUN
    elif found:
        step.state = FAILED


def judge_profile(step: CheckStep) -> None:
    """Read the metrics of ncu, with units."""
    lines = [line for line in step.output.splitlines() if line.startswith('"')]
    metrics = {
        row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}".strip()
        for row in csv.DictReader(lines)
        if row.get("Metric Name")
    }
    step.facts = {"metrics": metrics}
    step.add_note(*(f"{name} {metrics[name]}" for name in NCU_METRICS if name in metrics))
    refusal = re.search("==ERROR== (?!The application)(.*)", step.output)
    if refusal:  # ncu needs administrator rights, or lacks counters for this GPU
        step.state = NOT_RUN
        step.add_note(refusal[1])
    elif step.state == OK and not metrics:
        step.state = FAILED
        step.add_note("ncu profiled no launch of the kernel")


def results_of(machine: dict[str, Any], steps: Sequence[CheckStep]) -> Results:
    """Return the machine, the outcomes and the rows as the contents of a results file."""
    not_run = [{"what": step.name, "why": step.note} for step in steps if step.state == NOT_RUN]
    for step in steps:
        not_run += step.facts.get("not_run", [])
    keys = ("name", "state", "seconds", "note", "facts", "tail")
    return Results(
        section="gpu_check",
        machine=machine,
        effort="quick",
        rows=[row for step in steps for row in step.rows],
        not_run=not_run,
        facts={"steps": [{key: getattr(step, key) for key in keys} for step in steps]},
    )


def commit() -> str | None:
    with contextlib.suppress(OSError):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


def last_lines(steps: Sequence[CheckStep]) -> list[str]:
    lines: list[str] = []
    for step in steps:
        failures = step.facts.get("failures", [])
        for failure in failures[:PRINTED_FAILURES]:
            lines += [f"FAILED: {failure['test']}", *failure["error"].splitlines()]
        if len(failures) > PRINTED_FAILURES:
            lines.append(f"... and {len(failures) - PRINTED_FAILURES} more: see the report")
        if step.state == FAILED and not failures:
            lines += [f"-- last output of {step.name}:", *step.output.splitlines()[-PRINTED_LINES:]]
    lines += [step.summary for step in steps]
    missing = [item for step in steps for item in step.facts.get("not_run", [])]
    lines += [f"not run: {item['what']}: {item['why']}" for item in missing]
    return [line[:PRINTED_COLUMNS] for line in lines]


def variables() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if "PYRINGAR_CACHE_DIR" not in found and not importlib.util.find_spec("platformdirs"):
        found["PYRINGAR_CACHE_DIR"] = str(Path("~/.cache/pyringar").expanduser())
    return found


def main(argv: Sequence[str] | None = None, make_plan: Callable[..., Any] = plan) -> int:
    about, _, more = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--only", metavar="STEP,...", help="only these steps, after the build")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the steps without running them"
    )
    args = parser.parse_args(argv)
    is_trial = os.environ.get(ON_CPU) == "1"
    with tempfile.TemporaryDirectory() as folder, exiting_on_signals():
        stages = make_plan(Path(folder), is_trial=is_trial)
        names = [step.name for step in itertools.chain(*stages)]
        only = args.only.split(",") if args.only else names
        if unknown := sorted(set(only) - set(names)):
            parser.error(f"--only names no step {', '.join(unknown)}, expected {', '.join(names)}")
        chosen = [[s for s in stage if s.name in (*only, "build")] for stage in stages]
        if args.dry_run:
            print_plan(chosen)
            return 0
        return run_all(list(filter(None, chosen)), args.out)


def run_all(stages: Sequence[Sequence[CheckStep]], out: Path) -> int:
    """Run the stages in order. A failed build ends the run."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    steps = list(itertools.chain(*stages))
    environment, machine = variables(), describe_host() | {"commit": commit()}
    out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        write(out, results_of(machine, steps))

    save()  # raises before the first step if the report cannot be written
    begin = time.monotonic()
    try:
        for stage in stages:
            before = shared_memory()
            run_stage([step for step in stage if step.command], environment, save)
            if stage[0].name == "tests":
                judge_leftovers(stage[0], before)
            if stage[0].name == "build":
                if stage[0].state != OK:
                    break
                machine |= stage[0].facts.pop("machine")
                if arch := machine.get("compute_capability"):
                    environment["PYRINGAR_CUDA_ARCHS"] = arch
    finally:
        save()
    print(f"\n{time.monotonic() - begin:.0f} s in total; the report is {out}")
    print("\n".join(last_lines(steps)))
    failed = [step.name for step in steps if step.state in (FAILED, CUT_OFF, NOT_REACHED)]
    print(f"FAILED: {', '.join(failed)}" if failed else "all steps passed")
    return int(bool(failed))


def print_plan(stages: Sequence[Sequence[CheckStep]]) -> None:
    for number, stage in enumerate(stages, start=1):
        for step in stage:
            command = shlex.join(step.command) if step.command else f"not run: {step.note}"
            print(f"{number}. {step.name:<15} at most {step.limit_s:.0f} s: {command}")


@contextlib.contextmanager
def exiting_on_signals() -> Iterator[None]:
    """On SIGINT, SIGTERM or SIGHUP kill the steps, save the report and exit."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
