"""Write README's summary, docs/report.md and its pictures from the results files.

    python benchmarks/tables.py              # rewrite what is out of date
    python benchmarks/tables.py --check      # exit status 1 if that would change anything
    python benchmarks/tables.py --from PATH  # first take over the results of a report

PATH is the folder of `python benchmarks/run_all.py --out DIR`, or the file of
`python benchmarks/gpu_check.py --out FILE`. Its results replace those in benchmarks/results. A
report of gpu_check.py also removes the notes about the report that it replaces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks import plots, report
from benchmarks.machine import machine_in_words
from benchmarks.rows import InputError, Results, Sections, by_section, read, read_folder, write
from benchmarks.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "report.md"
FIGURES = ROOT / "docs" / "figures"
GPU_CHECK = "gpu_check"  # a report of several sections, whose benchmarks are quick
OTHER_FIGURES = {"timeline.png", "cluster.png"}  # drawn by the commands in docs/
BEGIN, END = "<!-- benchmark:summary -->", "<!-- /benchmark:summary -->"
PAGE_NOTE = "<!-- Written by benchmarks/tables.py from benchmarks/results; do not edit. -->\n\n"
# The sections that README shows, and the number of sentences about each.
ON_CPU = {"allreduce": 1, "processes": 1, "ddp": 1}
ON_GPU = {"allreduce_cuda": 3, "training_cuda": 1}


def sections() -> Sections:
    """Return the committed results."""
    return by_section(read_folder(RESULTS))


def readme() -> str:
    """Return README with its summary made anew."""
    text, found, summary = README.read_text(), sections(), ""
    for counts in (ON_CPU, ON_GPU):
        machine = found[next(iter(counts))].machine
        lines = [
            f"- {line}"
            for n, count in counts.items()
            for line in report.section_lines(found[n])[:count]
        ]
        summary += "\n".join(["\n", f"On {machine_in_words(machine)}:", "", *lines])
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{summary.strip()}\n{END}{rest.split(END)[1]}"


def page() -> str:
    """Return docs/report.md."""
    notes = gpu_notes().read_text() if gpu_notes().exists() else ""
    return PAGE_NOTE + report.render(sections(), Path(FIGURES.name), notes)


def gpu_notes() -> Path:
    """Return the file with what is known beside the rows of gpu_check.py's report."""
    return RESULTS / f"{GPU_CHECK}.md"


def stale() -> list[str]:
    """Return what would change: README, the page, and pictures of other results."""
    found = [README.name] if readme() != README.read_text() else []
    if not PAGE.exists() or PAGE.read_text() != page():
        found.append(f"docs/{PAGE.name}")
    for name, results in sections().items():
        figure = plots.filename_of(name)
        if plots.source_in(FIGURES / figure) != results.digest:
            found.append(f"docs/figures/{figure}")
    return found + [f"docs/figures/{path.name} (no results for it)" for path in extra_figures()]


def extra_figures() -> list[Path]:
    """Return the pictures of sections without results."""
    wanted = {plots.filename_of(name) for name in sections()} | OTHER_FIGURES
    return [path for path in sorted(FIGURES.glob("*.png")) if path.name not in wanted]


def take_over(path: Path) -> None:
    """Copy the results of a report into benchmarks/results.

    Raises:
        InputError: The report is missing, wrong, failed, or not of a full run.
    """
    measured = read_folder(path) if path.is_dir() else [read(path)]
    for results in measured:
        check(path, results)
    for results in measured:
        if results.section == GPU_CHECK:
            gpu_notes().unlink(missing_ok=True)
            for step in results.facts["steps"]:
                step.pop("tail", None)  # the step's output, with paths of that machine
        if results.rows:
            write(RESULTS / results.filename, results)


def check(path: Path, results: Results) -> None:
    """Raise InputError if results are not to be published."""
    name, is_gpu_check = results.section, results.section == GPU_CHECK
    for section in by_section([results]):
        if section not in SECTIONS:
            raise InputError(f"{path}: section {section!r} is none of {', '.join(SECTIONS)}")
    if results.effort != "full" and not (is_gpu_check and results.machine.get("gpu")):
        raise InputError(f"{path}: {name} is a {results.effort} run, expected a full one")
    if results.failed:
        raise InputError(f"{path}: {name} failed: {results.failed[0]['why']}")
    if results.wrong:
        raise InputError(f"{path}: {name} is wrong: {results.wrong[0].about}")


def rewrite() -> None:
    """Bring everything up to date."""
    README.write_text(readme())
    PAGE.write_text(page())
    plots.draw(sections(), FIGURES)
    for path in extra_figures():
        path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite what is out of date, or report it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if it would")
    parser.add_argument("--from", dest="report", type=Path, metavar="PATH", help="take over")
    args = parser.parse_args(argv)
    if args.check:
        names = ", ".join(stale())
        if names:
            print(f"{names}: out of date: run python benchmarks/tables.py", file=sys.stderr)
        return int(bool(names))
    if args.report:
        try:
            take_over(args.report)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2
    rewrite()
    return 0


if __name__ == "__main__":
    sys.exit(main())
