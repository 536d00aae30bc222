"""The models that can be trained, each on all ranks, behind one small interface."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.errors import CompilerNotFoundError
from pyringar.parallel.batchnorm import synchronise_batchnorm
from pyringar.parallel.bucketer import GradientBucketer
from pyringar.parallel.rank_threads import run_in_lockstep, run_ranks
from pyringar.parallel.replicate import copy_buffers, replicate
from pyringar.parallel.shards import get_params
from pyringar.train.config import MODEL_TITLES, TrainConfig
from pyringar.train.model_lenet import PARAM_NAMES, lenet, lenet_params
from pyringar.train.model_resnet18 import fit_tensor_cores, resnet18
from pyringar.train.step import AfterBackward

__all__ = ["RankedModel", "autocast", "build_model", "threads_per_rank"]

_NUM_CLASSES = 10


def autocast(config: TrainConfig, devices: Sequence[torch.device]) -> ExitStack:
    """Enter torch's autocast on the ranks' devices, if ``config.amp`` is set."""
    stack = ExitStack()
    if config.amp:
        for kind in {device.type for device in devices}:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
    return stack


def threads_per_rank(config: TrainConfig) -> int:
    """Return the number of torch threads of each rank of this process."""
    return torch.get_num_threads() if config.shards is None else 1


class RankedModel(ABC):
    """A model with one replica per rank, all of which hold the same bits."""

    title: str  # for people
    params: list[list[Tensor]]  # params[rank][i]
    replicas: Sequence[nn.Module | list[Tensor]]  # one module per rank, or the same as params
    bucketer: GradientBucketer | AfterBackward  # reduces the gradients of params

    def __init__(self, config: TrainConfig, devices: Sequence[torch.device]) -> None:
        self._autocast = functools.partial(autocast, config, devices)

    def scores(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Score every rank's images, for training: ``(n, 1, 28, 28)`` to ``(n, 10)`` each."""
        with self._autocast():
            return self._forward(shards)

    @abstractmethod
    def _forward(self, shards: Sequence[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def _score(self, rank: int, X: Tensor) -> Tensor: ...  # noqa: N803

    def score(self, rank: int, X: Tensor) -> Tensor:  # noqa: N803
        """Score one rank's images, for training."""
        with self._autocast():
            return self._score(rank, X)

    @abstractmethod
    def evaluators(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """Return one function or module per rank that scores test images, with equal results."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return rank 0's parameters and buffers by name."""

    def buffers(self) -> list[list[Tensor]]:
        """Return the buffers of every rank, which may differ, such as running statistics."""
        return [[] for _ in self.params]

    def tensors(self) -> list[Tensor]:
        """Return every tensor that a step changes, on all ranks."""
        return [tensor for mine in (*self.params, *self.buffers()) for tensor in mine]

    def close(self) -> None:
        """Remove the hooks; the communicator stays open."""
        self.bucketer.close()


def build_model(
    config: TrainConfig, devices: Sequence[torch.device], comm: Communicator | RankCommunicator
) -> RankedModel:
    """Make the model that ``config`` names, with the initial numbers of its seed, on all ranks."""
    return {"lenet": _LeNet, "resnet18": _ResNet18}[config.model](config, devices, comm)


def _make_bucketer(
    replicas: Sequence[Any], comm: Any, config: TrainConfig
) -> GradientBucketer | AfterBackward:
    """Return a bucketer with hooks, or a call after backward if there is no compiled engine.

    A sharded step reduces by itself, and one rank has nothing to reduce: both need no hooks.
    """
    try:
        if config.shards is None and comm.world_size > 1:
            return GradientBucketer(
                replicas,
                comm=comm,
                bucket_cap_mb=config.bucket_cap_mb,
                overlap=None if config.overlap and not config.cuda_graph else False,
            )
    except CompilerNotFoundError:
        if not isinstance(comm, Communicator):
            raise
    params = [list(r.parameters()) if isinstance(r, nn.Module) else r for r in replicas]
    return AfterBackward(params, [own[0].device for own in params], comm)


class _LeNet(RankedModel):
    """The book's list of tensors and a function."""

    title = MODEL_TITLES["lenet"]

    def __init__(
        self,
        config: TrainConfig,
        devices: Sequence[torch.device],
        comm: Communicator | RankCommunicator,
    ) -> None:
        super().__init__(config, devices)
        generator = torch.Generator().manual_seed(config.seed)
        initial = lenet_params(config.init, generator=generator, dtype=config.torch_dtype)
        self.params = [get_params(initial, device) for device in devices]
        self.replicas = self.params
        self.bucketer = _make_bucketer(self.params, comm, config)
        self._lenet = torch.compile(lenet) if config.compile else lenet

    def _score(self, rank: int, X: Tensor) -> Tensor:  # noqa: N803
        return self._lenet(X, self.params[rank])

    def _forward(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [self._score(rank, shard) for rank, shard in enumerate(shards)]

    def evaluators(self) -> Sequence[Callable[[Tensor], Tensor]]:
        return [functools.partial(lenet, params=params) for params in self.params]

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(PARAM_NAMES, self.params[0], strict=True))


class _Cast(torch.autograd.Function):
    """Cast weights to bfloat16 and their gradients back, all in one launch; autocast's bits."""

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


class _ResNet18(RankedModel):
    """A module, replicated."""

    def __init__(
        self,
        config: TrainConfig,
        devices: Sequence[torch.device],
        comm: Communicator | RankCommunicator,
    ) -> None:
        super().__init__(config, devices)
        self.title = (
            f"{MODEL_TITLES[config.model]} of width {config.width}, {config.batchnorm} batch norm"
        )
        self._devices = devices
        net = resnet18(
            width=config.width, init=config.init, seed=config.seed, dtype=config.torch_dtype
        )
        if config.channels_last:
            fit_tensor_cores(net)
        self._modules = replicate(net, devices)
        self._is_synced = config.batchnorm == "sync" and len(devices) > 1
        if self._is_synced:
            synchronise_batchnorm(self._modules)
        # All gradients then come at the end of backward, where a graph's reduction begins anyway.
        self._casts_at_once = config.amp and config.cuda_graph and not config.compile
        if config.compile:
            for replica in self._modules:
                replica.compile()
        self.bucketer = _make_bucketer(self._modules, comm, config)
        self.replicas = self._modules
        self.params = [list(replica.parameters()) for replica in self._modules]

    def _score(self, rank: int, X: Tensor) -> Tensor:  # noqa: N803
        if not len(X):
            return X.new_empty(0, _NUM_CLASSES)
        replica = self._modules[rank]
        if not self._casts_at_once:
            scores: Tensor = replica(X)
            return scores
        weights = {name: param for name, param in replica.named_parameters() if param.dim() > 1}
        casts = dict(zip(weights, _Cast.apply(*weights.values()), strict=True))
        scores = torch.func.functional_call(replica, casts, (X,))
        return scores

    def _forward(self, shards: Sequence[Tensor]) -> list[Tensor]:
        calls = {
            rank: functools.partial(self._modules[rank], shard)
            for rank, shard in enumerate(shards)
            if len(shard)
        }
        run = run_in_lockstep if self._is_synced else run_ranks
        scores = run(calls, self._devices) if calls else {}
        empty = [shard.new_empty(0, _NUM_CLASSES) for shard in shards]
        return [scores.get(rank, none) for rank, none in enumerate(empty)]

    def evaluators(self) -> Sequence[Callable[[Tensor], Tensor]]:
        copy_buffers(self._modules)  # of rank 0
        return self._modules

    def buffers(self) -> list[list[Tensor]]:
        return [list(replica.buffers()) for replica in self._modules]

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._modules[0].state_dict()
        return state
