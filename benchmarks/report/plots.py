"""Pictures of results. Each PNG holds a hash of the sections that it was drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import bars
from benchmarks.report.document import digest, name_of, times_of
from benchmarks.report.style import STYLES, by_key, finish, legend_below, pyplot, sizes_axis
from pyringar.train.trace import Span, Trace

__all__ = ["SOURCE", "Figure", "draw", "figures_of", "source_in"]

SOURCE = "Source"  # the PNG's text field that names what it was drawn from

Section = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """A picture of one section: ``draw(section, path)`` writes the PNG."""

    name: str
    section: str
    title: str
    draw: Callable[[Section, Path], None]
    is_possible: Callable[[Section], bool]


def figures_of(sections: Mapping[str, Section]) -> list[Figure]:
    """Those pictures that these sections hold data for."""
    return [f for f in FIGURES if f.section in sections and f.is_possible(sections[f.section])]


def draw(sections: Mapping[str, Section], folder: Path) -> list[Figure]:
    """Draw all that is possible, anew only where the data changed; what is there afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = figures_of(sections)
    for figure in figures:
        path, source = folder / f"{figure.name}.png", digest(sections, [figure.section])
        if source_in(path) != source:
            figure.draw(sections[figure.section], path)
            _stamp(path, source)
    return figures


def source_in(path: Path) -> str | None:
    """The hash of what a picture was drawn from; None if there is none."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        image.load()
        return dict(getattr(image, "text", {})).get(SOURCE)


def _stamp(path: Path, source: str) -> None:
    """Few colours, for a small file, and the hash."""
    from PIL import Image, PngImagePlugin

    text = PngImagePlugin.PngInfo()
    text.add_text(SOURCE, source)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, pnginfo=text, optimize=True)


# -- time against size -----------------------------------------------------------------------------


def _flat(section: Section) -> Rows:
    """Rows of one float32 tensor per rank."""
    return [
        row
        for row in section["rows"]
        if row.get("dtype", "fp32") == "fp32" and _is_flat(row) and row.get("size_bytes")
    ]


def _is_flat(row: Mapping[str, Any]) -> bool:
    return bool(row["case"][0].isdigit() and " x " not in row["case"] and "," not in row["case"])


def _panels(section: Section) -> dict[int, Rows]:
    """Flat rows by number of ranks, where there are sizes enough for a line."""
    panels = by_key(_flat(section), lambda row: row["world_size"])
    return {
        k: rows
        for k, rows in sorted(panels.items())
        if len({row["size_bytes"] for row in rows}) >= 2
    }


def _limits(rows: Rows) -> dict[int, float]:
    """Seconds of the physical limit, by size."""
    found = {}
    for row in rows:
        if name_of(row) == "limit":
            found[row["size_bytes"]] = times_of(row).median_s
        elif row.get("limit_us"):
            found[row["size_bytes"]] = row["limit_us"] * 1e-6
        elif row.get("limit_share"):
            found[row["size_bytes"]] = times_of(row).median_s * row["limit_share"]
    return found


def draw_times(section: Section, path: Path) -> None:
    """Time against size, both logarithmic, a panel per number of ranks; the limit dashed."""
    panels = _panels(section)
    plt = pyplot()
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        *(lines, columns),
        figsize=(1.2 + 3.9 * columns, 0.9 + 3.3 * lines),
        sharey=True,
        squeeze=False,
    )
    for axes, (k, rows) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, rows)
        axes.set_title(f"{k} ranks")
        sizes_axis(axes.xaxis, sorted({row["size_bytes"] for row in rows}))
        axes.set_xlabel("size of one rank's tensor")
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel("time of a call (microseconds)")
    legend_below(figure, list(grid.flat)[: len(panels)])
    finish(figure, path, section["machine"])


def _draw_panel(axes: Any, rows: Rows) -> None:
    for name, own in by_key(rows, name_of).items():
        points = sorted({row["size_bytes"]: times_of(row) for row in own}.items())
        style = STYLES.get(name)
        if style is None or name == "limit" or len(points) < 2:
            continue
        sizes = [size for size, _ in points]
        axes.plot(sizes, [t.median_s * 1e6 for _, t in points], **style.line())
        low = [(t.median_s if t.q1_s is None else t.q1_s) * 1e6 for _, t in points]
        high = [(t.median_s if t.q3_s is None else t.q3_s) * 1e6 for _, t in points]
        axes.fill_between(sizes, low, high, color=style.color, alpha=0.18, linewidth=0)
    limits = sorted(_limits(rows).items())
    if len(limits) >= 2:
        times = [seconds * 1e6 for _, seconds in limits]
        axes.plot([size for size, _ in limits], times, **STYLES["limit"].line())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")


# -- scaling with k --------------------------------------------------------------------------------

LEAST_LIMIT_BYTES = 2**18  # below, the limit is the time of calling torch
SCALED = ("naive", "stack", "ring", "fused", "bound", "auto")


def _scaled(section: Section) -> dict[int, Rows]:
    """Flat rows by size, where there are three numbers of ranks or more; at most three sizes."""
    sizes = by_key(_flat(section), lambda row: row["size_bytes"])
    found = {
        size: rows
        for size, rows in sorted(sizes.items())
        if len({row["world_size"] for row in rows}) >= 3
    }
    if len(found) <= 3:
        return found
    names = list(found)
    return {size: found[size] for size in (names[0], names[len(names) // 2], names[-1])}


def draw_scaling(section: Section, path: Path) -> None:
    """Gigabytes of all ranks together that are reduced in a second, against the number of ranks."""
    panels = _scaled(section)
    plt = pyplot()
    figure, grid = plt.subplots(
        *(1, len(panels)), figsize=(1.2 + 3.7 * len(panels), 4.4), squeeze=False
    )
    for axes, rows in zip(grid.flat, panels.values(), strict=True):
        for name, own in by_key(rows, name_of).items():
            points = sorted(
                (row["world_size"], row["world_size"] * row["size_bytes"] / times_of(row).median_s)
                for row in own
            )
            if name in SCALED and len(points) >= 2:
                axes.plot(*_gigabytes(points), **STYLES[name].line())
        limits = {
            row["world_size"]: times_of(row).median_s * row["limit_share"]
            for row in rows
            if row.get("limit_share") and row["size_bytes"] >= LEAST_LIMIT_BYTES
        }
        size = rows[0]["size_bytes"]
        points = sorted((k, k * size / seconds) for k, seconds in limits.items())
        if points:
            axes.plot(*_gigabytes(points), **STYLES["limit"].line())
        ranks = sorted({row["world_size"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(k) for k in ranks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(f"{rows[0]['case'].removesuffix(' fp32')} a rank")
        axes.set_xlabel("ranks")
    grid[0, 0].set_ylabel("reduced per second (GB, all ranks together)")
    legend_below(figure, list(grid.flat))
    finish(figure, path, section["machine"])


def _gigabytes(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [k for k, _ in points], [rate / 1e9 for _, rate in points]


# -- one step --------------------------------------------------------------------------------------


def draw_timeline(section: Section, path: Path) -> None:
    """What a step did and when, as `pyringar train --timeline` draws it."""
    trace = Trace()
    trace.spans = [Span(**span) for span in section["timeline"]["spans"]]
    trace.plot(path)


FIGURES = (
    Figure(
        "allreduce-time",
        "allreduce",
        "Time of an all_reduce against size, by algorithm, a panel for each number of ranks",
        draw_times,
        lambda section: bool(_panels(section)),
    ),
    Figure(
        "allreduce-speedup",
        "allreduce",
        "Times as fast as the book's loop, by size and number of ranks",
        bars.draw_allreduce,
        lambda section: bool(bars.allreduce_groups(section)),
    ),
    Figure(
        "allreduce-scaling",
        "allreduce",
        "Bytes reduced per second against the number of ranks",
        draw_scaling,
        lambda section: bool(_scaled(section)),
    ),
    Figure(
        "processes-time",
        "processes",
        "Time of an all_reduce of ranks in processes against size, beside gloo and the limit",
        draw_times,
        lambda section: bool(_panels(section)),
    ),
    Figure(
        "processes-speedup",
        "processes",
        "Times as fast as gloo, ranks in processes",
        bars.draw_processes,
        lambda section: bool(bars.processes_groups(section)),
    ),
    Figure(
        "ddp",
        "ddp",
        "What communication adds to a step of DistributedDataParallel",
        bars.draw_ddp,
        lambda section: bool(section["rows"]),
    ),
    Figure(
        "bucketing",
        "bucketing",
        "Time of reductions, hidden behind backward and exposed after it",
        bars.draw_bucketing,
        lambda section: bool(section["rows"]),
    ),
    Figure(
        "training",
        "training",
        "Time of a training step, by loop and number of ranks",
        bars.draw_training,
        lambda section: bool(section["rows"]),
    ),
    Figure(
        "timeline",
        "training",
        "What two ranks compute and reduce during one step",
        draw_timeline,
        lambda section: bool(section.get("timeline")),
    ),
    Figure(
        "allreduce-cuda-speedup",
        "allreduce_cuda",
        "Times as fast as the book's loop, several ranks on one GPU",
        bars.draw_allreduce,
        lambda section: bool(bars.allreduce_groups(section)),
    ),
)
