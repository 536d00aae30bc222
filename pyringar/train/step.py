"""One training step on k ranks: the book's train_batch, done right."""

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
from pyringar.parallel.rank_threads import run_in_order
from pyringar.parallel.sharded_step import ShardedStep
from pyringar.parallel.shards import Device, Split, mismatch_flags, shard_sizes, split_batch
from pyringar.train.config import TrainConfig
from pyringar.train.model_lenet import lenet
from pyringar.train.step_trace import Trace

if TYPE_CHECKING:
    from pyringar.train.graph import RankStreams
    from pyringar.train.models import RankedModel

Replicas = Sequence[Sequence[Tensor]]  # replicas[rank][i]
Score = Callable[[int, Tensor], Tensor]  # a rank and its shard to scores
Scores = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # shards to scores, one per rank
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
    """Do one step of SGD with LeNet on a batch that is split over the ranks.

    Losses are summed in every shard and the gradients divided by the size of the whole batch. Any
    split gives the gradient of the undivided batch up to rounding; shards may be empty.
    Gradients are reduced in one call. Replicas that held the same bits do so afterwards.

    Args:
        X: Samples, ``(n, 1, 28, 28)``, ``n`` at least 1.
        y: Class indices, ``(n,)``.
        device_params: ``device_params[rank][i]``: replicas from `pyringar.get_params`,
            updated in place; afterwards their ``grad`` is the sum over all ranks.
        devices: One device per rank.
        lr: Learning rate.
        comm: Reduces the gradients. Default: a communicator in rank order, for this call.
        weights: Shares of the ranks; see `pyringar.split_batch`.

    Returns:
        Every rank's summed loss, on its device, without a synchronization. 0 for an empty shard.

    Raises:
        ArgumentError: The numbers of ranks differ, the batch is empty, or `split_batch` refuses.
    """
    k = len(device_params)
    if k != len(devices):
        raise ArgumentError(f"device_params has {k} replicas for {len(devices)} devices")
    shards = split_batch(X, y, devices, weights)
    if X.shape[0] == 0:
        raise ArgumentError(f"X has shape {tuple(X.shape)}: there is no sample to learn from")
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
    """Return the cross-entropy summed over the samples; at least float32."""
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    return F.cross_entropy(scores, labels, reduction="sum")


def reduce_gradients(device_params: Replicas, devices: Sequence[Device], comm: Any) -> None:
    """Sum the gradients of all replicas into all of them; a missing gradient counts as zeros."""
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

    With momentum ``v = momentum * v + step_size * grad`` is subtracted; ``velocities`` holds ``v``,
    updated in place. Every product is rounded before its use, since only some devices have a fused
    multiply-add. A CUDA graph reads ``step_size`` from a 0-dimensional tensor.
    """
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    if not pairs:
        return
    with torch.no_grad():  # on a GPU a few launches for all parameters, instead of two for each
        steps = list(torch._foreach_mul([grad for _, grad in pairs], step_size))
        if velocities:
            both = zip(velocities, params, strict=True)
            last = [velocity for velocity, param in both if param.grad is not None]
            torch._foreach_mul_(last, momentum)
            torch._foreach_add_(last, steps)
            steps = last
        torch._foreach_sub_([param for param, _ in pairs], steps)


class StepState:
    """The state of training steps over ``replicas[rank][i]``.

    ``velocities[rank]`` are the momentum buffers, none if ``momentum`` is 0. ``sums`` holds every
    rank's loss so far, float64, on its device: reading it synchronizes.
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
        """Return the summed loss of all samples since the last call. Waits for the devices."""
        loss = sum(total.item() for total in self.sums)
        for total in self.sums:
            total.zero_()
        return loss


class EagerStep(StepState):
    """One training step of all ranks of this process, called for every batch.

    ``split`` cuts a batch into one shard per rank. ``scores`` maps the shards to scores ``(n,
    classes)``; ``streams`` runs the ranks instead. ``reduce`` sums every ``grad`` over all ranks.
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
        """Train on a batch; return `mismatch_flags`. Step size: learning rate over batch size."""
        losses = self.train(self._split(X, y), step_size, trace)
        for total, loss in zip(self.sums, losses, strict=True):
            total += loss
        return mismatch_flags(self._replicas)

    def train(self, shards: Split, step_size: StepSize, trace: Trace | None = None) -> list[Tensor]:
        """Train on one shard of samples and labels per rank; return every rank's summed loss."""
        k = len(self._replicas)
        for param in itertools.chain(*self._replicas):
            param.grad = None  # backward would add to it
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
        with span(trace, "backward", len(shards[0])):  # autograd runs one thread for each GPU
            found_losses = [loss for loss in losses if loss.requires_grad]  # ranks without samples
            if found_losses:
                torch.autograd.backward(found_losses)
        return [loss.detach() for loss in losses]


def _compute_rank(score: Score, rank: int, X: Tensor, y: Tensor) -> Tensor:
    loss = sum_loss(score(rank, X), y)
    if loss.requires_grad:  # a rank without samples may have computed nothing
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


class ShardStep(StepState):
    """One training step of all ranks in shards; ``sums[rank]`` is the loss of all ranks."""

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
        """Return the loss of all samples since the last call in rank 0's process, else 0."""
        loss = self.sums[0].item()
        super().take_loss()
        return loss if self._first == 0 else 0.0

    def evaluation(self, size: int, world_size: int) -> tuple[int, Any]:
        """Return a batch size and a split function with equal pieces on any number of ranks."""
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
