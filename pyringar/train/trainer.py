"""Train a model on k ranks, and return the results."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.topology import Plan
from pyringar.errors import ArgumentError, RingarError
from pyringar.parallel.replicate import copy_buffers
from pyringar.parallel.sharded_step import torch_threads
from pyringar.parallel.shards import check_replicas_equal, count_correct, digest_of
from pyringar.train.checkpoint import (
    SETTING,
    Checkpoint,
    has_checkpoint,
    named_in,
    prepare_folder,
    read_checkpoint,
    recipe_of,
    to_file,
)
from pyringar.train.config import TrainConfig, folder_of
from pyringar.train.data import ImageData, batches, load_data
from pyringar.train.devices import describe_devices, synchronize
from pyringar.train.graph import GraphStep, RankStreams, check_ranks
from pyringar.train.model_lenet import BOOK_PLATEAU_STEPS
from pyringar.train.models import RankedModel, autocast, threads_per_rank
from pyringar.train.step import EagerStep, ShardStep
from pyringar.train.step_trace import Trace
from pyringar.train.train_group import TrainGroup

logger = logging.getLogger(__name__)

_EVAL_BATCH = 1_000
_TRACED_STEPS = 100  # limit, so that a browser can open the trace file
_MOST_STEPS_AHEAD = 2  # enqueued steps; each holds a batch in GPU memory


@dataclass(frozen=True)
class EpochResult:
    """Result of one pass over the training images.

    Attributes:
        epoch: Number of the epoch, from 1.
        loss: Mean training loss during the epoch.
        accuracy: Fraction of the test images classified correctly after the epoch, 0 to 1.
        seconds: Training time, without evaluation.
    """

    epoch: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """Results of a training run.

    Attributes:
        config: The configuration.
        devices: One device per rank.
        data: Description of the images.
        plan: The allreduce of the gradients.
        epochs: One entry per epoch.
        params: The trained parameters, on the CPU.
        state: Parameters by name, for ``load_state_dict``; for ResNet-18 also the running
            statistics of rank 0.
    """

    config: TrainConfig
    devices: tuple[torch.device, ...]
    data: str
    plan: Plan
    epochs: tuple[EpochResult, ...]
    params: tuple[Tensor, ...]
    state: dict[str, Tensor]

    @property
    def digest(self) -> str:
        """Hash of the bits of all tensors in ``state``."""
        return digest_of(self.state.values())

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

    def __str__(self) -> str:
        """Return a line with test accuracy, seconds per epoch and devices, as in the book."""
        mean_s = sum(self.seconds) / len(self.seconds)
        where = describe_devices(self.devices)
        return f"test acc: {self.curve[-1]:.2f}, {mean_s:.1f} sec/epoch on {where}"


def train(
    num_gpus: int,
    batch_size: int,
    lr: float,
    *,
    on_epoch: Callable[[EpochResult], None] | None = None,
    save: str | Path | None = None,
    resume: str | Path | None = None,
    **options: Any,
) -> TrainResult:
    """Train LeNet (or another ``model``) from scratch on ``num_gpus`` ranks.

    Runs with different numbers of ranks start from the same parameters and use the same images in
    the same order. In float64 the parameters of LeNet then agree up to rounding; in float32 they
    differ visibly after some dozens of steps. With ``shards`` they have the same bits.

    Args:
        num_gpus: Number of ranks. Ranks share GPUs if there are fewer GPUs than ranks, and use the
            CPU if there is no GPU.
        batch_size: Samples per step, summed over all ranks.
        lr: Learning rate.
        on_epoch: See `Trainer.run`.
        save: See `Trainer`, which also lists the exceptions.
        resume: See `Trainer`.
        **options: Any other field of `TrainConfig`, by name.

    Returns:
        Curve and parameters. ``str(result)`` is the last line that the book prints.
    """
    known = {field.name for field in fields(TrainConfig)} - {"ranks", "batch_size", "lr"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ArgumentError(f"train has no option {unknown[0]!r}, only {', '.join(sorted(known))}")
    config = TrainConfig(ranks=num_gpus, batch_size=batch_size, lr=lr, **options)
    with Trainer(config, save=save, resume=resume) as trainer:
        return trainer.run(on_epoch=on_epoch)


def train_resnet18(num_gpus: int, batch_size: int, lr: float, **options: Any) -> TrainResult:
    """Train ResNet-18 from scratch on ``num_gpus`` ranks. See `train`.

    With ``batchnorm="local"`` every rank normalizes by the statistics of its own samples, so the
    result depends on the number of ranks. With ``"sync"`` it differs only by rounding.
    """
    return train(num_gpus, batch_size, lr, **{"model": "resnet18", **options})


class Trainer(AbstractContextManager["Trainer"]):
    """A training run, with devices, data and plan to inspect before it starts.

    Args:
        config: The configuration.
        data: Images to use instead of the data set that ``config`` names.
        trace: Records the first 100 steps.
        group: The ranks of the run. Default: all in this process. With one process per rank,
            ``devices`` and ``replicas`` hold the rank of this process. `close` closes it.
        save: Folder for a checkpoint, which each epoch replaces. Must not hold a checkpoint of
            another run.
        resume: Folder with the checkpoint to resume from. The run then saves there, or in
            ``save``. The result has the bits of an uninterrupted run with the same version and
            number of threads of torch; a difference is logged. With ``shards`` the number of ranks
            may change. Options that affect bits must be the same, but ``epochs`` may grow. The
            linear schedule then falls to 0 over all epochs of this run, so bits differ from an
            uninterrupted run.

    Attributes:
        devices: One device per rank of this process.
        all_devices: One device per rank of the run.
        is_main: Whether this process has rank 0, the only rank that prints.
        steps_per_epoch: Steps in one epoch.
        step: Number of finished steps, including steps before the checkpoint.
        stretched_from: Number of epochs of the resumed run, if its linear schedule now falls over
            more epochs; else None.

    Raises:
        ArgumentError: A device is missing, steps cannot be captured, or a checkpoint cannot be
            written or read.
        CudaError: The capture of a step failed.
        RingarError: The images are not available.

    A context manager that closes the communicator.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: ImageData | None = None,
        trace: Trace | None = None,
        group: TrainGroup | None = None,
        *,
        save: str | Path | None = None,
        resume: str | Path | None = None,
    ) -> None:
        self._trace = trace
        # Choose devices before loading data, so that a wrong device fails before a download.
        self.group = group or TrainGroup(config)
        self.devices = self.group.devices
        self.all_devices = self.group.all_devices
        self.is_main = self.group.is_main
        self.config = config = config.resolve(self.devices, is_traced=trace is not None)
        if config.cuda_graph:
            check_ranks(self.devices, trace)
        values = (str(torch.__version__), threads_per_rank(config))
        self._setting = dict(zip(SETTING, values, strict=True))
        # Checkpoint folders: _folder to write to, _source to resume from.
        self._folder = None if save is None else folder_of("save", save)
        self._source = None if resume is None else folder_of("resume", resume)
        checkpoint = self._open_checkpoints()
        loaded = data or self.group.load(lambda: load_data(config.dataset, config.data_dir))
        self.description = str(loaded)
        # Keep all images on the first GPU, if any, so that steps copy nothing from the host.
        home = next((d for d in self.devices if d.type == "cuda"), torch.device("cpu"))
        self._data = loaded.to(home, config.torch_dtype)
        self.steps_per_epoch = math.ceil(len(self._data.train_labels) / config.batch_size)
        self._num_steps = self.steps_per_epoch * config.epochs
        self._warn_of_plateau()
        self._warn_of_idle_ranks()
        self._shuffle = torch.Generator().manual_seed(config.seed)
        self.model = RankedModel(config, self.devices, self.group.comm)
        if trace is not None:
            trace.title = f"{self.model.title} on {describe_devices(self.all_devices)}"
        self.replicas = self.model.params
        self._run_step = self._make_step()
        self.step = 0
        # Enqueued steps: step number, mismatch flags, and CUDA events at the end of the step.
        self._unchecked: deque[tuple[int, list[Tensor], list[torch.cuda.Event]]] = deque()
        self._has_run = False
        self._done: list[EpochResult] = []  # epochs in the checkpoint
        self.stretched_from: int | None = None
        if self._folder is not None:
            self._recipe |= self._found_recipe(loaded)
        if checkpoint is not None and self._source is not None:
            self._resume_from(checkpoint, self._source)

    @property
    def checkpoint_dir(self) -> Path | None:
        """Folder with the newest checkpoint of the run; None before the first checkpoint."""
        folder = self._folder
        return folder if folder is not None and has_checkpoint(folder) else None

    @property
    def plan(self) -> Plan:
        """The plan of the allreduce that sums the gradients of a step."""
        nbytes = sum(param.nbytes for param in self.replicas[0])
        return self.group.comm.plan(nbytes, self.config.torch_dtype)

    def run(
        self,
        on_step: Callable[[], None] | None = None,
        on_epoch: Callable[[EpochResult], None] | None = None,
        on_test_batch: Callable[[int, int], None] | None = None,
    ) -> TrainResult:
        """Train for all epochs.

        A second call trains for as many epochs again. It raises if the learning rate is not
        constant or checkpoints are saved.

        Args:
            on_step: Called after every step; its time counts as training time.
            on_epoch: Called after every epoch, for example a `pyringar.train.LivePlot`. A resumed
                run first calls it for the epochs in the checkpoint.
            on_test_batch: Called after every batch of test images; see `evaluate`.

        Raises:
            RingarError: The replicas diverged, the loss of an epoch is not finite, a checkpoint
                could not be written, or a second call is not allowed.
        """
        can_continue = self.config.lr_schedule == "constant" and self._folder is None
        if self._has_run and not can_continue:
            raise RingarError(
                "run was called before: make another Trainer, with resume to continue a saved run"
            )
        self._has_run = True
        on_epoch = on_epoch or (lambda result: None)
        epochs = list(self._done)
        for result in epochs:
            on_epoch(result)
        while len(epochs) < self.config.epochs:
            loss, seconds = self._train_epoch(on_step)
            accuracy = self.evaluate(on_test_batch)
            result = EpochResult(len(epochs) + 1, loss, accuracy, seconds)
            self.group.check_equal(self.replicas[0])
            if not math.isfinite(loss):
                on_epoch(result)
                raise RingarError(
                    f"the loss of epoch {result.epoch} is {loss}, so training ended: try a "
                    f"smaller learning rate than lr={self.config.lr:g}"
                )
            epochs.append(result)
            try:
                self._save(epochs)
            finally:  # call on_epoch even if the checkpoint could not be written
                on_epoch(result)
        state = self.model.replicas[0].state_dict()
        return TrainResult(
            config=self.config,
            devices=self.all_devices,
            data=self.description,
            plan=self.plan,
            epochs=tuple(epochs),
            params=tuple(param.detach().cpu() for param in self.replicas[0]),
            state={name: tensor.detach().cpu() for name, tensor in state.items()},
        )

    def evaluate(self, on_batch: Callable[[int, int], None] | None = None) -> float:
        """Return the accuracy on the test images, which are split over the ranks.

        Args:
            on_batch: Called after every batch with the numbers of finished and of all images.
        """
        models = self.model.replicas
        copy_buffers(models)  # use the batch norm statistics of rank 0
        self.group.share_buffers(models[0].state_dict(), self.replicas[0])
        size, split = _EVAL_BATCH, self.group.split
        if isinstance(self._run_step, ShardStep):
            size, split = self._run_step.evaluation(size, self.config.world_size)
        test = self._test_batches(size, on_batch or (lambda done, total: None))
        with autocast(self.config, self.devices), torch_threads(threads_per_rank(self.config)):
            correct, total = count_correct(models, test, split, self.devices)
        return float(self.group.total(correct) / total)

    def _test_batches(
        self, size: int, on_batch: Callable[[int, int], None]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self._data.test_images, self._data.test_labels
        for i, batch in enumerate(batches(images, labels, size), 1):
            yield batch
            on_batch(min(i * size, len(labels)), len(labels))

    def close(self) -> None:
        """Close the model's hooks and the communicator."""
        if isinstance(self._run_step, ShardStep):
            self._run_step.close()
        self.model.close()
        self.group.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _make_step(self) -> EagerStep | GraphStep | ShardStep:
        config = self.config
        if config.shards is not None:
            return ShardStep(self.model, self.group.comm, config)
        streams: RankStreams | None = None
        if config.cuda_graph and config.batchnorm == "local":
            streams = RankStreams(self.devices[0], len(self.devices), self.model.score)
        eager = EagerStep(
            self.replicas,
            self.model.scores,
            reduce=self.model.reduce,
            split=functools.partial(self.group.split, devices=self.devices, weights=config.weights),
            streams=streams,
            momentum=config.momentum,
        )
        if not config.cuda_graph:
            return eager
        images, labels = self._data.train_images, self._data.train_labels
        sizes = {min(config.batch_size, len(labels)), len(labels) % config.batch_size} - {0}
        state = [tensor for mine in (*self.replicas, *self.model.buffers()) for tensor in mine]
        return GraphStep(eager, [(images[:n], labels[:n]) for n in sizes], state)

    def _train_epoch(self, on_step: Callable[[], None] | None) -> tuple[float, float]:
        images, labels = self._data.train_images, self._data.train_labels
        synchronize(self.devices)
        begin_s = time.perf_counter()
        for batch in batches(images, labels, self.config.batch_size, self._shuffle):
            self._train_batch(*batch)
            if on_step is not None:
                on_step()
        self._check_steps(0)
        synchronize(self.devices)
        seconds = time.perf_counter() - begin_s
        return float(self.group.total(self._run_step.take_loss()) / len(labels)), seconds

    def _train_batch(self, images: Tensor, labels: Tensor) -> None:
        trace = self._trace
        if trace is not None and trace.step >= _TRACED_STEPS:
            trace = None
        step_size = self.config.lr_at(self.step, self._num_steps) / len(labels)
        flags = self._run_step(images, labels, step_size, trace)
        if trace is not None:
            if self.model.bucketer is not None:
                trace.add_buckets(self.model.bucketer.stats(), len(self.devices))
            trace.step += 1
        # Enqueue the copies now: a read after the next step's launch would wait for that step.
        copies = [flag.to("cpu", non_blocking=True) for flag in flags]
        events = [_record_event(d) for d in set(self.devices) if d.type == "cuda"]
        self._unchecked.append((self.step, copies, events))
        self.step += 1
        self._check_steps(_MOST_STEPS_AHEAD if events else 0)

    def _check_steps(self, most_unchecked: int) -> None:
        """Check all but the newest ``most_unchecked`` steps; RingarError if replicas differ."""
        while len(self._unchecked) > most_unchecked:
            number, flags, events = self._unchecked.popleft()
            for event in events:
                event.synchronize()
            if not any(flags):
                continue
            try:
                check_replicas_equal(self.replicas)
            except RingarError as error:
                raise RingarError(f"after step {number}: {error}") from None
            raise RingarError(f"after step {number}: the replicas had diverged")

    def _warn_of_plateau(self) -> None:
        has_plateau = self.config.model == "lenet" and self.config.init == "book"
        if has_plateau and self._num_steps < 2 * BOOK_PLATEAU_STEPS:
            logger.warning(
                "init is 'book', which stays at chance for some %d steps; this run has %d. "
                "Init 'he' learns from the first step",
                BOOK_PLATEAU_STEPS,
                self._num_steps,
            )

    def _warn_of_idle_ranks(self) -> None:
        ranks, size = self.config.world_size, self.config.batch_size
        if ranks > size and self.config.weights is None:
            idle = f"{ranks - size} of {ranks} ranks get no image of a batch of {size}"
            logger.warning("%s; use at most %d ranks, or a larger batch size", idle, size)

    def _open_checkpoints(self) -> Checkpoint | None:
        name, source = ("resume" if self._folder is None else "save"), self._source
        self._folder = target = self._folder or source
        if target is None:
            return None
        self._recipe = recipe_of(self.config, self.all_devices)

        def prepare() -> bytes:
            if source is None:
                prepare_folder(name, target, may_replace=False)
                return b""
            content = read_checkpoint(source)
            self._check_recipe(Checkpoint.decode(content, source), source)
            prepare_folder(name, target, may_replace=target.resolve() == source.resolve())
            return content

        content = self.group.share(prepare)
        return None if source is None else Checkpoint.decode(content, source)

    def _check_recipe(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Raise ArgumentError for different options; warn of another torch or thread count."""
        checkpoint.check(self._recipe, folder)
        if self.config.epochs < checkpoint.num_epochs:
            raise ArgumentError(
                f"epochs is {self.config.epochs}, but the checkpoint in '{folder}' is of a run of "
                f"{checkpoint.num_epochs} epochs; expected {checkpoint.num_epochs} or more"
            )
        for name, value in self._setting.items():
            if checkpoint.setting[name] != value:
                logger.warning(
                    "%s: %s now, %s when the checkpoint in '%s' was written; the bits may differ "
                    "from an uninterrupted run",
                    name,
                    value,
                    checkpoint.setting[name],
                    folder,
                )

    def _found_recipe(self, data: ImageData) -> dict[str, str]:
        images = (data.train_images, data.train_labels, data.test_images, data.test_labels)
        order = self.plan.order if self.config.shards is None else self.config.order
        return {"dataset": f"{data}, digest {digest_of(images)}", "allreduce": f"in {order} order"}

    def _save(self, epochs: Sequence[EpochResult]) -> None:
        if self._folder is not None and self.is_main:
            checkpoint = Checkpoint(
                recipe=self._recipe,
                setting=self._setting,
                num_epochs=self.config.epochs,
                epochs=[list(astuple(epoch)) for epoch in epochs],
                shuffle=self._shuffle.get_state(),
                tensors=[to_file(tensor) for tensor in self._tensors()[0]],
            )
            checkpoint.write(self._folder)

    def _tensors(self) -> list[list[Tensor]]:
        kinds = (self.replicas, self.model.buffers(), self._run_step.velocities)
        return [[*itertools.chain(*of_rank)] for of_rank in zip(*kinds, strict=True)]

    def _resume_from(self, checkpoint: Checkpoint, source: Path) -> None:
        checkpoint.check(self._recipe, source)
        self._check_tensors(checkpoint, source)
        # Run a first step, which assigns gradients to buckets: ring sums depend on the buckets.
        size = self.config.batch_size
        self._run_step(self._data.train_images[:size], self._data.train_labels[:size], 0.0)
        self._run_step.take_loss()
        with torch.no_grad():
            for tensors in self._tensors():
                for target, saved in zip(tensors, checkpoint.tensors, strict=True):
                    target.copy_(saved)
        if self.config.lr_schedule == "linear" and self.config.epochs > checkpoint.num_epochs:
            self.stretched_from = checkpoint.num_epochs
        self._done = [EpochResult(int(n), *rest) for n, *rest in checkpoint.epochs]
        self.step = len(self._done) * self.steps_per_epoch

    def _check_tensors(self, checkpoint: Checkpoint, source: Path) -> None:
        """Restore the shuffle generator; ArgumentError if a tensor has another shape or dtype."""
        try:
            self._shuffle.set_state(checkpoint.shuffle)
        except RuntimeError as error:
            raise ArgumentError(
                f"{named_in(source)} has a shuffle that is no state of a torch.Generator: {error}"
            ) from None
        found, wanted = (
            [f"{tuple(t.shape)} {t.dtype}" for t in tensors]
            for tensors in (checkpoint.tensors, self._tensors()[0])
        )
        for i, (one, other) in enumerate(itertools.zip_longest(found, wanted, fillvalue="missing")):
            if one != other:
                raise ArgumentError(
                    f"{named_in(source)} has tensors whose entry {i} is {one}, expected {other}"
                )


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
