"""Tables in Markdown, one for each benchmark, from what its results file holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.report.text import describe, format_us, markdown_table

__all__ = ["TABLES", "allreduce_table"]

PEERS = ("naive", "stack")


def identity_of(row: dict[str, Any]) -> tuple[str, int, str]:
    """What a row of allreduce.py is about."""
    return row["case"], row["world_size"], row["algorithm"]


def allreduce_table(report: dict[str, Any]) -> str:
    """A line per case and algorithm: naive's time beside ours, all from one interleaved run."""
    machine, rows = report["machine"], report["rows"]
    naive = {(r["case"], r["world_size"]): r for r in rows if r["algorithm"] == "naive"}
    stack = {(r["case"], r["world_size"]): r for r in rows if r["algorithm"] == "stack"}
    # Results from before it was measured have no such column.
    column, bar = ("stack().sum() | ", "---|") if stack else ("", "")
    lines = [
        f"Measured on {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"{machine['date']}: medians of one interleaved run, each result checked in it. `bound` is "
        "a call whose arguments were checked before; `of limit` compares with reading and "
        "writing every buffer once, the least an allreduce can do (above 1 for small sizes, "
        "where torch's own call overhead is in the limit).",
        "",
        f"| per rank | ranks | algorithm | naive | {column}ours | times as fast | of limit |",
        f"|---|---|---|---|{bar}---|---|---|",
    ]
    for row in rows:
        if row["algorithm"] in PEERS:
            continue
        key = row["case"], row["world_size"]
        base = naive[key]
        found = f"| {format_us(stack[key]['median_us'])} " if key in stack else "|  "
        other = found if stack else ""
        lines.append(
            f"| {row['case']} | {row['world_size']} | `{row['algorithm']}` "
            f"| {format_us(base['median_us'])} {other}| {format_us(row['median_us'])} "
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
        f"One process per rank, {describe(machine)}, {machine['date']}: medians of the slowest "
        "rank, interleaved, each result checked; in brackets the minima: gloo sleeps between "
        "messages, and is far from its minimum most of the time. `of limit` compares with every "
        "rank's writing its own tensor.",
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
        f"DDP's step without the optimiser, {describe(machine)}, {machine['date']}: medians of the "
        "slowest rank, interleaved. "
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


def training_table(report: dict[str, Any]) -> str:
    """A line per model, number of ranks and way to train."""
    machine, rows = report["machine"], report["rows"]
    lines = [
        "A training step, from the batch to updated parameters, batch size "
        f"{rows[0]['batch_size']}, {describe(machine)}, {machine['torch_threads']} torch threads, "
        f"{machine['date']}: medians of interleaved epochs, in brackets the quartiles; parameters "
        "checked against the book's. "
        "`undivided` is the whole batch on one replica, the limit: all of the arithmetic and no "
        "communication. `book` reduces each parameter through rank 0 after backward.",
        "",
    ]
    cells = [
        [
            *(row["case"], row["world_size"], row["candidate"]),
            f"{format_us(row['median_ms'] * 1e3)} "
            f"({format_us(row['q1_ms'] * 1e3)} to {format_us(row['q3_ms'] * 1e3)})",
            f"{row['ratio_to_book']:.2f}",
            f"{row['limit_share']:.2f}",
        ]
        for row in rows
    ]
    columns = ("model", "ranks", "loop", "step", "times as fast as the book's", "of limit")
    return "\n".join([*lines, markdown_table(columns, cells)])


def allreduce_cuda_table(report: dict[str, Any]) -> str:
    """A line per case, clock and algorithm on the GPU."""
    lines = [
        f"Several ranks on one GPU, {describe(report['machine'])}, {report['machine']['date']}: "
        "medians, interleaved, each result checked. `of limit` compares with moving every byte "
        "once at the rate of a copy within the device.",
        "",
    ]
    cells = [
        [
            *(row["case"], row["world_size"], row["clock"], f"`{row['algorithm']}`"),
            *(format_us(row["median_us"]), f"{row['ratio_to_naive']:.2f}"),
            f"{row['limit_share']:.2f}",
        ]
        for row in report["rows"]
    ]
    columns = ("per rank", "ranks", "clock", "algorithm", "time", "times naive", "of limit")
    return "\n".join([*lines, markdown_table(columns, cells)])


def peers_cuda_table(report: dict[str, Any]) -> str:
    """A line per size and candidate, ranks in processes with GPUs."""
    lines = [
        f"One process per rank, tensors on GPUs, {describe(report['machine'])}, "
        f"{report['machine']['date']}: medians of the slowest rank. Each peer took turns with ours "
        "in processes of their own. `of limit` compares with every rank's writing its own tensor.",
        "",
    ]
    cells = [
        [
            *(row["case"], row["world_size"], row["candidate"], format_us(row["median_us"])),
            *(f"{row['ratio_to_peer']:.2f}", f"{row['limit_share']:.2f}"),
        ]
        for row in report["rows"]
    ]
    columns = ("per rank", "ranks", "candidate", "time", "times the peer", "of limit")
    return "\n".join([*lines, markdown_table(columns, cells)])


def training_cuda_table(report: dict[str, Any]) -> str:
    """A line per way to train 60,000 images, and what communication costs a step."""
    lines = [f"Epochs on one GPU, {describe(report['machine'])}, {report['machine']['date']}.", ""]
    cells = []
    for row in report["rows"]:
        if "bucketed_s" in row:
            lines[0] += (
                f" A step of {row['case']} on {row['world_size']} ranks takes "
                f"{format_us(row['bucketed_s'] * 1e6)} with buckets, "
                f"{format_us(row['after_backward_s'] * 1e6)} with one reduction after backward, "
                f"{format_us(row['without_s'] * 1e6)} with none."
            )
            continue
        times = "" if row["times_one"] is None else f"{row['times_one']:.2f}"
        seconds = (format_us(row[name] * 1e6) for name in ("median_s", "min_s"))
        cells.append([row["case"], row["world_size"], row["images"], *seconds, times])
    columns = ("training", "ranks", "images", "epoch", "minimum", "times one rank")
    return "\n".join([*lines, markdown_table(columns, cells)])


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "allreduce": allreduce_table,
    "processes": processes_table,
    "ddp": ddp_table,
    "bucketing": bucketing_table,
    "training": training_table,
    "allreduce_cuda": allreduce_cuda_table,
    "peers_cuda": peers_cuda_table,
    "training_cuda": training_cuda_table,
}
