"""Check a machine with a GPU by one command: build, test, look for memory errors, measure.

    python benchmarks/gpu_check.py                     # all of it, within 9 minutes
    python benchmarks/gpu_check.py --only build,tests
    python benchmarks/gpu_check.py --out report.jsonl --quick

Writes one results file: the findings of every step in its head, then the rows of all benchmarks.
Every step is a process of its own with its own deadline, so that a hang costs one step. Needs no
network and no installed pyringar; torch, pybind11, ninja, a C++ compiler, nvcc and pytest must be
there. Exit status: 0 all well, 1 something failed, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import describe_machine
from benchmarks.rows import Results, read, write
from benchmarks.script import exit_with

ROOT = Path(__file__).resolve().parent.parent

TOTAL_S = 540.0
TAIL_CHARS = 20_000
PRINTED_CHARS = 5000
SCRIPTS = {"training": "training_cuda", "benchmarks": "allreduce_cuda"}
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")

# Run under the sanitizers: every engine, vector and element paths, lists, a strided tensor. Every
# tensor is an allocation of its own, so that reading past its end is seen.
SHORT_RUN = """
import torch, pyringar as pr
with pr.Communicator(["cuda:0"] * 3, timeout=100.0) as comm:
    for algorithm in ("fused", "direct", "ring"):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
            for numel in (1, 37, 1031, 20_011):
                data = [(torch.arange(numel) % 5 + r).to(dtype).cuda() for r in range(3)]
                wanted = (torch.arange(numel) % 5 * 3 + 3).to(dtype)
                comm.all_reduce(data, algorithm=algorithm)
                assert all(torch.equal(t.cpu(), wanted) for t in data), (algorithm, dtype, numel)
        lists = [[torch.ones(n, device="cuda") for n in (3, 999, 70)] for _ in range(3)]
        comm.all_reduce_coalesced(lists, algorithm=algorithm)
        views = [torch.ones(999, device="cuda")[1:] for _ in range(3)]
        comm.all_reduce(views, algorithm=algorithm)
    ins = [torch.ones(300, device="cuda") for _ in range(3)]
    outs = [torch.zeros(100, device="cuda") for _ in range(3)]
    comm.reduce_scatter(outs, ins)
    comm.all_gather(ins, outs)
    comm.broadcast(ins, root=2)
    torch.cuda.synchronize()
    comm.all_reduce([t[::2] for t in ins])
    torch.cuda.synchronize()
print("right")
"""

DESCRIBE = "import json, benchmarks.gpu_check as g; print(json.dumps(g.describe()))"


@dataclass
class Step:
    """The outcome of one step: ``ok`` is None where it could not be run for a reason."""

    name: str
    ok: bool | None
    seconds: float = 0.0
    note: str = ""
    tail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """The end of a process: ``code`` is None where its deadline ended it."""

    code: int | None
    seconds: float
    output: str

    def step(self, name: str, **facts: Any) -> Step:
        """Return the outcome of the step that this process was."""
        note = f"ended at its deadline, {self.seconds:.0f} s" if self.code is None else ""
        return Step(name, self.code == 0, self.seconds, note, self.output[-TAIL_CHARS:], facts)


class Checker:
    """Runs the steps, none beyond the time that is left of the whole."""

    def __init__(self, total_s: float, environment: Mapping[str, str]) -> None:
        self._end = time.monotonic() + total_s
        self._environment = dict(environment)

    def run(self, command: Sequence[str], most_s: float, **environment: str) -> Run:
        """Run a process group to its end or to its deadline, with stdout and stderr together."""
        begin = time.monotonic()
        limit_s = max(1.0, min(most_s, self._end - begin))
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Also what it started itself: a sanitizer's or NCCL's processes.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        return Run(code, time.monotonic() - begin, text)


# -- steps -----------------------------------------------------------------------------------------


def build(checker: Checker, args: argparse.Namespace) -> Step:
    """Compile both engines for this machine; note registers and spills of the kernels."""
    command = [sys.executable, "-m", "pyringar", "build", "--cuda"]
    run = checker.run(command, 150.0)
    kernels = kernels_built() if run.code == 0 else []
    facts: dict[str, Any] = {"kernels": len(kernels)}
    if kernels:
        facts["most_registers"] = max(kernel["registers"] for kernel in kernels)
        facts["spilling"] = [kernel["name"] for kernel in kernels if kernel["spill_store_bytes"]]
    step = run.step("build", **facts)
    if kernels:
        step.note = f"{len(kernels)} kernels, at most {facts['most_registers']} registers"
        if facts["spilling"]:
            step.note += f", {len(facts['spilling'])} spill"
    return step


def kernels_built() -> list[dict[str, Any]]:
    """Return the kernels in the CUDA engine's build record."""
    from pyringar.engine import build as _build

    engine = _build.find_engine(_build.Recipe(kind=_build.CUDA))
    return [] if engine is None else list(engine.record.get("kernels", []))


def machine(checker: Checker, args: argparse.Namespace) -> Step:
    """Describe the machine that all is measured on."""
    run = checker.run([sys.executable, "-c", DESCRIBE], 60.0)
    step = run.step("machine")
    if step.ok:
        step.facts = json.loads(run.output.splitlines()[-1])
        step.note = "driver {driver}, CUDA {torch_cuda}, NCCL {nccl}".format(**step.facts)
    return step


def tests(checker: Checker, args: argparse.Namespace) -> Step:
    """Run the tests that need a GPU."""
    if importlib.util.find_spec("pytest") is None:
        return Step("tests", False, note="pytest is not installed")
    # addopts is for the whole suite and wants plugins that may not be here.
    files = ("tests/cuda", "tests/test_cuda_processes.py", "tests/test_train_graph.py")
    command = [sys.executable, "-m", "pytest", *files, "-v", "-m", "cuda"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "--maxfail=30", "--durations=10"]
    command += ["--tb=short", "-o", "faulthandler_timeout=60"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append("--timeout=100")
    run = checker.run(command, 220.0)
    counts = count_outcomes(run.output)
    step = run.step("tests", **counts, not_passed=names_not_passed(run.output))
    # A run that skips everything has shown nothing.
    step.ok = bool(step.ok and counts["passed"] > 0)
    counted = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
    step.note = "; ".join(filter(None, (counted or "no test ran", step.note)))
    return step


def count_outcomes(output: str) -> dict[str, int]:
    """Count outcomes in pytest's verbose lines: right even where it was killed."""
    found = re.findall(
        r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", output, re.MULTILINE
    )
    counts = collections.Counter(outcome.lower() for outcome in found)
    counts["xfailed"], counts["xpassed"] = counts.pop("xfail", 0), counts.pop("xpass", 0)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def names_not_passed(output: str) -> list[str]:
    """Return the tests that failed, and the one that was running when pytest was killed."""
    failed = re.findall(r"^(\S+::.*) (?:FAILED|ERROR)\b", output, re.MULTILINE)
    last = output.rstrip().rpartition("\n")[2]
    return failed + [last.strip()] * bool(re.match(r"tests/\S+::.*(?<!%\])$", last))


def sanitizer(checker: Checker, args: argparse.Namespace, tool: str, most_s: float) -> Step:
    """Run all engines shortly under a tool of compute-sanitizer."""
    program = find_sanitizer()
    if program is None:
        return Step(tool, None, note="compute-sanitizer is neither on PATH nor under CUDA_HOME")
    command = [program, "--tool", tool, "--error-exitcode", "9"]
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = checker.run([*command, sys.executable, "-c", SHORT_RUN], most_s, **settings)
    step = run.step(tool)
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", run.output)
    step.note = "; ".join(filter(None, (step.note, *found[-1:])))
    return step


def find_sanitizer() -> str | None:
    """Find compute-sanitizer on PATH, in CUDA_HOME, or where CUDA is usually installed."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    places = [str(Path(home, "bin", "compute-sanitizer")) for home in homes if home]
    return next(filter(None, map(shutil.which, ("compute-sanitizer", *places))), None)


def measure(checker: Checker, args: argparse.Namespace, name: str, most_s: float) -> Step:
    """Run a benchmark; its results become part of ours."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        command = [
            sys.executable,
            f"benchmarks/{SCRIPTS[name]}.py",
            "--json",
            str(path),
            "--allow-busy",
        ]
        run = checker.run(command + ["--quick"] * args.quick, most_s)
        results = read(path) if path.is_file() else None
    step = run.step(name, results=results)
    goals = results.facts.get("goals", []) if results else []
    reached = sum(goal["is_reached"] is True for goal in goals)
    counted = "no report"
    if results:
        counted = f"{len(results.rows)} rows, {reached} of {len(goals)} goals reached"
    step.note = "; ".join(filter(None, (counted, step.note)))
    return step


STEPS: dict[str, Callable[[Checker, argparse.Namespace], Step]] = {
    "build": build,
    "machine": machine,
    "tests": tests,
    "training": partial(measure, name="training", most_s=110.0),
    "benchmarks": partial(measure, name="benchmarks", most_s=150.0),
    "memcheck": partial(sanitizer, tool="memcheck", most_s=60.0),
    "racecheck": partial(sanitizer, tool="racecheck", most_s=60.0),
}


# -- report ----------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Return machine, GPU and versions; build the engines where they are not built yet."""
    return {**describe_machine("cuda"), "packages": versions()}


def versions() -> dict[str, str | None]:
    """Return those of the packages that take part; None for what is not there."""
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "pybind11", "ninja", "pytest"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def measured_by(facts: Mapping[str, Mapping[str, Any]]) -> list[Results]:
    """Return what the benchmarks' steps have measured."""
    found = [facts[name]["results"] for name in SCRIPTS if name in facts]
    return [results for results in found if results]


def report_of(gpu: Mapping[str, Any], steps: Sequence[Step]) -> Results:
    """Return one report: the benchmarks' rows, as in every results file, and all that was found."""
    facts = {step.name: step.facts for step in steps}
    measured = measured_by(facts)
    return Results(
        section="gpu_check",
        machine={
            **{"cpu": "unknown", "cores": "unknown", "date": "unknown"},
            **(measured[0].machine if measured else {}),
            **gpu,
            **facts.get("machine", {}),
        },
        effort=measured[0].effort if measured else "full",
        rows=[row for results in measured for row in results.rows],
        not_run=[item for results in measured for item in results.not_run],
        facts={
            "ok": all(step.ok is not False for step in steps),
            "steps": [{k: v for k, v in asdict(step).items() if k != "facts"} for step in steps],
            "build": facts.get("build", {}),
            "tests": facts.get("tests", {}),
            "goals": [goal for results in measured for goal in results.facts.get("goals", [])],
        },
    )


def summarize(step: Step) -> str:
    """Return one line of the summary."""
    state = {True: "ok", False: "FAILED", None: "not run"}[step.ok]
    return f"{step.name:<11} {state:<8} {step.seconds:>6.1f} s  {step.note}"


def slug(name: str) -> str:
    """Return a name for files: nvidia-h200 for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@contextlib.contextmanager
def environment(architecture: str) -> Iterator[dict[str, str]]:
    """Set the variables of all steps: this checkout, this GPU's code, a cache for engines."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "PYRINGAR_CUDA_ARCHS": architecture, "PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:
        if "PYRINGAR_CACHE_DIR" not in os.environ and not importlib.util.find_spec("platformdirs"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pyringar-"))
            settings["PYRINGAR_CACHE_DIR"] = folder
        os.environ.update(settings)
        yield dict(os.environ)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Build, test and measure pyringar on a GPU.")
    parser.add_argument("--out", metavar="PATH", help="the report (default: gpu-NAME.jsonl, here)")
    parser.add_argument(
        "--only", default=",".join(STEPS), help="steps, in order (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds of every benchmark")
    parser.add_argument(
        "--total-s", type=float, default=TOTAL_S, help="seconds in all (default: %(default)g)"
    )
    args = parser.parse_args(argv)
    args.steps = args.only.split(",")
    unknown = [name for name in args.steps if name not in STEPS]
    if unknown:
        parser.error(f"--only: no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps, print a line for each, write the report."""
    args = parse_arguments(argv)
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device here (torch {torch.__version__}): nothing was checked")
        return 2
    gpu = torch.cuda.get_device_name(0)
    major, minor = torch.cuda.get_device_capability(0)
    out = Path(args.out or f"gpu-{slug(gpu)}.jsonl")
    print(f"{gpu}, torch {torch.__version__}", flush=True)
    steps: list[Step] = []
    with environment(f"{major}.{minor}") as variables:
        checker = Checker(args.total_s, variables)
        for name in args.steps:
            steps.append(STEPS[name](checker, args))
            print(summarize(steps[-1]), flush=True)
            if steps[-1].ok is False:
                print(steps[-1].tail[-PRINTED_CHARS:], flush=True)
            if name == "build" and not steps[-1].ok:
                break  # every other step would build again, and fail
    report = report_of({"gpu": gpu, "torch": torch.__version__}, steps)
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, report)
    is_good = report.facts["ok"]
    print(f"\n{'all well' if is_good else 'FAILED'}: {out}")
    return 0 if is_good else 1


if __name__ == "__main__":
    exit_with(main)
