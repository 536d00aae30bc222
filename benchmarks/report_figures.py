"""Draw the pictures of the report. Each PNG stores a hash of the results that it shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench import KIB, MIB, format_size
from benchmarks.machine import machine_in_words
from benchmarks.rows import Results, Row, Sections, by_key, limit_of
from benchmarks.sections import SECTIONS

SOURCE = "Source"  # PNG text field with the hash
SPEEDUP = "allreduce-speedup.png"  # README's picture
README_FONT_SIZE = 11  # points, readable on a phone
DPI = 110
TICKS = (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
# The palette of Okabe and Ito, which color-blind people can tell apart.
GREY, BLACK, ORANGE, SKY = "#8c8c8c", "#000000", "#e69f00", "#56b4e9"
GREEN, YELLOW, BLUE, RED, PINK = "#009e73", "#d9c400", "#0072b2", "#d55e00", "#cc79a7"

SHADES = ("#a6cee3", "#56b4e9", "#0072b2", "#003f66")  # one shade per world size, small to large


class Style(NamedTuple):
    """Label, color and marker of a candidate."""

    label: str
    color: str
    marker: str = "o"


STYLES = {
    "naive": Style("the book's allreduce", GREY, "s"),
    "book": Style("the book's loop", GREY),
    "nn.DataParallel": Style("nn.DataParallel", GREY),
    "gloo": Style("gloo", GREY, "s"),
    "nccl": Style("NCCL", YELLOW, "X"),
    "impi": Style("Intel MPI", "#4b0082", "1"),
    "openmpi": Style("Open MPI", "#2f4f4f", "3"),
    "deepspeed": Style("DeepSpeed", "#b03060", "|"),
    "limit": Style("limit", BLACK),
    "bare": Style("without DDP (limit)", BLACK),
    "undivided": Style("one replica (limit)", BLACK),
    "without": Style("without a reduction (limit)", BLACK),
    "fused": Style("fused", GREEN, "P"),
    "direct": Style("direct", SKY, "D"),
    "ring": Style("ring", ORANGE, "^"),
    "sharded": Style("sharded", YELLOW, "X"),
    "auto": Style("pyringar, auto", BLUE),
    "ringar": Style("pyringar", BLUE),
    "ringar, shards": Style("pyringar, shards", GREEN),
    "bound": Style("prepared call (bound)", RED, "*"),
    "backend": Style('backend "ringar"', PINK, "v"),
    "rank": Style("rank order", GREY, "s"),
    "exact": Style("exact", RED, "*"),
    "fused per tensor": Style("fused, per tensor", GREEN),
    "coalesced": Style("one coalesced call", ORANGE),
}


def style_of(candidate: str) -> Style:
    return STYLES.get(candidate) or Style(candidate, BLUE)


def draw(sections: Sections, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, results in figures_of(sections).items():
        path = folder / name
        if results.rows and source_in(path) != results.digest:
            figure = draw_speedup(results) if name == SPEEDUP else draw_section(results)
            _save(figure, path, results)


def figures_of(sections: Sections) -> dict[str, Results]:
    """Return the results that each picture shows, by file name."""
    figures = {filename_of(name): results for name, results in sections.items()}
    if "allreduce" in sections and size_panels(sections["allreduce"].rows):
        figures[SPEEDUP] = sections["allreduce"]
    return figures


def filename_of(section: str) -> str:
    return f"{section}-time.png"


def source_in(path: Path) -> str | None:
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        image.load()
        return dict(getattr(image, "text", {})).get(SOURCE)


def draw_section(results: Results) -> Any:
    panels = size_panels(results.rows)
    return _lines(panels) if panels else _bars(results)


def draw_speedup(results: Results) -> Any:
    """Return bars: time of the book's allreduce over time of `auto`, by size and ranks."""
    panels = size_panels(results.rows)
    sizes = sorted({row.size_bytes or 0 for rows in panels.values() for row in rows})
    figure, axes = pyplot().subplots(figsize=(6, 4.2))
    width = 0.84 / len(panels)
    for number, ((k, rows), color) in enumerate(zip(panels.items(), SHADES)):  # noqa: B905
        times = {(row.candidate, row.size_bytes): row.median_s for row in rows}
        measured = [size for size in sizes if ("auto", size) in times]
        places = [sizes.index(size) + (number - (len(panels) - 1) / 2) * width for size in measured]
        ratios = [times["naive", size] / times["auto", size] for size in measured]
        axes.bar(places, ratios, width, color=color, label=f"{k} ranks")
    axes.axhline(1, color=BLACK, linestyle="--", linewidth=1.2, label="book's allreduce")
    labels = [format_size(size).replace(" ", "\n") for size in sizes]
    axes.set_xticks(range(len(sizes)), labels)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.tick_params(labelsize=README_FONT_SIZE)
    axes.set_xlabel("size of each rank's tensor", fontsize=README_FONT_SIZE)
    axes.set_ylabel("times as fast as the book's allreduce", fontsize=README_FONT_SIZE)
    axes.grid(visible=False, axis="x")
    return figure


def size_panels(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return rows of single fp32 tensors by world size; omit world sizes with one size."""
    flat = [
        row
        for row in rows
        if row.size_bytes
        and row.case.removesuffix(" fp32") == format_size(row.size_bytes)
        and row.clock in (None, "device")
    ]
    flat.sort(key=lambda row: (row.world_size, row.size_bytes or 0))
    panels = by_key(flat, lambda row: row.world_size)
    return {k: found for k, found in panels.items() if len({row.case for row in found}) > 1}


def limit_line(rows: Sequence[Row]) -> dict[int, float]:
    """Return the limit by size; NaN if a size has no limit."""
    sizes = by_key(rows, lambda row: row.size_bytes)
    return {size: limit_of(found) or math.nan for size, found in sizes.items()}


def _lines(panels: dict[int, list[Row]]) -> Any:
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    figure, grid = _panels(len(panels), columns, sharey=True)
    for axes, (k, rows) in zip(grid, panels.items(), strict=True):
        names = by_key(rows, lambda row: row.candidate)
        limit = SECTIONS[rows[0].section].limit
        for name, own in names.items():
            if name != limit and len(own) > 1:
                style = style_of(name)
                sizes = [row.size_bytes for row in own]
                axes.plot(
                    sizes,
                    [row.median_s * 1e6 for row in own],
                    label=style.label,
                    color=style.color,
                    marker=style.marker,
                    linewidth=1.6,
                    markersize=4.5,
                )
                quartiles = [row.q1_s * 1e6 for row in own], [row.q3_s * 1e6 for row in own]
                axes.fill_between(sizes, *quartiles, color=style.color, alpha=0.18, linewidth=0)
        line = limit_line(rows)
        if not all(map(math.isnan, line.values())):
            heights = [s * 1e6 for s in line.values()]
            axes.plot(list(line), heights, "k--", label="limit", marker="_", markersize=6)
        axes.set(title=f"{k} ranks", xlabel="size of one rank's tensor", xscale="log", yscale="log")
        shown = [size for size in TICKS if min(line) <= size <= max(line)]
        axes.xaxis.set_ticks(shown, map(format_size, shown), fontsize=8)
        axes.xaxis.set_ticks([], minor=True)
    for axes in grid[::columns]:
        axes.set_ylabel("microseconds per call")
    return figure


def _bars(results: Results) -> Any:
    cases = by_key(results.rows, lambda row: row.case)
    figure, grid = _panels(len(cases), min(3, len(cases)), sharey=False)
    for axes, (case, rows) in zip(grid, cases.items(), strict=True):
        unit, factor = ("ms", 1e3) if max(row.median_s for row in rows) < 1 else ("s", 1.0)
        ranks = by_key(rows, lambda row: row.world_size)
        ticks, place = {}, 0
        for k, same in ranks.items():
            ticks[k] = place + (len(same) - 1) / 2
            for row in same:
                _bar(axes, place, row, factor)
                place += 1
            place += 1
        axes.set_xticks(list(ticks.values()), list(map(str, ticks)))
        axes.set(title=case, xlabel="ranks", ylabel=f"median time in {unit} (lines: quartiles)")
        axes.grid(visible=False, axis="x")
    return figure


def _bar(axes: Any, place: int, row: Row, factor: float) -> None:
    style, variant = style_of(row.candidate), row.candidate.partition("bucketed, ")[2]
    below, above = row.median_s - row.q1_s, row.q3_s - row.median_s
    axes.bar(
        place,
        row.median_s * factor,
        0.9,
        color=style.color,
        alpha={"0.1 MB": 0.4, "1 MB": 0.7}.get(variant, 1.0),
        label=style.label,
        yerr=[[below * factor], [above * factor]],
        error_kw={"ecolor": RED, "elinewidth": 1, "capsize": 2},
    )


def _panels(count: int, columns: int, *, sharey: bool) -> tuple[Any, list[Any]]:
    lines = math.ceil(count / columns)
    figure, grid = pyplot().subplots(
        lines,
        columns,
        figsize=(1.2 + 3.9 * columns, 0.9 + 3.3 * lines),
        sharey=sharey,
        squeeze=False,
    )
    for axes in list(grid.flat)[count:]:
        axes.remove()
    return figure, list(grid.flat)[:count]


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.grid": True})
    plt.rcParams.update({"grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return plt


def _save(figure: Any, path: Path, results: Results) -> None:
    """Add a legend and the machine; write a PNG with a palette of 128 colors and the hash."""
    from PIL import Image, PngImagePlugin

    font_size = README_FONT_SIZE if path.name == SPEEDUP else 8
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=3 if path.name == SPEEDUP else 4,
        frameon=False,
        fontsize=font_size,
    )
    title = f"{machine_in_words(results.machine)}, {results.machine['date']}"
    figure.suptitle(title, fontsize=font_size, color="#555555")
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=DPI)
    pyplot().close(figure)
    text = PngImagePlugin.PngInfo()
    text.add_text(SOURCE, results.digest)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, pnginfo=text, optimize=True)
