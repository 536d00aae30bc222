"""Run one training step on k ranks, as the book's train_batch does."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from pyringar.comm.communicator import Communicator
from pyringar.errors import ArgumentError
from pyringar.parallel.bucket_params import Comm
from pyringar.parallel.rank_runs import run_in_order
from pyringar.parallel.sharded_step import ShardedStep
from pyringar.parallel.shards import Device, Split, mismatch_flags, shard_sizes, split_batch
from pyringar.train.config import TrainConfig
from pyringar.train.model_lenet import lenet
from pyringar.train.step_trace import Trace

if TYPE_CHECKING:
    from pyringar.train.graph import RankStreams
    from pyringar.train.models import RankedModel

Replicas = Sequence[Sequence[Tensor]]  # replicas[rank][i]: parameter i of a rank
Score = Callable[[int, Tensor], Tensor]  # maps a rank and its shard to scores
Scores = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # maps shards to scores, one per rank
StepSize = float | Tensor  # the learning rate over the batch size


def train_batch(
    X: Tensor,
    y: Tensor,
    device_params: Replicas,
    devices: Sequence[Device],
    lr: float,
    *,
    comm: Communicator | None = None,
    weights: Sequence[float] | None = None,
) -> list[Tensor]:
    """Run one SGD step with LeNet on a batch that is split over the ranks.

    The loss of a shard is a sum, and gradients are divided by the size of the whole batch. So any
    split gives the gradient of the whole batch, up to rounding; shards may be empty. Gradients are
    reduced in one call. Replicas with equal bits still have equal bits afterwards.

    Args:
        X: Samples, ``(n, 1, 28, 28)``, ``n`` at least 1.
        y: Class indices, ``(n,)``.
        device_params: ``device_params[rank][i]``: replicas from `pyringar.get_params`,
            updated in place; afterwards their ``grad`` is the sum over all ranks.
        devices: One device per rank.
        lr: Learning rate.
        comm: Communicator for the gradients. Default: a new communicator in rank order.
        weights: Relative shard sizes of the ranks; see `pyringar.split_batch`.

    Returns:
        The summed loss of every rank, on its device; 0 for an empty shard. Does not synchronize.

    Raises:
        ArgumentError: The numbers of ranks differ, the batch is empty, or `split_batch` raises.
    """
    k = len(device_params)
    if k != len(devices):
        raise ArgumentError(f"device_params has {k} replicas for {len(devices)} devices")
    shards = split_batch(X, y, devices, weights)
    if X.shape[0] == 0:
        raise ArgumentError(f"X has shape {tuple(X.shape)}, expected one sample or more")
    step = EagerStep(
        device_params,
        scores=lambda shards: [
            lenet(X, params) for X, params in zip(shards, device_params, strict=True)
        ],
        reduce=lambda: reduce_gradients(device_params, devices, comm),
        split=functools.partial(split_batch, devices=devices, weights=weights),
    )
    return step.train(shards, lr / X.shape[0])


def span(trace: Trace | None, category: str, num_ranks: int) -> AbstractContextManager[None]:
    return nullcontext() if trace is None else trace.span(category, *range(num_ranks))


def sum_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed over the samples in float32 or float64."""
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    return F.cross_entropy(scores, labels, reduction="sum")


def reduce_gradients(device_params: Replicas, devices: Sequence[Device], comm: Any) -> None:
    """All-reduce the gradients of all replicas; a missing gradient counts as zeros."""
    for param in itertools.chain(*device_params):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    lists: list[Any] = [[param.grad for param in params] for params in device_params]
    with nullcontext(comm) if comm is not None else Communicator(devices, order="rank") as used:
        used.all_reduce_coalesced(lists)


def sgd(
    params: Sequence[Tensor],
    step_size: StepSize,
    velocities: Sequence[Tensor] = (),
    momentum: float = 0.0,
) -> None:
    """Subtract ``step_size`` times the gradient from every parameter that has one.

    With momentum, ``v = momentum * v + step_size * grad`` is subtracted. ``velocities`` holds ``v``
    and is updated in place. Products are rounded before they are added, as not all devices have a
    fused multiply-add. For a CUDA graph ``step_size`` is a 0-dimensional tensor.
    """
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    if not pairs:
        return
    with torch.no_grad():  # _foreach functions need only a few launches
        steps = list(torch._foreach_mul([grad for _, grad in pairs], step_size))
        if velocities:
            both = zip(velocities, params, strict=True)
            last = [velocity for velocity, param in both if param.grad is not None]
            torch._foreach_mul_(last, momentum)
            torch._foreach_add_(last, steps)
            steps = last
        torch._foreach_sub_([param for param, _ in pairs], steps)


class StepState:
    """Momentum buffers and loss sums of the replicas ``replicas[rank][i]``.

    ``velocities[rank]`` are the momentum buffers; empty if ``momentum`` is 0. ``sums[rank]`` is the
    summed loss of a rank, float64, on its device; reading it synchronizes.
    """

    def __init__(self, replicas: Replicas, momentum: float) -> None:
        self._replicas, self._momentum = replicas, momentum
        used = replicas if momentum else [[] for _ in replicas]
        self.velocities = [[torch.zeros_like(param) for param in params] for params in used]
        devices = [params[0].device for params in replicas]
        self.sums = [torch.zeros((), dtype=torch.float64, device=device) for device in devices]

    def update(self, rank: int, step_size: StepSize) -> None:
        sgd(self._replicas[rank], step_size, self.velocities[rank], self._momentum)

    def take_loss(self) -> float:
        """Return the loss of all samples since the last call, and reset it. Synchronizes."""
        loss = sum(total.item() for total in self.sums)
        for total in self.sums:
            total.zero_()
        return loss


class EagerStep(StepState):
    """A training step of all ranks of this process, called for every batch.

    ``split`` splits a batch into one shard per rank. ``scores`` maps the shards to scores ``(n,
    classes)``; with ``streams``, its ``score`` computes each rank on a CUDA stream instead.
    ``reduce`` sums every ``grad`` over all ranks.
    """

    def __init__(
        self,
        replicas: Replicas,
        scores: Scores,
        reduce: Callable[[], None],
        split: Callable[[Tensor, Tensor], Split],
        streams: RankStreams | None = None,
        momentum: float = 0.0,
    ) -> None:
        super().__init__(replicas, momentum)
        self._scores, self._reduce, self._split = scores, reduce, split
        self._streams = streams

    def __call__(
        self, X: Tensor, y: Tensor, step_size: StepSize, trace: Trace | None = None
    ) -> list[Tensor]:
        """Train on a batch; return the `mismatch_flags` of the replicas."""
        losses = self.train(self._split(X, y), step_size, trace)
        for total, loss in zip(self.sums, losses, strict=True):
            total += loss
        return mismatch_flags(self._replicas)

    def train(self, shards: Split, step_size: StepSize, trace: Trace | None = None) -> list[Tensor]:
        """Train on one shard of samples and labels per rank; return every rank's summed loss."""
        k = len(self._replicas)
        for param in itertools.chain(*self._replicas):
            param.grad = None  # else backward would add to the old gradient
        if self._streams is not None:
            computations = {
                rank: functools.partial(_compute_rank, self._streams.score, rank, X, y)
                for rank, (X, y) in enumerate(zip(*shards, strict=True))
            }
            losses = list(self._streams.run(computations).values())
        else:
            losses = self._compute_together(shards, trace)
        with span(trace, "wait", k):
            self._reduce()
        updates = {rank: functools.partial(self.update, rank, step_size) for rank in range(k)}
        run = run_in_order if self._streams is None else self._streams.run
        with span(trace, "optimizer", k):
            run(updates)
        return losses

    def _compute_together(self, shards: Split, trace: Trace | None) -> list[Tensor]:
        with span(trace, "forward", len(shards[0])):
            scores = self._scores(shards[0])
            losses = [sum_loss(*pair) for pair in zip(scores, shards[1], strict=True)]
        with span(trace, "backward", len(shards[0])):
            # Skip ranks without samples: their losses require no gradient. A single backward call
            # lets autograd use one thread per GPU.
            with_grad = [loss for loss in losses if loss.requires_grad]
            if with_grad:
                torch.autograd.backward(with_grad)
        return [loss.detach() for loss in losses]


def _compute_rank(score: Score, rank: int, X: Tensor, y: Tensor) -> Tensor:
    loss = sum_loss(score(rank, X), y)
    if loss.requires_grad:  # False for a rank without samples
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


class ShardStep(StepState):
    """A training step in shards; each ``sums[rank]`` is the loss summed over all ranks."""

    def __init__(self, model: RankedModel, comm: Comm, config: TrainConfig) -> None:
        super().__init__(model.params, config.momentum)
        self._model, self._num_shards = model, config.shards or 1
        step = self._step = ShardedStep(model.replicas, self._num_shards, comm=comm)
        self._each = len(step.shards[0])
        self._first = step.shards[0].start // self._each  # the first rank of this process

    def __call__(
        self, X: Tensor, y: Tensor, step_size: float, trace: Trace | None = None
    ) -> list[Tensor]:
        sizes = shard_sizes(len(X), self._num_shards)
        shards = list(zip(torch.split(X, sizes), torch.split(y, sizes), strict=True))

        def loss_of(_: Any, shard: int) -> Tensor | None:
            if not sizes[shard]:
                return None
            rank = shard // self._each - self._first
            images, labels = (part.to(self.sums[rank].device) for part in shards[shard])
            return sum_loss(self._model.score(rank, images), labels)

        loss = self._step(loss_of, **({} if trace is None else {"watch": trace.span}))
        with span(trace, "optimizer", len(self._replicas)):
            for rank in range(len(self._replicas)):
                self.update(rank, step_size)
        for total in self.sums:
            total += loss.to(total.device)
        return mismatch_flags(self._replicas)

    def take_loss(self) -> float:
        """Return the loss of all samples since the last call; 0 in processes without rank 0."""
        loss = self.sums[0].item()
        super().take_loss()
        return loss if self._first == 0 else 0.0

    def evaluation(self, size: int, world_size: int) -> tuple[int, Any]:
        """Return a test batch size and a split function; pieces are equal for all world sizes."""
        piece = math.ceil(size / self._num_shards)

        def split(X: Tensor, y: Tensor, devices: Sequence[torch.device]) -> Split:
            begins = [(self._first + i) * piece for i in range(len(devices))]
            images, labels = (
                tuple(t[b : b + piece].to(d) for b, d in zip(begins, devices, strict=True))
                for t in (X, y)
            )
            return images, labels

        return piece * world_size, split

    def close(self) -> None:
        self._step.close()
