"""Compare two reports of benchmarks/run_all.py, or two results files of one benchmark.

    python benchmarks/compare.py OLD NEW                     # folders, or files
    python benchmarks/compare.py OLD NEW --threshold 0.05 --all

Rows are matched by section, case, ranks, candidate and clock. A row is slower or faster when its
median moved by more than its band: the threshold, or the spread of both runs added up (half the
distance of the quartiles), whichever is larger; beyond 50 % nothing can be told. Peers, such as
gloo and naive, judge nobody: that they moved says that the machine did. --all shows them, and the
rows that are the same.

Exit status: 0 nothing of ours is slower; 1 something is, or is wrong; 2 a file cannot be used. On
unequal machines, or beside other programs, medians say nothing about versions: then only wrong
results give 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.bench import format_s
from benchmarks.machine import machine_in_words
from benchmarks.rows import InputError, Row, Sections, read_sections
from benchmarks.script import exit_with

THRESHOLD = 0.10
# What makes two machines the same, and what may differ between versions on one machine.
HARDWARE = ("cpu", "cores", "memory_gib", "gpu", "torch_threads")
SOFTWARE = ("pyringar", "torch", "python", "system", "driver")
VERDICTS = ("wrong", "slower", "faster", "too noisy", "same", "only in old", "only in new")
TOO_NOISY = 0.5  # a band in which nothing would be noticed


@dataclass(frozen=True)
class Pair:
    """A row of both reports, or of one of them."""

    old: Row | None
    new: Row | None
    threshold: float

    @property
    def row(self) -> Row:
        """The newer one that is there."""
        row = self.new or self.old
        assert row is not None
        return row

    @property
    def ratio(self) -> float | None:
        """New over old: above 1 is slower."""
        return self.new.median_s / self.old.median_s if self.new and self.old else None

    @property
    def band(self) -> float:
        """The least change that counts, as a share of the old time."""
        return max(self.threshold, sum(row.spread for row in (self.old, self.new) if row))

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.new and not self.new.correct:
            return "wrong"
        if self.ratio is None:
            return "only in old" if self.new is None else "only in new"
        if self.ratio > 1 + self.band:
            return "slower"
        if self.ratio < 1 / (1 + self.band):
            return "faster"
        return "too noisy" if self.band > TOO_NOISY else "same"


def compare(old: Sections, new: Sections, threshold: float = THRESHOLD) -> list[Pair]:
    """Match every row of both reports; rows that occur twice in turn."""
    mine, theirs = rows_by_key(old), rows_by_key(new)
    return [
        Pair(mine.get(key), theirs.get(key), threshold) for key in dict.fromkeys((*mine, *theirs))
    ]


def rows_by_key(sections: Sections) -> dict[tuple[object, ...], Row]:
    """Return all rows by what they are about, and a number where that occurs twice."""
    found: dict[tuple[object, ...], Row] = {}
    for results in sections.values():
        for row in results.rows:
            number = 0
            while (key := (*row.key, number)) in found:
                number += 1
            found[key] = row
    return found


def differences(old: Sections, new: Sections, fields: Sequence[str]) -> list[str]:
    """Say in which of these fields machines differ, in the sections that both have."""
    found = {}
    for name in old.keys() & new.keys():
        mine, theirs = old[name].machine, new[name].machine
        for field in fields:
            if mine.get(field) != theirs.get(field):
                found[f"{field}: {mine.get(field)} and {theirs.get(field)}"] = None
    return sorted(found)


# -- output ----------------------------------------------------------------------------------------


def table(pairs: Sequence[Pair]) -> str:
    """Return a line per pair, the worst verdicts first."""
    ordered = sorted(
        pairs,
        key=lambda p: (not p.row.is_ours, VERDICTS.index(p.verdict), -abs((p.ratio or 1) - 1)),
    )
    width = max(len(f"{pair.row.section}: {pair.row.about}") for pair in ordered)
    lines = [f"{'':<{width}}  {'old':>9}  {'new':>9}  {'ratio':>6}  {'band':>5}  verdict"]
    for pair in ordered:
        name = f"{pair.row.section}: {pair.row.about}"
        old, new = (format_s(row.median_s) if row else "-" for row in (pair.old, pair.new))
        ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
        verdict = pair.verdict.replace("same", "same within noise")
        peer = "" if pair.row.is_ours else " (a peer)"
        lines.append(
            f"{name:<{width}}  {old:>9}  {new:>9}  {ratio:>6}  {pair.band:>5.0%}  {verdict}{peer}"
        )
    return "\n".join(lines)


def summary(pairs: Sequence[Pair]) -> str:
    """Say how many of ours have which verdict, and how far peers moved."""
    ours = [pair.verdict for pair in pairs if pair.row.is_ours]
    counts = ", ".join(
        f"{ours.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in ours
    )
    lines = [f"ours: {counts or 'nothing'}"]
    moved = [pair.ratio for pair in pairs if not pair.row.is_ours and pair.ratio is not None]
    if moved:
        middle = statistics.median(moved)
        lines.append(f"peers took {middle:.2f} times as long, in the median of {len(moved)}")
        if not 0.9 < middle < 1.1:
            lines.append("which our code cannot have caused: the machine was not in the same state")
    return "\n".join(lines)


def exit_status(pairs: Sequence[Pair], is_fair: bool) -> int:
    """Return 1 where something of ours is slower, on equal machines, or anything is wrong."""
    if any(pair.verdict == "wrong" for pair in pairs):
        return 1
    slower = any(pair.verdict == "slower" and pair.row.is_ours for pair in pairs)
    return int(slower and is_fair)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", help="a folder of results, or one of its files")
    parser.add_argument("new", metavar="NEW", help="another")
    parser.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        metavar="SHARE",
        help="least change that counts, as a share of the old time (default: %(default)s)",
    )
    parser.add_argument("--all", action="store_true", help="show rows without a change, too")
    args = parser.parse_args(argv)
    if not args.threshold >= 0:
        parser.error(f"--threshold: {args.threshold!r} is not a share, expected 0 or more")
    return args


def print_sources(name: str, path: str, sections: Sections) -> None:
    """Print where rows are from: machine, date and effort."""
    machine = next(iter(sections.values())).machine
    efforts = ", ".join(sorted({results.effort for results in sections.values()}))
    print(f"{name}: {path}: {machine_in_words(machine)}, {machine.get('date')}, {efforts}")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print what changed."""
    args = parse_arguments(argv)
    try:
        old, new = read_sections(args.old), read_sections(args.new)
        pairs = compare(old, new, args.threshold)
        if not any(pair.ratio is not None for pair in pairs):
            raise InputError(f"{args.new}: has no row of {args.old}: nothing to compare")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print_sources("old", args.old, old)
    print_sources("new", args.new, new)
    for line in differences(old, new, SOFTWARE):
        print(f"differs: {line}")
    unequal = differences(old, new, HARDWARE)
    if unequal:
        print(f"UNEQUAL MACHINES ({'; '.join(unequal)}): this compares machines, not versions")
    busy = [
        f"{name}: {section}: other programs used {results.disturbed_by}"
        for name, sections in (("old", old), ("new", new))
        for section, results in sections.items()
        if results.disturbed_by
    ]
    for line in busy:
        print(f"BUSY MACHINE: {line}")
    shown = [p for p in pairs if args.all or (p.verdict != "same" and p.row.is_ours)]
    print(f"\n{table(shown)}\n" if shown else "")
    print(summary(pairs))
    failed = [f"{name}: {results.failed}" for name, results in new.items() if results.failed]
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else exit_status(pairs, is_fair=not (unequal or busy))


if __name__ == "__main__":
    exit_with(main)
