"""One look for all pictures: a colour for each candidate, that the colour-blind can tell apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.text import describe

__all__ = ["STYLES", "Style", "by_key", "finish", "legend_below", "pyplot", "sizes_axis"]

DPI = 110


@dataclass(frozen=True)
class Style:
    """How a candidate looks: Okabe and Ito's colours, with shapes of its own."""

    label: str
    color: str
    marker: str = "o"
    dashes: str = "-"

    def line(self) -> dict[str, Any]:
        """Arguments of a line."""
        return {
            "label": self.label,
            "color": self.color,
            "marker": self.marker,
            "linestyle": self.dashes,
            "linewidth": 1.6,
            "markersize": 4.5,
        }


_GREY, _BLACK, _ORANGE, _SKY = "#8c8c8c", "#000000", "#e69f00", "#56b4e9"
_GREEN, _YELLOW, _BLUE, _RED, _PINK = "#009e73", "#d9c400", "#0072b2", "#d55e00", "#cc79a7"

STYLES = {
    "naive": Style("naive (the book's loop)", _GREY, "s"),
    "stack": Style("torch.stack().sum()", _PINK, "v"),
    "gloo": Style("gloo", _GREY, "s"),
    "ring": Style("ring", _ORANGE, "^"),
    "direct": Style("direct", _SKY, "D"),
    "fused": Style("fused", _GREEN, "P"),
    "bound": Style("bound (checked before)", _RED, "*"),
    "registered": Style("registered tensors", _GREEN, "P"),
    "auto": Style("auto", _BLUE, "o"),
    "checked": Style("auto", _BLUE, "o"),
    "coalesced": Style("auto", _BLUE, "o"),
    "sharded": Style("sharded", _YELLOW, "X"),
    "limit": Style("limit: each byte read, written once", _BLACK, "", "--"),
    "backend": Style('backend "ringar"', _PINK, "v"),
    "undivided": Style("undivided, one replica (limit)", _BLACK),
    "book": Style("the book's loop", _GREY),
    "ringar": Style("pyringar", _BLUE),
    "nn.DataParallel": Style("nn.DataParallel", _ORANGE),
}


def pyplot() -> Any:
    """Matplotlib without a screen."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.grid": True})
    plt.rcParams.update({"grid.color": "#dddddd", "grid.linewidth": 0.6, "axes.axisbelow": True})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return plt


def by_key(
    rows: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], Any]
) -> dict[Any, list[Mapping[str, Any]]]:
    """Rows in groups, in the order in which keys come."""
    found: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def sizes_axis(axis: Any, sizes: Sequence[int]) -> None:
    """Ticks at powers of two that people know, not more than fit."""
    known = [(8, "8 B"), (2**12, "4 KiB"), (2**16, "64 KiB"), (2**20, "1 MiB")]
    known += [(2**24, "16 MiB"), (2**28, "256 MiB")]
    shown = [(size, name) for size, name in known if sizes[0] <= size <= sizes[-1]]
    axis.set_ticks([size for size, _ in shown], [name for _, name in shown], fontsize=8)
    axis.set_ticks([], minor=True)


def legend_below(figure: Any, panels: Sequence[Any]) -> None:
    """One legend for all panels, beneath them, where no data is."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=min(4, len(found)),
        frameon=False,
        fontsize=8,
    )


def finish(figure: Any, path: Path, machine: Mapping[str, Any]) -> None:
    """Name the machine, write the file, forget the figure."""
    figure.suptitle(f"{describe(machine)}, {machine['date']}", fontsize=8, color="#555555")
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=DPI)
    pyplot().close(figure)
