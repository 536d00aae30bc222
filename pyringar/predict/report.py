"""A forecast as text for people, and as JSON values for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from pyringar.predict.algorithms import ITEM_BYTES
from pyringar.predict.forecast import Choice, Forecast, Row
from pyringar.predict.network import Network

__all__ = ["align", "as_dict", "fastest", "format_bytes", "render"]

_WIRING = {
    "switch": "each rank has one link to a switch, which is never the bottleneck",
    "ring": "wires between neighbours only; messages to others go through them, the shorter way",
}
_ASSUMED = (
    "computation and communication do not slow each other down; adding up, packing, starting a "
    "call and the optimiser take no time; messages queue for links in the order in which they "
    "come; chunks travel whole"
)
_WIDTH = 100


def as_dict(forecast: Forecast) -> dict[str, Any]:
    """Return all figures as JSON values."""
    workload = forecast.workload
    return {
        "is_prediction": True,
        "workload": asdict(workload) | {"nbytes": workload.nbytes},
        "networks": [asdict(network) for network in forecast.networks],
        "auto": [asdict(choice) for choice in forecast.choices],
        "not_counted": _ASSUMED,
        "rows": [asdict(row) for row in forecast.rows],
    }


def render(forecast: Forecast) -> str:
    """Return the table, with its assumptions above it and what follows from it below."""
    pairs = zip(forecast.networks, forecast.choices, strict=True)
    parts = [
        _header(forecast),
        _table(forecast),
        "\n".join(_verdict(forecast, network, choice) for network, choice in pairs),
        _legend(forecast),
        _wrap("Not counted: ", _ASSUMED),
    ]
    return "\n\n".join(parts)


def fastest(rows: Sequence[Row]) -> Row:
    """Return the row of the shortest step, or all-reduce where no steps are known."""
    return min(rows, key=lambda row: (_time_s(row), row.all_reduce_s))


def _time_s(row: Row) -> float:
    return row.all_reduce_s if row.step is None else row.step.step_s


def format_bytes(nbytes: int) -> str:
    """44703272 -> "44.7 MB"; megabytes of 10**6 bytes."""
    return f"{nbytes / 1e6:.4g} MB" if nbytes >= 1e3 else f"{nbytes} bytes"


def _four_digits(value: float) -> str:
    """Format without an exponent: 0.4737, 83.82, 45,419."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _ms(seconds: float) -> str:
    return _four_digits(seconds * 1e3)


def _mb(nbytes: int) -> str:
    return _four_digits(nbytes / 1e6)


def _wrap(head: str, text: str) -> str:
    return textwrap.fill(
        head + text, _WIDTH, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def align(table: Sequence[Sequence[str]], left: str = "algorithm") -> str:
    """Return rows of cells as lines; the first row holds the titles, ``left`` is the text column.

    A row without cells is an empty line.
    """
    titles = table[0]
    widths = [max(len(row[i]) for row in table if row) for i in range(len(titles))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if title == left else cell.rjust(width)
            for title, cell, width in zip(titles, row, widths, strict=False)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _has_nodes(forecast: Forecast) -> bool:
    return any(network.nodes > 1 for network in forecast.networks)


def _header(forecast: Forecast) -> str:
    workload, largest = forecast.workload, forecast.networks[-1]
    count = len(workload.tensors)
    how = "packed into one" if workload.is_packed else "not packed"
    tensors = f"{count} float32 tensors, {how}" if count > 1 else "one float32 tensor"
    facts = {
        "reduced": f"{workload.name}: {format_bytes(workload.nbytes)} a rank, {tensors}",
        "link": str(largest.link),
        "wiring": _WIRING[largest.wiring],
    }
    if _has_nodes(forecast):
        facts["between nodes"] = f"{largest.node_link}, {largest.nics_per_node} for each node"
    if workload.backward is not None:
        backward = workload.backward
        facts["compute"] = (
            f"{_ms(backward.compute_s)} ms a step, every rank its own batch ({backward.source})"
        )
        numels = [sum(workload.tensors[i] for i in bucket) for bucket in workload.buckets()]
        sizes = ", ".join(f"{numel * ITEM_BYTES / 1e6:.3g}" for numel in numels)
        facts["buckets"] = f"{sizes} MB, in this order"
    lines = [_wrap(f"  {name:<14}", text) for name, text in facts.items()]
    return "\n".join(["A prediction, not a measurement.", "", *lines])


def _columns(forecast: Forecast) -> dict[str, Callable[[Row], str]]:
    """Return the cell of a row by the title of its column."""
    best = [fastest(forecast.of(network.world_size)) for network in forecast.networks]
    columns: dict[str, Callable[[Row], str]] = {"ranks": lambda row: str(row.world_size)}
    if _has_nodes(forecast):
        columns["nodes"] = lambda row: str(row.nodes)
    columns["algorithm"] = lambda row: row.algorithm + ("" if row.is_in_engine else "*")
    columns["allreduce ms"] = lambda row: _ms(row.all_reduce_s)
    columns["MB a link"] = lambda row: _mb(row.rank_link_bytes)
    if _has_nodes(forecast):
        columns["MB a card"] = lambda row: _mb(row.node_link_bytes) if row.nodes > 1 else "-"
    if forecast.workload.backward is not None:
        columns["step ms"] = lambda row: _ms(row.step.step_s) if row.step else "-"
        columns["exposed ms"] = lambda row: _ms(row.step.exposed_s) if row.step else "-"
        columns["efficiency"] = lambda row: f"{row.efficiency:.1%}" if row.efficiency else "-"
    columns[""] = lambda row: "<- fastest" if row in best else ""
    return columns


def _table(forecast: Forecast) -> str:
    columns = _columns(forecast)
    table = [list(columns)]
    for network in forecast.networks:
        rows = forecast.of(network.world_size)
        table += [[], *([cell(row) for cell in columns.values()] for row in rows)]
    return align(table)


def _verdict(forecast: Forecast, network: Network, choice: Choice) -> str:
    """Say what ``auto`` takes, and whether another algorithm of the engine's would be faster."""
    if network.world_size == 1:
        return "1 rank: there is nothing to reduce."
    rows = {row.algorithm: row for row in forecast.of(network.world_size) if row.is_in_engine}
    best = fastest(list(rows.values()))
    text = f"`auto` takes {choice.algorithm}: {choice.reason}."
    if _time_s(best) < 0.99 * _time_s(rows[choice.algorithm]):
        text += f" {best.algorithm} is predicted to be faster."
    if network.nodes > 1:
        text += " (It drives one process and knows of no nodes.)"
    return _wrap(f"{network.world_size} ranks: ", text)


def _legend(forecast: Forecast) -> str:
    """Explain the columns and names that do not explain themselves."""
    lines = ["MB a link: through the busiest rank's link, in the busier direction"]
    if _has_nodes(forecast):
        lines.append("MB a card: likewise through a node's network card")
        lines.append("ring/ring and the like: inside nodes / across nodes, for every shard")
    if any(not row.is_in_engine for row in forecast.rows):
        lines.append("* a schedule made of the engine's parts, not an algorithm of this version")
    return "\n".join(lines)
