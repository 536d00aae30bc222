"""A training step over a fixed number of shards, whose bits do not depend on the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.parallel.sharded_step import ShardedStep
from pyringar.parallel.shards import Shards, mismatch_flags, shard_sizes
from pyringar.train.config import TrainConfig
from pyringar.train.models import RankedModel
from pyringar.train.step import Momentum, span, sum_loss
from pyringar.train.trace import Trace


class ShardStep:
    """One training step of all ranks in shards; called as an `EagerStep` is.

    ``sums`` holds the loss of all ranks so far, float64, on every rank of this process.
    """

    def __init__(
        self, model: RankedModel, comm: Communicator | RankCommunicator, config: TrainConfig
    ) -> None:
        self._model, self._num_shards = model, config.shards or 1
        step = self._step = ShardedStep(model.replicas, self._num_shards, comm=comm)
        self.momentum = Momentum.of(config.momentum, model.params)
        self.sums = [
            torch.zeros((), dtype=torch.float64, device=params[0].device) for params in model.params
        ]
        self._each = len(step.shards[0])
        self._first = step.shards[0].start // self._each  # the first rank of this process

    def __call__(
        self, X: Tensor, y: Tensor, step_size: float, trace: Trace | None = None
    ) -> list[Tensor]:
        """Train on a batch; see `EagerStep`."""
        sizes = shard_sizes(len(X), self._num_shards)
        shards = list(zip(torch.split(X, sizes), torch.split(y, sizes), strict=True))

        def loss_of(_: Any, shard: int) -> Tensor | None:
            if not sizes[shard]:
                return None
            rank = shard // self._each - self._first
            images, labels = (part.to(self.sums[rank].device) for part in shards[shard])
            return sum_loss(self._model.score(rank, images), labels)

        loss = self._step(loss_of, **({} if trace is None else {"watch": trace.span}))
        with span(trace, "optimizer", len(self._model.params)):
            for rank, params in enumerate(self._model.params):
                self.momentum.update(rank, params, step_size)
        for total in self.sums:
            total += loss.to(total.device)
        return mismatch_flags(self._model.params)

    def take_loss(self) -> float:
        """Return the loss of all samples since the last call in rank 0's process, else 0."""
        loss = self.sums[0].item() if self._first == 0 else 0.0
        for total in self.sums:
            total.zero_()
        return loss

    def evaluation(self, size: int, world_size: int) -> tuple[int, Any]:
        """Return a batch size and a split function with equal pieces on any number of ranks."""
        piece = math.ceil(size / self._num_shards)

        def split(X: Tensor, y: Tensor, devices: Sequence[torch.device]) -> tuple[Shards, Shards]:
            begins = [(self._first + i) * piece for i in range(len(devices))]
            images, labels = (
                tuple(t[b : b + piece].to(d) for b, d in zip(begins, devices, strict=True))
                for t in (X, y)
            )
            return images, labels

        return piece * world_size, split

    def close(self) -> None:
        """Close what the step owns."""
        self._step.close()
