"""Writes README's tables from the results files, so that no figure there is typed by hand.

python benchmarks/tables.py            # rewrite what stands between the markers
python benchmarks/tables.py --check    # exit status 1 if that would change anything
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def format_us(microseconds: float) -> str:
    """Three digits, in the unit that suits them."""
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if microseconds < limit:
            return f"{microseconds / (limit / 1e3):.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


def allreduce_table(report: dict[str, Any]) -> str:
    """A line per case and algorithm: naive's time beside ours, all from one interleaved run."""
    machine, rows = report["machine"], report["rows"]
    naive = {(r["case"], r["world_size"]): r for r in rows if r["algorithm"] == "naive"}
    lines = [
        f"Measured on {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date']}: medians of one interleaved run, each result checked in it. `bound` is "
        "a call whose arguments were checked before; `of limit` compares with reading and "
        "writing every buffer once, the least an allreduce can do (above 1 for small sizes, "
        "where torch's own call overhead is in the limit).",
        "",
        "| per rank | ranks | algorithm | naive | ours | times as fast | of limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["algorithm"] == "naive":
            continue
        base = naive[row["case"], row["world_size"]]
        lines.append(
            f"| {row['case']} | {row['world_size']} | `{row['algorithm']}` "
            f"| {format_us(base['median_us'])} | {format_us(row['median_us'])} "
            f"| {row['ratio_to_naive']:.2f} | {row['limit_share']:.2f} |"
        )
    return "\n".join(lines)


def bucketing_table(report: dict[str, Any]) -> str:
    """A line per way to reduce the gradients of a training step."""
    machine = report["machine"]
    lines = [
        f"A training step without the optimiser, {machine['cpu']}, {machine['cores']} cores, one "
        f"torch thread, {machine['date']}: medians of interleaved rounds, gradients checked bit "
        f"for bit. `exposed` is what came after backward. A hook costs {report['hook_us']:.2f} us.",
        "",
        "| model | ranks | gradients reduced | step | reductions | exposed |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cap = row["bucket_cap_mb"]
        how = row["candidate"] if cap is None else f"bucketed, {cap:g} MB"
        times = (format_us(row[name] * 1e3) for name in ("median_ms", "comm_ms", "exposed_ms"))
        lines.append(f"| {row['case']} | {row['world_size']} | {how} | {' | '.join(times)} |")
    return "\n".join(lines)


def processes_table(report: dict[str, Any]) -> str:
    """A line per case and way to call, gloo's time beside ours."""
    machine, rows = report["machine"], report["rows"]
    gloo: dict[tuple[str, int], tuple[float, float]] = {}
    for row in rows:
        if row["candidate"].startswith("gloo"):
            key, times = (row["case"], row["world_size"]), (row["median_us"], row["min_us"])
            gloo[key] = min(times, gloo.get(key, times))
    lines = [
        f"One process per rank, {machine['cpu']}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['date']}: medians of the slowest rank, interleaved, each "
        "result checked; in brackets the minima: gloo sleeps between messages, and is far from its "
        "minimum most of the time. `of limit` compares with every rank's writing its own tensor.",
        "",
        "| per rank | ranks | call | gloo | ours | times as fast | of limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["candidate"].startswith("gloo") or row["candidate"] == "limit":
            continue
        theirs, least = gloo.get((row["case"], row["world_size"]), (0.0, 0.0))
        ratio = f"{theirs / row['median_us']:.1f} ({least / row['min_us']:.1f})" if theirs else ""
        share = f"{row['limit_share']:.2f}" if row["limit_share"] else ""
        lines.append(
            f"| {row['case']} | {row['world_size']} | {row['candidate']} "
            f"| {f'{format_us(theirs)} ({format_us(least)})' if theirs else ''} "
            f"| {format_us(row['median_us'])} ({format_us(row['min_us'])}) | {ratio} | {share} |"
        )
    return "\n".join(lines)


def ddp_table(report: dict[str, Any]) -> str:
    """A line per model and backend."""
    machine = report["machine"]
    lines = [
        f"DDP's step without the optimiser, {machine['cpu']}, {machine['cores']} cores, torch "
        f"{machine['torch']}, {machine['date']}: medians of the slowest rank, interleaved. "
        "`communication` is the step less the same step without DDP.",
        "",
        "| model | ranks | backend | step | communication | times as cheap as gloo's |",
        "|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        spent, ratio = row["communication_ms"], row["ratio_to_gloo"]
        lines.append(
            f"| {row['case']} | {row['world_size']} | {row['candidate']} "
            f"| {format_us(row['step_ms'] * 1e3)} "
            f"| {'' if spent is None else format_us(spent * 1e3)} "
            f"| {'' if ratio is None else f'{ratio:.1f}'} |"
        )
    return "\n".join(lines)


TABLES = {
    "allreduce": ("allreduce-cpu.json", allreduce_table),
    "bucketing": ("bucketing-cpu.json", bucketing_table),
    "processes": ("processes-cpu.json", processes_table),
    "ddp": ("ddp-cpu.json", ddp_table),
}


def filled(text: str) -> str:
    """The same text with every table between its markers made anew."""
    for name, (file, table) in TABLES.items():
        begin, end = f"<!-- benchmark:{name} -->", f"<!-- /benchmark:{name} -->"
        head, rest = text.split(begin)
        tail = rest.split(end)[1]
        report = json.loads((RESULTS / file).read_text())
        text = f"{head}{begin}\n{table(report)}\n{end}{tail}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite README's tables, or say that they are out of date."""
    parser = argparse.ArgumentParser(description="Write README's tables from benchmarks/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if it would")
    args = parser.parse_args(argv)
    old = README.read_text()
    new = filled(old)
    if args.check:
        if new != old:
            print("README.md is out of date: run python benchmarks/tables.py", file=sys.stderr)
        return int(new != old)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
