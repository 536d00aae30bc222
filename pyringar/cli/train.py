"""``pyringar train``: the book's LeNet or ResNet-18, data parallel on any number of ranks."""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from pyringar.cli.paths import check_output_path
from pyringar.train import EpochResult, TrainConfig, Trainer, TrainResult
from pyringar.train.config import CHOICES
from pyringar.train.devices import describe_devices
from pyringar.train.group import OneProcess, Processes, num_processes, writes_files
from pyringar.train.live import LivePlot
from pyringar.train.plot import save_plot
from pyringar.train.trace import Trace

__all__ = ["add_parser", "run"]

_DESCRIPTION = """Train LeNet or ResNet-18 from scratch on many ranks: the batch is split, every
rank has a copy of the parameters, and their gradients are summed by pyringar's allreduce while
backward goes on. Ranks share what there is: GPUs if there are any, else the CPU."""
_EPILOG = """Without options: two ranks, five epochs, on Fashion-MNIST if it is there or can be
downloaded, else on a built-in synthetic set. Example:
pyringar train lenet --ranks 4 --allreduce ring --plot curve.png.
Under torchrun every process is one rank, on the CPU:
torchrun --nproc-per-node 2 -m pyringar train lenet"""


def _devices(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _weights(text: str) -> tuple[float, ...] | str:
    if text == "auto":
        return text
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between") from None


_COUNT = {"type": int, "metavar": "N"}
_FLAG = {"action": "store_true"}
# Options by group: what --help says, and how argparse reads them. All but _FILES and --live are
# fields of TrainConfig, which has the choices and the defaults, and checks the values.
_OPTIONS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "ranks": {
        "ranks": ("number of ranks (2)", {"type": int, "metavar": "K"}),
        "devices": (
            "one device per rank, such as cpu,cpu or cuda:0,cuda:1 (spread by itself)",
            {"type": _devices, "metavar": "D,D,..."},
        ),
        "allreduce": ("how gradients are summed", {}),
        "weights": (
            "shares of the ranks in every batch, such as 3,1, or auto to measure them (equal)",
            {"type": _weights, "metavar": "W,W,..."},
        ),
        "max_inflight": ("steps that the host may run ahead of the GPUs", _COUNT),
        "bucket_cap_mb": (
            "gradients are summed in buckets of about this size",
            {"type": float, "metavar": "MB"},
        ),
        "no_overlap": (
            "sum gradients after backward, not while it goes on",
            {"dest": "overlap", "action": "store_false"},
        ),
        "compile": ("let torch compile the model; overlap is lost", _FLAG),
        "cuda_graph": (
            "capture the step in a CUDA graph and replay it; all ranks on one GPU",
            _FLAG,
        ),
    },
    "recipe": {
        "epochs": ("passes over the images", _COUNT),
        "batch_size": ("images a step, all ranks together", _COUNT),
        "scale_batch": ("multiply the batch size by the ranks", _FLAG),
        "lr": ("learning rate", {"type": float}),
        "lr_schedule": ("linear falls to 0 over all steps, constant is as in the book", {}),
        "lr_scale": ("multiply the learning rate by the ranks, or their square root", {}),
        "init": (
            "initial weights: by the number of inputs (he), 0.01 as in the book, or for resnet18 "
            "torch's default",
            {},
        ),
        "seed": ("of initial weights and image order", {"type": int}),
        "dtype": ("of parameters and images", {}),
        "amp": ("compute in bfloat16 where that is safe (autocast)", _FLAG),
    },
    "resnet18 only": {
        "width": ("channels of the first of four stages", _COUNT),
        "batchnorm": ("normalise by every rank's own samples, or by the whole batch", {}),
    },
    "data and output": {
        "dataset": ("auto takes synthetic images where Fashion-MNIST cannot be had", {}),
        "data_dir": (
            "holds FashionMNIST/raw, or gets it by download (the user's data folder)",
            {"metavar": "DIR"},
        ),
        "plot": ("write the curve as a picture", {"metavar": "FILE.png"}),
        "live": (
            "draw the curve as text: in place as it grows in a terminal, else once at the end",
            _FLAG,
        ),
        "trace": (
            "write what the first 100 steps did and when, for ui.perfetto.dev and pyringar trace",
            {"metavar": "FILE.json"},
        ),
        "timeline": ("draw the last of these steps as a picture", {"metavar": "FILE.png"}),
    },
}
_FILES = {"plot": ".png", "trace": ".json", "timeline": ".png"}


def add_parser(subparsers: Any) -> None:
    """Add ``train`` to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train a model on many ranks and print the curve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,  # only options that are given reach TrainConfig
    )
    parser.add_argument("model", choices=CHOICES["model"], help="what to train")
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, (text, how) in options.items():
            choices = {"choices": CHOICES[name]} if name in CHOICES else {}
            default = getattr(TrainConfig, name, None)
            if default not in (None, "") and default is not False:
                text = f"{text} ({default})"
            group.add_argument("--" + name.replace("_", "-"), help=text, **choices, **how)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, and print the curve and the book's last line."""
    options = {name: value for name, value in vars(args).items() if name != "run"}
    is_live = options.pop("live", False)
    files = {name: options.pop(name) for name in _FILES if name in options}
    if writes_files():
        for name, path in files.items():
            check_output_path(f"--{name}", path, _FILES[name])
    trace = Trace()
    config, group = _join(options)
    with Trainer(config, trace=trace if files.keys() - {"plot"} else None, group=group) as trainer:
        if not trainer.is_main:
            trainer.run()
            return 0
        _print_header(trainer)
        result = _train_with_bar(trainer, is_live)
    if group.digest:
        print(f"ranks      {config.world_size} processes, equal parameters {group.digest}")
    write: dict[str, Callable[[str], None]] = {
        "plot": functools.partial(save_plot, result),
        "trace": trace.save,
        "timeline": trace.plot,
    }
    for name, path in files.items():
        write[name](path)
        print(f"{name:<10} {path}")
    print(result.line)
    return 0


def _join(options: dict[str, Any]) -> tuple[TrainConfig, OneProcess | Processes]:
    """Return the run that is wanted and its ranks: the processes of torchrun, where there are."""
    if num_processes() == 1:
        config = TrainConfig(**options)
        return config, OneProcess(config)
    config = TrainConfig(**{"ranks": num_processes(), **options})
    group = Processes(config)
    if not group.is_main:  # rank 0 says it for all
        logging.getLogger("pyringar").setLevel(logging.ERROR)
    return config, group


def _print_header(trainer: Trainer) -> None:
    config = trainer.config
    params = trainer.replicas[0]
    count = sum(param.numel() for param in params)
    print(f"model      {trainer.model.title}, {count:,} parameters in {len(params)} tensors")
    print(f"data       {trainer.description}")
    where = "" if trainer.devices == trainer.all_devices else ", each a process"
    print(f"devices    {describe_devices(trainer.all_devices)}{where}")
    print(f"allreduce  {trainer.plan}")
    when = "each summed as soon as it is full" if config.overlap else "summed after backward"
    print(f"buckets    {len(trainer.model.bucketer.buckets)}, {when}")
    if config.cuda_graph:
        print("step       captured in a CUDA graph, replayed for every full batch")
    amp = " with amp" if config.amp else ""
    weights = ":".join(f"{weight:g}" for weight in trainer.weights or ())
    shares = f" shared {weights}" if weights else ""
    print(
        f"recipe     batch {config.global_batch_size}{shares}, lr {config.initial_lr:g} "
        f"{config.lr_schedule}, {config.init} init, {config.dtype}{amp}, seed {config.seed}"
    )
    print(f"\n{'epoch':>5}  {'loss':>7}  {'acc':>6}  {'seconds':>7}", flush=True)


def _train_with_bar(trainer: Trainer, is_live: bool) -> TrainResult:
    """Train; a line per epoch on stdout, and a progress bar on stderr if that is a terminal.

    A live plot stands below the bar, and both on stdout, for it stays there in the end.
    """
    from tqdm import tqdm

    config = trainer.config
    screen = sys.stdout if is_live else sys.stderr
    bar = tqdm(
        total=config.epochs * trainer.steps_per_epoch,
        unit="step",
        leave=False,
        file=screen,
        disable=not screen.isatty(),
    )
    plot = LivePlot(config.epochs, where="text") if is_live else None

    def print_epoch(epoch: EpochResult) -> None:
        line = f"{epoch.epoch:5d}  {epoch.loss:7.4f}  {epoch.accuracy:6.3f}  {epoch.seconds:7.2f}"
        bar.write(line, file=sys.stdout)  # clears the bar first, where there is one
        sys.stdout.flush()
        if plot is not None:
            plot(epoch)

    with plot or nullcontext(), bar:  # the plot goes last, and stays
        return trainer.run(on_step=bar.update, on_epoch=print_epoch)
