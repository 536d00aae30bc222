"""Print and write the results of ``pyringar train``."""

from __future__ import annotations

import csv
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyringar.cli.parser import check_output_path, paragraph
from pyringar.cli.status_line import STATUS, duration
from pyringar.errors import RingarError

if TYPE_CHECKING:
    from pyringar.comm.topology import Plan
    from pyringar.train import EpochResult, TrainConfig, Trainer, TrainResult
    from pyringar.train.step_trace import Trace

logger = logging.getLogger(__name__)

FILES = {"out": ".pt", "plot": ".png", "trace": ".json", "log": ".csv"}  # option to suffix
_WARM_UP_STEPS, _WARM_UP_S = 3, 1.0  # whichever ends first
_ADVICE_AFTER_STEPS, _ADVICE_AFTER_S = 20, 10.0  # whichever comes first
_SLOW_EPOCH_S = 60.0
_BUSY_AFTER_S, _BUSY_SHARE = 5.0, 0.7  # seconds; processor time / elapsed time


# How each algorithm works, by the names in docs/algorithms.md.
_METHODS = {
    "fused": "one pass over shared memory",
    "direct": "every rank sums a slice and the others copy it",
    "ring": "partial sums go around a ring of neighbors",
    "sharded": "each parameter is summed by the rank that owns it",
    "naive": "rank 0 receives all gradients and returns their sum",
    "hierarchical": "first on each machine, then between machines",
}
_ORDERS = {
    "rank": "sums in rank order",
    "ring": "sums in the order of the ring",
    "tree": "sums as a balanced tree",
    "exact": "exact sums",
}


def describe_plan(plan: Plan) -> str:
    """Return one line with the algorithm of a plan and its order of addition."""
    # "exchange", for small tensors between processes, is "direct" with one wait instead of two.
    name = "direct" if plan.algorithm == "exchange" else plan.algorithm
    parts = [f"{name}: {_METHODS[name]}", _ORDERS.get(plan.order, "")]
    return ", ".join(filter(None, parts))


def print_header(trainer: Trainer, *, is_verbose: bool) -> None:
    for label, text in _facts(trainer, is_verbose=is_verbose).items():
        print(paragraph(text, label))
    print(f"\n{'epoch':>5}  {'loss':>7}  {'acc':>6}  {'seconds':>7}", flush=True)


def _facts(trainer: Trainer, *, is_verbose: bool) -> dict[str, str]:
    from pyringar.train.devices import describe_devices
    from pyringar.train.models import threads_per_rank

    config, bucketer, params = trainer.config, trainer.model.bucketer, trainer.replicas[0]
    count = sum(param.numel() for param in params)
    where = "" if trainer.devices == trainer.all_devices else ", one process per rank"
    facts = {
        "model": f"{trainer.model.title}, {count:,} parameters in {len(params)} tensors",
        "data": trainer.description,
        "devices": f"{describe_devices(trainer.all_devices)}{where}",
    }
    if config.world_size == 1:
        facts["allreduce"] = "none: a single rank has no gradients to exchange"
    else:
        facts["allreduce"] = describe_plan(trainer.plan)
    if config.shards is not None:
        facts["shards"] = (
            f"{config.shards} per batch, {config.shards // config.world_size} on each rank; "
            "the gradients are summed as a tree"
        )
    elif config.world_size > 1:
        num_buckets = len(bucketer.buckets) if bucketer else 1
        is_early = bucketer is not None and bucketer.overlap
        buckets = "1 bucket" if num_buckets == 1 else f"{num_buckets} buckets"
        when = "summed as soon as they are ready" if is_early else "summed after backward"
        facts["gradients"] = f"in {buckets}, {when}"
    if len(trainer.devices) > 1 and trainer.devices[0].type == "cpu":
        each = threads_per_rank(config)
        threads = f"{each} torch thread{'' if each == 1 else 's'}"
        facts["ranks"] = f"one after the other, with {threads} each"
    if config.cuda_graph:
        facts["step"] = "captured in a CUDA graph, replayed for every batch"
    facts["recipe"] = _recipe(config)
    if is_verbose:
        facts["plan"] = str(trainer.plan)
    if trainer.step:
        done = trainer.step // trainer.steps_per_epoch
        facts["resume"] = f"{done} of {config.epochs} epochs are done; going on from the checkpoint"
    if trainer.stretched_from is not None:
        facts["schedule"] = (
            f"stretched from {trainer.stretched_from} to {config.epochs} epochs: the learning rate "
            "falls to 0 over all epochs, so bits differ from an uninterrupted run; with "
            "--lr-schedule constant they would not"
        )
    return facts


def _recipe(config: TrainConfig) -> str:
    weights = [f"{weight:g}" for weight in config.weights or ()]
    shares = f" shared {(':' if len(weights) < 9 else ' : ').join(weights)}" if weights else ""
    parts = [f"batch {config.batch_size}{shares}", f"lr {config.lr:g} {config.lr_schedule}"]
    parts += [f"momentum {config.momentum:g}"] if config.momentum else []
    parts += [f"{config.init} init", config.dtype]
    parts += ["amp"] if config.amp else []
    parts += ["channels last"] if config.channels_last else []
    return ", ".join([*parts, f"seed {config.seed}"])


class EpochDisplay:
    """Shows progress inside epochs on the status line, and a row per finished epoch on stdout."""

    def __init__(self, trainer: Trainer, *, is_live: bool) -> None:
        self._trainer, self._is_live = trainer, is_live
        self._steps, self._has_advised = 0, False
        is_one_process = trainer.devices == trainer.all_devices
        self._checks_cores = is_one_process and trainer.devices[0].type == "cpu"
        self._begin(trainer.step // trainer.steps_per_epoch)

    def _begin(self, epoch: int) -> None:
        STATUS.start()
        num_epochs = self._trainer.config.epochs
        self._epoch, self._later = epoch, num_epochs - epoch - 1
        self._title = f"epoch {epoch + 1} of {num_epochs}"
        self._begin_s = time.monotonic()

    def step(self) -> None:
        per_epoch = self._trainer.steps_per_epoch
        done = self._trainer.step - self._epoch * per_epoch
        step_s = (time.monotonic() - self._begin_s) / done
        left_s = (per_epoch - done) * step_s
        text = f"{self._title}: step {done} of {per_epoch}, {duration(left_s)} left"
        run_s = left_s + self._later * per_epoch * step_s
        STATUS.show(f"{text}, {duration(run_s)} for all epochs" if self._later else text)
        self._advise()

    def _advise(self) -> None:
        """Log advice for slow runs, after the first steps or seconds."""
        self._steps += 1
        now_s = time.monotonic()
        if self._steps == 1 or (
            self._steps <= _WARM_UP_STEPS and now_s < self._begin_s + _WARM_UP_S
        ):
            self._warm_steps, self._warm_s = self._steps, now_s
            self._warm_cpu_s = time.process_time()
            return
        elapsed_s, config = now_s - self._warm_s, self._trainer.config
        is_known = self._steps >= _ADVICE_AFTER_STEPS or elapsed_s >= _ADVICE_AFTER_S
        if is_known and not self._has_advised and config.model == "resnet18":
            self._has_advised = True
            step_s = elapsed_s / (self._steps - self._warm_steps)
            if (epoch_s := step_s * self._trainer.steps_per_epoch) >= _SLOW_EPOCH_S:
                where = f"at width {config.width} on this machine"
                faster = "; faster: --width 8" if config.width > 8 else ""
                logger.info("an epoch takes about %s %s%s", duration(epoch_s), where, faster)
        if self._checks_cores and elapsed_s >= _BUSY_AFTER_S:
            self._checks_cores = False
            # The ranks of one process run one after another and never wait, so they keep a free
            # core busy. Little processor time means that other programs use the cores.
            if time.process_time() - self._warm_cpu_s < _BUSY_SHARE * elapsed_s:
                logger.warning("other programs use the cores, so this is slower than it could be")

    def test_batch(self, done: int, total: int) -> None:
        STATUS.show(f"{self._title}: tested {done:,} of {total:,} images")

    def print_epoch(self, epoch: EpochResult) -> None:
        from pyringar.train.training_plots import accuracy_bar

        row = f"{epoch.epoch:5d}  {epoch.loss:7.4f}  {epoch.accuracy:6.3f}  {epoch.seconds:7.2f}"
        if self._is_live:
            row += f"  {accuracy_bar(epoch.accuracy)}"
        STATUS.clear()
        print(row, flush=True)
        self._begin(epoch.epoch)


class Outputs:
    """Output files of a run. The constructor checks the paths; `check` raises later errors."""

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
            logger.warning("--trace: the checkpoint has all steps, so there is no trace to write")
        for name, write in writers.items():
            if name in self._paths:
                self._try(name, write)
        for name, path in self._paths.items():
            if name not in self._failures and (name in writers or name == "log"):
                print(f"{name:<10} {path}")  # not wrapped, since a path may have spaces

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
    """Return the configuration and the results of a run."""
    return {
        "config": vars(result.config),
        "data": result.data,
        "devices": list(map(str, result.devices)),
        "allreduce": str(result.plan),
        "digest": result.digest,
        "epochs": [asdict(epoch) for epoch in result.epochs],
    }
