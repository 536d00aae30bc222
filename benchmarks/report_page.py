"""Write the report: summary sentences, a table and a picture per section, missing results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import MIB, format_s
from benchmarks.machine import disturbance, machine_in_words
from benchmarks.process_allreduce import BESIDE
from benchmarks.report_figures import filename_of, style_of
from benchmarks.rows import Results, Row, Sections, by_key, limit_of, num_ranks
from benchmarks.sections import SECTIONS

METHOD = """How to read the tables:

- A time is the median over rounds. Each round times all candidates in random order. All results \
were checked.
- **Bold** is the fastest implementation of pyringar.
- *Speedup* is the time of the fastest competitor divided by the time of pyringar.
- *Limit* is the time of the least memory traffic or computation that a case needs. It is empty if \
a call was faster.
- *Share of limit* is the limit divided by the time of pyringar: 100% cannot be improved."""
INCOMPLETE = "**This run ended early.** The report shows only the cases that were finished."
SLOW_RATIO = 1.10  # `auto` counts as slow from this ratio of its time to the fastest algorithm's
LARGE_BYTES = 16 * MIB
ALGORITHMS = {
    "allreduce": ("fused", "direct", "ring", "sharded", "naive"),
    "processes": ("direct",),
}


def render(
    sections: Sections, figures: Path | None, gpu_notes: str = "", *, is_complete: bool = True
) -> str:
    """Return the report page as Markdown.

    Args:
        sections: Results by section.
        figures: Folder of the pictures, relative to the page; None: no pictures.
        gpu_notes: Markdown text above the sections of a GPU.
        is_complete: False if the run ended before its last case; the page says so.
    """
    measured = {name: sections[name] for name in SECTIONS if name in sections}
    on_gpu = [name for name, found in measured.items() if found.rows and found.machine.get("gpu")]
    parts = ["# Benchmark report", "" if is_complete else INCOMPLETE]
    parts += [*_disturbances(measured), *_head(measured), *_faults(measured)]
    if summary := sentences(measured):
        parts += ["Summary:", "\n".join(f"- {line}" for line in summary)]
    parts += [METHOD]
    for name, results in measured.items():
        if not results.rows:
            continue
        if name in on_gpu[:1]:
            parts += _gpu_head(results, gpu_notes)
        title = SECTIONS[name].title
        parts += [f"{'###' if name in on_gpu else '##'} {title}"]
        parts += [f"![{title}]({figures}/{filename_of(name)})"] if figures else []
        parts += [SECTIONS[name].about, _versions(results), table(results)]
    parts += _not_run(measured)
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(machine: Mapping[str, Any]) -> str:
    engine = machine.get("engine", {})
    about = ", ".join(f"{name} {engine[name]}" for name in ("compiler", "simd") if engine.get(name))
    return (
        f"{machine_in_words(machine)}, {machine['memory_gib']} GiB of memory, {machine['system']}, "
        f"Python {machine['python']}, pyringar {machine['pyringar']} ({about})"
    )


def _disturbances(sections: Sections) -> Iterator[str]:
    shares = {name: disturbance(found.machine) for name, found in sections.items()}
    if names := ", ".join(name for name, share in shares.items() if share):
        used = f"other programs used {max(shares.values()):.0%} of the processors"
        yield f"**Measured while {used}: times and ratios are not reliable.** Sections: {names}."


def _head(sections: Sections) -> Iterator[str]:
    on_cpu = [results for results in sections.values() if not results.machine.get("gpu")]
    machines = by_key(on_cpu, lambda results: _machine(results.machine))
    for machine, measured in machines.items():
        dates = sorted({results.machine["date"] for results in measured})
        titles = ", ".join(f'"{SECTIONS[results.section].title}"' for results in measured)
        which = f" of the sections {titles}" if len(machines) > 1 else ""
        days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        yield f"Machine{which}: {machine}. Measured {days}."
        yield _effort(measured[0])


def _effort(results: Results) -> str:
    if results.effort == "full":
        return ""
    return f"This was a **{results.effort}** run with few rounds, so the times are rough."


def _faults(sections: Sections) -> Iterator[str]:
    wrong = [f"{name}: {row.about}" for name, found in sections.items() for row in found.wrong]
    if wrong:
        yield f"**Wrong results.** {'; '.join(wrong)}."
    for name, results in sections.items():
        for item in results.failed:
            yield f"**{name} failed:** {item['what']}: `{item['why']}`"


def _gpu_head(results: Results, notes: str) -> Iterator[str]:
    machine = results.machine
    yield "## On one GPU"
    yield (
        f"{_machine(machine)}, driver {machine['driver']}, CUDA {machine['torch_cuda']}, NCCL "
        f"{machine['nccl']}. Measured {machine['date']}."
    )
    yield _effort(results)
    yield notes.strip()
    if steps := results.facts.get("steps"):
        cells = [[step["name"], step["state"], step["note"]] for step in steps]
        yield markdown_table(("step of gpu_check.py", "state", "outcome"), cells)


def _versions(results: Results) -> str:
    versions = results.facts.get("versions", {})
    return f"Versions: {'; '.join(versions.values())}." if versions else ""


def _not_run(sections: Sections) -> list[str]:
    lines = [f"- {name}: no results" for name in SECTIONS if name not in sections]
    for name, results in sections.items():
        about = "GPU" if results.machine.get("gpu") else name
        lines += [f"- {about}: {item['what']}: {item['why']}" for item in results.not_run]
    return ["## Not run", "\n".join(dict.fromkeys(lines))] if lines else []


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def table(results: Results) -> str:
    benchmark = SECTIONS[results.section]
    names = list(dict.fromkeys(row.candidate for row in results.rows))
    lines = []
    for (case, k, clock), rows in by_key(results.rows, lambda row: row.group).items():
        found = {row.candidate: row for row in rows}
        own, limit_s = found.get(benchmark.ours), limit_of(rows)
        others = (*benchmark.peers, benchmark.limit)
        ours = [row.median_s for row in rows if row.candidate not in others]
        line = {"case": case, "ranks": str(k), "clock": clock or ""}
        line["limit"] = format_s(limit_s) if limit_s and benchmark.limit not in found else ""
        line |= {f"`{name}`": _cell(found.get(name), min(ours, default=0)) for name in names}
        if ratio := speedup(rows):
            line[f"speedup of `{benchmark.ours}`"] = f"{ratio:.2f}"
        if own and limit_s:
            line[f"`{benchmark.ours}`: share of limit"] = f"{limit_s / own.median_s:.0%}"
        lines.append(line)
    names = list(dict.fromkeys(name for line in lines for name in line))
    columns = [name for name in names if any(line.get(name) for line in lines)]
    return markdown_table(columns, [[line.get(name, "") for name in columns] for line in lines])


def _cell(row: Row | None, best_s: float) -> str:
    if row is None:
        return ""
    time = format_s(row.median_s)
    time = f"**{time}**" if row.median_s == best_s else time
    parts = ", ".join(f"{name} {format_s(seconds)}" for name, seconds in row.parts_s.items())
    return f"{time} ({parts})" if parts else time


def speedup(rows: Sequence[Row]) -> float | None:
    """Return the fastest peer's time divided by pyringar's, in the rows of one group."""
    benchmark = SECTIONS[rows[0].section]
    own = [row.median_s for row in rows if row.candidate == benchmark.ours]
    peers = [row.median_s for row in rows if row.candidate in benchmark.peers]
    return min(peers) / own[0] if own and peers else None


def sentences(sections: Sections) -> list[str]:
    lines = [line for results in sections.values() for line in section_lines(results)]
    return [*lines, *auto_lines(sections)]


def section_lines(results: Results) -> list[str]:
    lines = [speedup_line(results)]
    if results.section == "processes":
        lines = [
            speedup_line(results, lambda row: not row.case.endswith(BESIDE)),
            speedup_line(results, lambda row: row.case.endswith(BESIDE), BESIDE),
        ]
    elif results.section == "allreduce":
        lines += [share_line(results, "auto")]
    elif results.section == "allreduce_cuda":
        lines += [share_line(results, "fused"), share_line(results, "ring")]
    elif results.section == "bucketing" and "hook_s" in results.facts:
        lines += [f"**Gradient hook**: {format_s(results.facts['hook_s'])} per parameter and step."]
    elif results.section == "training_cuda":
        epochs = [
            f"{row.case.replace(', graph', ' in a CUDA graph')} {format_s(row.median_s)}"
            for row in results.rows
            if row.candidate == "ringar" and row.world_size == 1
        ]
        lines = [f"**An epoch** of 60,000 images, 1 rank on 1 GPU: {'; '.join(epochs)}.", *lines]
    return [line for line in lines if line]


def speedup_line(
    results: Results, keep: Callable[[Row], bool] = lambda row: True, about: str = ""
) -> str:
    benchmark = SECTIONS[results.section]
    rows = [row for row in results.rows if row.clock in (None, "device") and keep(row)]
    found = []
    for group in by_key(rows, lambda row: row.group).values():
        if ratio := speedup(group):
            case = group[0].case.removesuffix(BESIDE)
            found.append((ratio, f"{case}, {num_ranks(group[0].world_size)}"))
    if not found:
        return ""
    measured = {row.candidate for row in rows}
    peers = [style_of(name).label for name in benchmark.peers if name in measured]
    others = ", ".join(peers[:-1])
    against = f"the fastest of {others} and {peers[-1]}" if others else peers[0]
    median = statistics.median(ratio for ratio, _ in found)
    speed = f"{median:.1f} times as fast" if abs(median - 1) >= 0.05 else "as fast"
    (low, low_case), (high, high_case) = min(found), max(found)
    spread = f"from {low:.2f} for {low_case}, to {high:.3g} for {high_case}"
    cases = f"median of {len(found)} cases; {spread}" if found[1:] else low_case
    return f"**{benchmark.title}{about}**: {speed} as {against} ({cases})."


def share_line(results: Results, candidate: str) -> str:
    """Return a sentence about the share of the limit that a candidate reaches on large tensors."""
    rows = [row for row in results.rows if row.clock in (None, "device")]
    shares = [
        min(1.0, limit_s / row.median_s)
        for group in by_key(rows, lambda row: row.group).values()
        for row in group
        if row.candidate == candidate
        and (row.size_bytes or 0) >= LARGE_BYTES
        and (limit_s := limit_of(group))
    ]
    if not shares:
        return ""
    title, median = SECTIONS[results.section].title, statistics.median(shares)
    spread = f", {min(shares):.0%} to {max(shares):.0%}" if shares[1:] else ""
    method = f"one read and one write per buffer; median of {len(shares)} cases{spread}"
    share = f"`{candidate}` reaches {median:.0%} of the memory limit ({method})"
    return f"**{title}**, tensors of 16 MiB and more: {share}."


def auto_lines(sections: Sections) -> list[str]:
    found = []
    for section, names in ALGORITHMS.items():
        rows = sections[section].rows if section in sections else []
        for (case, k, _), group in by_key(rows, lambda row: row.group).items():
            times = {row.candidate: row.median_s for row in group}
            named = [times[name] for name in names if name in times]
            if "auto" in times and times.keys() & set(names) - {"naive"}:
                found.append((times["auto"] / min(named), f"{case}, {num_ranks(k)}"))
    if not found:
        return []
    slow = sum(ratio > SLOW_RATIO for ratio, _ in found)
    worst, worst_case = max(found)
    return [
        f"**Choice of algorithm**: `auto` was more than {SLOW_RATIO - 1:.0%} slower than the "
        f"fastest algorithm in {slow} of {len(found)} cases. Its worst case took {worst:.2f} times "
        f"as long ({worst_case})."
    ]
