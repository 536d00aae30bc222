"""Draw at most two pictures of a section. Each PNG holds a hash of what it was drawn from."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.candidates import CANDIDATES, candidate_of
from benchmarks.machine import machine_in_words
from benchmarks.rows import Results, Row, Sections, by_key, limits
from benchmarks.sections import SECTIONS

SOURCE = "Source"  # the PNG's text field that names what it was drawn from
DPI = 110
RED = "#d55e00"
# Other calls of an algorithm that is there, and what is not compared.
NOT_COMPARED = ("bound", "allreduce", "limit", "gloo", "gloo flattened", "naive")
SIZES = {8: "8 B", 2**12: "4 KiB", 2**16: "64 KiB", 2**20: "1 MiB", 2**24: "16 MiB"}
SIZES |= {2**28: "256 MiB"}


@dataclass(frozen=True)
class Figure:
    """A picture of one section."""

    section: str
    kind: str
    title: str
    draw: Callable[[Results, str | Path], None]

    @property
    def filename(self) -> str:
        """The PNG's name."""
        return f"{self.section}-{self.kind}.png"


def figures_of(sections: Sections) -> list[Figure]:
    """Return the pictures that these sections hold data for."""
    found = []
    for name, results in sections.items():
        if SECTIONS[name].device == "cuda":
            if shares_of(results):
                title = "Share of the limit that each algorithm reaches, by number of ranks"
                found.append(Figure(name, "share", title, draw_shares))
            continue
        if sizes_panels(results):
            title = "Time of a call against size, a panel for each number of ranks"
            found.append(Figure(name, "time", title, draw_times))
        elif results.rows and not has_sizes(results):
            found.append(Figure(name, "time", "Time, medians with quartiles", draw_steps))
        if any(row.parts_s for row in results.rows):
            parts = dict.fromkeys(part for row in results.rows for part in row.parts_s)
            found.append(Figure(name, "parts", f"Time of {' and '.join(parts)}", draw_parts))
        elif speedups_of(results):
            title = f"Times as fast as {baseline_of(results)}, by size and number of ranks"
            found.append(Figure(name, "speedup", title, draw_speedups))
    return found


def draw(sections: Sections, folder: Path) -> list[Figure]:
    """Draw all pictures, anew only where the data changed; return them."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = figures_of(sections)
    for figure in figures:
        path, results = folder / figure.filename, sections[figure.section]
        if source_in(path) != results.digest:
            figure.draw(results, path)
    return figures


def source_in(path: Path) -> str | None:
    """Return the hash of what a picture was drawn from; None if there is none."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        image.load()
        return dict(getattr(image, "text", {})).get(SOURCE)


# -- what is drawn ---------------------------------------------------------------------------------


def has_sizes(results: Results) -> bool:
    """Say whether cases are named by their size."""
    return any(row.size_bytes for row in results.rows)


def sizes_panels(results: Results) -> dict[int, list[Row]]:
    """Return rows of one fp32 tensor per rank by number of ranks, where they make a line."""
    flat = [
        row
        for row in results.rows
        if row.size_bytes
        and row.dtype == "fp32"
        and row.case[0].isdigit()
        and not {"x", ","} & set(row.case)
        and row.clock in (None, "device")
    ]
    panels = by_key(sorted(flat, key=lambda r: r.size_bytes or 0), lambda row: row.world_size)
    return {k: rows for k, rows in sorted(panels.items()) if len({r.case for r in rows}) >= 2}


def baseline_of(results: Results) -> str:
    """Name what the section compares with."""
    if SECTIONS[results.section].peers:
        return "the best peer"
    return candidate_of(next(iter(SECTIONS[results.section].baseline), "the peer")).label


def speedups_of(results: Results) -> dict[int, dict[str, list[Row]]]:
    """Return the rows that have a baseline: by number of ranks, then by case, the largest last."""
    rows = [
        row
        for row in results.rows
        if row.speedup
        and row.candidate not in (*NOT_COMPARED, *SECTIONS[row.section].peers)
        and row.size_bytes
        and row.clock in (None, "device")
    ]
    order = {name: number for number, name in enumerate(CANDIDATES)}
    rows.sort(key=lambda row: order.get(candidate_of(row.candidate).name, -1))
    rows.sort(key=lambda row: (not row.case[0].isdigit(), " x " in row.case, row.size_bytes or 0))
    ranks = by_key(rows, lambda row: row.world_size)
    cases = {k: by_key(ranks[k], lambda row: row.case) for k in sorted(ranks)}
    return {k: found for k, found in cases.items() if len(found) > 3 or len(cases) == 1}


def shares_of(results: Results) -> dict[str, list[Row]]:
    """Return the rows of one large tensor per rank on a GPU, by case, where they have a limit."""
    found = limits(results.rows)
    rows = [
        row
        for row in results.rows
        if (row.case, row.world_size, row.clock) in found
        and row.section == "allreduce_cuda"
        and row.candidate in ("naive", "fused", "ring", "nccl")
        and row.case in ("256 MiB fp32", "256 MiB bf16", "16 MiB fp32")
    ]
    return by_key(rows, lambda row: row.case)


# -- drawing ---------------------------------------------------------------------------------------


def draw_times(results: Results, path: str | Path) -> None:
    """Draw time against size, both logarithmic, a panel per number of ranks; the limit dashed."""
    panels = sizes_panels(results)
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    size = (1.2 + 3.9 * columns, 0.9 + 3.3 * lines)
    figure, grid = pyplot().subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
    for axes, (k, rows) in zip(grid.flat, panels.items(), strict=False):
        for name, own in by_key(rows, lambda row: row.candidate).items():
            if name != "limit" and len(own) >= 2:
                _draw_line(axes, own)
        _draw_limit(axes, rows)
        axes.set(title=f"{k} ranks", xlabel="size of one rank's tensor", xscale="log", yscale="log")
        shown = [size for size in SIZES if rows[0].size_bytes <= size <= rows[-1].size_bytes]
        axes.xaxis.set_ticks(shown, [SIZES[size] for size in shown], fontsize=8)
        axes.xaxis.set_ticks([], minor=True)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("time of a call (microseconds)")
    _finish(figure, list(grid.flat)[: len(panels)], path, results)


def _draw_line(axes: Any, rows: Sequence[Row]) -> None:
    """Draw a candidate's medians, and its quartiles as a band."""
    style = candidate_of(rows[0].candidate)
    sizes = [row.size_bytes for row in rows]
    axes.plot(
        *(sizes, [row.median_s * 1e6 for row in rows]),
        label=style.label,
        color=style.color,
        marker=style.marker,
        linewidth=1.6,
        markersize=4.5,
    )
    low, high = [row.q1_s * 1e6 for row in rows], [row.q3_s * 1e6 for row in rows]
    axes.fill_between(sizes, low, high, color=style.color, alpha=0.18, linewidth=0)


def _draw_limit(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the limit where it is one, dashed; with gaps where a call is faster."""
    found = limits(rows)
    places = {row.size_bytes: found.get((row.case, row.world_size, row.clock)) for row in rows}
    heights = [math.nan if s is None else s * 1e6 for s in places.values()]
    if found:
        style = CANDIDATES["limit"]
        axes.plot(
            *(list(places), heights, "--"),
            color=style.color,
            label=style.label,
            marker="_",
            markersize=6,
        )


def draw_speedups(results: Results, path: str | Path) -> None:
    """Draw horizontal bars from 1 on, a panel per number of ranks: right is faster.

    Where there are no sizes: bars of times.
    """
    panels = speedups_of(results)
    if not panels:
        return draw_steps(results, path)
    thin = max(len(rows) for cases in panels.values() for rows in cases.values())
    most = max(len(cases) for cases in panels.values())
    size = (1.6 + 3.4 * len(panels), max(2.8, 1.4 + most * (0.16 + 0.115 * thin)))
    figure, grid = pyplot().subplots(1, len(panels), figsize=size, sharex=True, squeeze=False)
    for axes, (k, cases) in zip(grid.flat, panels.items(), strict=True):
        for number, rows in enumerate(cases.values()):
            for turn, row in enumerate(rows):
                at = number + (turn - (len(rows) - 1) / 2) * 0.86 / thin
                style = candidate_of(row.candidate)
                axes.barh(
                    *(at, (row.speedup or 1) - 1, 0.79 / thin),
                    left=1,
                    color=style.color,
                    label=style.label,
                )
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=1)
        names = [case.removesuffix(" fp32") for case in cases]
        axes.set_yticks(range(len(cases)), names, fontsize=8)
        axes.set_ylim(most - 0.45, -0.55)
        axes.grid(visible=False, axis="y")
        axes.set(title=f"{k} ranks", xlabel=f"times as fast as {baseline_of(results)}")
        _plain_ticks(axes)
    _finish(figure, list(grid.flat), path, results)


def _plain_ticks(axes: Any) -> None:
    """Write 0.5, 1, 2, 5, ... instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes.get_xlim()
    subs = (1.0,) if high / low > 200 else (1.0, 2.0, 5.0) if high / low > 20 else (1, 1.5, 2, 3, 5)
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8)


def draw_steps(results: Results, path: str | Path) -> None:
    """Draw bars of medians with quartiles, a panel per case, a group per number of ranks."""
    models = by_key(results.rows, lambda row: row.case)
    size = (1 + 3.8 * len(models), 3.5)
    figure, grid = pyplot().subplots(1, len(models), figsize=size, squeeze=False)
    for axes, (model, rows) in zip(grid.flat, models.items(), strict=True):
        ranks = sorted({row.world_size for row in rows})
        names = list(dict.fromkeys(row.candidate for row in rows))
        width = 0.8 / len(names)
        for turn, name in enumerate(names):
            own = [row for row in rows if row.candidate == name]
            offset = (turn - (len(names) - 1) / 2) * width
            _draw_medians(axes, own, [ranks.index(r.world_size) + offset for r in own], width)
        axes.set_xticks(range(len(ranks)), [str(k) for k in ranks])
        axes.set(title=textwrap.fill(model, 32), xlabel="ranks")
        axes.set(ylabel="milliseconds (lines: quartiles)")
        axes.grid(visible=False, axis="x")
    _finish(figure, list(grid.flat), path, results)


def _draw_medians(axes: Any, rows: Sequence[Row], places: Sequence[float], width: float) -> None:
    style = candidate_of(rows[0].candidate)
    _, _, variant = rows[0].candidate.partition(", ")
    low = [(row.median_s - row.q1_s) * 1e3 for row in rows]
    high = [(row.q3_s - row.median_s) * 1e3 for row in rows]
    axes.bar(
        *(places, [row.median_s * 1e3 for row in rows], width * 0.92),
        color=style.color,
        alpha={"0.1 MB": 0.4, "1 MB": 0.7}.get(variant, 1.0),
        label=f"{style.label}, {variant}" if variant else style.label,
        yerr=[low, high],
        error_kw={"ecolor": RED, "elinewidth": 1, "capsize": 2},
    )


def draw_shares(results: Results, path: str | Path) -> None:
    """Draw bars of the share of the limit, a panel per case, a group per number of ranks."""
    cases, found = shares_of(results), limits(results.rows)
    names = list(dict.fromkeys(row.candidate for rows in cases.values() for row in rows))
    width = 0.8 / len(names)
    size = (1 + 3.4 * len(cases), 3.5)
    figure, grid = pyplot().subplots(1, len(cases), figsize=size, squeeze=False, sharey=True)
    for axes, (case, rows) in zip(grid.flat, cases.items(), strict=True):
        ranks = sorted({row.world_size for row in rows})
        for row in rows:
            style, k = candidate_of(row.candidate), row.world_size
            at = ranks.index(k) + (names.index(row.candidate) - (len(names) - 1) / 2) * width
            share = found[row.case, k, row.clock] / row.median_s
            bar = axes.bar(at, share, width * 0.92, color=style.color, label=style.label)
            axes.bar_label(bar, fmt="%.2f", fontsize=7, padding=1)
        axes.axhline(1, color="black", linestyle="--", linewidth=1, label="the rate of a copy")
        axes.set_xticks(range(len(ranks)), [str(k) for k in ranks])
        axes.set(title=f"{case} per rank", xlabel="ranks on the GPU")
        axes.grid(visible=False, axis="x")
    grid[0, 0].set_ylabel("share of the limit")
    _finish(figure, list(grid.flat), path, results)


def draw_parts(results: Results, path: str | Path) -> None:
    """Draw the parts of a time, the smaller ones within the larger, a panel per case and ranks."""
    rows = [row for row in results.rows if row.parts_s]
    panels = by_key(rows, lambda row: (row.case, row.world_size))
    ranks = sorted({k for _, k in panels})
    models = list(dict.fromkeys(case for case, _ in panels))
    most = max(len(rows) for rows in panels.values())
    size = (2 + 3.1 * len(models), 1.2 + len(ranks) * (0.7 + 0.26 * most))
    figure, grid = pyplot().subplots(
        *(len(ranks), len(models)), figsize=size, squeeze=False, sharey=True
    )
    colors = ("#56b4e9", RED)
    for (model, k), found in panels.items():
        axes = grid[ranks.index(k), models.index(model)]
        names = [row.candidate for row in found]
        for part, color in zip(found[0].parts_s, colors, strict=False):
            axes.barh(names, [r.parts_s[part] * 1e3 for r in found], 0.7, color=color, label=part)
        axes.set(title=f"{model}, {k} ranks", xlabel="milliseconds a step")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", labelsize=8)
    grid[0, 0].invert_yaxis()  # of all panels, which share it
    _finish(figure, list(grid.flat), path, results)


# -- the look --------------------------------------------------------------------------------------


def pyplot() -> Any:
    """Return matplotlib without a screen."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.grid": True})
    plt.rcParams.update({"grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return plt


def _finish(figure: Any, panels: Sequence[Any], path: str | Path, results: Results) -> None:
    """Put one legend below, name the machine, and write the file with few colours and the hash."""
    from PIL import Image, PngImagePlugin

    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        *(list(found.values()), list(found)),
        loc="outside lower center",
        ncols=min(4 if len(panels) > 1 else 3, len(found)),
        frameon=False,
        fontsize=8,
    )
    machine = results.machine
    busy = results.disturbed_by
    title = f"{machine_in_words(machine)}, {machine['date']}"
    title += f"\nBUSY MACHINE: other programs used {busy}" if busy else ""
    figure.suptitle(title, fontsize=8, color="#555555")
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=DPI)
    pyplot().close(figure)
    text = PngImagePlugin.PngInfo()
    text.add_text(SOURCE, results.digest)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, pnginfo=text, optimize=True)
