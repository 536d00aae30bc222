"""Runs every benchmark that this machine allows, and writes one report.

    python benchmarks/run_all.py --out DIR             # 20 minutes or so on two cores
    python benchmarks/run_all.py --out DIR --quick     # 4 minutes; every section, rough figures
    python benchmarks/run_all.py --out DIR --only allreduce,ddp

DIR then holds report.md, which is for people, its pictures, and report.json, which
benchmarks/compare.py and benchmarks/tables.py read. Both are written anew after every section, so
that a run which is broken off leaves the sections that were over. Run it on an otherwise idle
machine. Exit status: 0 all well, 1 a result was wrong or a section failed, 2 wrong arguments,
130 broken off.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.machine import describe_machine
from benchmarks.report import page, plots
from benchmarks.report.document import VERSION, name_of, write_atomically, write_results, wrong_rows
from benchmarks.report.sections import EFFORTS, SECTIONS, Plan, Section, why_not

FIGURES = "figures"


class Report:
    """report.json, report.md and the pictures, written anew whenever something is over."""

    def __init__(self, folder: Path, effort: str) -> None:
        self._folder = folder
        self.content: dict[str, Any] = {
            "version": VERSION,
            "effort": effort,
            "machine": describe_machine(),
            "sections": {},
            "failed": [],
            "not_run": [],
        }
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, section: str, results: dict[str, Any]) -> None:
        """What a section measured."""
        self.content["sections"][section] = results
        self.write()

    def add_failure(self, section: str, error: BaseException) -> None:
        """What a section raised."""
        self.content["failed"].append(
            {
                "section": section,
                "error": f"{type(error).__name__}: {error}",
                "traceback": "".join(traceback.format_exception(error)),
            }
        )
        self.write()

    def add_not_run(self, what: str, why: str) -> None:
        """What could not be measured, and the reason."""
        self.content["not_run"].append({"what": what, "why": why})
        self.write()

    @property
    def is_good(self) -> bool:
        """Whether nothing failed and nothing was wrong."""
        return not self.content["failed"] and not wrong_rows(self.content["sections"])

    def write(self) -> None:
        """Write all three; the JSON first, for what is measured must not hang on a picture."""
        write_results(self._folder / "report.json", self.content)
        figures = plots.draw(self.content["sections"], self._folder / FIGURES)
        text = page.render(self.content, figures, FIGURES)
        write_atomically(self._folder / "report.md", text)


class Bar:
    """A bar over all sections: each is as long as it is expected to take."""

    def __init__(self, plans: dict[str, Plan], is_quiet: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=sum(plan.expected_s for plan in plans.values()),
            disable=is_quiet,
            bar_format="{percentage:3.0f}% |{bar:24}| {elapsed} gone, {remaining} left  {desc}",
        )
        self._end = 0.0

    def begin(self, name: str, plan: Plan) -> None:
        """A section begins."""
        self._unit_s = plan.expected_s / plan.num_units
        self._end += plan.expected_s
        self._bar.set_description_str(name)

    def step(self, name: str, label: str) -> None:
        """One of its units is over."""
        self._bar.set_description_str(f"{name}: {label}", refresh=False)
        self._bar.update(min(self._unit_s, self._end - self._bar.n))

    def end(self) -> None:
        """The section is over, with however many units."""
        self._bar.update(self._end - self._bar.n)

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._bar.write(line, file=sys.stdout)

    def close(self) -> None:
        """Leave it as it is."""
        self._bar.close()


def run_section(section: Section, plan: Plan, report: Report, bar: Bar) -> None:
    """Measure one section; what it raises goes into the report."""
    bar.begin(section.name, plan)
    begin = time.monotonic()
    try:
        results = plan.measure(lambda label, rows: bar.step(section.name, label))
    except Exception as error:  # whatever it was, the other sections can still be measured
        report.add_failure(section.name, error)
        bar.say(f"{section.name}: FAILED: {type(error).__name__}: {error}")
        return
    finally:
        bar.end()
    results["seconds"] = round(time.monotonic() - begin, 1)
    report.add(section.name, results)
    wrong = wrong_rows({section.name: results})
    names = len({name_of(row) for row in results["rows"]})
    right = f"{len(wrong)} WRONG: {'; '.join(wrong)}" if wrong else "all right"
    bar.say(
        f"{section.name}: {len(results['rows'])} rows of {names} candidates, {right}, "
        f"{results['seconds']:.0f} s"
    )


def run(chosen: Sequence[Section], effort: str, folder: Path, is_quiet: bool = False) -> int:
    """Measure sections one after the other; the exit status."""
    report = Report(folder, effort)
    plans = {}
    for section in chosen:
        why = why_not(section)
        if why is None:
            plans[section.name] = section, section.plan(effort)
        else:
            report.add_not_run(section.name, why)
            print(f"{section.name}: not run: {why}", flush=True)
    bar = Bar({name: plan for name, (_, plan) in plans.items()}, is_quiet)
    waiting = list(plans)
    try:
        for section, plan in plans.values():
            run_section(section, plan, report, bar)
            waiting.remove(section.name)
    except KeyboardInterrupt:
        for name in waiting:
            report.add_not_run(name, "the run was broken off")
        print(f"broken off; what was over is in {folder}", file=sys.stderr)
        return 130
    finally:
        bar.close()
    report.write()
    print(f"{folder / 'report.md'}, {folder / 'report.json'}")
    return 0 if report.is_good else 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the report")
    parser.add_argument("--quick", action="store_true", help="few sizes, few rounds, every section")
    names = ",".join(section.name for section in SECTIONS)
    parser.add_argument("--only", metavar="NAME,...", help=f"some sections of {names}")
    # A trial of the program, for its tests: seconds, one tiny case per section.
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    known = {section.name: section for section in SECTIONS}
    wanted = args.only.split(",") if args.only else list(known)
    for name in wanted:
        if name not in known:
            parser.error(f"--only: {name!r} is none of {', '.join(known)}")
    args.sections = [section for section in SECTIONS if section.name in wanted]
    args.effort = EFFORTS[2] if args.smoke else EFFORTS[1] if args.quick else EFFORTS[0]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and say how it went."""
    args = parse_arguments(argv)
    machine = describe_machine()
    load = os.getloadavg()[0]
    print(f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, load {load:.1f}")
    if load > 0.5 and args.effort == "full":
        print("something else is running here: figures will say so, too", file=sys.stderr)
    return run(args.sections, args.effort, Path(args.out), is_quiet=not sys.stderr.isatty())


if __name__ == "__main__":
    sys.exit(main())
