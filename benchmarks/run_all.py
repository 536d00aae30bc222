"""Run every benchmark that this machine allows, and write one report.

    python benchmarks/run_all.py --out DIR             # 30 minutes or so on two cores
    python benchmarks/run_all.py --out DIR --quick     # 3 minutes; every section, rough figures
    python benchmarks/run_all.py --out DIR --only allreduce,ddp

DIR then holds report.md, which is for people, its pictures, and a results file per section, which
benchmarks/compare.py and benchmarks/tables.py read. All are written anew after every section, so
that an aborted run leaves the sections that were over. It does not begin beside other programs
that use the processors; a section that some disturbed is marked, and makes the run a failure.
--allow-busy measures nevertheless, and only marks. Exit status: 0 all well, 1 a result was wrong,
or a section failed or was disturbed, 2 wrong arguments, 3 other programs run, 130 aborted.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks import rows as files
from benchmarks.bench import PEERS_HELP, Benchmark, Run
from benchmarks.busy import others_now, refusal
from benchmarks.machine import describe_machine, machine_in_words
from benchmarks.peers.registry import peers_option
from benchmarks.report import page, plots
from benchmarks.rows import Results, Row
from benchmarks.script import exit_with
from benchmarks.sections import SECTIONS

FIGURES = "figures"


class Report:
    """The results files, report.md and the pictures, written anew whenever something is over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.sections: dict[str, Results] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in SECTIONS:  # of an earlier run into the same folder
            for path in folder.glob(f"{name}-[cg]pu.jsonl"):
                path.unlink()

    def add(self, results: Results) -> None:
        """Take a section; write its file first, for no measurement must hang on a picture."""
        self.sections[results.section] = results
        files.write(self._folder / results.filename, results)
        figures = plots.draw(self.sections, self._folder / FIGURES)
        text = page.render(self.sections, figures, FIGURES)
        files.write_atomically(self._folder / "report.md", text)

    def is_good(self, allows_busy: bool) -> bool:
        """Say whether nothing failed, was wrong or, unless that is allowed, disturbed."""
        return not any(
            results.failed or results.wrong or (results.disturbed_by and not allows_busy)
            for results in self.sections.values()
        )


def not_run(benchmark: Benchmark, effort: str, why: str) -> Results:
    """Return the results of a section that did not run."""
    missing = [{"what": "the section", "why": why}]
    return Results(benchmark.section, describe_machine(), effort, not_run=missing)


def run_section(
    benchmark: Benchmark, effort: str, is_quiet: bool, peers: Sequence[str] | None = None
) -> Results:
    """Measure one section; what it raises goes into its results."""
    count = 0

    def tell(rows: Sequence[Row]) -> None:
        nonlocal count
        count += len(rows)
        if not is_quiet:
            line = f"{benchmark.section}: {count} rows, {rows[-1].about}"
            print(f"\r{line:<100.100}", end="\r", file=sys.stderr, flush=True)

    begin = time.monotonic()
    run = Run(benchmark, effort, tell=tell, peers=peers)
    try:
        run.measure()
    except Exception as error:  # whatever it was, the other sections can still be measured
        run.results.failed = f"{type(error).__name__}: {error}"
        run.results.facts["traceback"] = "".join(traceback.format_exception(error))
    run.results.facts["seconds"] = round(time.monotonic() - begin, 3)
    return run.results


def summarize(results: Results) -> str:
    """Say in a line how a section went."""
    if results.failed:
        return f"{results.section}: FAILED: {results.failed}"
    wrong = "; ".join(row.about for row in results.wrong)
    busy = results.disturbed_by
    names = len({row.candidate for row in results.rows})
    return (
        f"{results.section}: {len(results.rows)} rows of {names} candidates, "
        f"{f'WRONG: {wrong}' if wrong else 'all right'}, {results.facts['seconds']:.0f} s"
        f"{f', BUSY MACHINE: other programs used {busy}' if busy else ''}"
    )


def run(
    chosen: Sequence[Benchmark],
    effort: str,
    folder: Path,
    is_quiet: bool = False,
    allows_busy: bool = False,
    peers: Sequence[str] | None = None,
) -> int:
    """Measure sections one after the other; return the exit status."""
    begin_s = time.monotonic()
    report = Report(folder)
    waiting = list(chosen)
    try:
        for benchmark in chosen:
            if benchmark.why_not:
                print(f"{benchmark.section}: not run: {benchmark.why_not}", flush=True)
                report.add(not_run(benchmark, effort, benchmark.why_not))
            else:
                report.add(run_section(benchmark, effort, is_quiet, peers))
                print(summarize(report.sections[benchmark.section]), flush=True)
            waiting.remove(benchmark)
    except KeyboardInterrupt:
        for benchmark in waiting:
            report.add(not_run(benchmark, effort, "the run was aborted"))
        print(f"aborted; what was over is in {folder}", file=sys.stderr)
        return 130
    print(f"{folder / 'report.md'}: {(time.monotonic() - begin_s) / 60:.1f} minutes")
    return 0 if report.is_good(allows_busy) else 1


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder of the report, in place of one there"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, few rounds, every section")
    parser.add_argument("--only", metavar="NAME,...", help=f"some sections of {','.join(SECTIONS)}")
    parser.add_argument("--allow-busy", action="store_true", help="even beside other programs")
    parser.add_argument("--peers", type=peers_option, default="all", help=PEERS_HELP)
    # A trial of the program, for its tests: seconds, one tiny case per section.
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    wanted = args.only.split(",") if args.only else list(SECTIONS)
    for name in wanted:
        if name not in SECTIONS:
            parser.error(f"--only: {name!r} is none of {', '.join(SECTIONS)}")
    args.sections = [benchmark for name, benchmark in SECTIONS.items() if name in wanted]
    args.effort = "smoke" if args.smoke else "quick" if args.quick else "full"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write, and say how it went."""
    args = parse_arguments(argv)
    print(machine_in_words(describe_machine()))
    if not args.allow_busy and args.effort != "smoke" and (why := refusal(others_now())):
        print(why, file=sys.stderr)
        return 3
    is_quiet = not sys.stderr.isatty()
    return run(args.sections, args.effort, Path(args.out), is_quiet, args.allow_busy, args.peers)


if __name__ == "__main__":
    exit_with(main)
