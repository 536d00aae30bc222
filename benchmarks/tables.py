"""Write README's summary, docs/report.md and its pictures from the results files.

    python benchmarks/tables.py              # rewrite what is out of date
    python benchmarks/tables.py --check      # exit status 1 if that would change anything
    python benchmarks/tables.py --from PATH  # first take over the results of a report

PATH is the folder that `python benchmarks/run_all.py --out DIR` wrote, or the file of
`python benchmarks/gpu_check.py --out FILE`. Its results files become those of benchmarks/results. A
report of gpu_check.py replaces the one there, and its notes, which are written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks import rows as files
from benchmarks.machine import machine_in_words
from benchmarks.report import page, plots
from benchmarks.report.summary import gpu_lines, headlines
from benchmarks.rows import InputError, Results, by_key, read_files, read_sections
from benchmarks.script import exit_with
from benchmarks.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
GPU_CHECK = "gpu_check"  # a report of several sections, whose benchmarks are quick
PAGE = ROOT / "docs" / "report.md"
FIGURES = ROOT / "docs" / "figures"
DRAWN_BY_HAND = {"timeline.png", "cluster.png"}  # by what docs/tasks.md and cluster.md run
BEGIN, END = "<!-- benchmark:summary -->", "<!-- /benchmark:summary -->"
PAGE_NOTE = (
    "<!-- Written by `python benchmarks/tables.py` from benchmarks/results; do not edit. -->\n\n"
)


def filled(text: str) -> str:
    """Return the text with the summary between its markers made anew."""
    sections = read_sections(RESULTS)
    summary = ""
    for section, lines in (("allreduce", headlines), ("allreduce_cuda", gpu_lines)):
        if section in sections:
            summary += f"\n\nOn {machine_in_words(sections[section].machine)}:\n\n"
            summary += "\n".join(f"- {line}" for line in lines(sections))
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{summary.strip()}\n{END}{rest.split(END)[1]}"


def report_page() -> str:
    """Return docs/report.md."""
    sections = read_sections(RESULTS)
    notes = gpu_notes().read_text() if gpu_notes().exists() else ""
    return PAGE_NOTE + page.render(sections, plots.figures_of(sections), FIGURES.name, notes)


def gpu_notes() -> Path:
    """Return the file of what is known beside the rows of gpu_check.py's report."""
    return RESULTS / f"{GPU_CHECK}-notes.md"


def stale() -> list[str]:
    """Name what would change: README, the page, and pictures drawn from other results."""
    found = []
    if filled(README.read_text()) != README.read_text():
        found.append(README.name)
    if not PAGE.exists() or PAGE.read_text() != report_page():
        found.append(f"docs/{PAGE.name}")
    sections = read_sections(RESULTS)
    figures = plots.figures_of(sections)
    for figure in figures:
        if plots.source_in(FIGURES / figure.filename) != sections[figure.section].digest:
            found.append(f"docs/figures/{figure.filename}")
    found += [f"docs/figures/{path.name} (no results for it)" for path in extra(figures)]
    return found


def extra(figures: Sequence[plots.Figure]) -> list[Path]:
    """Return the pictures that nothing would draw."""
    wanted = {figure.filename for figure in figures} | DRAWN_BY_HAND
    return [path for path in sorted(FIGURES.glob("*.png")) if path.name not in wanted]


def take_over(path: str) -> list[str]:
    """Make a report's files the results files; say what was taken.

    Raises:
        InputError: There is no report, or one of a failed, wrong, aborted or not full run, or of a
            busy machine.
    """
    measured = read_files(path)
    for results in measured:
        check(path, results)
    measured = [results for results in measured if results.rows]
    for results in measured:
        if results.section == GPU_CHECK:
            gpu_notes().unlink(missing_ok=True)
            for step in results.facts.get("steps", ()):
                step.pop("tail", None)  # what it printed, with paths of that machine
        files.write(RESULTS / results.filename, results)
    return [f"{results.filename}: {len(results.rows)} rows" for results in measured]


def check(path: str, results: Results) -> None:
    """Raise InputError if results are not to be published."""
    name = results.section
    for section in by_key(results.rows, lambda row: row.section) or (name,):
        if section not in SECTIONS:
            raise InputError(f"{path}: section {section!r} is none of {', '.join(SECTIONS)}")
    if results.effort != "full" and not (name == GPU_CHECK and results.machine.get("gpu")):
        raise InputError(f"{path}: {name} is a {results.effort} run, expected a full one")
    if results.disturbed_by:
        raise InputError(
            f"{path}: {name} was measured on a busy machine: other programs used "
            f"{results.disturbed_by}"
        )
    if results.failed:
        raise InputError(f"{path}: the section {name} failed: {results.failed}")
    if results.wrong:
        raise InputError(f"{path}: {name} is wrong: {results.wrong[0].about}")


def rewrite() -> None:
    """Bring everything up to date."""
    README.write_text(filled(README.read_text()))
    for path in extra(plots.draw(read_sections(RESULTS), FIGURES)):
        path.unlink()
    PAGE.write_text(report_page())


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite what is out of date, or say what is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if it would")
    parser.add_argument("--from", dest="report", metavar="PATH", help="take over a report")
    args = parser.parse_args(argv)
    if args.check:
        names = ", ".join(stale())
        if names:
            print(f"{names}: out of date: run python benchmarks/tables.py", file=sys.stderr)
        return int(bool(names))
    if args.report:
        try:
            print("\n".join(take_over(args.report)))
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
    rewrite()
    return 0


if __name__ == "__main__":
    exit_with(main)
