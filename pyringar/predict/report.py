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
_WIDTH = 80


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
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e3 else f"{nbytes} bytes"


def _digits(value: float) -> str:
    """Format the three digits that a model is good for, without an exponent: 0.474, 45,400."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 999.5 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return f"{_digits(100 * share)}%" if share else "-"


def _ms(seconds: float) -> str:
    return _digits(seconds * 1e3)


def _mb(nbytes: int) -> str:
    return _digits(nbytes / 1e6)


def _wrap(head: str, text: str) -> str:
    return textwrap.fill(
        head + text, _WIDTH, subsequent_indent=" " * len(head), break_on_hyphens=False
    )


def align(table: Sequence[Sequence[str]], left: str = "algorithm") -> str:
    """Return rows of cells as lines; the first row holds the titles, ``left`` is the text column.

    A title may have two lines. A row of one text stands alone, with an empty line before it.
    """
    titles, rows = table[0], table[1:]
    height = max(title.count("\n") for title in titles) + 1
    heads = [("\n" * (height - 1 - title.count("\n")) + title).split("\n") for title in titles]
    full = [*zip(*heads, strict=True), *(row for row in rows if len(row) > 1)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if title == left else cell.rjust(width)
            for title, cell, width in zip(titles, row, widths, strict=True)
        ]
        return "  ".join(cells).rstrip()

    lines = map(line, zip(*heads, strict=True))
    return "\n".join([*lines, *(line(row) if len(row) > 1 else f"\n{row[0]}" for row in rows)])


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
    columns: dict[str, Callable[[Row], str]] = {}
    columns["algorithm"] = lambda row: row.algorithm + ("" if row.is_in_engine else "*")
    columns["allreduce\nms"] = lambda row: _ms(row.all_reduce_s)
    columns["MB a\nlink"] = lambda row: _mb(row.rank_link_bytes)
    if _has_nodes(forecast):
        columns["MB a\ncard"] = lambda row: _mb(row.node_link_bytes) if row.nodes > 1 else "-"
    if forecast.workload.backward is not None:
        columns["step\nms"] = lambda row: _ms(row.step.step_s) if row.step else "-"
        columns["exposed\nms"] = lambda row: _ms(row.step.exposed_s) if row.step else "-"
        columns["effi-\nciency"] = lambda row: _percent(row.efficiency)
    columns[""] = lambda row: "fastest" if row in best else ""
    return columns


def _table(forecast: Forecast) -> str:
    columns = _columns(forecast)
    table = [list(columns)]
    for network in forecast.networks:
        nodes = f" in {network.nodes} nodes" if network.nodes > 1 else ""
        table.append([f"{_count_ranks(network)}{nodes}"])
        rows = forecast.of(network.world_size)
        table += ([cell(row) for cell in columns.values()] for row in rows)
    return align(table)


def _count_ranks(network: Network) -> str:
    return f"{network.world_size} rank{'' if network.world_size == 1 else 's'}"


def _verdict(forecast: Forecast, network: Network, choice: Choice) -> str:
    """Say what ``auto`` takes, and whether another algorithm of the engine's would be faster."""
    if network.world_size == 1:
        return "1 rank: there is nothing to reduce."
    rows = {row.algorithm: row for row in forecast.of(network.world_size) if row.is_in_engine}
    best, taken = fastest(list(rows.values())), rows[choice.algorithm]
    text = f"`auto` takes {choice.algorithm}: {choice.reason}."
    if _time_s(best) < 0.99 * _time_s(taken):
        what = "an all-reduce" if best.step is None else "a step"
        text += (
            f" It goes by where ranks are, and knows neither these links nor their wiring, over "
            f"which {what} by {best.algorithm} is predicted to take {_ms(_time_s(best))} ms "
            f"instead of {_ms(_time_s(taken))}: name it, and measure both."
        )
    if network.nodes > 1:
        text += " (It drives one process and knows of no nodes.)"
    return _wrap(f"{_count_ranks(network)}: ", text)


def _legend(forecast: Forecast) -> str:
    """Explain the columns and names that do not explain themselves."""
    lines = ["MB a link: through the busiest rank's link, in the busier direction"]
    if _has_nodes(forecast):
        lines.append("MB a card: likewise through a node's network card")
        lines.append("ring/ring and the like: inside nodes / across nodes, for every shard")
    if any(not row.is_in_engine for row in forecast.rows):
        lines.append("* a schedule made of the engine's parts, not an algorithm of this version")
    return "\n".join(lines)
