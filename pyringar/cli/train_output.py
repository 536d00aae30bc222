"""Print and write what ``pyringar train`` tells."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from pyringar.cli.paths import check_output_dir, check_output_path
from pyringar.cli.text import COLUMNS, paragraph
from pyringar.errors import ArgumentError, RingarError, UnsupportedError

if TYPE_CHECKING:
    from pyringar.train import EpochResult, Trainer, TrainResult
    from pyringar.train.trace import Trace

__all__ = ["FILES", "Outputs", "Progress", "as_json", "print_header"]

logger = logging.getLogger(__name__)

FILES: dict[str, str | tuple[str, ...]] = {
    "out": ".pt",  # first: what took longest to get
    "plot": ".png",
    "trace": ".json",
    "timeline": ".png",
    "log": (".csv", ".jsonl"),
}
_OF_STEPS = ("trace", "timeline")
_PROGRESS_EVERY_S = 10.0


def print_header(trainer: Trainer) -> None:
    """Print what will run, and the head of the table of epochs."""
    for label, text in _facts(trainer).items():
        print(paragraph(text, label))
    print(f"\n{'epoch':>5}  {'loss':>7}  {'acc':>6}  {'seconds':>7}", flush=True)


def _facts(trainer: Trainer) -> dict[str, str]:
    from pyringar.train.devices import describe_devices
    from pyringar.train.models import threads_per_rank

    config = trainer.config
    params = trainer.replicas[0]
    count = sum(param.numel() for param in params)
    where = "" if trainer.devices == trainer.all_devices else ", each a process"
    alone = config.world_size == 1
    plan = "none: one rank has nothing to add to its gradients" if alone else str(trainer.plan)
    bucketer = trainer.model.bucketer
    when = "each summed as soon as it is full" if bucketer.overlap else "summed after backward"
    facts = {
        "model": f"{trainer.model.title}, {count:,} parameters in {len(params)} tensors",
        "data": trainer.description,
        "devices": f"{describe_devices(trainer.all_devices)}{where}",
        "allreduce": plan,
        "buckets": f"{len(bucketer.buckets)}, {when}",
    }
    if alone or config.shards is not None:
        del facts["buckets"]
    if config.shards is not None:
        facts["shards"] = (
            f"{config.shards} of every batch, {config.shards // config.world_size} on every rank, "
            "computed one by one, summed as a tree"
        )
    if len(trainer.devices) > 1 and trainer.devices[0].type == "cpu":
        each = threads_per_rank(config)
        facts["ranks"] = f"in turns, with {each} torch thread{'' if each == 1 else 's'} each"
    if config.cuda_graph:
        facts["step"] = "captured in a CUDA graph, replayed for every batch"
    amp = " with amp" if config.amp else ""
    amp += ", channels last" if config.channels_last else ""
    weights = [f"{weight:g}" for weight in trainer.weights or ()]
    shares = f" shared {(':' if len(weights) < 9 else ' : ').join(weights)}" if weights else ""
    momentum = f" momentum {config.momentum:g}" if config.momentum else ""
    facts["recipe"] = (
        f"batch {config.global_batch_size}{shares}, lr {config.initial_lr:g} "
        f"{config.lr_schedule}{momentum}, {config.init} init, {config.dtype}{amp}, "
        f"seed {config.seed}"
    )
    if trainer.step:
        epochs, steps = divmod(trainer.step, trainer.steps_per_epoch)
        done = f"{epochs} of {config.epochs} epochs" + (f" and {steps} steps" if steps else "")
        facts["resume"] = f"{done} are done; going on from the checkpoint"
    return facts


class Progress:
    """Steps as they are done: a bar in a terminal, elsewhere a line on stderr now and then.

    Args:
        trainer: What runs.
        is_live: Whether a plot stands below the bar: then both are on stdout, where the plot stays.
    """

    def __init__(self, trainer: Trainer, is_live: bool) -> None:
        from tqdm import tqdm

        self._trainer = trainer
        screen = sys.stdout if is_live else sys.stderr
        self._bar: Any = tqdm(
            total=trainer.config.epochs * trainer.steps_per_epoch,
            initial=trainer.step,
            unit="step",
            leave=False,
            file=screen,
            disable=not screen.isatty(),
        )
        self._told_s = time.monotonic()

    def step(self) -> None:
        """Note a step."""
        self._bar.update()
        now_s = time.monotonic()
        if self._bar.disable and now_s - self._told_s >= _PROGRESS_EVERY_S:
            self._told_s = now_s
            per_epoch = self._trainer.steps_per_epoch
            epoch, step = divmod(self._trainer.step - 1, per_epoch)
            logger.info("epoch %d: step %d of %d", epoch + 1, step + 1, per_epoch)

    def print_epoch(self, epoch: EpochResult) -> None:
        """Print a line of the table, above the bar if there is one."""
        line = f"{epoch.epoch:5d}  {epoch.loss:7.4f}  {epoch.accuracy:6.3f}  {epoch.seconds:7.2f}"
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()
        self._told_s = time.monotonic()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class Outputs:
    """The files of a run, which are checked before it starts; what fails later is told at its end.

    Args:
        paths: By option.

    Raises:
        ArgumentError: One cannot be written, or two are the same; names the flag.
        UnsupportedError: A package for it is missing; names the flag.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths: dict[str, str] = {}
        self._failures: list[str] = []
        self._logs: dict[str, Callable[[EpochResult], None]] = {}
        self._open = ExitStack()
        seen: dict[str, str] = {}
        for name, path in paths.items():
            if name == "tensorboard":
                checked = check_output_dir(f"--{name}", path)
            else:
                checked = check_output_path(f"--{name}", path, FILES[name])
            self._paths[name] = str(checked)
            other = seen.setdefault(os.path.realpath(checked), name)
            if other != name:
                raise ArgumentError(f"--{name} is '{path}', and so is --{other}")

    @property
    def wants_trace(self) -> bool:
        """Return whether the steps have to be traced."""
        return not self._paths.keys().isdisjoint(_OF_STEPS)

    def open_logs(self) -> None:
        """Begin the logs, in the place of older ones."""
        from pyringar.train.log import EpochLog, TensorBoardLog

        makers: dict[str, Any] = {"log": EpochLog, "tensorboard": TensorBoardLog}
        for name in makers.keys() & self._paths.keys():
            try:
                log = self._open.enter_context(makers[name](self._paths[name]))
            except UnsupportedError as error:
                raise UnsupportedError(f"--{name}: {error}") from error
            self._logs[name] = log

    def add_epoch(self, result: EpochResult) -> None:
        """Write an epoch to the logs. One that cannot be written stops, and not the training."""
        for name, log in list(self._logs.items()):
            if not self._try(name, lambda log=log: log(result)):  # type: ignore[misc]
                del self._logs[name]

    def write(self, result: TrainResult, trace: Trace) -> None:
        """Write all files, and print their names.

        Args:
            result: The finished run.
            trace: What its steps did.
        """
        from pyringar.train.checkpoint import save_state
        from pyringar.train.plot import save_plot

        writers: dict[str, Callable[[str], object]] = {
            "plot": lambda path: save_plot(result, path),
            "trace": trace.save,
            "timeline": trace.plot,
            "out": lambda path: save_state(result.state, path),
        }
        for name, path in self._paths.items():
            write = writers.get(name)
            if name in _OF_STEPS and not trace.spans:
                logger.warning("--%s: all steps were done before, so nothing is written", name)
                continue
            is_written = name in self._logs
            if write is not None:
                is_written = self._try(name, lambda write=write, path=path: write(path))  # type: ignore[misc]
            if is_written:
                line = f"{name:<10} {path}"  # not wrapped: paths may have spaces
                what = f"the parameters of {_module_of(result)}" if name == "out" else ""
                between = ", " if len(f"{line}, {what}") <= COLUMNS else f",\n{'':<10} "
                print(f"{line}{between}{what}" if what else line)

    def close(self) -> None:
        """Close the logs."""
        with suppress(OSError):  # of a log that could not be written before
            self._open.close()

    def check(self) -> None:
        """Raise if something could not be written.

        Raises:
            RingarError: Names the flags and the reasons.
        """
        if self._failures:
            raise RingarError("; ".join(self._failures))

    def _try(self, name: str, write: Callable[[], object]) -> bool:
        try:
            write()
        except (OSError, RingarError) as error:
            reason = getattr(error, "strerror", None) or error
            self._failures.append(
                f"--{name} is '{self._paths[name]}', which could not be written: {reason}"
            )
            return False
        return True


def as_json(result: TrainResult) -> dict[str, Any]:
    """Return what was run and how it went."""
    from pyringar.train.log import as_json as row_of

    return {
        "config": vars(result.config),
        "data": result.data,
        "devices": list(map(str, result.devices)),
        "allreduce": str(result.plan),
        "epochs": [row_of(epoch) for epoch in result.epochs],
    }


def _module_of(result: TrainResult) -> str:
    """Return what makes the module that loads a run's parameters."""
    config = result.config
    options = {}
    if config.model == "resnet18":
        options["width"] = str(config.width)
    if config.dtype != "float32":
        options["dtype"] = f"torch.{config.dtype}"
    words = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"pyringar.train.{'LeNet' if config.model == 'lenet' else config.model}({words})"
