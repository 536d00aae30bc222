"""Define `TrainConfig`, the validated options of a training run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyringar.choices import ALGORITHMS, BATCHNORMS, Algorithm, Order, check_choice, check_count
from pyringar.errors import ArgumentError

if TYPE_CHECKING:  # the command line lists the choices without importing torch
    import torch

_DEFAULT_RANKS = 2
_FULL_WIDTH = 64

# Initial weights of each model; the first is the default.
INITS = {"lenet": ("he", "book"), "resnet18": ("default", "book")}
MODEL_TITLES = {"lenet": "LeNet", "resnet18": "ResNet-18"}
CHOICES: dict[str, tuple[str, ...]] = {
    "model": tuple(MODEL_TITLES),
    "allreduce": ALGORITHMS,
    "lr_schedule": ("constant", "linear"),
    "dtype": ("float32", "float64"),
    "dataset": ("auto", "fashion-mnist", "synthetic"),
    "batchnorm": BATCHNORMS,
    "init": tuple(dict.fromkeys(init for inits in INITS.values() for init in inits)),
}
# Option to the values of other options that remain allowed with it, and to the reason.
_RULES: dict[str, tuple[dict[str, tuple[Any, ...]], str]] = {
    "model lenet": (
        {"width": (_FULL_WIDTH,), "batchnorm": ("local",), "channels_last": (None, False)},
        "an option of resnet18 alone",
    ),
    "shards": (
        {
            "allreduce": ("auto", "fused", "direct"),
            "weights": (None,),
            "batchnorm": ("local",),
            "bucket_cap_mb": (10.0,),
            "overlap": (True,),
            "compile": (False,),
            "cuda_graph": (None, False),
        },
        "so that bits do not depend on the number of ranks",
    ),
    "compile": ({"batchnorm": ("local",)}, "since compiled layers cannot wait for other ranks"),
    "amp": ({"dtype": ("float32",)}, "which computes in bfloat16"),
    "cuda_graph": (
        {"allreduce": tuple(name for name in ALGORITHMS if name != "ring")},
        "since a graph cannot capture the ring",
    ),
}


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run.

    The defaults learn well in few epochs. The book uses ``batch_size=256, lr=0.2, epochs=10,
    lr_schedule="constant", init="book"``.

    Attributes:
        ranks: Number of ranks: on the machine's GPUs, or on the CPU if there are none. Default:
            one per entry of ``devices``, else 2.
        batch_size: Samples per step, summed over all ranks.
        lr: Learning rate.
        devices: One device per rank, such as ``("cpu", "cpu")`` or ``("cuda:0",)``.
        epochs: Passes over the training images.
        allreduce: How gradients are reduced. ``fused``, ``direct``, ``sharded`` and ``naive`` add
            in rank order and give equal bits. ``ring`` adds in another order.
        lr_schedule: ``"linear"``: the learning rate falls linearly to 0. ``"constant"``: as in the
            book; the accuracy then changes by several points from epoch to epoch.
        weights: Relative share of each batch that a rank gets, for devices of unequal speed. The
            gradient is the same for all weights.
        init: LeNet: ``"he"`` (default) or ``"book"``, see `pyringar.train.lenet_params`.
            ResNet-18: ``"default"`` or ``"book"``, see `pyringar.train.resnet18`.
        seed: Seed of the initial parameters and of the order of the images.
        dtype: Dtype of parameters, images and gradients: ``"float32"`` or ``"float64"``.
        dataset: See `pyringar.train.load_data`.
        data_dir: See `pyringar.train.load_data`.
        model: ``"lenet"`` or ``"resnet18"``.
        width: Channels of ResNet-18 in its first stage.
        batchnorm: Statistics of ResNet-18: ``"local"`` computes them over the samples of each rank,
            ``"sync"`` over the whole batch. Evaluation uses the running statistics of rank 0.
        amp: Compute in bfloat16 where torch's autocast allows it. Parameters and gradients stay
            float32. Faster on GPUs, slower on CPUs without 16-bit arithmetic.
        channels_last: Use the channels-last layout in ResNet-18, for tensor cores, and do not train
            the biases that a batch norm cancels. Changes results by rounding. None: on with
            ``amp`` on GPUs.
        bucket_cap_mb: See `pyringar.GradientBucketer`.
        overlap: True: on GPUs and over processes, reduce each bucket as soon as it is full. False:
            reduce after backward, as CPU ranks of one process always do. Does not change bits if
            gradients are added in rank order.
        compile: Compile the model with ``torch.compile``, which takes a minute. Compiled backward
            returns all gradients at its end, so reduction does not overlap with it.
        cuda_graph: Capture the whole step in a CUDA graph and replay it for every batch, which
            saves launches and lets ranks compute at the same time. All ranks must share one GPU,
            and ``allreduce`` must not be ``"ring"``. Does not change bits. None: on with ``amp`` if
            possible, and off with ``compile``.
        momentum: Fraction of the previous update that is added to each update, 0 to below 1. With
            a constant learning rate it equals the momentum of ``torch.optim.SGD``.
        shards: Split every batch into this many shards, and compute each with one torch thread.
            Bits then do not depend on the number of ranks; see `pyringar.ShardedStep`. Batch norm
            uses the statistics of a shard.

    Raises:
        ArgumentError: A value is out of range; names the option.
    """

    ranks: int | None = None
    batch_size: int = 64
    lr: float = 0.1
    devices: Sequence[str | torch.device] | None = None
    epochs: int = 5
    allreduce: Algorithm = "auto"
    lr_schedule: str = "linear"
    weights: Sequence[float] | None = None
    init: str = ""  # "": the model's default
    seed: int = 0
    dtype: str = "float32"
    dataset: str = "auto"
    data_dir: str | Path | None = None
    model: str = "lenet"
    width: int = _FULL_WIDTH
    batchnorm: str = "local"
    amp: bool = False
    channels_last: bool | None = None
    bucket_cap_mb: float = 10.0
    overlap: bool = True
    compile: bool = False
    cuda_graph: bool | None = None
    momentum: float = 0.0
    shards: int | None = None

    def __post_init__(self) -> None:
        from pyringar.parallel.sharded_step import check_shards
        from pyringar.parallel.shards import shard_sizes
        from pyringar.train.devices import choose_devices

        if self.ranks is not None:
            check_count("ranks", self.ranks, 1)
        for name, least in {"batch_size": 1, "epochs": 1, "width": 1, "seed": 0}.items():
            check_count(name, getattr(self, name), least)
        for name in ("lr", "bucket_cap_mb"):
            _check_number(name, getattr(self, name), lambda x: 0 < x < math.inf, "positive number")
        _check_number("momentum", self.momentum, lambda x: 0 <= x < 1, "number from 0 to below 1")
        for name in ("lr", "bucket_cap_mb", "momentum"):  # no NumPy numbers in checkpoints
            object.__setattr__(self, name, float(getattr(self, name)))
        for name, choices in CHOICES.items():
            if name != "init":  # the valid choices of `init` depend on the model
                check_choice(name, getattr(self, name), choices)
        inits = INITS[self.model]
        if not self.init:
            object.__setattr__(self, "init", inits[0])
        check_choice("init", self.init, inits)
        if self.devices is not None:
            choose_devices(self.world_size, self.devices)  # raises if a device is missing
        if self.weights is not None:
            shard_sizes(0, self.world_size, self.weights)  # raises ArgumentError for a wrong weight
            object.__setattr__(self, "weights", tuple(map(float, self.weights)))
        if self.shards is not None:
            check_shards(self.shards, self.world_size, "shards")
        self._check_rules()

    def _check_rules(self) -> None:
        for rule, (allowed, why) in _RULES.items():
            is_chosen = self.model == "lenet" if rule == "model lenet" else getattr(self, rule)
            for name, only in allowed.items() if is_chosen else ():
                value = getattr(self, name)
                if value not in only:
                    raise ArgumentError(
                        f"{name} is {value!r}, expected {' or '.join(map(repr, only))} with "
                        f"{rule}, {why}"
                    )

    def resolve(self, devices: Sequence[torch.device], *, is_traced: bool) -> TrainConfig:
        """Choose ``channels_last`` and ``cuda_graph`` where they are None.

        Args:
            devices: One per rank.
            is_traced: Whether steps are traced; a CUDA graph cannot be traced.
        """
        is_amp = self.amp and all(device.type == "cuda" for device in devices)
        is_plain = self.allreduce != "ring" and not (self.compile or self.shards)
        can_capture = is_plain and len(set(devices)) == 1 and not is_traced
        choices: dict[str, Any] = {
            "channels_last": is_amp and self.model == "resnet18",
            "cuda_graph": is_amp and can_capture,
        }
        left = {name: value for name, value in choices.items() if getattr(self, name) is None}
        return replace(self, **left)

    @property
    def world_size(self) -> int:
        """Number of ranks, from ``ranks`` or else from ``devices``."""
        if self.ranks is not None:
            return self.ranks
        return _DEFAULT_RANKS if self.devices is None else len(self.devices)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that ``dtype`` names."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def lr_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of one step.

        Args:
            step: Number of the step, from 0.
            num_steps: Steps of the whole run.
        """
        left = 1.0 if self.lr_schedule == "constant" else 1 - step / num_steps
        return self.lr * left

    @property
    def order(self) -> Order:
        """The order in which gradients are added: ``"tree"``, ``"rank"``, or ``"any"``."""
        if self.shards is not None:
            return "tree"
        return "any" if self.allreduce in ("ring", "auto") else "rank"


def folder_of(name: str, path: str | Path) -> Path:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"{name} is {path!r}, expected the path of a folder")
    return Path(os.path.expanduser(text))


def _check_number(name: str, value: Any, fits: Callable[[float], bool], expected: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not fits(value):
        raise ArgumentError(f"{name} is {value!r}, expected a {expected}")
