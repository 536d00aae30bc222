"""A line per epoch, in a file or for TensorBoard, while training goes on."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any

from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.train.trainer import EpochResult

__all__ = ["LOG_SUFFIXES", "EpochLog", "TensorBoardLog", "as_json", "import_tensorboard"]

LOG_SUFFIXES = (".csv", ".jsonl")


class EpochLog:
    """Write epoch, loss, accuracy and seconds of every epoch to a file, at once.

    An instance is what `Trainer.run` takes as ``on_epoch``. A run that goes on from a
    checkpoint tells the epochs that are done first, so that the file has all of them.

    Args:
        path: A new file, or one to replace: ``.csv``: a header, and commas between; ``.jsonl``: an
            object a line, in which a loss that is no number is null.

    Raises:
        ArgumentError: Another ending.
        OSError: It cannot be written; calls raise this, too.

    A context manager: leaving it closes the file.
    """

    def __init__(self, path: str | Path) -> None:
        suffix = Path(path).suffix.lower()
        if suffix not in LOG_SUFFIXES:
            raise ArgumentError(f"path is '{path}', expected an ending of .csv or .jsonl")
        self._file = Path(path).open("w", encoding="utf-8", newline="")  # noqa: SIM115
        self._table: Any = None
        if suffix == ".csv":
            names = [field.name for field in fields(EpochResult)]
            self._table = csv.DictWriter(self._file, names, lineterminator="\n")
            self._table.writeheader()

    def __call__(self, result: EpochResult) -> None:
        """Write an epoch."""
        if self._table is not None:
            self._table.writerow(asdict(result))
        else:
            self._file.write(json.dumps(as_json(result)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> EpochLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def as_json(result: EpochResult) -> dict[str, float | None]:
    """Return an epoch's figures by name; a loss that is no number is None, which JSON has."""
    return {name: x if math.isfinite(x) else None for name, x in asdict(result).items()}


class TensorBoardLog:
    """Write the same for TensorBoard.

    An instance is what `Trainer.run` takes as ``on_epoch``. Curves that are in the folder
    already are hidden by the new ones.

    Args:
        folder: Where ``tensorboard --logdir`` will look.

    Raises:
        UnsupportedError: The package tensorboard cannot be imported; says how to install it.
        OSError: The folder cannot be written.

    A context manager: leaving it closes what it writes.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer = import_tensorboard().SummaryWriter(str(folder), purge_step=0)

    def __call__(self, result: EpochResult) -> None:
        """Write an epoch."""
        self._writer.add_scalar("train/loss", result.loss, result.epoch)
        self._writer.add_scalar("train/seconds", result.seconds, result.epoch)
        self._writer.add_scalar("test/accuracy", result.accuracy, result.epoch)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left, and close."""
        self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def import_tensorboard() -> ModuleType:
    """Return torch's half of TensorBoard, which needs the other.

    Raises:
        UnsupportedError: It cannot be imported.
    """
    try:
        from torch.utils import tensorboard
    except ImportError as error:
        raise UnsupportedError(
            f"tensorboard cannot be imported ({error}); install it with `pip install tensorboard`"
        ) from error
    return tensorboard
