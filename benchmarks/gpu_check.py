"""Check a machine with a GPU: build, test, measure, look for memory errors, profile.

    python benchmarks/gpu_check.py --only build,machine,tests   --out DIR/gpu.jsonl
    python benchmarks/gpu_check.py --only training,benchmarks   --out DIR/gpu.jsonl
    python benchmarks/gpu_check.py --only sanitizers,profile    --out DIR/gpu.jsonl
    python benchmarks/gpu_check.py                              # all of it, within 24 minutes

For a GPU that is at hand for minutes at a time: each of the three commands ends within 8 minutes,
and adds what it finds to the report. The report is a results file: the outcome of every step in its
first line, then a line for every row that was measured. It is written anew, in whole, whenever
something is known, so that what ends this command in the middle leaves what was known by then.
Where only a certain folder outlives the machine, keep the report there, by --out.

Each step is a process with a limit of its own, so that a hang, a crash or an error after which CUDA
is lost costs one step; each file of tests is a step. Needs no network and no installed pyringar;
torch, pybind11, ninja, a C++ compiler, nvcc and pytest must be there. docs/gpu.md says how to read
what comes.

Exit status: 0 all well; 1 something failed; 2 nothing was run; 3 nothing failed, but time was over
before all was done.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import math
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_process import Budget
from benchmarks.gpu_steps import (
    CUT_OFF,
    FAILED,
    IDENTIFY,
    NOT_REACHED,
    NOT_RUN,
    OK,
    PLANS,
    ROOT,
    UNFINISHED,
    Checker,
    Plan,
    Step,
    json_in,
)
from benchmarks.rows import InputError, Results, by_key, read, write
from benchmarks.script import exit_with

COMMAND_S, ALL_S = 480.0, 1440.0
IDENTIFY_S = 60.0
PRINTED_CHARS, PRINTED_FAILURES = 5000, 10
# In these two reports must agree, or they are not one.
SAME = ("gpu", "gpus", "driver", "cpu", "cores", "python", "torch", "packages", "source")

Identify = Callable[[Checker], dict[str, Any]]


class CannotCheckError(Exception):
    """Nothing can be run; the message says why."""


# -- report ----------------------------------------------------------------------------------------


class Report:
    """Keeps what is known in a file that is complete at any time.

    Args:
        path: The file; what it holds already is kept, and its folder is made.
        machine: Machine, versions and sources.

    Raises:
        CannotCheckError: The file is not a report, or of another machine, version or source.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path, self._machine = path, machine
        self.steps: dict[str, Step] = {}
        self.num_before = 0
        if path.exists():
            self._take_earlier()
        path.parent.mkdir(parents=True, exist_ok=True)

    def _take_earlier(self) -> None:
        try:
            earlier = read(self.path)
            steps = [Step(**step) for step in earlier.facts["steps"]]
        except (InputError, KeyError, TypeError) as error:
            raise CannotCheckError(
                f"--out: {self.path} is not a report to add to: {error}"
            ) from error
        for key in SAME:
            if earlier.machine.get(key) != self._machine.get(key):
                raise CannotCheckError(
                    f"--out: {self.path} is of another machine or version, name another file: "
                    f"{key} is {earlier.machine.get(key)!r} there, {self._machine.get(key)!r} here"
                )
        for step in steps:
            step.rows = [row for row in earlier.rows if row.section == step.facts.get("section")]
        self.steps = {step.name: step for step in steps}
        self.num_before = len(steps)

    def take(self, *steps: Step) -> None:
        """Take the outcomes of steps, in place of earlier ones, and write all.

        One that is not over, or was cut off, does not take the place of one that came to its end.
        """
        for step in steps:
            earlier = self.steps.get(step.name)
            if step.state != CUT_OFF or earlier is None or earlier.state not in (OK, FAILED):
                self.steps[step.name] = step
        write(self.path, self.results())

    def results(self) -> Results:
        """Return all as a results file holds it."""
        steps = list(self.steps.values())
        described = self.steps.get("machine", Step("machine"))
        is_quick = any(step.facts.get("effort") == "quick" for step in steps)
        return Results(
            section="gpu_check",
            machine={**described.facts, **self._machine},
            effort="quick" if is_quick else "full",
            rows=[row for step in steps for row in step.rows],
            not_run=[
                *({"what": s.name, "why": s.note} for s in steps if s.state == NOT_RUN),
                *(missing for step in steps for missing in step.facts.get("not_run", [])),
            ],
            facts={
                "failed": [step.name for step in steps if step.state == FAILED],
                "unfinished": [step.name for step in steps if step.state in UNFINISHED],
                "steps": [
                    {
                        key.name: getattr(step, key.name)
                        for key in fields(Step)
                        if key.name != "rows"
                    }
                    for step in steps
                ],
            },
        )


def summarize(step: Step) -> str:
    """Return one line of the summary."""
    return f"{step.name:<18} {step.state:<11} {step.seconds:>6.1f} s  {step.note}".rstrip()


def explain(step: Step) -> str:
    """Return what failed: tests with their last lines, else the end of what was printed."""
    failures = step.facts.get("not_passed", [])
    if not failures or step.facts["running"]:
        return step.tail[-PRINTED_CHARS:]
    lines = [
        f"    {line}"
        for failure in failures[:PRINTED_FAILURES]
        for line in (f"{failure['outcome']}: {failure['test']}", *failure["error"], "")
    ]
    return "\n".join(lines)


# -- the run ---------------------------------------------------------------------------------------


def run_steps(plans: Sequence[Plan], checker: Checker, report: Report) -> list[Step]:
    """Run steps while there is time; print and keep the outcome of each."""
    done: list[Step] = []
    for plan in plans:
        why_not = reason_not_to_begin(plan, checker.budget, done)
        if why_not:
            step = Step(plan.name, NOT_REACHED, note=why_not)
            if report.steps[plan.name].state == NOT_REACHED:  # else an earlier outcome stays
                report.take(step)
        else:
            report.take(Step(plan.name, CUT_OFF, note="had begun when this was written"))
            step = run_step(plan, checker)
            report.take(step)
        done.append(step)
        print(summarize(step), flush=True)
        if step.state == FAILED:
            print(explain(step), flush=True)
    return done


def reason_not_to_begin(plan: Plan, budget: Budget, done: Sequence[Step]) -> str:
    """Return why a step is not reached; "" if it is."""
    if any(step.name == "build" and step.state != OK for step in done):
        return "there is no build"  # every step would build again, and fail
    if budget.left_s < plan.least_s:
        return f"{budget.left_s:.0f} s were left"
    return ""


def run_step(plan: Plan, checker: Checker) -> Step:
    """Run a step; one that cannot read what its process printed has failed, and ends no other."""
    try:
        return plan.run(checker, plan)
    except Exception as error:
        note = f"{type(error).__name__}: {error}"
        return Step(plan.name, FAILED, note=note, tail=traceback.format_exc())


def identify(checker: Checker) -> dict[str, Any]:
    """Return machine, versions and sources; a process asks, since a sick GPU may not answer.

    Raises:
        CannotCheckError: There is no GPU, or it does not answer.
    """
    ended = checker.run([sys.executable, "-c", IDENTIFY], IDENTIFY_S)
    if ended.code != 0:
        raise CannotCheckError(f"asking for the GPU: {ended.why or 'failed'}\n{ended.output}")
    try:
        machine: dict[str, Any] = json_in(ended)
    except ValueError as error:
        raise CannotCheckError(f"asking for the GPU: {error}") from error
    if "gpu" not in machine:
        raise CannotCheckError(f"no CUDA device here (torch {machine['torch']})")
    return machine


def variables() -> dict[str, str]:
    """Return the variables of all steps: this checkout, a folder for engines, words at once."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if "PYRINGAR_CACHE_DIR" not in found and not importlib.util.find_spec("platformdirs"):
        found["PYRINGAR_CACHE_DIR"] = str(Path("~/.cache/pyringar").expanduser())
    return found


def parse_arguments(argv: Sequence[str] | None, plans: Sequence[Plan]) -> argparse.Namespace:
    """Read the command line."""
    parts = {part: [p.name for p in same] for part, same in by_key(plans, lambda p: p.part).items()}
    about, _, more = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        description=about,
        epilog=f"{more}\nParts and their steps; build is always among them:\n{in_lines(parts)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="NAME,...", help="these parts or steps (default: all)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the report; added to, if it is there (default: gpu-NAME.jsonl)",
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds of every benchmark")
    parser.add_argument(
        "--total-s",
        type=float,
        metavar="S",
        help=f"seconds in all (default: {COMMAND_S:g}; without --only {ALL_S:g})",
    )
    args = parser.parse_args(argv)
    names = args.only.split(",") if args.only is not None else list(parts)
    known = dict.fromkeys([*parts, *itertools.chain(*parts.values())])
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(
            f"--only: no step {', '.join(map(repr, unknown))}; there are {', '.join(known)}"
        )
    args.plans = [p for p in plans if p.name in names or p.part in names or p.name == "build"]
    if args.total_s is None:
        args.total_s = ALL_S if args.only is None else COMMAND_S
    if not 0 < args.total_s < math.inf:
        parser.error(f"--total-s is {args.total_s:g}, expected a positive number of seconds")
    if args.out == "":
        parser.error("--out is '', expected the name of a file")
    return args


def in_lines(parts: Mapping[str, Sequence[str]]) -> str:
    """Write a part and its steps in a line, or several."""
    return "\n".join(
        textwrap.fill(f"  {part:<11} {', '.join(names)}", 88, subsequent_indent=" " * 14)
        for part, names in parts.items()
    )


def main(
    argv: Sequence[str] | None = None,
    plans: Sequence[Plan] = PLANS,
    identify: Identify = identify,
) -> int:
    """Run the steps, print a line for each, keep the report; return the exit status."""
    args = parse_arguments(argv, plans)
    checker = Checker(Budget(args.total_s), variables(), is_quick=args.quick)
    try:
        machine = identify(checker)
        report = Report(Path(args.out or f"gpu-{slug(machine['gpu'])}.jsonl"), machine)
        report.take(*(Step(plan.name) for plan in args.plans if plan.name not in report.steps))
    except (CannotCheckError, OSError) as error:
        what = f"--out: {error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"nothing was run: {what}")
        return 2
    print(f"{machine['gpu']}, torch {machine['torch']}, report: {report.path}", flush=True)
    if report.num_before:
        print(f"added to the {report.num_before} steps that are there", flush=True)
    checker.environment["PYRINGAR_CUDA_ARCHS"] = machine["compute_capability"]
    checker.save = report.take
    with exiting_on_signals():
        return conclude(run_steps(args.plans, checker, report))


def conclude(steps: Sequence[Step]) -> int:
    """Print how it went; return the exit status."""
    failed = [step.name for step in steps if step.state == FAILED]
    unfinished = [step.name for step in steps if step.state in UNFINISHED]
    print()
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    if unfinished:
        print(f"time was over: {', '.join(unfinished)}; run them by --only, with the same --out")
    if not failed and not unfinished:
        print("all well")
    return 1 if failed else 3 if unfinished else 0


def slug(name: str) -> str:
    """Return a name for files: nvidia-h200 for NVIDIA H200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@contextlib.contextmanager
def exiting_on_signals() -> Iterator[None]:
    """End what was started, too, when asked to end: it is in groups of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


if __name__ == "__main__":
    exit_with(main)
