"""A curve that grows while training goes on: a picture in notebooks, text in terminals.

    with LivePlot(num_epochs=8) as plot, Trainer(config) as trainer:
        trainer.run(on_epoch=plot)

Several runs in one plot: ``run(on_epoch=plot.curve("4 ranks"))``.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.train.trainer import EpochResult

__all__ = ["LivePlot", "text_plot"]

Curves = Mapping[str, Sequence[float]]

_WHERE = ("auto", "notebook", "text")
_MARKERS = "●○■□▲△◆◇"
_TEXT_HEIGHT = 8  # rows of the plot itself
_TEXT_WIDTH = 60  # columns of the plot itself, at most
_COLUMNS_PER_EPOCH = 6


class LivePlot:
    """Test accuracy over the epochs, redrawn in place after every one of them.

    An instance is what :meth:`Trainer.run` takes as ``on_epoch``. In a notebook one picture is
    replaced by the next; in a terminal some lines are; elsewhere, such as in a file, the finished
    plot is written once, by :meth:`close`.

    Args:
        num_epochs: How many there will be, so that the axis need not grow.
        where: ``"notebook"``, ``"text"``, or ``"auto"``: the first in a notebook, else the second.
        file: Where text goes; ``sys.stdout`` if not given.

    Raises:
        ArgumentError: Unknown ``where``, or a number of epochs below 1.
        UnsupportedError: ``"notebook"`` without IPython or matplotlib; says what to install.

    A context manager: leaving it closes it. Cost: in a notebook some 50 ms an epoch.
    """

    def __init__(
        self,
        num_epochs: int | None = None,
        *,
        where: str = "auto",
        file: TextIO | None = None,
    ) -> None:
        if where not in _WHERE:
            raise ArgumentError(f"where is {where!r}, expected one of {', '.join(_WHERE)}")
        if num_epochs is not None and num_epochs < 1:
            raise ArgumentError(f"num_epochs is {num_epochs}, expected 1 or more")
        self.curves: dict[str, list[float]] = {}
        self._num_epochs = num_epochs or 1
        in_notebook = where == "notebook" or (where == "auto" and _is_notebook())
        self._screen: _Screen = _Picture() if in_notebook else _Text(file or sys.stdout)

    def __call__(self, result: EpochResult) -> None:
        """Add an epoch to the curve without a name."""
        self._add("accuracy", result)

    def curve(self, label: str) -> Callable[[EpochResult], None]:
        """Return a callback for ``Trainer.run(on_epoch=...)`` that adds epochs to a new curve.

        Args:
            label: The curve's name in the legend; one used again starts its curve anew.
        """
        self.curves.pop(label, None)
        return lambda result: self._add(label, result)

    def close(self) -> None:
        """Draw no more; in a terminal or a file, write the finished plot where text goes."""
        self._screen.close(self.curves, self._num_epochs)

    def __enter__(self) -> LivePlot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __str__(self) -> str:
        """The plot as text, as it is now."""
        return text_plot(self.curves, self._num_epochs)

    def _add(self, label: str, result: EpochResult) -> None:
        self.curves.setdefault(label, []).append(result.accuracy)
        self._num_epochs = max(self._num_epochs, len(self.curves[label]))
        self._screen.show(self.curves, self._num_epochs)


class _Screen(Protocol):
    """Show a plot somewhere."""

    def show(self, curves: Curves, num_epochs: int) -> None:
        """Replace what was shown before."""

    def close(self, curves: Curves, num_epochs: int) -> None:
        """Show nothing more."""


# -- notebooks -------------------------------------------------------------------------------------


def _is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this: then IPython is imported."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


class _Picture:
    """One display of a notebook, updated."""

    def __init__(self) -> None:
        try:
            import matplotlib  # noqa: F401
            from IPython import display
        except ImportError as error:
            raise UnsupportedError(
                f"a live plot in a notebook needs IPython and matplotlib ({error}); install them "
                "with `pip install ipython matplotlib`, or give where='text'"
            ) from error
        self._display: Any = display
        self._handle: Any = None

    def show(self, curves: Curves, num_epochs: int) -> None:
        image = self._display.Image(data=_png(curves, num_epochs), format="png")
        if self._handle is None:
            self._handle = self._display.display(image, display_id=True)
        else:
            self._handle.update(image)

    def close(self, curves: Curves, num_epochs: int) -> None:
        self._handle = None  # what is shown stays


def _png(curves: Curves, num_epochs: int) -> bytes:
    # Agg directly, not through pyplot: no state left behind, and no second picture by itself.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, values in curves.items():
        epochs = range(1, len(values) + 1)
        axes.plot(epochs, values, "o-", markersize=4, label=f"{label}: {values[-1]:.3f}")
    axes.set(xlabel="epoch", ylabel="test accuracy", xlim=(0.8, max(num_epochs, 2) + 0.2))
    axes.set_ylim(*_limits(curves))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


# -- text ------------------------------------------------------------------------------------------


class _Text:
    """Lines of a terminal, written over; or nothing until the end, in a file.

    Each line is a bar of tqdm's without a bar, so that progress bars and their ``write`` know of
    them.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: list[Any] = []

    def show(self, curves: Curves, num_epochs: int) -> None:
        if not self._file.isatty():
            return
        from tqdm import tqdm

        texts = text_plot(curves, num_epochs).splitlines()
        while len(self._lines) < len(texts):
            self._lines.append(tqdm(bar_format="{desc}", file=self._file, leave=False))
        for line, text in zip(self._lines, texts, strict=False):
            line.set_description_str(text)

    def close(self, curves: Curves, num_epochs: int) -> None:
        if self._lines:
            for line in reversed(self._lines):
                line.close()
            self._lines.clear()
            self._file.write("\r")  # tqdm leaves the cursor where the last line ended
        if curves:
            self._file.write(text_plot(curves, num_epochs) + "\n")
            self._file.flush()


def text_plot(curves: Curves, num_epochs: int) -> str:
    """Draw curves between 0 and 1 as lines of text.

    Args:
        curves: By name, one value per epoch. Where two fall on one place, the later curve is seen.
        num_epochs: How many epochs the axis holds; it is squeezed into 60 columns.

    Returns:
        Lines without trailing blanks, the last one naming the curves and their last values.
    """
    low, high = _limits(curves)
    step = min(_COLUMNS_PER_EPOCH, max(1, _TEXT_WIDTH // num_epochs))
    shown = max(1, -(-num_epochs // _TEXT_WIDTH))  # epochs to a column, where there are very many
    width = step * (-(-num_epochs // shown) - 1) + 1
    rows = [[" "] * width for _ in range(_TEXT_HEIGHT)]
    for marker, values in zip(_repeated(_MARKERS, len(curves)), curves.values(), strict=True):
        for epoch, value in enumerate(values):
            height = round((value - low) / (high - low) * (_TEXT_HEIGHT - 1))
            rows[_TEXT_HEIGHT - 1 - height][epoch // shown * step] = marker
    labels = {0: f"{high:.1f}", _TEXT_HEIGHT - 1: f"{low:.1f}"}
    lines = [f"{labels.get(i, ''):>4} │ {''.join(row)}" for i, row in enumerate(rows)]
    lines.append("     └" + "─" * (width + 1))
    last = f"{num_epochs}"
    axis = "1".ljust(width - len(last)) + last if num_epochs > 1 else "1"
    lines.append(f"       {axis} epoch")
    names = zip(_repeated(_MARKERS, len(curves)), curves.items(), strict=True)
    lines.append("       " + "  ".join(f"{m} {name} {v[-1]:.3f}" for m, (name, v) in names if v))
    return "\n".join(line.rstrip() for line in lines)


def _repeated(markers: str, count: int) -> str:
    return (markers * (count // len(markers) + 1))[:count]


def _limits(curves: Curves) -> tuple[float, float]:
    """Tenths around all values, so that a curve near its end is still seen to move."""
    values = [value for values in curves.values() for value in values]
    if not values:
        return 0.0, 1.0
    low = math.floor(min(values) * 10 + 1e-9) / 10
    high = math.ceil(max(values) * 10 - 1e-9) / 10
    if high - low > 0.05:
        return low, high
    low = min(low, 0.9)
    return low, low + 0.1
