"""Pictures with bars: speed-ups, and what a step's time is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.document import name_of, times_of
from benchmarks.report.style import STYLES, by_key, finish, legend_below, pyplot

__all__ = [
    "allreduce_groups",
    "draw_allreduce",
    "draw_bucketing",
    "draw_ddp",
    "draw_processes",
    "draw_training",
    "processes_groups",
]

Section = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
Groups = dict[int, dict[str, dict[str, float]]]  # ranks, case, candidate: how many times as fast

HIDDEN, EXPOSED = "#56b4e9", "#d55e00"


# -- speed-ups -------------------------------------------------------------------------------------


def allreduce_groups(section: Section) -> Groups:
    """Times as fast as naive."""
    shown = ("stack", "ring", "direct", "fused", "auto", "coalesced")
    groups: Groups = {}
    for row in section["rows"]:
        if name_of(row) in shown and row.get("clock", "device") == "device":
            cases = groups.setdefault(row["world_size"], {})
            cases.setdefault(row["case"], {})[name_of(row)] = row["ratio_to_naive"]
    return {k: groups[k] for k in sorted(groups) if len(groups[k]) > 3 or len(groups) == 1}


def processes_groups(section: Section) -> Groups:
    """Times as fast as gloo."""
    shown = ("ring", "checked", "coalesced", "registered", "backend")
    groups: Groups = {}
    for row in sorted(section["rows"], key=_order):
        if name_of(row) in shown and row.get("ratio_to_gloo"):
            cases = groups.setdefault(row["world_size"], {})
            cases.setdefault(row["case"], {})[name_of(row)] = row["ratio_to_gloo"]
    return dict(sorted(groups.items()))


def _order(row: Mapping[str, Any]) -> tuple[bool, int]:
    """Lists of tensors after single ones, small before large."""
    return " x " in row["case"], row["size_bytes"]


def draw_allreduce(section: Section, path: Path) -> None:
    """Speed-up over naive."""
    draw_speedups(allreduce_groups(section), "times as fast as naive", section, path)


def draw_processes(section: Section, path: Path) -> None:
    """Speed-up over gloo."""
    draw_speedups(processes_groups(section), "times as fast as gloo", section, path)


def draw_speedups(groups: Groups, label: str, section: Section, path: Path) -> None:
    """Horizontal bars from 1 on, a panel per number of ranks: right is faster."""
    plt = pyplot()
    thin = max(len(found) for cases in groups.values() for found in cases.values())
    most = max(len(cases) for cases in groups.values())
    figure, grid = plt.subplots(
        *(1, len(groups)),
        figsize=(1.6 + 3.4 * len(groups), max(2.8, 1.4 + most * (0.16 + 0.115 * thin))),
        sharex=True,
        squeeze=False,
    )
    for axes, (k, cases) in zip(grid.flat, groups.items(), strict=True):
        _draw_cases(axes, cases, thin, most)
        axes.set_title(f"{k} ranks")
        axes.set_xlabel(label)
    legend_below(figure, list(grid.flat))
    finish(figure, path, section["machine"])


def _draw_cases(axes: Any, cases: Mapping[str, Mapping[str, float]], thin: int, most: int) -> None:
    height = 0.86 / thin
    order = list(STYLES)
    for number, found in enumerate(cases.values()):
        names = sorted(found, key=order.index)
        for turn, name in enumerate(names):
            at = number + (turn - (len(names) - 1) / 2) * height
            style = STYLES[name]
            # From 1 on: what is slower points to the left.
            axes.barh(
                *(at, found[name] - 1, height * 0.92),
                left=1,
                color=style.color,
                label=style.label,
            )
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(cases)), [case.removesuffix(" fp32") for case in cases], fontsize=8)
    axes.set_ylim(most - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    _plain_ticks(axes)


def _plain_ticks(axes: Any) -> None:
    """0.5, 1, 2, 5, ... instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    subs = (1.0,) if high / low > 200 else (1.0, 2.0, 5.0) if high / low > 20 else (1, 1.5, 2, 3, 5)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)


# -- steps -----------------------------------------------------------------------------------------


def draw_ddp(section: Section, path: Path) -> None:
    """A step without DDP, and what communication adds, a panel per model."""
    plt = pyplot()
    models = by_key(section["rows"], lambda row: (row["case"], row["world_size"]))
    figure, grid = plt.subplots(1, len(models), figsize=(1 + 3.6 * len(models), 3.4), squeeze=False)
    for axes, ((case, k), rows) in zip(grid.flat, models.items(), strict=True):
        names = [row["candidate"] for row in rows]
        bare = next(row["step_ms"] for row in rows if row["candidate"] == "bare")
        steps = [row["step_ms"] for row in rows]
        axes.bar(names, [min(bare, s) for s in steps], 0.6, color="#8c8c8c", label="computation")
        more = [max(0.0, step - bare) for step in steps]
        axes.bar(names, more, 0.6, bottom=bare, color=EXPOSED, label="communication adds")
        for at, step in enumerate(steps):
            axes.annotate(
                f"{step:.3g}", (at, step), (0, 3), textcoords="offset points", ha="center"
            )
        axes.margins(y=0.12)
        axes.set_title(f"{case}, {k} ranks")
        axes.set_ylabel("milliseconds a step")
        axes.grid(visible=False, axis="x")
    legend_below(figure, list(grid.flat))
    finish(figure, path, section["machine"])


def draw_bucketing(section: Section, path: Path) -> None:
    """Time of reductions: what was hidden behind backward, and what came after it."""
    plt = pyplot()
    panels = by_key(section["rows"], lambda row: (row["case"], row["world_size"]))
    models = list(dict.fromkeys(case for case, _ in panels))
    ranks = sorted({k for _, k in panels})
    most = max(len(rows) for rows in panels.values())
    figure, grid = plt.subplots(
        *(len(ranks), len(models)),
        figsize=(2 + 3.1 * len(models), 1.2 + len(ranks) * (0.6 + 0.26 * most)),
        squeeze=False,
        sharey=True,
    )
    for line, k in enumerate(ranks):
        for column, model in enumerate(models):
            axes, rows = grid[line, column], panels.get((model, k), [])
            names = [_reduction_name(row) for row in rows]
            exposed = [row["exposed_ms"] for row in rows]
            hidden = [row["comm_ms"] - row["exposed_ms"] for row in rows]
            axes.barh(names, exposed, 0.7, color=EXPOSED, label="exposed, after backward")
            axes.barh(names, hidden, 0.7, left=exposed, color=HIDDEN, label="hidden in backward")
            axes.set_title(f"{model}, {k} ranks")
            axes.set_xlabel("milliseconds a step")
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", labelsize=8)
            axes.margins(x=0.08)
    grid[0, 0].invert_yaxis()  # of all panels, which share it
    legend_below(figure, list(grid.flat))
    finish(figure, path, section["machine"])


def _reduction_name(row: Mapping[str, Any]) -> str:
    cap = row["bucket_cap_mb"]
    return str(row["candidate"]) if cap is None else f"buckets, {cap:g} MB"


def draw_training(section: Section, path: Path) -> None:
    """Time of a step by number of ranks, medians with quartiles, a panel per model."""
    plt = pyplot()
    models = by_key(section["rows"], lambda row: row["case"])
    figure, grid = plt.subplots(1, len(models), figsize=(1 + 3.8 * len(models), 3.5), squeeze=False)
    for axes, (model, rows) in zip(grid.flat, models.items(), strict=True):
        ranks = sorted({row["world_size"] for row in rows})
        names = [name for name in STYLES if any(row["candidate"] == name for row in rows)]
        width = 0.8 / len(names)
        for turn, name in enumerate(names):
            own = [row for row in rows if row["candidate"] == name]
            times = [times_of(row) for row in own]
            medians = [t.median_s * 1e3 for t in times]
            low = [(t.median_s - (t.q1_s or t.median_s)) * 1e3 for t in times]
            high = [((t.q3_s or t.median_s) - t.median_s) * 1e3 for t in times]
            places = [
                ranks.index(row["world_size"]) + (turn - (len(names) - 1) / 2) * width
                for row in own
            ]
            axes.bar(
                *(places, medians, width * 0.92),
                color=STYLES[name].color,
                label=STYLES[name].label,
                yerr=[low, high],
                error_kw={"ecolor": "#d55e00", "elinewidth": 1, "capsize": 2},
            )
        axes.set_xticks(range(len(ranks)), [str(k) for k in ranks])
        axes.set_title(model)
        axes.set_xlabel("ranks")
        axes.set_ylabel("milliseconds a step (bars: quartiles)")
        axes.grid(visible=False, axis="x")
    legend_below(figure, list(grid.flat))
    finish(figure, path, section["machine"])
