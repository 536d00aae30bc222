"""Training a model on k ranks: the book's train, returning what it found instead of printing it."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.topology import Plan
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.shards import check_replicas_equal, count_correct
from pyringar.train.balance import measure_weights
from pyringar.train.config import TrainConfig
from pyringar.train.data import ImageData, batches, load_data
from pyringar.train.devices import describe_devices, synchronize
from pyringar.train.graph import GraphStep, check_ranks
from pyringar.train.group import OneProcess, TrainGroup
from pyringar.train.model_lenet import BOOK_PLATEAU_STEPS
from pyringar.train.models import autocast, build_model, plain_model
from pyringar.train.pacing import StepWindow
from pyringar.train.step import EagerStep
from pyringar.train.trace import Trace

__all__ = ["EpochResult", "TrainResult", "Trainer", "train", "train_resnet18"]

logger = logging.getLogger(__name__)

_EVAL_BATCH = 1_000
_TRACED_STEPS = 100  # enough to see, and a file that a browser opens


@dataclass(frozen=True)
class EpochResult:
    """One pass over the training images.

    Attributes:
        epoch: Its number, from 1.
        loss: Mean loss over the training images, each at the step that used it.
        accuracy: Share of the test images classified correctly afterwards, 0 to 1.
        seconds: Time it took, without the test.
    """

    epoch: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """Hold the results of a training run.

    Attributes:
        config: What was asked for.
        devices: What it ran on, one device per rank.
        data: What it was trained on, for people.
        plan: How the gradients were reduced.
        epochs: One entry per epoch.
        params: The trained parameters, on the CPU.
        state: The same and, for ResNet-18, rank 0's running statistics, by name: what
            ``load_state_dict`` takes.
    """

    config: TrainConfig
    devices: tuple[torch.device, ...]
    data: str
    plan: Plan
    epochs: tuple[EpochResult, ...]
    params: tuple[Tensor, ...]
    state: dict[str, Tensor]

    @property
    def curve(self) -> list[float]:
        """Test accuracy after every epoch."""
        return [epoch.accuracy for epoch in self.epochs]

    @property
    def losses(self) -> list[float]:
        """Mean training loss of every epoch."""
        return [epoch.loss for epoch in self.epochs]

    @property
    def seconds(self) -> list[float]:
        """Training time of every epoch."""
        return [epoch.seconds for epoch in self.epochs]

    @property
    def line(self) -> str:
        """The book's last line, with the ranks that really ran."""
        mean_s = sum(self.seconds) / len(self.seconds)
        return (
            f"test acc: {self.curve[-1]:.2f}, {mean_s:.1f} sec/epoch "
            f"on {describe_devices(self.devices)}"
        )

    def __str__(self) -> str:
        return self.line


def train(
    num_gpus: int,
    batch_size: int,
    lr: float,
    *,
    on_epoch: Callable[[EpochResult], None] | None = None,
    **options: Any,
) -> TrainResult:
    """Train LeNet (or another ``model``) from scratch on ``num_gpus`` ranks.

    Runs that differ only in the number of ranks start from the same parameters and see the same
    images in the same order. In float64 LeNet's parameters agree to rounding; in float32 they drift
    apart after some dozens of steps, when rounding first turns a ReLU on or off.

    Args:
        num_gpus: Number of ranks: on the machine's GPUs, several on one where there are too few,
            or on the CPU where there are none.
        batch_size: Samples a step, over all ranks together.
        lr: Learning rate.
        on_epoch: Called after each epoch: see :meth:`Trainer.run`.
        **options: Any other field of :class:`TrainConfig`, by name.

    Returns:
        The curve, the parameters, and the book's last line as its ``str``.

    Raises:
        ArgumentError: An option is unknown or out of range, or a device is not there.
        RingarError: The replicas diverged, or the data cannot be had.
    """
    known = {field.name for field in fields(TrainConfig)} - {"ranks", "batch_size", "lr"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ArgumentError(f"train has no option {unknown[0]!r}, only {', '.join(sorted(known))}")
    config = TrainConfig(ranks=num_gpus, batch_size=batch_size, lr=lr, **options)
    with Trainer(config) as trainer:
        return trainer.run(on_epoch=on_epoch)


def train_resnet18(num_gpus: int, batch_size: int, lr: float, **options: Any) -> TrainResult:
    """Train ResNet-18 from scratch on ``num_gpus`` ranks.

    Every run starts from the numbers of its seed, running statistics included. With
    ``batchnorm="local"`` every rank normalises with its own samples, so that what is learned
    depends on the number of ranks; with ``"sync"`` it does so by rounding only. See :func:`train`;
    ``width``, ``batchnorm`` and ``amp`` are among the options.
    """
    return train(num_gpus, batch_size, lr, **{"model": "resnet18", **options})


class Trainer:
    """A training run that can be looked at: devices, data and plan are known before it starts.

    Args:
        config: What to do.
        data: Images to use instead of those that ``config`` names.
        trace: Where to note what the first steps did, and when.
        group: This process's rank, where every rank is a process. ``devices`` and ``replicas`` are
            then of this rank alone. Closed with the trainer.

    Raises:
        ArgumentError: A device is not there, or steps of such a run cannot be captured.
        CudaError: They could not be captured.
        RingarError: The data cannot be had.

    A context manager: leaving it closes its communicator.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ImageData | None = None,
        trace: Trace | None = None,
        group: TrainGroup | None = None,
    ) -> None:
        self.config = config
        self._trace = trace
        # Before the data, because a wrong device should not cost a download.
        self.group = group or OneProcess(config)
        self.devices = self.group.devices
        if config.cuda_graph:
            check_ranks(self.devices, trace)
        load = functools.partial(load_data, config.dataset, config.data_dir)
        loaded = data or self.group.load(load)
        self.description = str(loaded)
        # Batches are cut on the first GPU, where there is one: no copy from the host in a step.
        home = next((d for d in self.devices if d.type == "cuda"), torch.device("cpu"))
        self._data = loaded.to(home, config.torch_dtype)
        self.steps_per_epoch = math.ceil(len(self._data.train_labels) / config.global_batch_size)
        self._num_steps = self.steps_per_epoch * config.epochs
        self._warn_of_plateau()
        self._shuffle = torch.Generator().manual_seed(config.seed)
        self.model = build_model(config, self.devices, self.group.comm)
        self.replicas = self.model.params
        self.weights = self._choose_weights()
        self._run_step = self._make_step()
        self._step = 0

    @property
    def plan(self) -> Plan:
        """Return what reduces the gradients of a step."""
        nbytes = sum(param.numel() * param.element_size() for param in self.replicas[0])
        plan: Plan = self.group.comm.plan(nbytes, self.config.torch_dtype)
        return plan

    @property
    def is_main(self) -> bool:
        """Return whether this process has rank 0, which alone prints."""
        return self.group.is_main

    @property
    def all_devices(self) -> tuple[torch.device, ...]:
        """The devices of all ranks, wherever they are."""
        return self.group.all_devices

    def run(
        self,
        on_step: Callable[[], None] | None = None,
        on_epoch: Callable[[EpochResult], None] | None = None,
    ) -> TrainResult:
        """Train for all epochs.

        Args:
            on_step: Called after every step, within the time that is measured.
            on_epoch: Called after every epoch, such as a :class:`pyringar.train.LivePlot`.

        Returns:
            The curve and the parameters.
        """
        epochs = []
        for epoch in range(1, self.config.epochs + 1):
            loss, seconds = self._train_epoch(on_step)
            result = EpochResult(epoch, loss, self.evaluate(), seconds)
            self.group.check_equal(self.replicas[0])
            if not math.isfinite(loss) and self.is_main:
                logger.warning(
                    "the loss is %s after epoch %d: the learning rate %g is too high",
                    *(loss, epoch, self.config.initial_lr),
                )
            epochs.append(result)
            if on_epoch is not None:
                on_epoch(result)
        return TrainResult(
            config=self.config,
            devices=self.all_devices,
            data=self.description,
            plan=self.plan,
            epochs=tuple(epochs),
            params=tuple(param.detach().cpu() for param in self.replicas[0]),
            state={name: t.detach().cpu() for name, t in self.model.state_dict().items()},
        )

    def evaluate(self) -> float:
        """Accuracy on the test images, counted by all ranks."""
        models = self.model.evaluators()
        self.group.share_buffers(self.model.state_dict(), self.replicas[0])
        test = batches(self._data.test_images, self._data.test_labels, _EVAL_BATCH)
        with autocast(self.config, self.devices):
            correct, total = count_correct(models, test, self.group.split, devices=self.devices)
        accuracy: float = self.group.total(correct) / total
        return accuracy

    def close(self) -> None:
        """Close the model's hooks and the communicator."""
        self.model.close()
        self.group.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _train_epoch(self, on_step: Callable[[], None] | None) -> tuple[float, float]:
        """Mean loss and seconds of one pass over the training images."""
        config, data = self.config, self._data
        window = StepWindow(self.devices, config.max_inflight, self._check_step)
        self._run_step.take_loss()  # of an epoch that was broken off
        synchronize(self.devices)
        begin_s = time.perf_counter()
        for images, labels in batches(
            data.train_images, data.train_labels, config.global_batch_size, self._shuffle
        ):
            trace = self._trace if self._step < _TRACED_STEPS else None
            step_size = config.lr_at(self._step, self._num_steps) / len(labels)
            flags = self._run_step(images, labels, step_size, trace)
            if trace is not None:
                trace.add_buckets(self.model.bucketer.stats(), len(self.devices))
                trace.step += 1
            # On their way before the next step is: reading one on its GPU would wait for that, too.
            arriving = [flag.to("cpu", non_blocking=True) for flag in flags]
            window.push(self._step, arriving)
            self._step += 1
            if on_step is not None:
                on_step()
        window.drain()
        synchronize(self.devices)
        seconds = time.perf_counter() - begin_s
        loss: float = self.group.total(self._run_step.take_loss()) / len(data.train_labels)
        return loss, seconds

    def _make_step(self) -> EagerStep | GraphStep:
        split = functools.partial(self.group.split, devices=self.devices, weights=self.weights)
        eager = EagerStep(self.replicas, self.model.scores, self.model.bucketer.wait, split)
        if not self.config.cuda_graph:
            return eager
        size = self.config.global_batch_size
        images, labels = self._data.train_images[:size], self._data.train_labels[:size]
        return GraphStep(eager, images, labels, self.model.tensors())

    def _warn_of_plateau(self) -> None:
        has_plateau = self.config.model == "lenet" and self.config.init == "book"
        if has_plateau and self._num_steps < 2 * BOOK_PLATEAU_STEPS and self.is_main:
            logger.warning(
                "init is 'book', which stays at chance for some %d steps; this run has %d",
                *(BOOK_PLATEAU_STEPS, self._num_steps),
            )

    def _choose_weights(self) -> Sequence[float] | None:
        if not isinstance(self.config.weights, str):
            return self.config.weights
        size = math.ceil(self.config.global_batch_size / self.config.world_size)
        with autocast(self.config, self.devices):
            return measure_weights(
                functools.partial(plain_model, self.config),
                self.devices,
                self._data.train_images[:size],
                self._data.train_labels[:size],
            )

    def _check_step(self, step: int, flags: Sequence[Tensor]) -> None:
        """Replicas that were equal and saw equal gradients are equal: else something is broken."""
        if any(bool(flag) for flag in flags):
            try:
                check_replicas_equal(self.replicas)
            except RingarError as error:
                raise RingarError(f"after step {step}: {error}") from None
            raise RingarError(f"after step {step}: the replicas had diverged")
