"""A forecast as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyringar.predict.forecast import Forecast, Row
from pyringar.predict.report import format_bytes

__all__ = ["save_plot"]

# By algorithm, the same in every picture.
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
    """Draw lines over several numbers of ranks, or a bar per algorithm for a single one.

    Args:
        forecast: The rows.
        path: A file that ends in ``.png``.
    """
    # Agg directly, not through pyplot: no window, no display, and no state left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measures: dict[str, Callable[[Row], float]] = {
        "one allreduce (ms)": lambda row: row.all_reduce_s * 1e3,
    }
    if forecast.workload.backward is not None:
        measures["scaling efficiency of a step (%)"] = lambda row: 100 * (row.efficiency or 0.0)
    figure = Figure(figsize=(7 if len(measures) == 1 else 11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for axes, (label, value) in zip(panels, measures.items(), strict=True):
        if len(forecast.networks) > 1:
            _draw_lines(axes, forecast, label, value)
        else:
            _draw_bars(axes, forecast, label, value)
        axes.spines[["top", "right"]].set_visible(False)
    if len(forecast.networks) > 1:
        panels[0].set_yscale("log")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False
        )
    figure.suptitle(_title(forecast), fontsize=10)
    figure.savefig(path, dpi=140)


def _title(forecast: Forecast) -> str:
    network, workload = forecast.networks[-1], forecast.workload
    where = f"{network.link.name}, {network.link.bandwidth_gbps:g} GB/s"
    if network.nodes > 1 and network.node_link is not None:
        where += f" in nodes of {network.ranks_per_node}, {network.node_link.name} between"
    if network.wiring == "ring":
        where += ", wires between neighbours"
    if len(forecast.networks) == 1:
        where = f"{network.world_size} ranks, {where}"
    return f"Predicted: {workload.name}, {format_bytes(workload.nbytes)} a rank; {where}"


def _draw_lines(axes: Any, forecast: Forecast, label: str, value: Callable[[Row], float]) -> None:
    """Draw a line per algorithm, dashed if the engine does not have it."""
    sizes = [network.world_size for network in forecast.networks]
    for name in dict.fromkeys(row.algorithm for row in forecast.rows):
        rows = [row for row in forecast.rows if row.algorithm == name]
        style = "o-" if rows[0].is_in_engine else "o--"
        x = [sizes.index(row.world_size) for row in rows]
        y = [value(row) for row in rows]
        axes.plot(x, y, style, color=_COLORS[name], markersize=4, linewidth=1.6, label=name)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set(xlabel="ranks", ylabel=label)
    axes.grid(alpha=0.25)


def _draw_bars(axes: Any, forecast: Forecast, label: str, value: Callable[[Row], float]) -> None:
    names = [row.algorithm for row in forecast.rows]
    colors = [_COLORS[name] for name in names]
    bars = axes.barh(names, [value(row) for row in forecast.rows], color=colors)
    axes.bar_label(bars, fmt="{:,.4g}", padding=3, fontsize=8.5)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(label)
