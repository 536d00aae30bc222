"""A forecast as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    has_step = forecast.workload.backward is not None
    figure = Figure(figsize=(11 if has_step else 7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if has_step else 1, squeeze=False)[0]
    if len(forecast.networks) > 1:
        _draw_lines(panels[0], forecast, "one allreduce (ms)", lambda row: row.all_reduce_s * 1e3)
        panels[0].set_yscale("log")
        if has_step:
            _draw_lines(panels[1], forecast, "scaling efficiency (%)", _percent)
            panels[1].set_ylim(0, 105)
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8.5)
    else:
        _draw_bars(panels[0], forecast.rows)
        if has_step:
            _draw_steps(panels[1], forecast.rows)
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


def _percent(row: Row) -> float:
    return 100 * (row.efficiency or 0.0)


def _draw_lines(axes: Any, forecast: Forecast, label: str, value: Callable[[Row], float]) -> None:
    """Draw a line per algorithm, dashed where no version of the engine has it."""
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
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bars(axes: Any, rows: Sequence[Row]) -> None:
    names = [row.algorithm for row in rows]
    times_ms = [row.all_reduce_s * 1e3 for row in rows]
    bars = axes.barh(names, times_ms, color=[_COLORS[name] for name in names])
    axes.bar_label(bars, fmt="{:,.4g}", padding=3, fontsize=8.5)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("one allreduce (ms)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Any, rows: Sequence[Row]) -> None:
    """Draw computation, and the communication that is exposed after it."""
    names = [row.algorithm for row in rows]
    steps = [row.step for row in rows if row.step]
    exposed_ms = [step.exposed_s * 1e3 for step in steps]
    compute_ms = [(step.step_s - step.exposed_s) * 1e3 for step in steps]
    labels = [f"{row.step.step_s * 1e3:.4g} ms, {_percent(row):.0f} %" for row in rows if row.step]
    axes.barh(names, compute_ms, color="#c9d3dd", label="compute")
    bars = axes.barh(
        names, exposed_ms, left=compute_ms, color="#b3423a", label="exposed communication"
    )
    axes.bar_label(bars, labels, padding=3, fontsize=8.5)
    axes.margins(x=0.28)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("one step (ms), and its scaling efficiency")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False, fontsize=8.5
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
