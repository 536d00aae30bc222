"""``pyringar train``: train LeNet or ResNet-18 data parallel on many ranks."""

from __future__ import annotations

import argparse
import io
import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from pyringar.cli.parser import add_json_option, paragraph
from pyringar.cli.status_line import STATUS, compiling_text, load_engine
from pyringar.cli.train_output import FILES, EpochDisplay, Outputs, as_json, print_header
from pyringar.errors import ArgumentError, CompilerNotFoundError, RingarError
from pyringar.train.config import CHOICES, TrainConfig

if TYPE_CHECKING:
    from pyringar.train import EpochResult, TrainResult
    from pyringar.train.train_group import TrainGroup

logger = logging.getLogger(__name__)

_DESCRIPTION = """Train LeNet or ResNet-18 from scratch on many ranks. Each batch is split over the
ranks, every rank has a copy of the parameters, and an allreduce sums the gradients. Ranks use the
machine's GPUs if there are any, else the CPU."""
_EPILOG = """Without options: two ranks and five epochs, on Fashion-MNIST if it is on disk or can be
downloaded, else on synthetic images. Example:
pyringar train lenet --ranks 4 --allreduce ring --plot curve.png.
Under torchrun every process is one rank, on the CPU:
torchrun --nproc-per-node 2 -m pyringar train lenet"""


def _devices(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between") from None


_COUNT = {"type": int, "metavar": "N"}
_DIR = {"metavar": "DIR"}
_FLAG = {"action": "store_true"}
_SWITCH = {"action": argparse.BooleanOptionalAction}
# Options by group: the help text, and the arguments for argparse. Options of all groups except
# "output" are fields of TrainConfig, which defines choices and defaults and checks the values.
_OPTIONS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "ranks": {
        "ranks": ("number of ranks (2)", {"type": int, "metavar": "K"}),
        "devices": (
            "one device per rank, such as cpu,cpu or cuda:0,cuda:1 (spread automatically)",
            {"type": _devices, "metavar": "D,D,..."},
        ),
        "allreduce": ("algorithm that sums the gradients", {}),
        "shards": (
            "split every batch into N shards, computed one by one: the same bits on any number of "
            "ranks, if each rank gets 1, 2, 4, ... shards",
            _COUNT,
        ),
        "weights": ("shard sizes, such as 3,1 (equal)", {"type": _weights, "metavar": "W,W,..."}),
        "bucket_cap_mb": ("sum gradients in buckets of MB", {"type": float, "metavar": "MB"}),
        "no_overlap": ("sum after backward", {"dest": "overlap", "action": "store_false"}),
        "compile": ("compile the model with torch.compile; disables overlap", _FLAG),
        "cuda_graph": ("capture the step; all ranks on one GPU (on with --amp)", _SWITCH),
    },
    "recipe": {
        "epochs": ("passes over the images", _COUNT),
        "batch_size": ("images per step, summed over all ranks", _COUNT),
        "lr": ("learning rate", {"type": float}),
        "lr_schedule": ("linear: falls to 0 over all steps; constant: as in the book", {}),
        "momentum": ("fraction of the previous update that is added", {"type": float}),
        "init": (
            "initial weights: by number of inputs (he), 0.01 (book), or torch's (default)",
            {},
        ),
        "seed": ("seed of initial weights and image order", {"type": int}),
        "amp": ("compute in bfloat16 where autocast allows it", _FLAG),
    },
    "resnet18 only": {
        "width": ("channels of the first stage", _COUNT),
        "channels_last": ("memory layout for tensor cores (on with --amp on GPUs)", _SWITCH),
        "batchnorm": ("normalize over the samples of a rank or of the batch (sync)", {}),
    },
    "data": {
        "dataset": ("auto: Fashion-MNIST if available, else synthetic", {}),
        "data_dir": ("folder with FashionMNIST/raw (the user's data folder)", _DIR),
    },
    "output": {
        "save": ("write a checkpoint after every epoch", _DIR),
        "resume": (
            "resume from the checkpoint in DIR and save there, with the bits of an uninterrupted "
            "run; repeat the other options, but --epochs may grow (a linear schedule is then "
            "stretched over all epochs, which changes bits)",
            _DIR,
        ),
        "out": ("write the trained parameters, for load_state_dict", {"metavar": "FILE.pt"}),
        "log": ("write a row per epoch", {"metavar": "FILE.csv"}),
        "plot": ("write the curve as a picture", {"metavar": "FILE.png"}),
        "live": ("draw a bar of the accuracy beside each epoch", _FLAG),
        "trace": ("write the times of 100 steps, see pyringar trace", {"metavar": "FILE.json"}),
        "verbose": ("print the plan of the allreduce in the header", _FLAG),
    },
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model on many ranks and print the curve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,  # TrainConfig supplies the defaults
    )
    parser.add_argument("model", choices=CHOICES["model"], help="model to train")
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, (text, how) in options.items():
            choices = {"choices": CHOICES[name]} if name in CHOICES else {}
            default = getattr(TrainConfig, name, None)
            if default not in (None, "") and default is not False:
                text = f"{text} ({default})"
            group.add_argument("--" + name.replace("_", "-"), help=text, **choices, **how)
    add_json_option(group)


def run(args: argparse.Namespace) -> int:
    given = dict(vars(args))
    is_json, is_live = given.pop("json", False), given.pop("live", False)
    if is_json and is_live:
        raise ArgumentError("live is True, but --json draws nothing")
    with redirect_stdout(io.StringIO()) if is_json else nullcontext():
        outputs, result = _run(given, is_live=is_live)
    if is_json and result is not None:
        print(json.dumps(as_json(result), indent=2, default=str))
    outputs.check()
    return 0


def _run(options: dict[str, Any], *, is_live: bool) -> tuple[Outputs, TrainResult | None]:
    from pyringar.train import Trainer
    from pyringar.train.step_trace import Trace
    from pyringar.train.train_group import writes_files

    folders = {name: options.pop(name) for name in ("save", "resume") if name in options}
    files = {name: options.pop(name) for name in FILES if name in options}
    is_verbose = options.pop("verbose", False)
    outputs = Outputs(files if writes_files() else {})
    config, group = _join(options)
    trace = Trace() if "trace" in files else None
    with Trainer(config, trace=trace, group=group, **folders) as trainer:
        if not trainer.is_main:
            trainer.run()
            return outputs, None
        outputs.open_log()
        print_header(trainer, is_verbose=is_verbose)
        display = EpochDisplay(trainer, is_live=is_live)

        def add_epoch(epoch: EpochResult) -> None:
            display.print_epoch(epoch)
            outputs.add_epoch(epoch)

        try:
            result = trainer.run(display.step, add_epoch, display.test_batch)
        except BaseException as error:
            if (folder := trainer.checkpoint_dir) is not None:
                advice = f"the same command with --resume '{folder}' instead of --save"
                logger.warning("finished epochs are in '%s'; to go on: %s", folder, advice)
            elif isinstance(error, KeyboardInterrupt):
                advice = "--save DIR keeps finished epochs, and --resume DIR goes on from there"
                if config.model == "resnet18" and config.width > 8:
                    advice += "; --width 8 trains a smaller network in less time"
                logger.warning("nothing was kept: %s", advice)
            raise
        try:
            if group.digest:
                ranks = f"{config.world_size} processes, equal parameters {group.digest}"
                print(paragraph(ranks, "ranks"))
            if config.shards is not None:
                digest = f"{result.digest}, the same on every possible number of ranks"
                print(paragraph(digest, "digest"))
            if trainer.checkpoint_dir is not None:
                print(f"{'save':<10} {trainer.checkpoint_dir}")
            outputs.write(result, trace)
        finally:
            print(paragraph(str(result)))
    return outputs, result


def _join(options: Mapping[str, Any]) -> tuple[TrainConfig, TrainGroup]:
    from pyringar.train.train_group import ProcessTrainGroup, TrainGroup, num_processes

    if num_processes() == 1:
        config = TrainConfig(**options)
        _load_engines(config)
        return config, TrainGroup(config)
    config = TrainConfig(**{"ranks": num_processes(), **options})
    group = ProcessTrainGroup(config)
    if not group.is_main:  # rank 0 logs for all ranks
        logging.getLogger("pyringar").setLevel(logging.ERROR)
    return config, group


def _load_engines(config: TrainConfig) -> None:
    """Load the engines that the run needs; show progress if one must be compiled."""
    import torch

    from pyringar.engine import load
    from pyringar.engine.compile import CUDA

    names = ["cuda"] if config.devices is None else [str(name) for name in config.devices]
    if torch.cuda.device_count() and any(name.startswith("cuda") for name in names):
        with STATUS.elapsed(compiling_text(CUDA)), suppress(RingarError):  # choose_devices warns
            load.cuda_engine()
            return
    try:
        load_engine()
    except CompilerNotFoundError as error:
        if config.allreduce in ("naive", "sharded"):
            return
        if config.shards is not None:
            raise
        advice = "Or train without the engine: --allreduce naive"
        raise CompilerNotFoundError(
            f"{error}{'' if str(error).endswith('.') else '.'} {advice}"
        ) from error
