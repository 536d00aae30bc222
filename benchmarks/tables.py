"""Write README's summary, docs/report.md and its pictures from the results files.

    python benchmarks/tables.py              # rewrite what is out of date
    python benchmarks/tables.py --check      # exit status 1 if that would change anything
    python benchmarks/tables.py --from DIR   # first take over the results of a report

DIR is what `python benchmarks/run_all.py --out DIR` wrote. Its results files become those of
benchmarks/results.
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
from benchmarks.report.summary import headlines
from benchmarks.rows import InputError, read_sections
from benchmarks.script import exit_with
from benchmarks.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
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
    lines = [f"- {line}" for line in headlines(sections)]
    machine = machine_in_words(sections["allreduce"].machine)
    summary = "\n".join([f"On {machine}:", "", *lines])
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{summary}\n{END}{rest.split(END)[1]}"


def report_page() -> str:
    """Return docs/report.md."""
    sections = read_sections(RESULTS)
    return PAGE_NOTE + page.render(sections, plots.figures_of(sections), FIGURES.name)


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


def take_over(folder: str) -> list[str]:
    """Make a report's sections the results files; say what was taken.

    Raises:
        InputError: There is no report, or one of a failed, wrong, aborted or not full run, or of a
            busy machine.
    """
    sections = read_sections(folder)
    for name, results in sections.items():
        if name not in SECTIONS:
            raise InputError(f"{folder}: section {name!r} is none of {', '.join(SECTIONS)}")
        if results.effort != "full":
            raise InputError(f"{folder}: {name} is a {results.effort} run, expected a full one")
        if results.disturbed_by:
            raise InputError(
                f"{folder}: {name} was measured on a busy machine: other programs used "
                f"{results.disturbed_by}"
            )
        if results.failed:
            raise InputError(f"{folder}: the section {name} failed: {results.failed}")
        if results.wrong:
            raise InputError(f"{folder}: {name} is wrong: {results.wrong[0].about}")
    measured = [results for results in sections.values() if results.rows]
    for results in measured:
        files.write(RESULTS / results.filename, results)
    return [f"{results.filename}: {len(results.rows)} rows" for results in measured]


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
    parser.add_argument("--from", dest="folder", metavar="DIR", help="take over a full report")
    args = parser.parse_args(argv)
    if args.check:
        names = ", ".join(stale())
        if names:
            print(f"{names}: out of date: run python benchmarks/tables.py", file=sys.stderr)
        return int(bool(names))
    if args.folder:
        try:
            print("\n".join(take_over(args.folder)))
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
    rewrite()
    return 0


if __name__ == "__main__":
    exit_with(main)
