"""The curve of a training run as a PNG."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pyringar.train.config import MODEL_TITLES
from pyringar.train.devices import describe_devices
from pyringar.train.trainer import TrainResult

__all__ = ["save_plot"]

_TITLE_WIDTH = 70  # characters of small type that fit over the axes


def save_plot(result: TrainResult, path: str | Path) -> None:
    """Draw test accuracy and training loss over the epochs.

    Args:
        result: The run.
        path: The picture.
    """
    from matplotlib.figure import Figure  # not pyplot: no window, and no state left behind
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    left = figure.add_subplot()
    epochs = [epoch.epoch for epoch in result.epochs]
    accuracy = left.plot(epochs, result.curve, "o-", color="tab:blue", label="test accuracy")
    left.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(alpha=0.3)
    right = left.twinx()
    loss = right.plot(epochs, result.losses, "s--", color="tab:orange", label="training loss")
    right.set(ylabel="training loss")
    right.set_ylim(bottom=0)
    figure.legend(handles=[*accuracy, *loss], loc="outside lower center", ncols=2, frameon=False)
    left.set_title(_title(result), fontsize="small")
    figure.savefig(path, dpi=150)


def _title(result: TrainResult) -> str:
    config = result.config
    title = MODEL_TITLES[config.model]
    where = f"{title} on {describe_devices(result.devices)}: accuracy {result.curve[-1]:.3f}"
    how = (
        f"{result.plan.algorithm} allreduce, batch {config.global_batch_size}, "
        f"lr {config.initial_lr:g} {config.lr_schedule}, {config.init} init, {config.dtype}"
    )
    return "\n".join(textwrap.fill(line, _TITLE_WIDTH) for line in (where, result.data, how))
