"""Compares two reports of benchmarks/run_all.py, or two results files of one benchmark.

    python benchmarks/compare.py OLD.json NEW.json
    python benchmarks/compare.py OLD.json NEW.json --threshold 0.05 --all

Rows are matched by what they are about: section, case, ranks, dtype, candidate. A row is slower or
faster when its median moved by more than its band: the threshold, or the spread of both runs added
up (half the distance of the quartiles), whichever is larger; beyond 50 % nothing can be told.
Peers, such as gloo and naive, judge nobody: that they moved says that the machine did. --all shows
them, and the rows that are the same.

Exit status: 0 nothing of ours is slower; 1 something is, or is wrong; 2 a file cannot be used. On
unequal machines medians say nothing about versions: then only wrong results give 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: an installed one comes first

from benchmarks.report.document import (
    InputError,
    identities,
    is_peer,
    load,
    name_of,
    times_of,
)
from benchmarks.report.text import describe, format_us

THRESHOLD = 0.10
# What makes two machines the same, and what may differ between versions on one machine.
HARDWARE = ("cpu", "cores", "memory_gib", "gpu", "torch_threads")
SOFTWARE = ("pyringar", "torch", "python", "system", "driver")
VERDICTS = ("wrong", "slower", "faster", "too noisy", "same", "only in old", "only in new")
TOO_NOISY = 0.5  # a band in which nothing would be noticed


@dataclass(frozen=True)
class Pair:
    """One row of one or of both files. Times are seconds, None where it is not there."""

    section: str
    about: str
    is_peer: bool
    old_s: float | None
    new_s: float | None
    band: float
    is_right: bool

    @property
    def ratio(self) -> float | None:
        """New over old: above 1 is slower."""
        if self.old_s is None or self.new_s is None:
            return None
        return self.new_s / self.old_s

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if not self.is_right:
            return "wrong"
        if self.ratio is None:
            return "only in old" if self.new_s is None else "only in new"
        if self.ratio > 1 + self.band:
            return "slower"
        if self.ratio < 1 / (1 + self.band):
            return "faster"
        return "too noisy" if self.band > TOO_NOISY else "same"


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], threshold: float = THRESHOLD
) -> list[Pair]:
    """Every row of both reports, matched."""
    pairs = []
    for section in dict.fromkeys((*old["sections"], *new["sections"])):
        mine, theirs = (
            identities(report["sections"].get(section, {}).get("rows", [])) for report in (old, new)
        )
        for key in dict.fromkeys((*mine, *theirs)):
            pairs.append(pair_of(section, mine.get(key), theirs.get(key), threshold))
    return pairs


def pair_of(
    section: str,
    old: Mapping[str, Any] | None,
    new: Mapping[str, Any] | None,
    threshold: float,
) -> Pair:
    """Two rows that are about the same."""
    row = new or old or {}
    spread = sum(times_of(one).spread for one in (old, new) if one is not None)
    return Pair(
        section=section,
        about=describe_row(row),
        is_peer=is_peer(row),
        old_s=None if old is None else times_of(old).median_s,
        new_s=None if new is None else times_of(new).median_s,
        band=max(threshold, spread),
        is_right=new is None or new["correct"] is True,
    )


def describe_row(row: Mapping[str, Any]) -> str:
    """Case, ranks, candidate, and what else tells it from others."""
    cap = row.get("bucket_cap_mb")
    more = [row.get("clock"), None if cap is None else f"{cap:g} MB"]
    extra = "".join(f", {word}" for word in more if word)
    return f"{row['case']}, {row['world_size']} ranks, {name_of(row)}{extra}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """In which of these fields machines differ, section by section where both have it."""
    found = {}
    machines = [(old["machine"], new["machine"])]
    machines += [
        (section["machine"], new["sections"][name]["machine"])
        for name, section in old["sections"].items()
        if name in new["sections"]
        and section.get("machine")
        and new["sections"][name].get("machine")
    ]
    for mine, theirs in machines:
        for field in fields:
            if mine.get(field) != theirs.get(field):
                found[f"{field}: {mine.get(field)} and {theirs.get(field)}"] = None
    return list(found)


# -- output ----------------------------------------------------------------------------------------


def table(pairs: Sequence[Pair]) -> str:
    """A line per pair, the worst verdicts first."""
    ordered = sorted(
        pairs, key=lambda p: (p.is_peer, VERDICTS.index(p.verdict), -abs((p.ratio or 1) - 1))
    )
    width = max(len(f"{pair.section}: {pair.about}") for pair in ordered)
    lines = [f"{'':<{width}}  {'old':>9}  {'new':>9}  {'ratio':>6}  {'band':>5}  verdict"]
    for pair in ordered:
        times = (
            "-" if seconds is None else format_us(seconds * 1e6)
            for seconds in (pair.old_s, pair.new_s)
        )
        old, new = times
        ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
        verdict = pair.verdict + (" (a peer)" if pair.is_peer else "")
        verdict = verdict.replace("same", "same within noise")
        name = f"{pair.section}: {pair.about}" if pair.section else pair.about
        lines.append(
            f"{name:<{width}}  {old:>9}  {new:>9}  {ratio:>6}  {pair.band:>5.0%}  {verdict}"
        )
    return "\n".join(lines)


def summary(pairs: Sequence[Pair]) -> str:
    """How many of ours have which verdict, and how far peers moved."""
    ours = [pair.verdict for pair in pairs if not pair.is_peer]
    counts = ", ".join(
        f"{ours.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in ours
    )
    lines = [f"ours: {counts or 'nothing'}"]
    moved = [pair.ratio for pair in pairs if pair.is_peer and pair.ratio is not None]
    if moved:
        middle = statistics.median(moved)
        lines.append(f"peers took {middle:.2f} times as long, in the median of {len(moved)}")
        if not 0.9 < middle < 1.1:
            lines.append("which our code cannot have caused: the machine was not in the same state")
    return "\n".join(lines)


def exit_status(pairs: Sequence[Pair], is_one_machine: bool) -> int:
    """1 where something of ours is slower, on one machine, or anything is wrong."""
    if any(pair.verdict == "wrong" for pair in pairs):
        return 1
    slower = any(pair.verdict == "slower" and not pair.is_peer for pair in pairs)
    return int(slower and is_one_machine)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD.json", help="report.json or a results file")
    parser.add_argument("new", metavar="NEW.json", help="another of the same kind")
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
        parser.error(f"--threshold: {args.threshold!r} is no share, expected 0 or more")
    return args


def load_both(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both files; results files, which old ones do not name, as the same benchmark's.

    Raises:
        InputError: One of them cannot be used, or they have nothing in common.
    """
    old, new = load(args.old), load(args.new)
    for one, other in ((old, new), (new, old)):
        if list(one["sections"]) == [""] and len(other["sections"]) == 1:
            one["sections"] = {next(iter(other["sections"])): one["sections"][""]}
    if not any(p.ratio is not None for p in compare(old, new)):
        raise InputError(f"{args.new}: has no row of {args.old}: nothing to compare")
    return old, new


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print what changed."""
    args = parse_arguments(argv)
    try:
        old, new = load_both(args)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"old: {args.old}: {describe(old['machine'])}, {old['machine'].get('date')}")
    print(f"new: {args.new}: {describe(new['machine'])}, {new['machine'].get('date')}")
    unequal = differences(old, new, HARDWARE)
    for line in differences(old, new, SOFTWARE):
        print(f"differs: {line}")
    if unequal:
        print(f"UNEQUAL MACHINES ({'; '.join(unequal)}): this compares machines, not versions")
    if old.get("effort") != new.get("effort"):
        print(f"efforts differ: {old.get('effort')} and {new.get('effort')}")
    pairs = compare(old, new, args.threshold)
    shown = [p for p in pairs if args.all or not (p.verdict == "same" or p.is_peer)]
    print(f"\n{table(shown)}\n" if shown else "")
    print(summary(pairs))
    return exit_status(pairs, not unequal)


if __name__ == "__main__":
    sys.exit(main())
