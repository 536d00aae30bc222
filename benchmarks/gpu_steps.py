"""The steps of gpu_check.py: what each runs, how long it may take, and what its end means."""

from __future__ import annotations

import contextlib
import csv
import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import gpu_process, gpu_test_log
from benchmarks.gpu_process import BUDGET, LIMIT, Budget, Ended
from benchmarks.rows import InputError, Results, Row, read

ROOT = Path(__file__).resolve().parent.parent

OK, FAILED, CUT_OFF = "ok", "FAILED", "cut off"
NOT_RUN, NOT_REACHED = "not run", "not reached"
UNFINISHED = (CUT_OFF, NOT_REACHED)

TAIL_CHARS = 20_000
TAIL_CHARS_OK = 2_000
TEST_S = 60  # for one test, where it sets no limit itself
QUIET_S = 75.0  # without a word from pytest: longer than a test's limit, which ends Python only
TEST_FILES = ("tests/cuda/test_*.py", "tests/test_cuda_processes.py", "tests/test_train_graph.py")
TEST_FILES += ("tests/test_hierarchical_gpus.py",)
SHARED_MEMORY = Path("/dev/shm")

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

# Run under ncu, which looks at the third launch: caches and clocks are then as in a loop.
PROFILED_RUN = """
import sys, torch, pyringar as pr
with pr.Communicator(["cuda:0"] * 4, timeout=100.0) as comm:
    tensors = [torch.ones(2**24, device="cuda") for _ in range(4)]
    for _ in range(3):
        comm.all_reduce(tensors, algorithm=sys.argv[1])
    torch.cuda.synchronize()
"""
SECTIONS_OF_NCU = ("SpeedOfLight", "Occupancy", "LaunchStats", "MemoryWorkloadAnalysis")
METRICS = ("Duration", "DRAM Throughput", "Registers Per Thread", "Achieved Occupancy")

# Each prints a line of JSON: this process itself touches neither CUDA nor the engines.
IDENTIFY = "import json, benchmarks.gpu_steps as g; print(json.dumps(g.identity()))"
DESCRIBE = """
import json, benchmarks.machine
print(json.dumps(benchmarks.machine.describe_machine("cuda")))
"""
BUILD = """
import json, sys, benchmarks.gpu_steps as g, pyringar.cli
status = pyringar.cli.main(["build", "--cuda"])
print(json.dumps([] if status else g.kernels_built()))
sys.exit(status)
"""
SOURCES = ("csrc", "pyringar", "benchmarks", "tests")
SUFFIXES = (".py", ".h", ".cpp", ".cuh", ".cu")
PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "pybind11", "ninja", "pytest")


@dataclass
class Step:
    """The outcome of one step.

    Attributes:
        state: ``ok``; ``FAILED``; ``cut off``, when time was over before it was; ``not run``, for
            a reason of the machine's; ``not reached``.
        note: A line about it.
        tail: The end of what it printed.
        facts: What it has found.
        rows: What it has measured.
    """

    name: str
    state: str = NOT_REACHED
    seconds: float = 0.0
    note: str = ""
    tail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, ended: Ended, *notes: str, **facts: Any) -> Step:
        """Return what the end of its process alone says."""
        state = OK if ended.code == 0 else CUT_OFF if ended.by == BUDGET else FAILED
        tail = ended.output[-(TAIL_CHARS_OK if state == OK else TAIL_CHARS) :]
        note = "; ".join(filter(None, (*notes, ended.why)))
        return cls(name, state, round(ended.seconds, 1), note, tail, facts)


class Checker:
    """Runs the processes of steps within a budget.

    Args:
        budget: The time of all steps.
        environment: The variables of all processes.
        save: Keeps what is known of a step while it runs.
        is_quick: Only a few rounds of every benchmark.
    """

    def __init__(
        self,
        budget: Budget,
        environment: Mapping[str, str],
        save: Callable[[Step], object] = lambda step: None,
        is_quick: bool = False,
    ) -> None:
        self.budget, self.save, self.is_quick = budget, save, is_quick
        self.environment = dict(environment)

    def run(self, command: Sequence[str], limit_s: float, **more: Any) -> Ended:
        """Run a process in this checkout; see `gpu_process.run`."""
        variables = self.environment | more.pop("variables", {})
        return gpu_process.run(
            command, self.budget, folder=ROOT, environment=variables, limit_s=limit_s, **more
        )


@dataclass(frozen=True)
class Plan:
    """A step to come. All are begun in turn; one has at most what those before it have left.

    Attributes:
        name: Its own.
        part: What it belongs to; ``--only`` takes either.
        limit_s: Most seconds.
        run: Makes the step.
        least_s: With less than that left it is not begun.
    """

    name: str
    part: str
    limit_s: float
    run: Callable[[Checker, Plan], Step]
    least_s: float = 20.0


# -- the machine and the sources -------------------------------------------------------------------


def identity() -> dict[str, Any]:
    """Return machine, versions and sources, building nothing; no ``gpu`` where there is none."""
    import torch

    from benchmarks.machine import describe_gpu, describe_host

    facts = describe_host() | {"packages": versions(), "commit": commit(), "source": source_hash()}
    return facts | (describe_gpu() if torch.cuda.is_available() else {})


def versions() -> dict[str, str | None]:
    """Return those of the packages that take part; None for what is not there."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str | None:
    """Return git's name of what is checked out; None in a copy without git."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def source_hash() -> str:
    """Return a hash of all code, committed or not."""
    found = hashlib.sha256()
    folders = (ROOT / name for name in SOURCES)
    for path in sorted(file for folder in folders for file in folder.rglob("*")):
        if path.suffix in SUFFIXES:
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


# -- build, machine, tests -------------------------------------------------------------------------


def build(checker: Checker, plan: Plan) -> Step:
    """Compile both engines for this machine; note registers and spills of the kernels."""
    ended = checker.run([sys.executable, "-c", BUILD], plan.limit_s)
    kernels = json_in(ended) if ended.code == 0 else []
    step = Step.of(plan.name, ended, kernels=len(kernels))
    if kernels:
        most = max(kernel["registers"] for kernel in kernels)
        spilling = [kernel["name"] for kernel in kernels if kernel["spill_store_bytes"]]
        step.facts |= {"most_registers": most, "spilling": spilling}
        step.note = f"{len(kernels)} kernels, at most {most} registers"
        step.note += f", {len(spilling)} spill" if spilling else ""
    return step


def kernels_built() -> list[dict[str, Any]]:
    """Return the kernels in the CUDA engine's build record."""
    from pyringar.engine import build as _build

    engine = _build.find_engine(_build.Recipe(kind=_build.CUDA))
    return [] if engine is None else list(engine.record.get("kernels", []))


def json_in(ended: Ended) -> Any:
    """Return what the last line of JSON holds that a process printed.

    Raises:
        ValueError: There is none.
    """
    for line in reversed(ended.output.splitlines()):
        if line.startswith(("{", "[")):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    raise ValueError(f"no line of JSON in what it printed: {ended.output[-500:]!r}")


def machine(checker: Checker, plan: Plan) -> Step:
    """Describe the machine that all is measured on."""
    ended = checker.run([sys.executable, "-c", DESCRIBE], plan.limit_s)
    step = Step.of(plan.name, ended)
    if step.state == OK:
        step.facts = json_in(ended)
        step.note = "driver {driver}, CUDA {torch_cuda}, NCCL {nccl}".format(**step.facts)
    return step


def tests(checker: Checker, plan: Plan, path: str) -> Step:
    """Run a file's tests that need a GPU, in a process that takes only them along if it is lost."""
    # addopts is for the whole suite and wants plugins that may not be here.
    command = [sys.executable, "-m", "pytest", path, "-v", "-m", "cuda", "--tb=short"]
    command += ["-o", "addopts=", "-p", "no:cacheprovider", "--maxfail=30", "--durations=5"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={TEST_S}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "tests.jsonl")
        command += ["-p", "benchmarks.gpu_test_log", "--test-log", str(log)]

        def look() -> None:
            found = gpu_test_log.read(log)
            checker.save(Step(plan.name, CUT_OFF, 0, found.in_words(), "", asdict(found)))

        before = shared_memory()
        ended = checker.run(command, plan.limit_s, quiet_s=QUIET_S, look=look)
        found = gpu_test_log.read(log)
    left = sorted(shared_memory() - before)
    step = Step.of(plan.name, ended, found.in_words(), **asdict(found), left_in_dev_shm=left)
    step.tail = "".join(line for line in step.tail.splitlines(True) if " PASSED " not in line)
    if ended.by == LIMIT:
        step.state = CUT_OFF  # test after test until then: slow, and no hang
    if left:
        step.note += f"; left in {SHARED_MEMORY}: {', '.join(left)}"
    # A file that skips everything has shown nothing; what is left behind breaks a promise.
    is_good = found.counts["passed"] and not found.running and not left
    if found.not_passed or (step.state == OK and not is_good):
        step.state = FAILED
    return step


def shared_memory() -> set[str]:
    """Return the names in the folder of shared memory."""
    with contextlib.suppress(OSError):
        return set(os.listdir(SHARED_MEMORY))
    return set()


# -- benchmarks ------------------------------------------------------------------------------------


def measure(checker: Checker, plan: Plan, script: str) -> Step:
    """Run a benchmark; rows are kept as they come, also those of one that is cut off."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        command = [sys.executable, script, "--json", str(path), "--allow-busy"]
        command += ["--quick"] * checker.is_quick

        def look() -> None:
            partial = Step(plan.name, CUT_OFF)
            take_results(partial, path)
            checker.save(partial)

        ended = checker.run(command, plan.limit_s, look=look)
        step = Step.of(plan.name, ended)
        results = take_results(step, path)
    if results and results.wrong:
        step.state = FAILED
        step.note += f"; {len(results.wrong)} WRONG"
    elif ended.code is None and step.rows:
        step.state = CUT_OFF
    elif results and results.not_run and not step.rows and ended.code == 1:
        missing = results.not_run[0]
        step.state = NOT_RUN
        step.note += f"; {missing['what']}: {missing['why']}"
    return step


def take_results(step: Step, path: Path) -> Results | None:
    """Take what a benchmark has written so far into its step."""
    try:
        results = read(path)
    except InputError:
        step.note = "; ".join(filter(None, ("no rows", step.note)))
        return None
    goals = results.facts.get("goals", [])
    reached = sum(goal["is_reached"] is True for goal in goals)
    counted = f"{len(results.rows)} rows" + (f", {reached} of {len(goals)} goals" if goals else "")
    step.note = "; ".join(filter(None, (counted, step.note)))
    step.rows = results.rows
    step.facts = {
        "section": results.section,
        "effort": results.effort,
        "others": results.others,
        "not_run": results.not_run,
        "goals": goals,
    }
    return results


# -- sanitizers and profiles -----------------------------------------------------------------------


def sanitizer(checker: Checker, plan: Plan) -> Step:
    """Run all engines shortly under the tool of compute-sanitizer that has the step's name."""
    program = find_tool("compute-sanitizer")
    if program is None:
        return Step(plan.name, NOT_RUN, note="no compute-sanitizer on PATH or under CUDA_HOME")
    command = [program, "--tool", plan.name, "--error-exitcode", "9", sys.executable, "-c"]
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    ended = checker.run([*command, SHORT_RUN], plan.limit_s, variables=settings)
    step = Step.of(plan.name, ended, *re.findall(r"\w+ SUMMARY: .*", ended.output)[-1:])
    found = re.findall(r"^========= ((?!COMPUTE-SANITIZER|.*SUMMARY)\S.*)", ended.output, re.M)
    if found:
        step.note = "; ".join(filter(None, (step.note, f"first: {found[0]}")))
    if "Device not supported" in ended.output:
        step.state = NOT_RUN
    elif ended.code is None:  # slow by nature: that it was not ready says nothing
        step.state = FAILED if found else CUT_OFF
    return step


def profile(checker: Checker, plan: Plan, algorithm: str) -> Step:
    """Look at one launch of an algorithm's kernel with ncu."""
    program = find_tool("ncu")
    if program is None:
        return Step(plan.name, NOT_RUN, note="no ncu on PATH or under CUDA_HOME")
    command = [program, "--csv", "--clock-control", "none", "-k", f"regex:{algorithm}_kernel"]
    command += ["--launch-skip", "2", "--launch-count", "1"]
    for section in SECTIONS_OF_NCU:
        command += ["--section", section]
    command += [sys.executable, "-c", PROFILED_RUN, algorithm]
    ended = checker.run(command, plan.limit_s)
    metrics = metrics_in(ended.output)
    step = Step.of(plan.name, ended, metrics=metrics)
    step.note = "; ".join(
        filter(None, (step.note, *(f"{m} {metrics[m]}" for m in METRICS if m in metrics)))
    )
    refusal = re.search("==ERROR== (?!The application)(.*)", ended.output)
    if refusal:  # counters are for administrators, or for no one on this machine
        step.state, step.note = NOT_RUN, refusal[1]
    elif step.state == OK and not metrics:
        step.state, step.note = FAILED, f"no launch of {algorithm}_kernel was seen"
    return step


def metrics_in(output: str) -> dict[str, str]:
    """Return ncu's metrics by name, each with its unit."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    return {
        row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}".strip()
        for row in csv.DictReader(lines)
        if row.get("Metric Name")
    }


def find_tool(name: str) -> str | None:
    """Find a program on PATH, in CUDA_HOME, or where CUDA is usually installed."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    places = [str(Path(home, "bin", name)) for home in homes if home]
    return next(filter(None, map(shutil.which, (name, *places))), None)


# -- the plan --------------------------------------------------------------------------------------


def plan_tests() -> Iterator[Plan]:
    """Yield a step for each file with tests that need a GPU."""
    for pattern in TEST_FILES:
        for found in sorted(glob.glob(pattern, root_dir=ROOT)):
            yield Plan(Path(found).stem, "tests", 150.0, partial(tests, path=found))


def benchmark(name: str) -> Callable[[Checker, Plan], Step]:
    """Return what runs a script of this folder."""
    return partial(measure, script=f"benchmarks/{name}.py")


PLANS: tuple[Plan, ...] = (
    Plan("build", "build", 150.0, build),
    Plan("machine", "machine", 40.0, machine, 5.0),
    *plan_tests(),
    Plan("training_cuda", "training", 150.0, benchmark("training_cuda"), 60.0),
    Plan("allreduce_cuda", "benchmarks", 170.0, benchmark("allreduce_cuda"), 30.0),
    Plan("peers_cuda", "benchmarks", 140.0, benchmark("peers_cuda"), 30.0),
    Plan("memcheck", "sanitizers", 120.0, sanitizer, 60.0),
    Plan("racecheck", "sanitizers", 120.0, sanitizer, 60.0),
    Plan("ncu_fused", "profile", 50.0, partial(profile, algorithm="fused"), 30.0),
    Plan("ncu_ring", "profile", 50.0, partial(profile, algorithm="ring"), 30.0),
    Plan("initcheck", "sanitizers", 60.0, sanitizer, 40.0),
    Plan("synccheck", "sanitizers", 60.0, sanitizer, 40.0),
)
