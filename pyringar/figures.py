"""Draw the pictures of the chapter: lines, bars, tables, timelines, steps of a ring.

    from pyringar import figures

    traffic = figures.Lines([2, 4, 8], {"naive": [1, 3, 7], "ring": [1, 1.5, 1.75]}, "ranks k")
    figures.draw(traffic)

`draw` puts panels side by side: `Lines`, `Bars`, `Table`, `Timeline`. All functions return a
`Picture`, which a notebook displays. The state of matplotlib (pyplot, rcParams) does not change.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyringar.choices import check_choice
from pyringar.errors import ArgumentError

__all__ = [
    "COLORS",
    "Bars",
    "Lines",
    "Picture",
    "Table",
    "Timeline",
    "draw",
    "images",
    "ring_steps",
    "splits",
]

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1")
"""Colors of ranks 0 to 3 and of the first four curves; further curves repeat them."""

_WAITING = "#b3423a"
_STYLES = ("-", "--", "-.", ":")  # line styles distinguish curves in black and white
_MARKERS = "osD^"
_MAX_MARKED = 20  # most points of a curve with markers; more would hide the line
_MAX_TICKS = 10  # most positions that all get a tick
_DECADES = 1000  # from this ratio on, logarithmic axes have ticks only at powers of 10
_DPI = 100
_WIDTH, _NARROW = 9.5, 6.0  # width in inches: of several panels, of a single panel


@dataclass(frozen=True)
class Picture:
    """A finished picture, which a notebook displays as PNG with 100 dots per inch.

    Attributes:
        figure: The matplotlib figure.
    """

    figure: Any

    def save(self, path: str | Path) -> None:
        """Write the picture to a file.

        Args:
            path: File name; the suffix ``.png``, ``.svg`` or ``.pdf`` sets the format.
        """
        self.figure.savefig(path, dpi=_DPI)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
        return file.getvalue()


@dataclass(frozen=True)
class Lines:
    """A panel of curves with common x positions.

    Curves differ in line style and marker, so that curves with equal values are all visible.

    Attributes:
        x: Positions of all curves. With 10 or fewer, each position gets a tick.
        curves: One value per position, by name of the curve.
        xlabel, ylabel, title: Texts of the panel.
        log: Logarithmic axes: ``""``, ``"x"``, ``"y"`` or ``"xy"``.
        ylim: Lowest and highest value shown.
        points: Dots ``(x, y)`` by name, in the color of the curve with that name.
        levels: Heights of horizontal lines, by name.
    """

    x: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    xlabel: str = ""
    ylabel: str = ""
    title: str = ""
    log: str = ""
    ylim: tuple[float, float] | None = None
    points: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.curves.items():
            if len(values) != len(self.x):
                raise ArgumentError(
                    f"curves[{name!r}] has {len(values)} values, expected {len(self.x)}, as in x"
                )

    def _draw(self, axes: Any) -> None:
        names = dict.fromkeys([*self.curves, *self.points])
        color = dict(zip(names, itertools.cycle(COLORS), strict=False))
        is_marked = len(self.x) <= _MAX_MARKED
        styles = itertools.cycle(zip(_STYLES, _MARKERS, strict=True) if is_marked else ["-"])
        for i, (name, values) in enumerate(self.curves.items()):
            size = max(3.0, 8.0 - 2 * i)
            style = "".join(next(styles))
            axes.plot(self.x, values, style, ms=size, color=color[name], label=name)
        for i, (name, pairs) in enumerate(self.points.items()):
            label = None if name in self.curves else name
            size = 5 if name in self.curves else max(4, 9 - 3 * i)
            x, y = zip(*pairs, strict=True)
            axes.plot(x, y, "o", ms=size, color=color[name], alpha=0.6, label=label)
        levels = zip(itertools.cycle(_STYLES), self.levels.items(), strict=False)
        for style, (name, level) in levels:
            axes.axhline(level, color="#444444", ls=style, lw=1.2, label=name)
        for name in self.log:
            _scale_by_powers(axes, name)
        if len(self.x) <= _MAX_TICKS:
            axes.set_xticks(self.x, [f"{x:g}" for x in self.x], minor=False)
        axes.minorticks_off()
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel, title=self.title)
        if self.ylim is not None:
            axes.set_ylim(*self.ylim)
        axes.grid(alpha=0.3)


@dataclass(frozen=True)
class Bars:
    """A panel with a horizontal bar per name, labeled with its value.

    Attributes:
        values: Lengths of the bars by name, from top to bottom.
        xlabel, title: Texts of the panel.
        form: Format of the values, as in ``format(value, form)``.
    """

    values: Mapping[str, float]
    xlabel: str = ""
    title: str = ""
    form: str = ".3g"

    def _draw(self, axes: Any) -> None:
        colors = itertools.islice(itertools.cycle(COLORS), len(self.values))
        bars = axes.barh([*self.values], [*self.values.values()], height=0.7, color=[*colors])
        labels = [format(value, self.form) for value in self.values.values()]
        axes.bar_label(bars, labels, padding=3, fontsize=9)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set(xlabel=self.xlabel, title=self.title)
        axes.grid(axis="x", alpha=0.3)


@dataclass(frozen=True)
class Table:
    """A panel with a table of numbers; larger numbers have darker cells.

    Attributes:
        rows, columns: Labels of rows and columns.
        values: ``values[row][column]``.
        xlabel, ylabel, title: Texts of the panel.
    """

    rows: Sequence[float]
    columns: Sequence[float]
    values: Sequence[Sequence[float]]
    xlabel: str = ""
    ylabel: str = ""
    title: str = ""

    def _draw(self, axes: Any) -> None:
        axes.imshow(self.values, cmap="Blues", aspect="auto")
        middle = (min(map(min, self.values)) + max(map(max, self.values))) / 2
        for i, row in enumerate(self.values):
            for j, value in enumerate(row):
                color = "white" if value > middle else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(self.columns)), [f"{name:g}" for name in self.columns])
        axes.set_yticks(range(len(self.rows)), [f"{name:g}" for name in self.rows])
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel, title=self.title)


@dataclass(frozen=True)
class Timeline:
    """A panel with one step: the computation, and below it the reduction of each bucket.

    Attributes:
        title: Title of the panel; the exposed time is appended.
        compute_s: Time at which the computation ends.
        exposed_s: Seconds from ``compute_s`` to the end of the last reduction.
        buckets: ``(nbytes, ready_s, begin_s, end_s)`` in the order of their launch. An ``end_s`` of
            None means the end of the step.
        xlabel: Label of the x axis.
    """

    title: str
    compute_s: float
    exposed_s: float
    buckets: Sequence[tuple[int, float, float, float | None]]
    xlabel: str = "milliseconds"

    def _draw(self, axes: Any) -> None:
        compute_ms, exposed_ms = self.compute_s * 1e3, self.exposed_s * 1e3
        total_ms = compute_ms + exposed_ms
        axes.barh(0, compute_ms, color=COLORS[0], label="computation")
        axes.barh(0, exposed_ms, left=compute_ms, color=_WAITING, label="waiting after it")
        names = ["compute"]
        for row, (nbytes, ready_s, begin_s, end_s) in enumerate(self.buckets, 1):
            begin_ms = begin_s * 1e3
            took_ms = (total_ms if end_s is None else end_s * 1e3) - begin_ms
            labels = ("reduction", "last gradient came") if row == 1 else (None, None)
            axes.barh(row, took_ms, left=begin_ms, color=COLORS[1], ec=COLORS[1], label=labels[0])
            axes.plot(ready_s * 1e3, row, "k|", ms=10, label=labels[1])
            names.append(f"{nbytes / 1e6:.1f} MB")
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.axvline(compute_ms, color="gray", ls=":")
        axes.invert_yaxis()
        axes.set_xlim(0, total_ms * 1.02)
        axes.set(xlabel=self.xlabel)
        axes.set_title(f"{self.title}: {exposed_ms:.1f} ms exposed", fontsize=10)


def draw(
    *panels: Lines | Bars | Table | Timeline, height: float = 3.2, legend: str = "inside"
) -> Picture:
    """Draw panels side by side.

    Args:
        *panels: Panels from left to right.
        height: Height of the picture in inches.
        legend: ``"inside"``: a legend in every panel; ``"below"``: one legend for all panels.
    """
    if not panels:
        raise ArgumentError("panels is empty, expected one or more")
    check_choice("legend", legend, ("inside", "below"))
    figure = _figure(_NARROW if len(panels) == 1 else _WIDTH, height)
    handles: dict[str, Any] = {}
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        panel._draw(axes)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        handles |= found
        if found and legend == "inside":
            axes.legend(frameon=False, fontsize=8)
    if handles and legend == "below":
        columns = min(len(handles), 4) if max(map(len, handles)) < 30 else 2
        _legend_below(figure, [*handles.values()], [*handles], columns)
    return Picture(figure)


def images(tensors: Any) -> Picture:
    """Draw images in a row.

    Args:
        tensors: Images ``(n, 1, height, width)``; larger values are darker.
    """
    figure = _figure(_WIDTH, 1.2)
    row = figure.subplots(1, len(tensors), squeeze=False)[0]
    for axes, image in zip(row, tensors, strict=True):
        axes.imshow(image[0].tolist(), cmap="gray_r")
        axes.axis("off")
    return Picture(figure)


def splits() -> Picture:
    """Draw three ways to split a network of four layers over four devices."""
    figure = _figure(_WIDTH, 3.0)
    titles = ("through the network", "through the layers", "through the data")
    for way, (axes, title) in enumerate(zip(figure.subplots(1, 3), titles, strict=True)):
        for box in itertools.product(range(4), repeat=3):
            layer, channel, quarter = box
            corner = (quarter + 0.05, layer + 0.1 + 0.2 * channel)
            axes.add_patch(_rectangle(corner, 0.9, 0.2, color=COLORS[box[way]]))
        axes.set(xlim=(0, 4), ylim=(-0.1, 4), xlabel="quarters of a batch")
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([i + 0.5 for i in range(4)], [f"layer {i + 1}" for i in range(4)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    _legend_of_colors(figure, [f"device {i}" for i in range(4)])
    return Picture(figure)


_CENTERS = ((0.0, 1.0), (1.35, 0.0), (0.0, -1.0), (-1.35, 0.0))  # ranks, clockwise from the top
_CELL = 0.17  # side of the square that shows one rank's contribution


def ring_steps(frames: Sequence[Sequence[Sequence[Sequence[int]]]], schedule: Any) -> Picture:
    """Draw a ring of four ranks before the first step and after every step.

    Args:
        frames: ``frames[step][rank][chunk]`` lists the ranks that contributed to the chunk.
        schedule: Messages of every step, as `ring_schedule` returns them.
    """
    if len(frames[0]) != len(_CENTERS):
        raise ArgumentError(f"frames has {len(frames[0])} ranks, expected {len(_CENTERS)}")
    figure = _figure(11.0, 5.4)
    axes = figure.subplots(2, 4).flatten()
    for step, moves in enumerate([[], *schedule]):
        title = "at the start"
        if moves:
            verb = "add" if moves[0].is_reduction else "keep"
            title = f"step {step}: {verb} what arrives"
        _draw_ranks(axes[step], title, frames[step])
        for move in moves:
            _draw_message(axes[step], move)
    for empty in axes[len(schedule) + 1 :]:
        empty.axis("off")
    places = ("top", "right", "bottom", "left")
    names = [f"from rank {rank} ({place})" for rank, place in enumerate(places)]
    _legend_of_colors(figure, names)
    return Picture(figure)


def _draw_ranks(axes: Any, title: str, held: Sequence[Sequence[Sequence[int]]]) -> None:
    for (x, y), chunks in zip(_CENTERS, held, strict=True):
        left, bottom = x - 2 * _CELL, y - 2 * _CELL
        frame = {"fill": False, "color": "#999999", "zorder": 3}
        axes.add_patch(_rectangle((left, bottom), 4 * _CELL, 4 * _CELL, **frame))
        for chunk, inside in enumerate(chunks):
            for height, rank in enumerate(inside):
                corner = (left + chunk * _CELL, bottom + height * _CELL)
                axes.add_patch(_rectangle(corner, _CELL, _CELL, fc=COLORS[rank], ec="white"))
    axes.set(xlim=(-1.9, 1.9), ylim=(-1.5, 1.5), aspect="equal")
    axes.set_title(title, fontsize=9)
    axes.axis("off")


def _draw_message(axes: Any, move: Any) -> None:
    (x0, y0), (x1, y1) = _CENTERS[move.src], _CENTERS[move.dst]
    begin, end = ((x0 + part * (x1 - x0), y0 + part * (y1 - y0)) for part in (0.32, 0.7))
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": "black"})
    where = (0.7 * (x0 + x1), 0.66 * (y0 + y1))
    axes.annotate(f"chunk {move.chunk}", where, ha="center", va="center", fontsize=8)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _scale_by_powers(axes: Any, name: str) -> None:
    """Make an axis logarithmic, with ticks at 1, 2 and 5 unless its range is large."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    getattr(axes, f"set_{name}scale")("log")
    axis = getattr(axes, f"{name}axis")
    low, high = axis.get_view_interval()
    if high < _DECADES * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _rectangle(corner: tuple[float, float], width: float, height: float, **style: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, **style)


def _legend_of_colors(figure: Any, names: Sequence[str]) -> None:
    patches = [_rectangle((0, 0), 1, 1, color=color) for color in COLORS]
    _legend_below(figure, patches, names, len(names))


def _legend_below(figure: Any, handles: Sequence[Any], names: Sequence[str], columns: int) -> None:
    place = {"loc": "outside lower center", "ncols": columns}
    figure.legend(handles, names, frameon=False, fontsize=9, **place)
