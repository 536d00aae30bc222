"""``pyringar train``: the book's LeNet or ResNet-18, data parallel on any number of ranks."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyringar.train import EpochResult, TrainConfig, Trainer, TrainResult

__all__ = ["add_parser", "run"]

# Options that are given are passed on to TrainConfig, which has the defaults and checks the values.
_DESCRIPTION = """Train LeNet or ResNet-18 from scratch on many ranks: the batch is split, every
rank has a copy of the parameters, and their gradients are summed by pyringar's allreduce while
backward goes on. Ranks share what there is: GPUs if there are any, else the CPU."""
_EPILOG = """Without options: two ranks, five epochs, on Fashion-MNIST if it is there or can be
downloaded, else on a built-in synthetic set. Example:
pyringar train lenet --ranks 4 --allreduce ring --plot curve.png.
Under torchrun every process is one rank, on the CPU:
torchrun --nproc-per-node 2 -m pyringar train lenet"""


def add_parser(subparsers: Any) -> None:
    """Add ``train`` to the command line."""
    parser = subparsers.add_parser(
        "train",
        help="train a model on many ranks and print the curve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", choices=("lenet", "resnet18"), help="what to train")
    _add_rank_options(parser.add_argument_group("ranks"))
    _add_recipe_options(parser.add_argument_group("recipe"))
    _add_resnet_options(parser.add_argument_group("resnet18 only"))
    _add_data_options(parser.add_argument_group("data and output"))
    parser.set_defaults(run=run)


def _add_rank_options(group: Any) -> None:
    group.add_argument("--ranks", type=int, metavar="K", help="number of ranks (2)")
    group.add_argument(
        "--devices",
        type=_devices,
        metavar="D,D,...",
        help="one device per rank, such as cpu,cpu or cuda:0,cuda:1 (spread by itself)",
    )
    group.add_argument(
        "--allreduce",
        choices=("auto", "fused", "direct", "ring", "sharded", "naive"),
        help="how gradients are summed (auto)",
    )
    group.add_argument(
        "--weights",
        type=_weights,
        metavar="W,W,...",
        help="shares of the ranks in every batch, such as 3,1, or auto to measure them (equal)",
    )
    group.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="steps that the host may run ahead of the GPUs (2)",
    )
    group.add_argument(
        "--bucket-cap-mb",
        type=float,
        metavar="MB",
        help="gradients are summed in buckets of about this size (10)",
    )
    group.add_argument(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="sum gradients after backward, not while it goes on",
    )
    group.add_argument(
        "--compile", action="store_true", help="let torch compile the model; overlap is lost"
    )
    group.add_argument(
        "--cuda-graph",
        action="store_true",
        help="capture the step in a CUDA graph and replay it; all ranks on one GPU",
    )


def _add_recipe_options(group: Any) -> None:
    group.add_argument("--epochs", type=int, metavar="N", help="passes over the images (5)")
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="images a step, all ranks together (64)"
    )
    group.add_argument(
        "--scale-batch", action="store_true", help="multiply the batch size by the ranks"
    )
    group.add_argument("--lr", type=float, help="learning rate (0.1)")
    group.add_argument(
        "--lr-schedule",
        choices=("constant", "linear"),
        help="linear falls to 0 over all steps, constant is as in the book (linear)",
    )
    group.add_argument(
        "--lr-scale",
        choices=("none", "sqrt", "linear"),
        help="multiply the learning rate by the ranks, or their square root (none)",
    )
    group.add_argument(
        "--init",
        choices=("he", "book", "default"),
        help="initial weights: by the number of inputs (he), 0.01 as in the book, or for resnet18 "
        "torch's default",
    )
    group.add_argument("--seed", type=int, help="of initial weights and image order (0)")
    group.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16", "float16"),
        help="of parameters and images (float32)",
    )
    group.add_argument(
        "--amp", action="store_true", help="compute in bfloat16 where that is safe (autocast)"
    )


def _add_resnet_options(group: Any) -> None:
    group.add_argument(
        "--width", type=int, metavar="N", help="channels of the first of four stages (64)"
    )
    group.add_argument(
        "--batchnorm",
        choices=("local", "sync"),
        help="normalise by every rank's own samples, or by the whole batch (local)",
    )


def _add_data_options(group: Any) -> None:
    group.add_argument(
        "--dataset",
        choices=("auto", "fashion-mnist", "synthetic"),
        help="auto takes synthetic images where Fashion-MNIST cannot be had (auto)",
    )
    group.add_argument(
        "--data-dir",
        metavar="DIR",
        help="holds FashionMNIST/raw, or gets it by download (the user's data folder)",
    )
    group.add_argument("--plot", metavar="FILE.png", help="write the curve as a picture")
    group.add_argument(
        "--live",
        action="store_true",
        help="draw the curve as text: in place as it grows in a terminal, else once at the end",
    )
    group.add_argument(
        "--trace",
        metavar="FILE.json",
        help="write what the first 100 steps did and when, for ui.perfetto.dev and pyringar trace",
    )
    group.add_argument(
        "--timeline", metavar="FILE.png", help="draw the last of these steps as a picture"
    )


def _devices(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _weights(text: str) -> tuple[float, ...] | str:
    if text == "auto":
        return text
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between") from None


def run(args: argparse.Namespace) -> int:
    """Train, and print the curve and the book's last line."""
    from pyringar.train import TrainConfig, Trainer
    from pyringar.train.group import TrainGroup, num_processes, writes_files
    from pyringar.train.plot import check_output_path, save_plot
    from pyringar.train.trace import Trace

    options = {name: value for name, value in vars(args).items() if name != "run"}
    plot, file, timeline = (options.pop(name, None) for name in ("plot", "trace", "timeline"))
    is_live = options.pop("live", False)
    for name, path in (("plot", plot), ("trace", file), ("timeline", timeline)):
        if path is not None and writes_files():
            check_output_path(name, path, ".json" if name == "trace" else ".png")
    trace = Trace() if file is not None or timeline is not None else None
    group = None
    if num_processes() > 1:
        config = TrainConfig(**{"ranks": num_processes(), **options})
        group = TrainGroup(config)
        if not group.is_main:  # rank 0 says it for all
            logging.getLogger("pyringar").setLevel(logging.ERROR)
    else:
        config = TrainConfig(**options)
    with Trainer(config, trace=trace, group=group) as trainer:
        if not trainer.is_main:
            trainer.run()
            return 0
        _print_header(trainer)
        result = _train_with_bar(trainer, is_live)
        if group is not None:
            print(f"ranks      {config.world_size} processes, equal parameters {group.digest}")
    if plot is not None:
        save_plot(result, plot)
        print(f"plot       {plot}")
    if trace is not None and file is not None:
        trace.save(file)
        print(f"trace      {file}")
    if trace is not None and timeline is not None:
        trace.plot(timeline)
        print(f"timeline   {timeline}")
    print(result.line)
    return 0


def _print_header(trainer: Trainer) -> None:
    from pyringar.train.devices import describe_devices

    config: TrainConfig = trainer.config
    params = trainer.replicas[0]
    count = sum(param.numel() for param in params)
    print(f"model      {trainer.model.title}, {count:,} parameters in {len(params)} tensors")
    print(f"data       {trainer.description}")
    where = "" if trainer.group is None else ", each a process"
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

    from pyringar.train.live import LivePlot

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
