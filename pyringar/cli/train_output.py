"""Print and write the results of ``pyringar train``."""

from __future__ import annotations

import csv
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyringar.cli.parser import check_output_path, paragraph
from pyringar.errors import RingarError

if TYPE_CHECKING:
    from pyringar.train import EpochResult, Trainer, TrainResult
    from pyringar.train.step_trace import Trace

logger = logging.getLogger(__name__)

FILES = {"out": ".pt", "plot": ".png", "trace": ".json", "log": ".csv"}  # options and suffixes
_PROGRESS_EVERY_S = 10.0


def print_header(trainer: Trainer) -> None:
    from pyringar.train.devices import describe_devices
    from pyringar.train.models import threads_per_rank

    config = trainer.config
    params = trainer.replicas[0]
    count = sum(param.numel() for param in params)
    where = "" if trainer.devices == trainer.all_devices else ", each a process"
    alone = config.world_size == 1
    bucketer = trainer.model.bucketer
    facts = {
        "model": f"{trainer.model.title}, {count:,} parameters in {len(params)} tensors",
        "data": trainer.description,
        "devices": f"{describe_devices(trainer.all_devices)}{where}",
        "allreduce": "none: one rank has nothing to add to its gradients",
    }
    if not alone:
        facts["allreduce"] = str(trainer.plan)
    if config.shards is not None:
        facts["shards"] = (
            f"{config.shards} of every batch, {config.shards // config.world_size} on every rank, "
            "computed one by one, summed as a tree"
        )
    elif not alone:
        num_buckets = len(bucketer.buckets) if bucketer else 1
        is_early = bucketer is not None and bucketer.overlap
        when = "each summed as soon as it is full" if is_early else "summed after backward"
        facts["buckets"] = f"{num_buckets}, {when}"
    if len(trainer.devices) > 1 and trainer.devices[0].type == "cpu":
        each = threads_per_rank(config)
        facts["ranks"] = f"in turns, with {each} torch thread{'' if each == 1 else 's'} each"
    if config.cuda_graph:
        facts["step"] = "captured in a CUDA graph, replayed for every batch"
    amp = " with amp" if config.amp else ""
    amp += ", channels last" if config.channels_last else ""
    weights = [f"{weight:g}" for weight in config.weights or ()]
    shares = f" shared {(':' if len(weights) < 9 else ' : ').join(weights)}" if weights else ""
    momentum = f" momentum {config.momentum:g}" if config.momentum else ""
    facts["recipe"] = (
        f"batch {config.batch_size}{shares}, lr {config.lr:g} {config.lr_schedule}{momentum}, "
        f"{config.init} init, {config.dtype}{amp}, seed {config.seed}"
    )
    if trainer.step:
        done = trainer.step // trainer.steps_per_epoch
        facts["resume"] = f"{done} of {config.epochs} epochs are done; going on from the checkpoint"
    if trainer.stretched_from is not None:
        facts["schedule"] = (
            f"stretched from {trainer.stretched_from} to {config.epochs} epochs: the learning rate "
            "falls to 0 over all of them, so the bits are not those of a run that was never "
            "stopped; with --lr-schedule constant they are"
        )
    for label, text in facts.items():
        print(paragraph(text, label))
    print(f"\n{'epoch':>5}  {'loss':>7}  {'acc':>6}  {'seconds':>7}", flush=True)


class ProgressLine:
    """Logs a line about the current step every 10 seconds."""

    def __init__(self, trainer: Trainer, *, is_live: bool) -> None:
        self._trainer, self._is_live = trainer, is_live
        self._logged_s = time.monotonic()

    def step(self) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _PROGRESS_EVERY_S:
            self._logged_s = now_s
            per_epoch = self._trainer.steps_per_epoch
            epoch, step = divmod(self._trainer.step - 1, per_epoch)
            logger.info("epoch %d: step %d of %d", epoch + 1, step + 1, per_epoch)

    def print_epoch(self, epoch: EpochResult) -> None:
        from pyringar.train.training_plots import accuracy_bar

        row = f"{epoch.epoch:5d}  {epoch.loss:7.4f}  {epoch.accuracy:6.3f}  {epoch.seconds:7.2f}"
        if self._is_live:
            row += f"  {accuracy_bar(epoch.accuracy)}"
        print(row, flush=True)
        self._logged_s = time.monotonic()


class Outputs:
    """The files of a run: checked before it starts; errors of writing are raised at its end."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = {
            name: str(check_output_path(f"--{name}", path, FILES[name]))
            for name, path in paths.items()
        }
        self._failures: dict[str, str] = {}

    def open_log(self) -> None:
        if "log" in self._paths:
            Path(self._paths["log"]).write_text("epoch,loss,accuracy,seconds\n", encoding="utf-8")

    def add_epoch(self, result: EpochResult) -> None:
        """Write a line to the log. An error ends the log, not the training."""
        if "log" in self._paths and "log" not in self._failures:
            self._try("log", lambda path: _append_row(path, result))

    def write(self, result: TrainResult, trace: Trace | None) -> None:
        from pyringar.train.checkpoint import save_state
        from pyringar.train.training_plots import save_plot

        writers: dict[str, Callable[[str], object]] = {
            "out": lambda path: save_state(result.state, path),
            "plot": lambda path: save_plot(result, path),
        }
        if trace is not None and trace.spans:
            writers["trace"] = trace.save
        elif trace is not None:
            logger.warning("--trace: all steps were done before, so nothing is written")
        for name, write in writers.items():
            if name in self._paths:
                self._try(name, write)
        for name, path in self._paths.items():
            if name not in self._failures and (name in writers or name == "log"):
                print(f"{name:<10} {path}")  # not wrapped: paths may have spaces

    def check(self) -> None:
        if self._failures:
            raise RingarError("; ".join(self._failures.values()))

    def _try(self, name: str, write: Callable[[str], object]) -> None:
        path = self._paths[name]
        try:
            write(path)
        except (OSError, RingarError) as error:
            reason = getattr(error, "strerror", None) or error
            self._failures[name] = f"--{name} is '{path}', which could not be written: {reason}"


def _append_row(path: str, result: EpochResult) -> None:
    with open(path, "a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(asdict(result).values())


def as_json(result: TrainResult) -> dict[str, Any]:
    """Return the configuration and the results; a loss that is not finite is None."""
    epochs = [asdict(epoch) for epoch in result.epochs]
    return {
        "config": vars(result.config),
        "data": result.data,
        "devices": list(map(str, result.devices)),
        "allreduce": str(result.plan),
        "digest": result.digest,
        "epochs": [{k: v if math.isfinite(v) else None for k, v in row.items()} for row in epochs],
    }
