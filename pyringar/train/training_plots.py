"""Plot a training run: live in notebooks and terminals, and as a picture file."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from pyringar import figures
from pyringar.choices import check_choice, check_count
from pyringar.errors import UnsupportedError
from pyringar.train.config import MODEL_TITLES
from pyringar.train.devices import describe_devices
from pyringar.train.trainer import EpochResult, TrainResult

_BAR_COLUMNS = 40


class LivePlot(AbstractContextManager["LivePlot"]):
    """Live plot of the test accuracy: a picture in a notebook, else a text bar per epoch.

        with LivePlot(num_epochs=8) as plot, Trainer(config) as trainer:
            trainer.run(on_epoch=plot)

    Several runs in one plot: ``run(on_epoch=plot.curve("4 ranks"))``.

    Args:
        num_epochs: Length of the epoch axis, which grows with more epochs.
        where: ``"notebook"``, ``"text"``, or ``"auto"``: a picture in a notebook, else text.
        file: Stream for the text. Default: ``sys.stdout``.

    Raises:
        UnsupportedError: A picture needs IPython, which is not installed.

    A context manager. Cost: about 50 ms per epoch in a notebook.
    """

    def __init__(
        self, num_epochs: int | None = None, *, where: str = "auto", file: TextIO | None = None
    ) -> None:
        check_choice("where", where, ("auto", "notebook", "text"))
        if num_epochs is not None:
            check_count("num_epochs", num_epochs, 1)
        self.curves: dict[str, list[float]] = {}
        self._losses: dict[str, float] = {}
        self._num_epochs = num_epochs or 1
        in_notebook = where == "notebook" or (where == "auto" and _is_notebook())
        self._display = _import_display() if in_notebook else None
        self._picture: Any = None  # IPython's display handle, which updates the picture
        self._file = file or sys.stdout

    def __call__(self, result: EpochResult) -> None:
        """Add an epoch to the curve 'accuracy'."""
        self._add("accuracy", result)

    def curve(self, label: str) -> Callable[[EpochResult], None]:
        """Return a callback for ``Trainer.run(on_epoch=...)`` that adds epochs to a new curve.

        Args:
            label: Name of the curve in the legend. Replaces an existing curve of this name.
        """
        self.curves.pop(label, None)
        return lambda result: self._add(label, result)

    def __exit__(self, *exception: object) -> None:
        pass

    def _add(self, label: str, result: EpochResult) -> None:
        self.curves.setdefault(label, []).append(result.accuracy)
        self._losses[label] = result.loss
        if self._display is not None:
            self._update_picture(self._display)
        else:
            text = f"{label}, epoch {result.epoch:>2}  {result.accuracy:.3f}"
            print(f"{text}  {accuracy_bar(result.accuracy)}", file=self._file, flush=True)

    def _update_picture(self, display: Any) -> None:
        self._num_epochs = max(self._num_epochs, *map(len, self.curves.values()))
        curves = {
            f"{name} {values[-1]:.3f}, loss {self._losses[name]:.3f}": [
                *values,
                *[math.nan] * (self._num_epochs - len(values)),
            ]
            for name, values in self.curves.items()
        }
        panel = figures.Lines(range(1, self._num_epochs + 1), curves, "epoch", "test accuracy")
        image = display.Image(data=figures.draw(panel)._repr_png_(), format="png")
        if self._picture is None:
            self._picture = display.display(image, display_id=True)
        else:
            self._picture.update(image)


def accuracy_bar(accuracy: float) -> str:
    return "█" * round(accuracy * _BAR_COLUMNS)


def _is_notebook() -> bool:
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


def save_plot(result: TrainResult, path: str | Path) -> None:
    config = result.config
    epochs = [epoch.epoch for epoch in result.epochs]
    curves = {f"last: {result.curve[-1]:.3f}": result.curve}
    where = f"{MODEL_TITLES[config.model]} on {describe_devices(result.devices)}"
    recipe = f"batch {config.batch_size}, lr {config.lr:g}, {result.plan.algorithm} allreduce"
    figures.draw(
        figures.Lines(epochs, curves, "epoch", "test accuracy", where, ylim=(0, 1)),
        figures.Lines(epochs, {"loss": result.losses}, "epoch", "training loss", recipe),
    ).save(path)
