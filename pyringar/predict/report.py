"""A forecast for people and for programs: a table, a dictionary."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pyringar.predict.forecast import Choice, Forecast, Row
from pyringar.predict.network import Network

__all__ = ["as_dict", "fastest", "format_bytes", "render"]

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


def render(forecast: Forecast) -> str:
    """The table, with what it rests on above it and what to make of it below."""
    parts = [_header(forecast), _table(forecast)]
    parts.append("\n".join(_verdict(forecast, choice) for choice in forecast.choices))
    parts.append(_legend(forecast))
    parts.append(_wrap("Not counted: ", _ASSUMED))
    return "\n\n".join(parts)


def _legend(forecast: Forecast) -> str:
    """Explain the columns and names that do not explain themselves."""
    lines = ["MB a link: through the busiest rank's link, in the busier direction"]
    if any(network.nodes > 1 for network in forecast.networks):
        lines.append("MB a card: likewise through a node's network card")
        lines.append("ring/ring and the like: inside nodes / across nodes, for every shard")
    if any(not row.is_in_engine for row in forecast.rows):
        lines.append("* a schedule made of the engine's parts, not an algorithm of this version")
    return "\n".join(lines)


def fastest(rows: Sequence[Row]) -> Row:
    """The quickest row: of steps where they are known, then of all-reduces."""
    return min(rows, key=lambda row: (_time_s(row), row.all_reduce_s))


def _time_s(row: Row) -> float:
    return row.all_reduce_s if row.step is None else row.step.step_s


def format_bytes(nbytes: int) -> str:
    """44703272 -> "44.7 MB"; megabytes of 10**6 bytes."""
    return f"{nbytes / 1e6:.4g} MB" if nbytes >= 1e3 else f"{nbytes} bytes"


def as_dict(forecast: Forecast) -> dict[str, Any]:
    """All of it as JSON values."""
    workload = forecast.workload
    return {
        "is_prediction": True,
        "workload": asdict(workload) | {"nbytes": workload.nbytes},
        "networks": [asdict(network) for network in forecast.networks],
        "auto": [asdict(choice) for choice in forecast.choices],
        "not_counted": _ASSUMED,
        "rows": [asdict(row) for row in forecast.rows],
    }


def _wrap(head: str, text: str) -> str:
    return textwrap.fill(
        head + text, _WIDTH, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def _header(forecast: Forecast) -> str:
    workload = forecast.workload
    largest = forecast.networks[-1]
    lines = ["A prediction, not a measurement.", ""]
    how = "packed into one" if workload.is_packed else "not packed"
    count = len(workload.tensors)
    facts = {
        "reduced": f"{workload.name}: {format_bytes(workload.nbytes)} a rank, "
        + (f"{count} float32 tensors, {how}" if count > 1 else "one float32 tensor"),
        "link": str(largest.link),
        "wiring": _WIRING[largest.wiring],
    }
    if any(network.nodes > 1 for network in forecast.networks):
        cards = largest.nics_per_node
        facts["between nodes"] = f"{largest.node_link}, {cards} for each node"
    if workload.backward is not None:
        facts["compute"] = f"{_ms(workload.backward.compute_s)} ms a step, every rank its own " + (
            f"batch ({workload.backward.source})"
        )
        sizes = [sum(workload.tensors[i] for i in b) * 4 / 1e6 for b in workload.buckets()]
        facts["buckets"] = ", ".join(f"{size:.3g}" for size in sizes) + " MB, in this order"
    lines += [_wrap(f"  {name:<14}", text) for name, text in facts.items()]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return _four_digits(seconds * 1e3)


def _four_digits(value: float) -> str:
    """As many as are of interest, and no exponent: 0.4737, 83.82, 45,419."""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _table(forecast: Forecast) -> str:
    has_step = forecast.workload.backward is not None
    has_nodes = any(network.nodes > 1 for network in forecast.networks)
    columns = ["ranks", *(["nodes"] if has_nodes else []), "algorithm", "allreduce ms"]
    columns += ["MB a link", *(["MB a card"] if has_nodes else [])]
    columns += ["step ms", "exposed ms", "efficiency"] if has_step else []
    columns.append("")
    table = [columns]
    for network in forecast.networks:
        rows = forecast.of(network.world_size)
        table += [[], *(_cells(row, has_nodes, row is fastest(rows)) for row in rows)]
    widths = [max(len(row[i]) for row in table if row) for i in range(len(columns))]
    name = columns.index("algorithm")
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == name else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in table
    )


def _cells(row: Row, has_nodes: bool, is_fastest: bool) -> list[str]:
    cells = [str(row.world_size), *([str(row.nodes)] if has_nodes else [])]
    cells += [row.algorithm + ("" if row.is_in_engine else "*"), _ms(row.all_reduce_s)]
    cells.append(_four_digits(row.rank_link_bytes / 1e6))
    if has_nodes:
        cells.append(_four_digits(row.node_link_bytes / 1e6) if row.nodes > 1 else "-")
    if row.step is not None:
        cells += [_ms(row.step.step_s), _ms(row.step.exposed_s)]
        cells.append("-" if row.efficiency is None else f"{row.efficiency:.1%}")
    return [*cells, "<- fastest" if is_fastest else ""]


def _verdict(forecast: Forecast, choice: Choice) -> str:
    """Say what ``auto`` takes, and whether another algorithm of the engine's would be faster."""
    head = f"{choice.world_size} ranks: "
    if choice.world_size == 1:
        return "1 rank: there is nothing to reduce."
    rows = {row.algorithm: row for row in forecast.of(choice.world_size) if row.is_in_engine}
    best = fastest(list(rows.values()))
    text = f"`auto` takes {choice.algorithm}: {choice.reason}."
    if _time_s(best) < 0.99 * _time_s(rows[choice.algorithm]):
        text += f" {best.algorithm} is predicted to be faster."
    if _network(forecast, choice).nodes > 1:
        text += " (It drives one process and knows of no nodes.)"
    return _wrap(head, text)


def _network(forecast: Forecast, choice: Choice) -> Network:
    return next(n for n in forecast.networks if n.world_size == choice.world_size)
