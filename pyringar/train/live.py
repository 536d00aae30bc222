"""A curve that grows while training goes on: a picture in notebooks, text in terminals.

    with LivePlot(num_epochs=8) as plot, Trainer(config) as trainer:
        trainer.run(on_epoch=plot)

Several runs in one plot: ``run(on_epoch=plot.curve("4 ranks"))``.
"""

from __future__ import annotations

import io
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TextIO

from pyringar.choices import check_choice
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.train.trainer import EpochResult

__all__ = ["LivePlot", "text_plot"]

Curves = Mapping[str, Sequence[float]]

_MARKERS = "●○■□▲△◆◇"
_TEXT_HEIGHT = 8  # rows of the plot itself
_TEXT_WIDTH = 60  # columns of the plot itself, at most
_COLUMNS_PER_EPOCH = 6


class LivePlot:
    """Test accuracy over the epochs, redrawn in place after every one of them.

    The last training loss stands beside each curve's name.

    An instance is what `Trainer.run` takes as ``on_epoch``. In a notebook one picture is
    replaced by the next; in a terminal some lines are; elsewhere, such as in a file, the finished
    plot is written once, by `close`.

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
        check_choice("where", where, ("auto", "notebook", "text"))
        if num_epochs is not None and num_epochs < 1:
            raise ArgumentError(f"num_epochs is {num_epochs}, expected 1 or more")
        self.curves: dict[str, list[float]] = {}
        self._losses: dict[str, float] = {}
        self._num_epochs = num_epochs or 1
        in_notebook = where == "notebook" or (where == "auto" and _is_notebook())
        self._display = _import_display() if in_notebook else None
        self._picture: Any = None  # in a notebook, once there is one
        self._file = file or sys.stdout
        self._lines: list[Any] = []  # in a terminal

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
        self._picture = None  # what is shown stays
        if self._lines:
            for line in reversed(self._lines):
                line.close()
            self._lines.clear()
            self._file.write("\r")  # tqdm leaves the cursor where the last line ended
        if self.curves and self._display is None:
            self._file.write(f"{self}\n")
            self._file.flush()

    def __enter__(self) -> LivePlot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __str__(self) -> str:
        """Return the plot as text, as it is now."""
        return text_plot(self.curves, self._num_epochs, self._losses)

    def _add(self, label: str, result: EpochResult) -> None:
        self.curves.setdefault(label, []).append(result.accuracy)
        self._losses[label] = result.loss
        self._num_epochs = max(self._num_epochs, len(self.curves[label]))
        if self._display is not None:
            self._update_picture(self._display)
        elif self._file.isatty():
            self._update_lines()

    def _update_picture(self, display: Any) -> None:
        image = display.Image(data=_png(self.curves, self._num_epochs, self._losses), format="png")
        if self._picture is None:
            self._picture = display.display(image, display_id=True)
        else:
            self._picture.update(image)

    def _update_lines(self) -> None:
        """Write each line as a tqdm bar without a bar: other bars and their ``write`` know it."""
        from tqdm import tqdm

        texts = str(self).splitlines()
        while len(self._lines) < len(texts):
            self._lines.append(tqdm(bar_format="{desc}", file=self._file, leave=False))
        for line, text in zip(self._lines, texts, strict=False):
            line.set_description_str(text)


def _is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this: then IPython is imported."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _import_display() -> Any:
    try:
        import matplotlib  # noqa: F401
        from IPython import display
    except ImportError as error:
        raise UnsupportedError(
            f"a live plot in a notebook needs IPython and matplotlib ({error}); install them "
            "with `pip install ipython matplotlib`, or give where='text'"
        ) from error
    return display


def _png(curves: Curves, num_epochs: int, losses: Mapping[str, float]) -> bytes:
    from matplotlib.figure import Figure  # not pyplot, which shows a second picture by itself
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for label, values in curves.items():
        epochs = range(1, len(values) + 1)
        axes.plot(epochs, values, "o-", markersize=4, label=_legend(label, values, losses))
    axes.set(xlabel="epoch", ylabel="test accuracy", xlim=(0.8, max(num_epochs, 2) + 0.2))
    axes.set_ylim(*_limits(curves))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _legend(name: str, values: Sequence[float], losses: Mapping[str, float]) -> str:
    loss = f", loss {losses[name]:.3f}" if name in losses else ""
    return f"{name} {values[-1]:.3f}{loss}"


def text_plot(
    curves: Curves, num_epochs: int, losses: Mapping[str, float] = MappingProxyType({})
) -> str:
    """Draw curves between 0 and 1 as lines of text.

    Args:
        curves: By name, one value per epoch. Where two fall on one place, the later curve is seen.
        num_epochs: How many epochs the axis holds; it is squeezed into 60 columns.
        losses: By name, the last training loss, to stand beside it.

    Returns:
        Lines without trailing blanks, the last one naming the curves and their last values.
    """
    low, high = _limits(curves)
    bottom = _TEXT_HEIGHT - 1
    step = min(_COLUMNS_PER_EPOCH, max(1, _TEXT_WIDTH // num_epochs))
    shown = math.ceil(num_epochs / _TEXT_WIDTH)  # epochs to a column, where there are very many
    width = step * (math.ceil(num_epochs / shown) - 1) + 1
    rows = [[" "] * width for _ in range(_TEXT_HEIGHT)]
    names = []
    for marker, (name, values) in zip(itertools.cycle(_MARKERS), curves.items(), strict=False):
        for epoch, value in enumerate(values):
            height = round((value - low) / (high - low) * bottom)
            rows[bottom - height][epoch // shown * step] = marker
        names.append(f"{marker} {_legend(name, values, losses)}")
    labels = {0: f"{high:.1f}", bottom: f"{low:.1f}"}
    lines = [f"{labels.get(i, ''):>4} │ {''.join(row)}" for i, row in enumerate(rows)]
    last = str(num_epochs) if num_epochs > 1 else ""
    lines += [
        "     └" + "─" * (width + 1),
        f"       1{last:>{width - 1}} epoch",
        "       " + "  ".join(names),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _limits(curves: Curves) -> tuple[float, float]:
    """Tenths around all values, so that a curve near its end is still seen to move."""
    values = list(itertools.chain(*curves.values()))
    if not values:
        return 0.0, 1.0
    low = math.floor(min(values) * 10 + 1e-9) / 10
    high = math.ceil(max(values) * 10 - 1e-9) / 10
    if high - low > 0.05:
        return low, high
    low = min(low, 0.9)
    return low, low + 0.1
