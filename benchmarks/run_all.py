"""Measure how fast pyringar is on this machine, beside other libraries, and write a report.

    python benchmarks/run_all.py                      # every section that this machine can run
    python benchmarks/run_all.py --quick              # rough figures
    python benchmarks/run_all.py ddp training         # these sections
    python benchmarks/run_all.py allreduce --only "1 MiB" --ranks 2,4
    python benchmarks/run_all.py --out DIR            # writes to DIR instead of ./bench

--quick takes about 4 minutes on two idle cores, longer on a busy machine. Each section prints its
table when it ends. The folder of --out gets the results files, pictures and report.md. Without
--out it is a new folder: ./bench, else ./bench-2 and so on. A results file is rewritten after each
case. Ctrl-C, SIGTERM and an error write a report of the finished cases, which says that it is
incomplete. A dry run writes files only with --out. Close other programs before you measure.

Exit status: 0; 1 if a result was wrong or a case raised an error; 2 for a wrong argument; 143 after
SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).resolve().parent.parent))  # searched after an installed pyringar

from benchmarks import report_figures, report_page
from benchmarks.bench import Benchmark, BenchmarkCase, Run
from benchmarks.machine import OtherPrograms, describe_machine, disturbance, machine_in_words
from benchmarks.rows import Results, num_ranks
from benchmarks.sections import SECTIONS

BAR_WIDTH = 10
WIDTH = 99  # columns of the line on a terminal
TERMINAL_PERIOD_S, LOG_PERIOD_S, REPEAT_S = 1.0, 8.0, 30.0


class SectionProgress:
    """Progress over all sections, shown on stderr by a thread.

    A terminal gets one line, rewritten every second. Any other stderr gets a line every 8 seconds
    if the line has changed, else every 30 seconds.

    Args:
        planned_s: Planned seconds per case, by section.
        cases: Cases by section.
    """

    def __init__(self, planned_s: dict[str, float], cases: dict[str, list[BenchmarkCase]]) -> None:
        self._planned_s, self._cases = planned_s, {k: v for k, v in cases.items() if v}
        self._total_s = self._plan_s(list(self._cases))
        self._begin_s = self._advance_s = time.monotonic()
        self._done_s, self._case_s = 0.0, 0.0  # planned seconds: finished cases; this case
        self._activity = "compiling the engine unless it is cached"
        self._is_terminal = sys.stderr.isatty()
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._show_regularly, daemon=True)

    def __enter__(self) -> SectionProgress:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.clear()

    def begin(self, section: str) -> None:
        """Show a section that begins, and its first case, unless it has no cases."""
        if section in self._cases:
            self._begin_case(section, 0)

    def advance(self, section: str, case: BenchmarkCase) -> None:
        """Show the case after a finished case of a section."""
        self._begin_case(section, self._cases[section].index(case) + 1)

    def _begin_case(self, section: str, number: int) -> None:
        names, case_s = list(self._cases), self._planned_s[section]
        index, cases = names.index(section), self._cases[section][number:]
        self._done_s = self._plan_s(names[:index]) + number * case_s
        self._case_s, self._advance_s = case_s if cases else 0.0, time.monotonic()
        about = f": {cases[0].name}, {num_ranks(cases[0].world_size)}" if cases else ""
        self._activity = f"section {index + 1} of {len(names)} ({section}){about}"

    def _plan_s(self, names: Sequence[str]) -> float:
        return sum(self._planned_s[name] * len(self._cases[name]) for name in names)

    def line(self, now_s: float) -> str:
        """Return the progress bar, the time left and the case; ``now_s``: time.monotonic()."""
        share = self._done_s / self._total_s if self._total_s else 1.0
        # Plans are for an idle machine. A slower one stays slower.
        spent_s = self._advance_s - self._begin_s
        cost = max(spent_s / self._done_s, 1.0) if self._done_s else 1.0
        case_left_s = max(self._case_s * cost - (now_s - self._advance_s), 0.0)
        left_s = (self._total_s - self._done_s - self._case_s) * cost + case_left_s
        left = f"about {left_s / 60:.0f} min left" if left_s >= 90 else "less than 2 min left"
        bar = "#" * round(share * BAR_WIDTH)
        return f"[{bar:<{BAR_WIDTH}}] {share:4.0%}, {left}, {self._activity}"

    def clear(self) -> None:
        """Clear the terminal's line before other output."""
        if self._is_terminal:
            self._print("")

    def _print(self, line: str) -> None:
        text = f"\r{line:<{WIDTH}.{WIDTH}}\r" if self._is_terminal else f"{line}\n"
        with self._lock:
            print(text, end="", file=sys.stderr, flush=True)

    def _show_regularly(self) -> None:
        period_s = TERMINAL_PERIOD_S if self._is_terminal else LOG_PERIOD_S
        shown, silent_s = "", 0.0
        while not self._stop.wait(period_s):
            line, silent_s = self.line(time.monotonic()), silent_s + period_s
            if self._is_terminal or line != shown or silent_s >= REPEAT_S:
                self._print(line)
                shown, silent_s = line, 0.0


def chosen_cases(benchmark: Benchmark, args: argparse.Namespace) -> list[BenchmarkCase]:
    return [
        case
        for case in benchmark.cases(args.effort)
        if args.only in case.name and (not args.ranks or case.world_size in args.ranks)
    ]


def measure(
    sections: Sequence[Benchmark], args: argparse.Namespace, found: dict[str, Results]
) -> None:
    """Measure all sections. ``found`` gets the results of a section before its first case."""
    cases = {
        benchmark.section: [] if benchmark.why_not(args.effort) else chosen_cases(benchmark, args)
        for benchmark in sections
    }
    planned_s = {b.section: b.efforts[args.effort].budget_s + b.setup_s for b in sections}
    if args.effort != "trial":
        others = OtherPrograms()
        time.sleep(0.5)
        warn_of_others(others.facts(), "use")
    with SectionProgress(planned_s, cases) as progress:
        machine = machine_in_words(describe_machine())
        progress.clear()
        print(machine)
        for benchmark in sections:
            name = benchmark.section
            progress.begin(name)
            run = Run(
                benchmark,
                args.effort,
                cases=cases[name],
                folder=args.out,
                tell=lambda case, name=name: progress.advance(name, case),
            )
            found[name] = run.results
            run.measure()
            progress.clear()
            print_section(found[name])
            warn_of_others(found[name].machine, "used", f" during {name}")


def warn_of_others(machine: dict[str, Any], verb: str, when: str = "") -> None:
    if share := disturbance(machine):
        text = f"warning: Other programs {verb} {share:.0%} of the processors{when}"
        print(f"{text}. Close them and measure again.", file=sys.stderr)


def print_section(results: Results) -> None:
    print(f"\n## {SECTIONS[results.section].title}\n", flush=True)
    if results.rows:
        print(report_page.table(results))
    for item in results.not_run:
        print(f"not run: {item['what']}: {item['why']}")
    for item in results.failed:
        print(f"FAILED: {item['what']}: {item['why']}")
    for row in results.wrong:
        print(f"WRONG: {row.about}")
    sys.stdout.flush()


def write_report(folder: Path, sections: dict[str, Results], *, is_complete: bool) -> None:
    print("\nWriting the report and the pictures", flush=True)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    figures = Path("figures") if can_draw else None
    page = report_page.render(sections, figures, is_complete=is_complete)
    page = re.sub(r"(?<!!)\[([^]]+)\]\([^)]+\.md\)", r"\1", page)  # no links to pages of docs/
    (folder / "report.md").write_text(page, encoding="utf-8")
    if can_draw:
        report_figures.draw(sections, folder / "figures")
    note = "" if can_draw else " (no pictures: matplotlib is not installed)"
    print(f"Wrote {folder / 'report.md'}{note}")


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that a report is written on the way out."""

    def leave(*_: object) -> NoReturn:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def new_folder() -> Path:
    """Return ./bench, or ./bench-2, ./bench-3 and so on if earlier results exist."""
    names = ("bench", *(f"bench-{number}" for number in range(2, 1000)))
    return next(path for path in map(Path, names) if not path.exists())


def numbers(text: str) -> list[int]:
    """Read a list of world sizes; argparse adds the option's name to the error."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,4") from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(SECTIONS)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"default: all of {names}")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="few sizes, few rounds")
    effort.add_argument("--dry-run", action="store_true", help="tiny sizes, CPU only: a smoke test")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--ranks", type=numbers, metavar="2,4", help="cases with these world sizes")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of results and report (default: ./bench)"
    )
    args = parser.parse_args(argv)
    for name in args.sections:
        if name not in SECTIONS:
            parser.error(f"SECTION is {name!r}, expected one of {names}")
    args.effort = "trial" if args.dry_run else "quick" if args.quick else "full"
    if args.out is None and not args.dry_run:
        args.out = new_folder()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    chosen = [SECTIONS[name] for name in args.sections or SECTIONS]
    chosen = [benchmark for benchmark in chosen if chosen_cases(benchmark, args)]
    if not chosen:
        print(f"no case matches --only {args.only!r} and --ranks {args.ranks}", file=sys.stderr)
        return 2
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for name in SECTIONS:  # the report must not show an earlier run's results
            (args.out / f"{name}.jsonl").unlink(missing_ok=True)
        print(f"Results, pictures and report.md go to {args.out}{os.sep}")
    found: dict[str, Results] = {}
    is_complete = False
    with sigterm_exits():
        try:
            measure(chosen, args, found)
            is_complete = True
        finally:
            if args.out and found:
                write_report(args.out, found, is_complete=is_complete)
    return int(any(results.wrong or results.failed for results in found.values()))


if __name__ == "__main__":
    sys.exit(main())
