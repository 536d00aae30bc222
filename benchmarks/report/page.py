"""The page that people read: summary, tables, pictures, and what could not be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report.document import wrong_rows
from benchmarks.report.plots import Figure
from benchmarks.report.summary import auto_table, summary_lines
from benchmarks.report.tables import TABLES
from benchmarks.report.text import describe

__all__ = ["TITLES", "render"]

TITLES = {
    "allreduce": "Ranks that are lists of one process",
    "processes": "One process per rank",
    "ddp": "DistributedDataParallel",
    "bucketing": "Gradients while backward runs",
    "training": "Training steps",
    "allreduce_cuda": "Several ranks on one GPU",
    "peers_cuda": "NCCL and symmetric memory",
    "training_cuda": "Training on one GPU",
}


def render(report: Mapping[str, Any], figures: Sequence[Figure], folder: str) -> str:
    """The whole page. Pictures are linked as ``folder/name.png``."""
    sections = report["sections"]
    parts = ["# Benchmark report", *_head(report), *_faults(report)]
    parts += ["\n".join(f"- {line}" for line in summary_lines(sections))]
    for name in TITLES:
        if name in sections:
            parts += [f"## {TITLES[name]}", *_pictures(figures, name, folder)]
            parts += [TABLES[name](sections[name])]
    if "allreduce" in sections or "processes" in sections:
        parts += ["## auto against the best algorithm", auto_table(sections)]
    parts += _not_run(report)
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Mapping[str, Any]) -> list[str]:
    machine = report["machine"]
    engine = machine.get("engine", {})
    about = ", ".join(f"{name} {engine[name]}" for name in ("compiler", "simd") if engine.get(name))
    lines = [
        f"{describe(machine)}, {machine['memory_gib']} GiB of memory, {machine['system']}, Python "
        f"{machine['python']}, pyringar {machine['pyringar']} ({about}). "
        f"Measured {_dates(report['sections'], machine)}.",
        "Candidates take turns in one run, after warming up; times are medians, their spread is "
        "in the JSON and in the pictures. Every row was checked for the right result in the same "
        "run. The physical limit of each case was measured in the same process.",
    ]
    if report.get("effort") not in (None, "full"):
        lines.append(f"A **{report['effort']}** run: few rounds, so that figures are rough.")
    return lines


def _dates(sections: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    dates = sorted({section["machine"]["date"] for section in sections.values()})
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else machine["date"]


def _faults(report: Mapping[str, Any]) -> list[str]:
    """What makes the run a failure, first of all."""
    parts = []
    wrong = wrong_rows(report["sections"])
    if wrong:
        parts.append("**Wrong results.** " + "; ".join(wrong) + ".")
    for fault in report.get("failed", []):
        parts.append(f"**The section {fault['section']} failed:** `{fault['error']}`")
    return parts


def _pictures(figures: Sequence[Figure], section: str, folder: str) -> list[str]:
    return [
        f"![{figure.title}]({folder}/{figure.name}.png)"
        for figure in figures
        if figure.section == section
    ]


def _not_run(report: Mapping[str, Any]) -> list[str]:
    missing = list(report.get("not_run", []))
    for name, section in report["sections"].items():
        for item in section.get("not_run", []):
            missing.append({"what": f"{name}: {item['what']}", "why": item["why"]})
    if not missing:
        return []
    lines = [f"- {item['what']}: {item['why']}" for item in missing]
    return ["## What was not run, and why", "\n".join(lines)]
