"""Write README's benchmark summary, docs/report.md and its pictures from benchmarks/results.

    python benchmarks/tables.py              # rewrite the outdated files
    python benchmarks/tables.py --check      # exit status 1 if a file is outdated

To publish new results, copy them into benchmarks/results first: all files of
`python benchmarks/run_all.py --out DIR`, or the file of
`python benchmarks/gpu_check.py --out DIR/gpu_check.jsonl`. gpu_check.md there is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # searched after an installed pyringar

from benchmarks import report_figures, report_page
from benchmarks.machine import machine_in_words
from benchmarks.rows import InputError, Sections, read_folder
from benchmarks.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "report.md"
FIGURES = ROOT / "docs" / "figures"
GPU_NOTES = "gpu_check.md"  # remarks about the results of gpu_check.py
BEGIN, END = "<!-- benchmark:summary -->", "<!-- /benchmark:summary -->"
PAGE_NOTE = "<!-- Written by benchmarks/tables.py from benchmarks/results; do not edit. -->\n\n"
# Sections in README's summary, and the number of sentences about each.
ON_CPU = {"allreduce": 1, "processes": 1, "ddp": 1, "training": 1}
ON_GPU = {"allreduce_cuda": 2, "training_cuda": 1}


def sections() -> Sections:
    """Return the published results.

    Raises:
        InputError: A result is wrong, failed, or is not from a full run.
    """
    found = read_folder(RESULTS)
    for name, results in found.items():
        faults = [*(row.about for row in results.wrong), *(item["why"] for item in results.failed)]
        if faults:
            raise InputError(f"{RESULTS}: {name} is wrong or failed: {faults[0]}")
        is_gpu_check = SECTIONS[name].device == "cuda" and results.machine.get("gpu")
        if results.effort != "full" and not is_gpu_check:
            raise InputError(f"{RESULTS}: {name} is a {results.effort} run, expected a full one")
    return found


def readme() -> str:
    text, found, summary = README.read_text(), sections(), ""
    for counts in (ON_CPU, ON_GPU):
        machine = found[next(iter(counts))].machine
        lines = [
            f"- {line}"
            for n, count in counts.items()
            for line in report_page.section_lines(found[n])[:count]
        ]
        summary += "\n".join(["\n", f"On {machine_in_words(machine)}:", "", *lines])
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{summary.strip()}\n{END}{rest.split(END)[1]}"


def page() -> str:
    notes = (RESULTS / GPU_NOTES).read_text()
    return PAGE_NOTE + report_page.render(sections(), Path(FIGURES.name), notes)


def stale() -> list[str]:
    found = [README.name] if readme() != README.read_text() else []
    if not PAGE.exists() or PAGE.read_text() != page():
        found.append(f"docs/{PAGE.name}")
    for figure, results in report_figures.figures_of(sections()).items():
        if report_figures.source_in(FIGURES / figure) != results.digest:
            found.append(f"docs/figures/{figure}")
    return found + [f"docs/figures/{path.name} (no results for it)" for path in extra_figures()]


def extra_figures() -> list[Path]:
    wanted = report_figures.figures_of(sections())
    return [path for path in sorted(FIGURES.glob("*.png")) if path.name not in wanted]


def rewrite() -> None:
    README.write_text(readme())
    PAGE.write_text(page())
    report_figures.draw(sections(), FIGURES)
    for path in extra_figures():
        path.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a file is outdated"
    )
    args = parser.parse_args(argv)
    try:
        if not args.check:
            rewrite()
        elif names := ", ".join(stale()):
            print(f"{names}: out of date: run python benchmarks/tables.py", file=sys.stderr)
            return 1
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
