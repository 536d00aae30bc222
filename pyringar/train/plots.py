"""Plots of a training run: live ones in notebooks and terminals, and a picture at its end."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from pyringar import figures
from pyringar.choices import check_choice
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.train.config import MODEL_TITLES
from pyringar.train.devices import describe_devices
from pyringar.train.trainer import EpochResult, TrainResult

__all__ = ["LivePlot", "save_plot", "text_plot"]

_MARKERS = "●○■□▲△◆◇"
_TEXT_HEIGHT = 8  # rows of the plot itself
_TEXT_WIDTH = 60  # columns of the plot itself, at most
_COLUMNS_PER_EPOCH = 6


class LivePlot:
    """Test accuracy over the epochs, redrawn in place after every epoch.

        with LivePlot(num_epochs=8) as plot, Trainer(config) as trainer:
            trainer.run(on_epoch=plot)

    Several runs in one plot: ``run(on_epoch=plot.curve("4 ranks"))``. In a file the finished plot
    is written once, by `close`.

    Args:
        num_epochs: Length of the axis.
        where: ``"notebook"``, ``"text"``, or ``"auto"``: a picture in a notebook, else text.
        file: Receives the text; default ``sys.stdout``.

    Raises:
        UnsupportedError: ``"notebook"`` without IPython.

    A context manager that closes the plot. Cost: in a notebook some 50 ms an epoch.
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
        self._picture: Any = None  # the handle of the picture in a notebook
        self._file = file or sys.stdout
        self._num_lines = 0  # lines in a terminal

    def __call__(self, result: EpochResult) -> None:
        """Add an epoch to the curve without a name."""
        self._add("accuracy", result)

    def curve(self, label: str) -> Callable[[EpochResult], None]:
        """Return a callback for ``Trainer.run(on_epoch=...)`` that adds epochs to a new curve.

        Args:
            label: Name of the curve in the legend. An old curve of that name is removed.
        """
        self.curves.pop(label, None)
        return lambda result: self._add(label, result)

    def erase(self) -> None:
        """Remove the plot from a terminal, so that other lines can be printed."""
        if self._num_lines:
            self._file.write(f"\x1b[{self._num_lines}F\x1b[J")
            self._num_lines = 0

    def close(self) -> None:
        """Stop drawing; in a terminal or a file, write the finished plot."""
        self.erase()
        if self.curves and self._display is None:
            self._file.write(f"{self}\n")
            self._file.flush()

    def __enter__(self) -> LivePlot:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __str__(self) -> str:
        """Return the plot as text."""
        return text_plot(self._named_curves(), self._num_epochs)

    def _add(self, label: str, result: EpochResult) -> None:
        self.curves.setdefault(label, []).append(result.accuracy)
        self._losses[label] = result.loss
        self._num_epochs = max(self._num_epochs, len(self.curves[label]))
        if self._display is not None:
            self._update_picture(self._display)
        elif self._file.isatty():
            self.erase()
            text = str(self)
            self._file.write(f"{text}\n")
            self._file.flush()
            self._num_lines = text.count("\n") + 1

    def _named_curves(self) -> dict[str, list[float]]:
        """Return the curves by their names with the last accuracy and loss."""
        return {
            f"{name} {values[-1]:.3f}, loss {self._losses[name]:.3f}": values
            for name, values in self.curves.items()
        }

    def _update_picture(self, display: Any) -> None:
        epochs = range(1, self._num_epochs + 1)
        curves = {
            name: [*values, *[math.nan] * (len(epochs) - len(values))]
            for name, values in self._named_curves().items()
        }
        panel = figures.Lines(epochs, curves, "epoch", "test accuracy", ylim=_limits(curves))
        image = display.Image(data=figures.draw(panel)._repr_png_(), format="png")
        if self._picture is None:
            self._picture = display.display(image, display_id=True)
        else:
            self._picture.update(image)


def _is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this: it has imported IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _import_display() -> Any:
    try:
        from IPython import display
    except ImportError as error:
        raise UnsupportedError(
            f"a live plot in a notebook needs IPython ({error}); install it with "
            "`pip install ipython`, or give where='text'"
        ) from error
    return display


def text_plot(curves: Mapping[str, Sequence[float]], num_epochs: int) -> str:
    """Draw curves between 0 and 1 as lines of text, with the names of the curves below.

    Args:
        curves: By name, one value per epoch. Where two meet, the later curve is drawn.
        num_epochs: Length of the axis, which is squeezed into 60 columns.
    """
    low, high = _limits(curves)
    bottom = _TEXT_HEIGHT - 1
    step = min(_COLUMNS_PER_EPOCH, max(1, _TEXT_WIDTH // num_epochs))
    shown = math.ceil(num_epochs / _TEXT_WIDTH)  # epochs per column
    width = step * (math.ceil(num_epochs / shown) - 1) + 1
    rows = [[" "] * width for _ in range(_TEXT_HEIGHT)]
    names = []
    for marker, (name, values) in zip(itertools.cycle(_MARKERS), curves.items(), strict=False):
        for epoch, value in enumerate(values):
            height = round((value - low) / (high - low) * bottom)
            rows[bottom - height][epoch // shown * step] = marker
        names.append(f"{marker} {name}")
    labels = {0: f"{high:.1f}", bottom: f"{low:.1f}"}
    lines = [f"{labels.get(i, ''):>4} │ {''.join(row)}" for i, row in enumerate(rows)]
    last = str(num_epochs) if num_epochs > 1 else ""
    lines += [
        "     └" + "─" * (width + 1),
        f"       1{last:>{width - 1}} epoch",
        "       " + "  ".join(names),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _limits(curves: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return tenths around all values, at least 0.1 apart."""
    values = [v for v in itertools.chain(*curves.values()) if not math.isnan(v)]
    if not values:
        return 0.0, 1.0
    low = math.floor(min(values) * 10 + 1e-9) / 10
    high = math.ceil(max(values) * 10 - 1e-9) / 10
    if high - low > 0.05:
        return low, high
    low = min(low, 0.9)
    return low, low + 0.1


def save_plot(result: TrainResult, path: str | Path) -> None:
    """Draw test accuracy and training loss over the epochs."""
    config = result.config
    epochs = [epoch.epoch for epoch in result.epochs]
    curves = {f"last: {result.curve[-1]:.3f}": result.curve}
    where = f"{MODEL_TITLES[config.model]} on {describe_devices(result.devices)}"
    recipe = f"batch {config.batch_size}, lr {config.lr:g}, {result.plan.algorithm} allreduce"
    figures.draw(
        figures.Lines(epochs, curves, "epoch", "test accuracy", where, ylim=(0, 1)),
        figures.Lines(epochs, {"loss": result.losses}, "epoch", "training loss", recipe),
    ).save(path)
