"""One training step on k ranks: the book's train_batch, done right."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from pyringar.comm.communicator import Communicator
from pyringar.errors import ArgumentError
from pyringar.parallel.shards import Device, Shards, mismatch_flags, split_batch
from pyringar.train.model_lenet import lenet
from pyringar.train.trace import Trace

__all__ = [
    "EagerStep",
    "Step",
    "Update",
    "reduce_gradients",
    "sgd",
    "sgd_scaled",
    "sum_loss",
    "train_batch",
]

Scores = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Update = Callable[[Sequence[Tensor]], None]
Split = Callable[[Tensor, Tensor, Sequence[Device], Sequence[float] | None], tuple[Shards, Shards]]


def train_batch(
    X: Tensor,  # noqa: N803
    y: Tensor,
    device_params: Sequence[Sequence[Tensor]],
    devices: Sequence[Device],
    lr: float,
    *,
    comm: Communicator | None = None,
    weights: Sequence[float] | None = None,
    scores: Scores | None = None,
    reduce: Callable[[], None] | None = None,
    update: Update | None = None,
    split: Split = split_batch,
    trace: Trace | None = None,
) -> list[Tensor]:
    """Do one step of SGD on a batch that is split over the ranks.

    Losses are summed in every shard and the gradients divided by the size of the whole batch, so
    any split, also one with empty shards, gives the gradient of the undivided batch up to
    rounding. All gradients are reduced in one call, unless ``reduce`` does better. Replicas that
    held the same bits hold the same bits afterwards.

    Args:
        X: Samples, ``(n, ...)``, ``n`` at least 1.
        y: Class indices, ``(n,)``.
        device_params: ``device_params[rank][i]``: replicas from
            :func:`pyringar.parallel.shards.get_params`. Updated in place; afterwards their ``grad``
            is the sum over all ranks.
        devices: One device per rank.
        lr: Learning rate.
        comm: What reduces. If not given, one in rank order that is closed again: give one where
            steps are many.
        weights: Shares of the ranks; see :func:`pyringar.parallel.shards.split_batch`.
        scores: Takes one shard of samples per rank and gives each rank's scores ``(n, classes)``,
            computed from ``device_params``; LeNet's if not given.
        reduce: Instead of ``comm``: called after backward, it returns when every ``grad`` is the
            sum over all ranks, such as :meth:`GradientBucketer.wait`.
        update: Instead of SGD with ``lr``: changes one rank's parameters by their ``grad``, which
            are sums over the whole batch.
        split: Cuts the batch, called as ``split(X, y, devices, weights)``: one shard per rank that
            is here. Where other ranks are in other processes theirs are left out.
        trace: Where to note the phases. What the host does for all ranks in one go stands in the
            row of each.

    Returns:
        Every rank's summed loss, on its device and not waited for: an empty shard's is 0.

    Raises:
        ArgumentError: Numbers of ranks that differ, an empty batch, or what `split_batch` refuses.
    """
    if len(device_params) != len(devices):
        raise ArgumentError(
            f"device_params has {len(device_params)} replicas for {len(devices)} devices"
        )
    X_shards, y_shards = split(X, y, devices, weights)  # noqa: N806
    if X.shape[0] == 0:
        raise ArgumentError(f"X has shape {tuple(X.shape)}: there is no sample to learn from")
    for param in itertools.chain(*device_params):
        param.grad = None  # or what an earlier step left would be added
    with _phase(trace, "forward", len(devices)):
        found = _lenet_scores(X_shards, device_params) if scores is None else scores(X_shards)
        losses = [sum_loss(ours, labels) for ours, labels in zip(found, y_shards, strict=True)]
    # One call: every GPU has a thread of autograd's of its own. A rank without samples may have
    # computed nothing, and then has no gradients.
    with _phase(trace, "backward", len(devices)):
        found_losses = [loss for loss in losses if loss.requires_grad]
        if found_losses:
            torch.autograd.backward(found_losses)
    with _phase(trace, "wait", len(devices)):
        if reduce is None:
            reduce_gradients(device_params, devices, comm)
        else:
            reduce()
    with _phase(trace, "optimizer", len(devices)):
        take_step = update or functools.partial(sgd, lr=lr, batch_size=X.shape[0])
        for params in device_params:
            take_step(params)
    return [loss.detach() for loss in losses]


@contextmanager
def _phase(trace: Trace | None, category: str, world_size: int) -> Iterator[None]:
    begin_ns = time.perf_counter_ns()
    yield
    if trace is not None:
        end_ns = time.perf_counter_ns()
        for rank in range(world_size):
            trace.add(category, category, rank, begin_ns, end_ns)


def _lenet_scores(
    shards: Sequence[Tensor], device_params: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    return [lenet(shard, params) for shard, params in zip(shards, device_params, strict=True)]


def sum_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the samples; 16-bit scores are taken to float32 first."""
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    return F.cross_entropy(scores, labels, reduction="sum")


def reduce_gradients(
    device_params: Sequence[Sequence[Tensor]],
    devices: Sequence[Device],
    comm: Communicator | None = None,
) -> None:
    """Sum the gradients of all replicas into all of them, in one call.

    A parameter without a gradient, on a rank that had no sample or did not use it, gets zeros.

    Args:
        device_params: As in :func:`train_batch`.
        devices: One device per rank; only read without ``comm``.
        comm: What reduces.
    """
    lists = [[_gradient(param) for param in params] for params in device_params]
    if comm is not None:
        comm.all_reduce_coalesced(lists)
        return
    with Communicator([str(device) for device in devices], order="rank") as own:
        own.all_reduce_coalesced(lists)


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad


def sgd(params: Sequence[Tensor], lr: float, batch_size: int) -> None:
    """Take one step against the gradients, which are sums over ``batch_size`` samples.

    The product is rounded before it is subtracted: a fused multiply-add, which some devices would
    use and others not, could give replicas on unlike devices different bits.
    """
    _subtract(params, lambda grads: torch._foreach_mul(grads, lr / batch_size))


def sgd_scaled(params: Sequence[Tensor], scale: Tensor) -> None:
    """The step of :func:`sgd`, to the bit, by a factor that is read when the step runs.

    Args:
        params: Parameters of one dtype and device, with gradients.
        scale: ``lr / batch_size``, 0-dimensional, on that device: float64 for float64, else
            float32, in which a GPU computes 16-bit products.
    """

    def multiply(grads: list[Tensor]) -> list[Tensor]:
        steps = torch._foreach_mul([grad.to(scale.dtype) for grad in grads], scale)
        return [step.to(grad.dtype) for step, grad in zip(steps, grads, strict=True)]

    _subtract(params, multiply)


def _subtract(
    params: Sequence[Tensor],
    steps_of: Callable[[list[Tensor]], tuple[Tensor, ...] | list[Tensor]],
) -> None:
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    if not pairs:
        return
    with torch.no_grad():  # on a GPU a few launches for all parameters, instead of two for each
        steps = steps_of([grad for _, grad in pairs])
        torch._foreach_sub_([param for param, _ in pairs], steps)


class Step(Protocol):
    """One training step of all ranks, called with one batch after the other."""

    def __call__(
        self,
        X: Tensor,  # noqa: N803
        y: Tensor,
        lr: float,
        trace: Trace | None = None,
    ) -> Sequence[Tensor]:
        """Train on a batch.

        Args:
            X: Samples, ``(n, ...)``.
            y: Class indices, ``(n,)``.
            lr: Learning rate.
            trace: As in :func:`train_batch`.

        Returns:
            Whether each rank but the first differs from it now; see :func:`mismatch_flags`. The
            next call may write into these tensors.
        """

    def take_loss(self) -> float:
        """The loss of all samples since the last call of this, summed. Waits for the devices."""


class EagerStep:
    """A :class:`Step` that queues its work anew for every batch.

    Args:
        device_params: As in :func:`train_batch`; one device per rank.
        weights: Shares of the ranks.
        scores: As in :func:`train_batch`.
        reduce: Likewise.
        split: Likewise.

    Attributes:
        sums: Every rank's loss so far, float64. Added up where it is: reading would wait.
    """

    def __init__(
        self,
        device_params: Sequence[Sequence[Tensor]],
        *,
        weights: Sequence[float] | None = None,
        scores: Scores | None = None,
        reduce: Callable[[], None] | None = None,
        split: Split = split_batch,
    ) -> None:
        self._device_params = device_params
        self._devices = [params[0].device for params in device_params]
        self._weights = weights
        self._scores = scores
        self._reduce = reduce
        self._split = split
        self.sums = [torch.zeros((), dtype=torch.float64, device=d) for d in self._devices]

    def __call__(
        self,
        X: Tensor,  # noqa: N803
        y: Tensor,
        lr: float,
        trace: Trace | None = None,
    ) -> list[Tensor]:
        """As :class:`Step` has it."""
        return self.run(X, y, functools.partial(sgd, lr=lr, batch_size=X.shape[0]), trace)

    def run(
        self,
        X: Tensor,  # noqa: N803
        y: Tensor,
        update: Update,
        trace: Trace | None = None,
    ) -> list[Tensor]:
        """The same with another way to change parameters; see :func:`train_batch`."""
        losses = train_batch(
            *(X, y, self._device_params, self._devices),
            lr=0.0,  # not used: update knows it
            weights=self._weights,
            scores=self._scores,
            reduce=self._reduce,
            update=update,
            split=self._split,
            trace=trace,
        )
        for total, loss in zip(self.sums, losses, strict=True):
            total += loss
        return mismatch_flags(self._device_params)

    def take_loss(self) -> float:
        """As :class:`Step` has it."""
        loss = sum(total.item() for total in self.sums)
        for total in self.sums:
            total.zero_()
        return loss
