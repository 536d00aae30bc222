"""Every choice of a training run in one frozen object that is checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyringar.choices import ALGORITHMS, BATCHNORMS, check_choice
from pyringar.errors import ArgumentError

if TYPE_CHECKING:  # the command line shows the choices, and does not wait for torch
    import torch

__all__ = ["CHOICES", "INITS", "MODEL_TITLES", "TrainConfig"]

_DEFAULT_RANKS = 2
_FULL_WIDTH = 64

# The initial weights that each model has; the first is what it takes if none is named.
INITS = {"lenet": ("he", "book"), "resnet18": ("default", "book")}
MODEL_TITLES = {"lenet": "LeNet", "resnet18": "ResNet-18"}
CHOICES: dict[str, tuple[str, ...]] = {
    "model": tuple(MODEL_TITLES),
    "allreduce": ALGORITHMS,
    "lr_schedule": ("constant", "linear"),
    "lr_scale": ("none", "sqrt", "linear"),
    "dtype": ("float32", "float64", "bfloat16", "float16"),
    "dataset": ("auto", "fashion-mnist", "synthetic"),
    "batchnorm": BATCHNORMS,
    "init": tuple(dict.fromkeys(init for inits in INITS.values() for init in inits)),
}
# What other options may be if there are shards; gradients then leave in one call.
_WITH_SHARDS: dict[str, tuple[Any, ...]] = {
    "allreduce": ("auto", "fused", "direct"),
    **{"weights": (None,), "batchnorm": ("local",), "lr_scale": ("none",), "scale_batch": (False,)},
    **{"bucket_cap_mb": (10,), "overlap": (True,), "compile": (False,)},
    "cuda_graph": (None, False),
}


@dataclass(frozen=True)
class TrainConfig:
    """Configure a training run.

    The defaults learn well in few epochs; the book's own choice is ``batch_size=256, lr=0.2,
    epochs=10, lr_schedule="constant", init="book"``.

    Attributes:
        ranks: Number of ranks; spread over the GPUs of the machine, or all on the CPU where there
            are none. Two if neither this nor ``devices`` is given.
        batch_size: Samples a step, over all ranks together.
        lr: Learning rate.
        devices: One device per rank instead of ``ranks``, such as ``("cpu", "cpu")`` or
            ``("cuda:0",)``.
        epochs: Passes over the training images.
        allreduce: How gradients are reduced. ``fused``, ``direct``, ``sharded`` and ``naive`` add
            in rank order and give equal bits; ``ring`` adds in its own.
        lr_schedule: ``"linear"``: falls in even steps, to 0 after the last one. ``"constant"``, as
            in the book: the accuracy then swings by several points from epoch to epoch.
        lr_scale: The learning rate grows with the ranks k: ``"none"``, ``"sqrt"`` (times
            ``sqrt(k)``) or ``"linear"`` (times k).
        scale_batch: Multiply the batch size by k, so that every rank has as much work as one rank
            alone would have.
        weights: Shares of the ranks in every batch, for devices of unequal speed; ``"auto"``
            measures them first. Any shares give the same gradient.
        init: LeNet: ``"he"`` (its default) or ``"book"``, see `pyringar.train.lenet_params`.
            ResNet-18: ``"default"`` or ``"book"``, see `pyringar.train.resnet18`.
        seed: Of the parameters and of the order of the images.
        dtype: ``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"float16"``, of parameters,
            images and gradients. CPUs without 16-bit arithmetic are slow at the last two.
        max_inflight: How many steps the host may run ahead of the GPUs; 0 waits for every step.
            Changes no number. Ranks on the CPU are never ahead.
        dataset: ``"fashion-mnist"``, ``"synthetic"``, or ``"auto"``: the first that can be had,
            but never the second where ``data_dir`` is named.
        data_dir: Folder that holds the files, itself or in ``FashionMNIST/raw``, or into which
            they are downloaded; by default the user's own data folder for pyringar.
        model: ``"lenet"`` or ``"resnet18"``.
        width: ResNet-18's channels in the first stage.
        batchnorm: ResNet-18's statistics: ``"local"``, of every rank's own samples, or ``"sync"``,
            of the whole batch. Images are tested with rank 0's running statistics.
        amp: Compute in bfloat16 where torch's autocast finds it safe; parameters and gradients
            stay float32. Faster on GPUs, slower on CPUs without 16-bit arithmetic.
        channels_last: Keep ResNet-18's activations and weights with their channels last in memory,
            as tensor cores read them, and leave biases out of training that batch norm subtracts
            again; see `pyringar.train.model_resnet18.fit_tensor_cores`. Changes bits by rounding.
            None: with ``amp`` on GPUs.
        bucket_cap_mb: Gradients are reduced in buckets of about this many megabytes; see
            `pyringar.GradientBucketer`.
        overlap: True: on GPUs and over processes, reduce each bucket as soon as it is full. False:
            reduce after backward, as for CPU ranks of one process. Changes no bit where ranks are
            added in rank order.
        compile: Let torch compile the model, which takes a minute first. Its backward hands over
            all gradients at its end, so that nothing overlaps.
        cuda_graph: Capture the whole step in a CUDA graph, and replay it for every batch: the
            host then has next to nothing to do, and ranks compute at the same time. For ranks that
            share one GPU. Changes no bit. None: with ``amp`` where it is possible, and without
            ``compile``.
        momentum: Each step goes on with this share of the one before it, 0 to below 1: the sum of
            past steps, each with the learning rate of its time. With a constant learning rate that
            is ``torch.optim.SGD``'s.
        shards: Cut every batch into as many shards, whatever the ranks, and compute each by itself,
            with one torch thread: what is learned has the same bits on any number of ranks, each of
            which gets a power of two of shards; see `pyringar.ShardedStep`. Batch norm is then per
            shard. Without it what is learned depends on the number of ranks, by rounding at least.

    Raises:
        ArgumentError: A value is out of range; names the option.
    """

    ranks: int | None = None
    batch_size: int = 64
    lr: float = 0.1
    devices: Sequence[str | torch.device] | None = None
    epochs: int = 5
    allreduce: str = "auto"
    lr_schedule: str = "linear"
    lr_scale: str = "none"
    scale_batch: bool = False
    weights: Sequence[float] | str | None = None
    init: str = ""  # the model's own
    seed: int = 0
    dtype: str = "float32"
    max_inflight: int = 2
    dataset: str = "auto"
    data_dir: str | Path | None = None
    model: str = "lenet"
    width: int = _FULL_WIDTH
    batchnorm: str = "local"
    amp: bool = False
    channels_last: bool | None = None
    bucket_cap_mb: float = 10
    overlap: bool = True
    compile: bool = False
    cuda_graph: bool | None = None
    momentum: float = 0.0
    shards: int | None = None

    def __post_init__(self) -> None:
        from pyringar.parallel.shards import shard_sizes
        from pyringar.train.devices import choose_devices

        if self.ranks is not None:
            _check_integer("ranks", self.ranks, 1)
        for name, least in {
            "batch_size": 1,
            "epochs": 1,
            "width": 1,
            "max_inflight": 0,
            "seed": 0,
        }.items():
            _check_integer(name, getattr(self, name), least)
        _check_share("momentum", self.momentum)
        _check_positive("lr", self.lr)
        _check_positive("bucket_cap_mb", self.bucket_cap_mb)
        for name in ("lr", "bucket_cap_mb", "momentum"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        for name, choices in CHOICES.items():
            if name != "init":  # the model's own
                check_choice(name, getattr(self, name), choices)
        self._check_model()
        if self.devices is not None:
            choose_devices(self.world_size, self.devices)  # says which is not there
        if isinstance(self.weights, str):
            check_choice("weights", self.weights, ("auto",))
        elif self.weights is not None:
            shard_sizes(0, self.world_size, self.weights)  # says what is wrong with them
            object.__setattr__(self, "weights", tuple(map(_plain, self.weights)))
        if self.compile and self.batchnorm == "sync":
            raise ArgumentError(
                "compile is on and batchnorm 'sync', whose layers wait for other ranks; expected "
                "local batch norm with compile"
            )
        if self.shards is not None:
            self._check_shards()
        if self.amp and self.dtype != "float32":
            raise ArgumentError(f"amp is on and dtype {self.dtype!r}, expected float32 with amp")

    def _check_model(self) -> None:
        inits = INITS[self.model]
        if not self.init:  # frozen, but not yet made
            object.__setattr__(self, "init", inits[0])
        check_choice("init", self.init, inits)
        plain = {"width": (_FULL_WIDTH,), "batchnorm": ("local",), "channels_last": (None, False)}
        for name, only in plain.items():
            if self.model == "lenet" and getattr(self, name) not in only:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}, but the model is lenet, which has "
                    f"no {name} to choose; it is for resnet18"
                )

    def _check_shards(self) -> None:
        from pyringar.parallel.sharded_step import check_shards

        check_shards(self.shards, self.world_size, "shards")
        for name, only in _WITH_SHARDS.items():
            value = getattr(self, name)
            if value not in only:
                raise ArgumentError(
                    f"{name} is {value!r} and shards {self.shards}, expected "
                    f"{' or '.join(map(repr, only))} with shards, whose bits must not depend on "
                    "the ranks"
                )

    def resolve(self, devices: Sequence[torch.device], *, is_traced: bool) -> TrainConfig:
        """Choose the options that are None by the devices.

        Args:
            devices: One per rank.
            is_traced: Whether the phases of steps are noted, which a graph does not show.

        Returns:
            The same with ``channels_last`` and ``cuda_graph`` on or off.
        """
        is_amp = self.amp and all(device.type == "cuda" for device in devices)
        can_capture = len(set(devices)) == 1 and not (is_traced or self.compile or self.shards)
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

    @property
    def global_batch_size(self) -> int:
        """Samples a step over all ranks, with ``scale_batch`` applied."""
        return self.batch_size * (self.world_size if self.scale_batch else 1)

    @property
    def initial_lr(self) -> float:
        """Learning rate of the first step, with ``lr_scale`` applied."""
        factor = {"none": 1.0, "sqrt": math.sqrt(self.world_size), "linear": float(self.world_size)}
        return self.lr * factor[self.lr_scale]

    def lr_at(self, step: int, num_steps: int) -> float:
        """Learning rate of one step.

        Args:
            step: Counted from 0.
            num_steps: Of the whole run.
        """
        left = 1.0 if self.lr_schedule == "constant" else 1 - step / num_steps
        return self.initial_lr * left

    @property
    def order(self) -> str:
        """The order in which gradients are added: a tree, of ranks, or any if a ring may run."""
        if self.shards is not None:
            return "tree"
        return "any" if self.allreduce in ("ring", "auto") else "rank"


def _plain(number: Any) -> Any:
    """Return a number of numpy's as one of Python's, which a checkpoint can hold."""
    return number.item() if hasattr(number, "item") else number


def _check_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number, {least} or more")


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"{name} is {value!r}, expected a number")
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{name} is {value!r}, expected a positive number")


def _check_share(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1:  # type: ignore[operator]
        raise ArgumentError(f"{name} is {value!r}, expected a number from 0 to below 1")
