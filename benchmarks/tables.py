"""Writes README's summary, docs/report.md and its pictures from the results files: no typed figure.

    python benchmarks/tables.py              # rewrite what is out of date
    python benchmarks/tables.py --check      # exit status 1 if that would change anything
    python benchmarks/tables.py --from DIR   # first take over the results of a report

DIR is what `python benchmarks/run_all.py --out DIR` wrote. Its sections become the files of
benchmarks/results, `allreduce-cpu.json` and so on, where what was measured with a GPU ends with
`-gpu` instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.report import page, plots
from benchmarks.report.document import (
    InputError,
    digest,
    load,
    write_results,
    wrong_rows,
)
from benchmarks.report.summary import headlines
from benchmarks.report.text import describe

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "report.md"
FIGURES = ROOT / "docs" / "figures"
BEGIN, END = "<!-- benchmark:summary -->", "<!-- /benchmark:summary -->"
PAGE_NOTE = (
    "<!-- Written by `python benchmarks/tables.py` from benchmarks/results; do not edit. -->\n\n"
)


def results(kind: str = "cpu") -> dict[str, dict[str, Any]]:
    """What benchmarks/results holds, by section: measured without a GPU, or with one."""
    paths = {name: RESULTS / f"{name}-{kind}.json" for name in page.TITLES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def filled(text: str) -> str:
    """The same text with the summary between its markers made anew."""
    sections = results()
    machine = sections["allreduce"]["machine"]
    lines = [f"- {line}" for line in headlines(sections)]
    summary = "\n".join([f"On {describe(machine)}:", "", *lines])
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{summary}\n{END}{rest.split(END)[1]}"


def report_page() -> str:
    """docs/report.md: the report that `run_all.py` would write about these results."""
    sections = results() | results("gpu")
    first = next(iter(sections.values()))
    report = {"machine": first["machine"], "sections": sections, "not_run": missing(sections)}
    text = page.render(report, plots.figures_of(sections), FIGURES.name)
    return PAGE_NOTE + text


def missing(sections: dict[str, Any]) -> list[dict[str, str]]:
    """Sections without results."""
    return [
        {"what": name, "why": "there are no results of it in benchmarks/results"}
        for name in page.TITLES
        if name not in sections
    ]


def stale() -> list[str]:
    """What would change, by name: README, the page, and pictures drawn from other results."""
    found = []
    if filled(README.read_text()) != README.read_text():
        found.append(README.name)
    if not PAGE.exists() or PAGE.read_text() != report_page():
        found.append(f"docs/{PAGE.name}")
    sections = results() | results("gpu")
    figures = plots.figures_of(sections)
    for figure in figures:
        source = digest(sections, [figure.section])
        if plots.source_in(FIGURES / f"{figure.name}.png") != source:
            found.append(f"docs/figures/{figure.name}.png")
    found += [f"docs/figures/{path.name} (no results for it)" for path in extra(figures)]
    return found


def extra(figures: Sequence[plots.Figure]) -> list[Path]:
    """Pictures that nothing here would draw."""
    wanted = {f"{figure.name}.png" for figure in figures}
    return [path for path in sorted(FIGURES.glob("*.png")) if path.name not in wanted]


def take_over(folder: str) -> list[str]:
    """Make a report's sections the results files; what was taken.

    Raises:
        InputError: There is no report, or one that is broken off, failed, wrong or not full.
    """
    path = Path(folder) / "report.json"
    report = load(path)
    if wrong_rows(report["sections"]):
        raise InputError(f"{path}: holds wrong results: {wrong_rows(report['sections'])[0]}")
    if report.get("failed"):
        raise InputError(f"{path}: the section {report['failed'][0]['section']} failed")
    if report.get("effort") != "full":
        raise InputError(f"{path}: is a {report.get('effort')} run, expected a full one")
    taken = []
    for name, section in report["sections"].items():
        if name not in page.TITLES:
            raise InputError(f"{path}: section {name!r} is none of {', '.join(page.TITLES)}")
        kind = "gpu" if section["machine"].get("gpu") else "cpu"
        target = RESULTS / f"{name}-{kind}.json"
        write_results(target, section)
        taken.append(f"{target.name}: {len(section['rows'])} rows")
    return taken


def rewrite() -> None:
    """Bring everything up to date."""
    README.write_text(filled(README.read_text()))
    figures = plots.draw(results() | results("gpu"), FIGURES)
    for path in extra(figures):
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
        names = stale()
        if names:
            print(
                f"{', '.join(names)}: out of date: run python benchmarks/tables.py", file=sys.stderr
            )
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
    sys.exit(main())
