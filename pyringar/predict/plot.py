"""A forecast as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyringar.predict.forecast import Forecast, Row
from pyringar.predict.report import format_bytes

__all__ = ["save_plot"]

# By algorithm, the same in every picture; what is in no engine is drawn with dashes.
_COLORS = {
    "naive": "#7f7f7f",
    "sharded": "#b07aa1",
    "direct": "#4e79a7",
    "ring": "#e15759",
    "two-way ring": "#ff9da7",
    "ring/ring": "#59a14f",
    "direct/ring": "#8cd17d",
    "direct/direct": "#1b7837",
}


def save_plot(forecast: Forecast, path: str | Path) -> None:
    """Draw it: over ranks where there are several numbers of them, else a bar per algorithm.

    Args:
        forecast: The rows.
        path: A file that ends in ``.png``.
    """
    # Agg directly, not through pyplot: no window, no display, and no state left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    has_step = forecast.workload.backward is not None
    figure = Figure(figsize=(11 if has_step else 7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if has_step else 1, squeeze=False)[0]
    if len(forecast.networks) > 1:
        _draw_lines(panels[0], forecast, "one allreduce (ms)", lambda r: r.all_reduce_s * 1e3)
        if has_step:
            _draw_lines(panels[1], forecast, "scaling efficiency (%)", _percent, limits=(0, 105))
    else:
        _draw_bars(panels[0], forecast.rows, "one allreduce (ms)")
        if has_step:
            _draw_steps(panels[1], forecast.rows)
    figure.suptitle(_title(forecast), fontsize=10)
    figure.savefig(path, dpi=140)


def _title(forecast: Forecast) -> str:
    network = forecast.networks[-1]
    where = f"{network.link.name}, {network.link.bandwidth_gbps:g} GB/s"
    if network.nodes > 1 and network.node_link is not None:
        where += f" in nodes of {network.ranks_per_node}, {network.node_link.name} between"
    if network.wiring == "ring":
        where += ", wires between neighbours"
    if len(forecast.networks) == 1:
        where = f"{network.world_size} ranks, {where}"
    workload = forecast.workload
    return f"Predicted: {workload.name}, {format_bytes(workload.nbytes)} a rank; {where}"


def _percent(row: Row) -> float:
    return 100 * (row.efficiency or 0.0)


def _draw_lines(
    axes: Any,
    forecast: Forecast,
    label: str,
    value: Callable[[Row], float],
    limits: tuple[float, float] | None = None,
) -> None:
    """A line per algorithm, named at its end; a logarithmic scale where no limits are given."""
    sizes = [network.world_size for network in forecast.networks]
    names = dict.fromkeys(row.algorithm for row in forecast.rows)
    ends = []
    for name in names:
        rows = [row for row in forecast.rows if row.algorithm == name]
        style = "o-" if rows[0].is_in_engine else "o--"
        places = [sizes.index(row.world_size) for row in rows]
        values = [value(row) for row in rows]
        axes.plot(places, values, style, color=_COLORS[name], markersize=4, linewidth=1.6)
        ends.append((values[-1], name))
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_xlim(-0.2, len(sizes) - 1 + 0.3 * len(sizes))
    axes.set_xlabel("ranks")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if limits is None:
        axes.set_yscale("log")
    else:
        axes.set_ylim(*limits)
    _name_ends(axes, len(sizes) - 1, sorted(ends), is_log=limits is None)


def _name_ends(axes: Any, x: int, ends: Sequence[tuple[float, str]], *, is_log: bool) -> None:
    """Write names beside the last points, lowest first, spread so that none hides another."""
    low, high = axes.get_ylim()
    heights = [value for value, _ in ends]
    if is_log:
        low, high = math.log10(low), math.log10(high)
        heights = [math.log10(max(value, 1e-9)) for value in heights]
    for (value, name), height in zip(ends, _spread(heights, low, high), strict=True):
        axes.annotate(
            name,
            xy=(x, value),
            xytext=(x + 0.25, 10**height if is_log else height),
            color=_COLORS[name],
            fontsize=8.5,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": _COLORS[name],
                "linewidth": 0.5,
                "relpos": (0, 0.5),
            },
        )


def _spread(heights: Sequence[float], low: float, high: float) -> list[float]:
    """Move ascending heights apart by a line of type; none above ``high``."""
    gap = (high - low) * 0.045
    spread: list[float] = []
    for height in heights:
        spread.append(max(height, spread[-1] + gap if spread else height))
    top = high - gap / 2
    for i in reversed(range(len(spread))):
        spread[i] = min(spread[i], top)
        top = spread[i] - gap
    return spread


def _draw_bars(axes: Any, rows: Sequence[Row], label: str) -> None:
    bars = axes.barh(
        [row.algorithm for row in rows],
        [row.all_reduce_s * 1e3 for row in rows],
        color=[_COLORS[row.algorithm] for row in rows],
    )
    axes.bar_label(bars, fmt="{:,.4g}", padding=3, fontsize=8.5)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Any, rows: Sequence[Row]) -> None:
    """Computation, and what of communication comes after it."""
    names = [row.algorithm for row in rows]
    exposed_ms = [row.step.exposed_s * 1e3 for row in rows if row.step]
    compute_ms = [(row.step.step_s - row.step.exposed_s) * 1e3 for row in rows if row.step]
    axes.barh(names, compute_ms, color="#c9d3dd", label="compute")
    bars = axes.barh(
        names, exposed_ms, left=compute_ms, color="#b3423a", label="exposed communication"
    )
    labels = [
        f"{c + e:.4g} ms, {_percent(r):.0f} %"
        for c, e, r in zip(compute_ms, exposed_ms, rows, strict=True)
    ]
    axes.bar_label(bars, labels, padding=3, fontsize=8.5)
    axes.margins(x=0.28)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("one step (ms), and its scaling efficiency")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize=8.5
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
