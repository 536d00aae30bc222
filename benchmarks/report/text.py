"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["describe", "format_us", "markdown_table"]


def format_us(microseconds: float) -> str:
    """Three digits, in the unit that suits them."""
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if microseconds < limit:
            return f"{microseconds / (limit / 1e3):.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s"


def describe(machine: Mapping[str, Any]) -> str:
    """The machine in a few words."""
    gpu = f"{machine['gpu']}, " if machine.get("gpu") else ""
    return f"{gpu}{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Cells between bars."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
