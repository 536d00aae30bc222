"""Measure, on this machine, how fast pyringar is beside its peers, and write a report.

    python benchmarks/run_all.py                      # every section that this machine can run
    python benchmarks/run_all.py --quick              # under 4 minutes on two cores, rough figures
    python benchmarks/run_all.py ddp training         # these sections
    python benchmarks/run_all.py allreduce --only "1 MiB" --ranks 2,4
    python benchmarks/run_all.py --out DIR            # also results files, pictures and report.md

Every section prints its table when it ends. With --out, its results file is rewritten after each
case, so an interrupted run keeps what it has measured. Leave the machine alone meanwhile.

Exit status: 0; 1 if a result was wrong or something failed; 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks import plots, report
from benchmarks.bench import Benchmark, Case, Run
from benchmarks.machine import describe_machine, machine_in_words
from benchmarks.rows import Results
from benchmarks.sections import SECTIONS

START_S = 1.0  # what a case takes beside its budget: checks, and warming up
BAR_WIDTH = 20


class Progress:
    """A line on a terminal: the share that is done, the time left, and the last case.

    Args:
        planned_s: Seconds that each section should take per case, by section.
        cases: The number of cases, by section.
    """

    def __init__(self, planned_s: dict[str, float], cases: dict[str, int]) -> None:
        self._planned_s = planned_s
        self._total_s = sum(planned_s[name] * count for name, count in cases.items())
        self._done_s, self._begin_s = 0.0, time.monotonic()
        self._is_shown = sys.stderr.isatty()

    def advance(self, section: str, case: Case) -> None:
        """Count a case of a section that has ended."""
        self._done_s = min(self._total_s, self._done_s + self._planned_s[section])
        if self._is_shown:
            line = f"{self.line(time.monotonic() - self._begin_s)}  {section}: {case.name}"
            print(f"\r{line:<100.100}", end="\r", file=sys.stderr, flush=True)

    def line(self, spent_s: float) -> str:
        """Return the bar and the time left, if the rest goes on as the part that is done."""
        share = self._done_s / self._total_s
        left_s = round(spent_s / share * (1 - share))
        bar = "#" * round(share * BAR_WIDTH)
        return f"[{bar:<{BAR_WIDTH}}] {share:4.0%}, {left_s // 60}:{left_s % 60:02} left"

    def clear(self) -> None:
        """Remove the line, for other output."""
        if self._is_shown:
            print(f"\r{'':<100}", end="\r", file=sys.stderr, flush=True)


def chosen_cases(benchmark: Benchmark, args: argparse.Namespace) -> list[Case]:
    """Return the cases of a section that the command line asks for."""
    return [
        case
        for case in benchmark.cases(args.effort)
        if args.only in case.name and (not args.ranks or case.world_size in args.ranks)
    ]


def measure(sections: Sequence[Benchmark], args: argparse.Namespace) -> dict[str, Results]:
    """Measure one section after the other, and print its table."""
    cases = {
        benchmark.section: [] if benchmark.why_not(args.effort) else chosen_cases(benchmark, args)
        for benchmark in sections
    }
    planned_s = {b.section: b.efforts[args.effort].budget_s + START_S for b in sections}
    progress = Progress(planned_s, {name: len(found) for name, found in cases.items()})
    found: dict[str, Results] = {}
    for benchmark in sections:
        name = benchmark.section
        run = Run(
            benchmark,
            args.effort,
            cases=cases[name],
            folder=args.out,
            tell=lambda case, name=name: progress.advance(name, case),
        )
        found[name] = run.measure()
        progress.clear()
        print_section(found[name])
    return found


def print_section(results: Results) -> None:
    """Print a section's table, and what went wrong."""
    print(f"\n## {SECTIONS[results.section].title}\n", flush=True)
    if results.rows:
        print(report.table(results))
    for item in results.not_run:
        print(f"not run: {item['what']}: {item['why']}")
    for item in results.failed:
        print(f"FAILED: {item['what']}: {item['why']}")
    for row in results.wrong:
        print(f"WRONG: {row.about}")
    sys.stdout.flush()


def write_report(folder: Path, sections: dict[str, Results]) -> None:
    """Write report.md, and the pictures where matplotlib is installed."""
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if can_draw:
        plots.draw(sections, folder / "figures")
    figures = Path("figures") if can_draw else None
    (folder / "report.md").write_text(report.render(sections, figures), encoding="utf-8")
    print(f"\n{folder / 'report.md'}{'' if can_draw else ' (no pictures: matplotlib is missing)'}")


def numbers(text: str) -> list[int]:
    """Read numbers of ranks; argparse names the option that is wrong."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 2,4") from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="few sizes, few rounds")
    effort.add_argument("--dry-run", action="store_true", help="tiny, on the CPU: only a trial")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--ranks", type=numbers, metavar="2,4", help="cases of so many ranks")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results and report there")
    args = parser.parse_args(argv)
    for name in args.sections:
        if name not in SECTIONS:
            parser.error(f"SECTION: {name!r} is none of {', '.join(SECTIONS)}")
    args.effort = "trial" if args.dry_run else "quick" if args.quick else "full"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; return the exit status."""
    args = parse_arguments(argv)
    chosen = [SECTIONS[name] for name in args.sections or SECTIONS]
    chosen = [benchmark for benchmark in chosen if chosen_cases(benchmark, args)]
    if not chosen:
        print("no case has such a name and number of ranks", file=sys.stderr)
        return 2
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for name in SECTIONS:  # of an earlier run into the same folder
            (args.out / f"{name}.jsonl").unlink(missing_ok=True)
    print(machine_in_words(describe_machine()))
    found = measure(chosen, args)
    if args.out:
        write_report(args.out, found)
    return int(any(results.wrong or results.failed for results in found.values()))


if __name__ == "__main__":
    sys.exit(main())
