"""Write the page that people read: summary, a table a section, pictures, and what was not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.bench import format_s
from benchmarks.machine import machine_in_words
from benchmarks.report.plots import Figure
from benchmarks.report.summary import FAR, auto_rows, summary_lines
from benchmarks.rows import Results, Row, Sections, by_key, limits, share_of_limit
from benchmarks.sections import SECTIONS

METHOD = (
    "Candidates take turns in one run, after warming up; times are medians, their spread is in the "
    "results files and in the pictures. Every row was checked for the right result in the same "
    "run. The physical limit of a case, where one is known, was measured in the same process; in "
    "brackets the share of it that was reached. Where a call was faster than what stands for the "
    "limit, whose own overhead is in it, there is no limit. Bold: the fastest of ours."
)
ROUGH = "A **{}** run: few rounds, so that figures are rough."


def render(sections: Sections, figures: Sequence[Figure], folder: str, gpu_notes: str = "") -> str:
    """Return the whole page. Pictures are linked as ``folder/name.png``."""
    measured = {name: sections[name] for name in SECTIONS if name in sections}
    is_busy = any(results.disturbed_by for results in measured.values())
    mark = "On a busy machine: " if is_busy else ""
    parts = ["# Benchmark report", *_disturbed(measured), *_head(measured), *_faults(measured)]
    parts += ["\n".join(f"- {mark}{line}" for line in summary_lines(measured))]
    on_gpu = [name for name, found in measured.items() if found.rows and found.machine.get("gpu")]
    for name, results in measured.items():
        if results.rows:
            parts += _gpu_head(results, gpu_notes) if name in on_gpu[:1] else []
            parts += [f"{'###' if name in on_gpu else '##'} {SECTIONS[name].title}"]
            parts += [f"![{f.title}]({folder}/{f.filename})" for f in figures if f.section == name]
            busy = results.disturbed_by
            parts += [f"**Busy machine: other programs used {busy}.**"] if busy else []
            parts += [] if name in on_gpu else [_elsewhere(results, measured)]
            parts += [SECTIONS[name].about]
            parts += [_libraries(results), table(results)]
    parts += ["## auto against the best algorithm", auto_table(measured)]
    parts += _not_run(measured)
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(machine: Mapping[str, Any]) -> str:
    engine = machine.get("engine", {})
    about = ", ".join(f"{name} {engine[name]}" for name in ("compiler", "simd") if engine.get(name))
    return (
        f"{machine_in_words(machine)}, {machine['memory_gib']} GiB of memory, {machine['system']}, "
        f"Python {machine['python']}, pyringar {machine['pyringar']} ({about})"
    )


def _elsewhere(results: Results, sections: Sections) -> str:
    """Name the machine of a section that was not measured on the first one's."""
    first = next(iter(sections.values())).machine
    same = all(results.machine.get(fact) == first.get(fact) for fact in ("cpu", "cores", "system"))
    return "" if same else f"On another machine: {_machine(results.machine)}."


def _head(sections: Sections) -> Iterator[str]:
    machine = next(iter(sections.values())).machine
    beside = [r for r in sections.values() if r.machine.get("gpu") == machine.get("gpu")]
    dates = sorted({results.machine["date"] for results in beside})
    yield (f"{_machine(machine)}. Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.")
    yield METHOD
    if machine.get("auto_table"):
        yield f"`auto` followed a table that is gone since: {machine['auto_table']}."
    for effort in {results.effort for results in beside} - {"full"}:
        yield ROUGH.format(effort)


def _gpu_head(results: Results, notes: str) -> Iterator[str]:
    """Yield what holds for all sections of a GPU: the machine, the steps of gpu_check.py, notes."""
    machine = results.machine
    yield "## On one GPU"
    yield (
        f"{_machine(machine)}, driver {machine['driver']}, CUDA {machine['torch_cuda']}, NCCL "
        f"{machine['nccl']}. Measured {machine['date']}."
    )
    yield "" if results.effort == "full" else ROUGH.format(results.effort)
    yield notes.strip()
    if steps := results.facts.get("steps"):
        cells = [[step["name"], step["state"], step["note"]] for step in steps]
        yield markdown_table(("step of gpu_check.py", "state", "outcome"), cells)


def _disturbed(sections: Sections) -> Iterator[str]:
    """Yield that other programs ran meanwhile, where they did."""
    found = [f"{name}: {r.disturbed_by}" for name, r in sections.items() if r.disturbed_by]
    if found:
        yield (
            "**These figures are not to be published: other programs used the processors.** "
            f"{'; '.join(found)}."
        )


def _faults(sections: Sections) -> Iterator[str]:
    """Yield what makes the run a failure."""
    wrong = [f"{name}: {row.about}" for name, found in sections.items() for row in found.wrong]
    if wrong:
        yield f"**Wrong results.** {'; '.join(wrong)}."
    for name, results in sections.items():
        if results.failed:
            yield f"**The section {name} failed:** `{results.failed}`"


def _libraries(results: Results) -> str:
    """Name what was measured beside ours, and say what it used of the processors out of turn."""
    versions, shares = results.facts.get("versions"), results.facts.get("idle_share")
    if not versions or not shares:
        return ""
    return (
        f"Measured: {'; '.join(versions.values())}. A rank used {max(shares.values()):.1%} of a "
        "processor at most while it was another library's turn."
    )


# -- tables ----------------------------------------------------------------------------------------


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Put cells between bars."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def table(results: Results) -> str:
    """Return a line per case, number of ranks and clock, with a column per candidate."""
    cases = by_key(results.rows, lambda row: (row.case, row.world_size, row.clock))
    names = list(dict.fromkeys(row.candidate for row in results.rows))
    needs_limit = not has_limit_column(results)
    are_limits = limits(results.rows)
    compared = ("auto", "bound") if SECTIONS[results.section].peers else ()
    lines = []
    for (case, k, clock), rows in cases.items():
        found = {row.candidate: row for row in rows}
        best = min((r.median_s for r in rows if r.is_ours), default=None)
        limit_s = are_limits.get((case, k, clock)) if needs_limit else None
        limit = format_s(limit_s) if limit_s else ""
        heads = {"case": case, "ranks": _ranks(results, k), "clock": clock, "limit": limit}
        shares = {row.candidate: share_of_limit(row, are_limits) for row in rows}
        cells = {f"`{n}`": _cell(found.get(n), best, shares.get(n)) for n in names}
        if (case, k, clock) not in are_limits and "`limit`" in cells:
            cells["`limit`"] = ""
        ratios = {f"best peer / `{n}`": _speedup(found.get(n)) for n in compared}
        lines.append(heads | cells | ratios)
    columns = [name for name in lines[0] if any(line[name] for line in lines)]
    return markdown_table(columns, [[line[name] for name in columns] for line in lines])


def _ranks(results: Results, k: int) -> str:
    """Write the number of ranks, and where they are processes that must share cores."""
    is_crowded = results.section == "processes" and k == 2 * results.machine["cores"]
    return f"{k}, twice the cores" if is_crowded else str(k)


def _speedup(row: Row | None) -> str:
    """Write how many times as fast as the best peer it is."""
    return f"{row.speedup:.2f}" if row and row.speedup else ""


def has_limit_column(results: Results) -> bool:
    """Say whether one of the candidates is the limit itself."""
    candidates = by_key(results.rows, lambda row: row.candidate).values()
    return any(all(row.limit_share == 1 for row in rows) for rows in candidates)


def _cell(row: Row | None, best_s: float | None, share: float | None) -> str:
    """Write the time, in brackets the share of the limit or what is known of its parts."""
    if row is None:
        return ""
    time = format_s(row.median_s)
    time = f"**{time}**" if row.median_s == best_s else time
    if row.parts_s:
        return f"{time} ({', '.join(f'{name} {format_s(s)}' for name, s in row.parts_s.items())})"
    return time if share is None else f"{time} ({share:.0%})"


def auto_table(sections: Sections) -> str:
    """Return the cases in which auto is far from the best algorithm, the farthest first."""
    rows = sorted(auto_rows(sections), key=lambda row: -row.ratio)
    if not rows:
        return "No results here hold `auto` beside algorithms that were asked for by name."
    far = [row for row in rows if row.is_far]
    others = sum(row.took_another for row in far)
    intro = (
        f"`auto` took more than {FAR:.2f} times the best algorithm's time in {len(far)} of "
        f"{len(rows)} cases; in {others} of these it had taken another algorithm than that. On "
        "ranks that are lists of one process `naive` counts as an algorithm. In the noise: the "
        "quartiles of both overlap."
    )
    cells = [
        [
            *(row.auto.section, row.auto.case, row.auto.world_size, format_s(row.auto.median_s)),
            f"`{row.auto.takes}`" if row.auto.takes else "",
            *(f"`{row.best.candidate}`", format_s(row.best.median_s)),
            f"{row.ratio:.2f}{' in the noise' if row.is_noise else ''}",
        ]
        for row in far
    ]
    columns = ("section", "case", "ranks", "auto", "takes", "best", "its time", "auto / best")
    return f"{intro}\n\n{markdown_table(columns, cells)}" if cells else intro


def _not_run(sections: Sections) -> list[str]:
    missing = {name: "no results" for name in SECTIONS if name not in sections}
    for name, results in sections.items():
        where = "GPU" if results.machine.get("gpu") else name
        for item in results.not_run:
            missing.setdefault(f"{where}: {item['what']}", item["why"])
    lines = [f"- {what}: {why}" for what, why in missing.items()]
    return ["## What was not run, and why", "\n".join(lines)] if lines else []
