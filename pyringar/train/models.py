"""Define `RankedModel`, the model in training with one replica per rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.comm.communicator import Communicator
from pyringar.errors import CompilerNotFoundError
from pyringar.parallel.batchnorm import synchronise_batchnorm
from pyringar.parallel.bucket_params import Comm
from pyringar.parallel.bucketer import GradientBucketer
from pyringar.parallel.rank_runs import run_in_lockstep, run_ranks
from pyringar.parallel.replicate import replicate
from pyringar.parallel.shards import Devices
from pyringar.train.config import MODEL_TITLES, TrainConfig
from pyringar.train.model_lenet import LeNet
from pyringar.train.model_resnet18 import fit_tensor_cores, resnet18
from pyringar.train.step import reduce_gradients

_NUM_CLASSES = 10


def autocast(config: TrainConfig, devices: Devices) -> ExitStack:
    stack = ExitStack()
    if config.amp:
        for kind in {device.type for device in devices}:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
    return stack


def threads_per_rank(config: TrainConfig) -> int:
    return torch.get_num_threads() if config.shards is None else 1


class RankedModel:
    """One replica of a model per rank of this process, all with the same bits.

    ``params[rank][i]`` are the parameters. ``bucketer`` reduces their gradients.
    """

    def __init__(self, config: TrainConfig, devices: Devices, comm: Comm) -> None:
        self._autocast = functools.partial(autocast, config, devices)
        self._devices, self._comm = devices, comm
        self.title, dtype = MODEL_TITLES[config.model], config.torch_dtype
        net: nn.Module
        if config.model == "lenet":
            generator = torch.Generator().manual_seed(config.seed)
            net = LeNet(config.init, generator=generator, dtype=dtype)
        else:
            self.title += f" of width {config.width}, {config.batchnorm} batch norm"
            net = resnet18(width=config.width, init=config.init, seed=config.seed, dtype=dtype)
        if config.channels_last:
            fit_tensor_cores(net)
        self.replicas = replicate(net, devices)
        self._is_synced = config.batchnorm == "sync" and len(devices) > 1
        if self._is_synced:
            synchronise_batchnorm(self.replicas)
        # Casting all weights at once delays all gradients to the end of backward. A captured step
        # loses nothing by that, because it reduces gradients only after backward.
        is_captured = config.model == "resnet18" and config.amp and config.cuda_graph
        self._casts_at_once = is_captured and not (config.compile or self._is_synced)
        if config.compile:
            for replica in self.replicas:
                replica.compile()
        self.params: list[list[Tensor]] = [list(r.parameters()) for r in self.replicas]
        self.bucketer = self._make_bucketer(config)

    def _make_bucketer(self, config: TrainConfig) -> GradientBucketer | None:
        comm = self._comm
        try:
            if config.shards is None and comm.world_size > 1:
                return GradientBucketer(
                    self.replicas,
                    comm=comm,
                    bucket_cap_mb=config.bucket_cap_mb,
                    overlap=None if config.overlap and not config.cuda_graph else False,
                )
        except CompilerNotFoundError:
            if not isinstance(comm, Communicator):
                raise
        return None

    def reduce(self) -> None:
        """Sum the gradients over all ranks; return when they are in place."""
        if self.bucketer is not None:
            self.bucketer.wait()
        elif self._comm.world_size > 1:
            reduce_gradients(self.params, self._devices, self._comm)

    def score(self, rank: int, X: Tensor) -> Tensor:
        """Compute the training scores of a rank: images ``(n, 1, 28, 28)`` to ``(n, 10)``."""
        if not len(X):
            return X.new_empty(0, _NUM_CLASSES)
        replica = self.replicas[rank]
        with self._autocast():
            if not self._casts_at_once:
                scores: Tensor = replica(X)
                return scores
            weights = {name: param for name, param in replica.named_parameters() if param.dim() > 1}
            casts = dict(zip(weights, _Cast.apply(*weights.values()), strict=True))
            scores = torch.func.functional_call(replica, casts, (X,))
            return scores

    def scores(self, shards: Sequence[Tensor]) -> list[Tensor]:
        calls = {
            rank: functools.partial(self.score, rank, shard)
            for rank, shard in enumerate(shards)
            if len(shard)
        }
        run = run_in_lockstep if self._is_synced else run_ranks
        found = run(calls, self._devices)
        return [found[r] if r in found else self.score(r, X) for r, X in enumerate(shards)]

    def buffers(self) -> list[list[Tensor]]:
        return [list(replica.buffers()) for replica in self.replicas]

    def close(self) -> None:
        if self.bucketer is not None:
            self.bucketer.close()


class _Cast(torch.autograd.Function):
    """Cast all weights to bfloat16, and their gradients back to float32, in one launch each."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        return _cast(weights, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _cast(grads, torch.float32)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    targets = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(targets, list(tensors))
    return tuple(targets)
