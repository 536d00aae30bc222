"""The models that can be trained, each on all ranks, behind one small interface."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.comm.base import RankCommunicator
from pyringar.comm.communicator import Communicator
from pyringar.errors import CompilerNotFoundError
from pyringar.parallel.bucketer import GradientBucketer
from pyringar.parallel.lockstep import RankThreads, are_side_by_side
from pyringar.parallel.module import DataParallel
from pyringar.parallel.replicate import copy_buffers
from pyringar.parallel.shards import get_params
from pyringar.train.config import MODEL_TITLES, TrainConfig
from pyringar.train.model_lenet import PARAM_NAMES, lenet, lenet_params
from pyringar.train.model_resnet18 import fit_tensor_cores, resnet18
from pyringar.train.step import AfterBackward, Mark, SideBySide

__all__ = [
    *("RankedModel", "autocast", "build_model", "plain_model"),
    *("takes_turns", "threads_per_rank"),
]

_NUM_CLASSES = 10


def autocast(config: TrainConfig, devices: Sequence[torch.device]) -> ExitStack:
    """Enter torch's autocast on the ranks' devices, if ``config.amp`` is set."""
    stack = ExitStack()
    if config.amp:
        for kind in {device.type for device in devices}:
            stack.enter_context(torch.autocast(kind, torch.bfloat16))
    return stack


def takes_turns(config: TrainConfig, devices: Sequence[torch.device]) -> bool:
    """Return whether one rank of this process computes after the other.

    Raises:
        ArgumentError: They cannot do what ``config.in_turns`` says.
    """
    # A model is compiled by one thread, and batch norm over the whole batch ties ranks together.
    is_tied = config.compile or config.batchnorm == "sync" or config.cuda_graph
    return is_tied or not are_side_by_side(devices, config.in_turns)


def threads_per_rank(config: TrainConfig, devices: Sequence[torch.device]) -> int:
    """Return how many torch threads a rank of this process computes with."""
    if config.shards is not None:
        return 1
    num_threads = torch.get_num_threads()
    return num_threads if takes_turns(config, devices) else RankThreads(devices).share()


class RankedModel(ABC):
    """A model with one replica per rank, all of which hold the same bits.

    Attributes:
        title: Its name, for people.
        params: ``params[rank][i]``: what a step changes.
        replicas: One module per rank, or what ``params`` has.
        bucketer: What reduces the gradients of ``params``.
        beside: How ranks compute at the same time; None where they take turns.
    """

    title: str
    params: list[list[Tensor]]
    replicas: Sequence[nn.Module | list[Tensor]]
    bucketer: GradientBucketer | AfterBackward
    beside: SideBySide | None = None

    def __init__(self, config: TrainConfig, devices: Sequence[torch.device]) -> None:
        self._autocast = functools.partial(autocast, config, devices)
        self._threads = None if takes_turns(config, devices) else RankThreads(devices)

    def scores(self, shards: Sequence[Tensor], mark: Mark | None = None) -> list[Tensor]:
        """Score every rank's images, for training: ``(n, 1, 28, 28)`` to ``(n, 10)`` each.

        Args:
            shards: One per rank.
            mark: Called with a rank whenever that has got on; see `Trace.turns`.
        """
        with self._autocast():
            return self._forward(shards, mark)

    @abstractmethod
    def _forward(self, shards: Sequence[Tensor], mark: Mark | None) -> list[Tensor]: ...

    @abstractmethod
    def _score(self, rank: int, X: Tensor) -> Tensor: ...  # noqa: N803

    def _compute_beside(self) -> None:
        """Let ranks compute at the same time, if they may; call when all else is there."""
        if self._threads is not None:
            self.beside = SideBySide(self._threads, self.score, self.bucketer.together)

    def score(self, rank: int, X: Tensor) -> Tensor:  # noqa: N803
        """Score one rank's images, for training.

        Args:
            rank: Of those that are here.
            X: Images.
        """
        # Threads share the casts that autocast keeps, and each clears them at its end: with every
        # weight used once, as here, no bit depends on when.
        with self._autocast():
            return self._score(rank, X)

    @abstractmethod
    def evaluators(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """One function or module per rank that scores test images, with the same answers on all."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Everything that was learned, by name; of rank 0."""

    def buffers(self) -> list[list[Tensor]]:
        """Return running statistics and the like, of every rank: these may differ."""
        return [[] for _ in self.params]

    def tensors(self) -> list[Tensor]:
        """Everything that a step changes, on all ranks."""
        return [tensor for mine in (*self.params, *self.buffers()) for tensor in mine]

    def close(self) -> None:
        """Let go of hooks and threads, not of the communicator."""
        self.bucketer.close()
        if self._threads is not None:
            self._threads.close()


def build_model(
    config: TrainConfig, devices: Sequence[torch.device], comm: Communicator | RankCommunicator
) -> RankedModel:
    """Make the model that ``config`` names, with the initial numbers of its seed, on all ranks.

    Args:
        config: The choice of model and everything about it.
        devices: One device per rank that is in this process.
        comm: What reduces.
    """
    return {"lenet": _LeNet, "resnet18": _ResNet18}[config.model](config, devices, comm)


def plain_model(config: TrainConfig, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Build the model of ``config`` by itself on a device: for measuring what a step takes."""
    if config.model == "resnet18":
        return _initial_resnet18(config).to(device)
    return functools.partial(lenet, params=get_params(_initial_lenet(config), device))


def _initial_lenet(config: TrainConfig) -> list[Tensor]:
    generator = torch.Generator().manual_seed(config.seed)
    return lenet_params(config.init, generator=generator, dtype=config.torch_dtype)


def _initial_resnet18(config: TrainConfig) -> nn.Module:
    net = resnet18(width=config.width, init=config.init, seed=config.seed, dtype=config.torch_dtype)
    if config.channels_last:
        fit_tensor_cores(net)
    return net


def _call_with(mark: Mark, rank: int, *_: object) -> None:
    mark(rank)


def _make_bucketer(
    replicas: Sequence[Any], comm: Any, shards: int | None = None, **options: Any
) -> GradientBucketer | AfterBackward:
    """Return what reduces gradients: as they come, or after backward if there is no engine.

    A step over shards has its own way, and one rank has nothing to reduce: both have no hooks.
    """
    try:
        if shards is None and comm.world_size > 1:
            return GradientBucketer(replicas, comm=comm, **options)
    except CompilerNotFoundError:
        if not isinstance(comm, Communicator):
            raise
    params = [list(r.parameters()) if isinstance(r, nn.Module) else r for r in replicas]
    return AfterBackward(params, [own[0].device for own in params], comm)


class _Replicas(DataParallel):
    """A module's replicas, also where there is no engine, and for steps over shards."""

    _shards: int | None = None

    def _make_bucketer(  # type: ignore[override]
        self, comm: Communicator | RankCommunicator | None
    ) -> GradientBucketer | AfterBackward:
        return _make_bucketer(self.replicas, comm, self._shards, **self._bucketing)


class _Unhooked(_Replicas):
    _shards = 1


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
        initial = _initial_lenet(config)
        self.params = [get_params(initial, device) for device in devices]
        self.replicas = self.params
        self.bucketer = _make_bucketer(
            *(self.params, comm, config.shards),
            bucket_cap_mb=config.bucket_cap_mb,
            overlap=config.overlap and not config.cuda_graph,
        )
        self._lenet = torch.compile(lenet) if config.compile else lenet
        self._compute_beside()

    def _score(self, rank: int, X: Tensor) -> Tensor:  # noqa: N803
        return self._lenet(X, self.params[rank])

    def _forward(self, shards: Sequence[Tensor], mark: Mark | None) -> list[Tensor]:
        scores = []
        for rank, (X, params) in enumerate(zip(shards, self.params, strict=True)):  # noqa: N806
            scores.append(self._lenet(X, params))
            if mark is not None:
                mark(rank)
        return scores

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
        self._net = (_Replicas if config.shards is None else _Unhooked)(
            _initial_resnet18(config),
            devices,
            batchnorm=config.batchnorm,
            bucket_cap_mb=config.bucket_cap_mb,
            overlap=config.overlap and not config.cuda_graph,
            comm=comm,
            in_turns=True,  # where they do not, each is called in its thread, and not all at once
        )
        self._is_compiled = config.compile
        # All gradients then come at the end of backward, which a graph's reduction waits for.
        self._casts_at_once = config.amp and config.cuda_graph and not config.compile
        if config.compile:
            for replica in self._net.replicas:
                replica.compile()
        self.bucketer, self.replicas = self._net.bucketer, self._net.replicas
        self.params = [list(replica.parameters()) for replica in self._net.replicas]
        self._compute_beside()

    def _score(self, rank: int, X: Tensor) -> Tensor:  # noqa: N803
        if not len(X):
            return X.new_empty(0, _NUM_CLASSES)
        replica = self._net.replicas[rank]
        if not self._casts_at_once:
            scores: Tensor = replica(X)
            return scores
        weights = {name: param for name, param in replica.named_parameters() if param.dim() > 1}
        casts = dict(zip(weights, _Cast.apply(*weights.values()), strict=True))
        scores = torch.func.functional_call(replica, casts, (X,))
        return scores

    def _forward(self, shards: Sequence[Tensor], mark: Mark | None) -> list[Tensor]:
        if not any(len(shard) for shard in shards):  # ranks in other processes have them all
            return [shard.new_empty(0, _NUM_CLASSES) for shard in shards]
        with self._marked(mark):
            return self._net.run_shards(shards)

    @contextmanager
    def _marked(self, mark: Mark | None) -> Iterator[None]:
        """Mark a rank, if anybody wants to know, whenever it is through one of its layers.

        Compiled modules have no layers: then nothing is marked.
        """
        hooks = []
        if mark is not None and not self._is_compiled:
            hooks = [
                part.register_forward_hook(functools.partial(_call_with, mark, rank))
                for rank, replica in enumerate(self._net.replicas)
                for part in replica.modules()
                if not any(part.children())
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def evaluators(self) -> Sequence[Callable[[Tensor], Tensor]]:
        copy_buffers(self._net.replicas)  # rank 0's running statistics count, as if it were alone
        return self._net.replicas

    def buffers(self) -> list[list[Tensor]]:
        return [list(replica.buffers()) for replica in self._net.replicas]

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._net.state_dict()
        return state

    def close(self) -> None:
        super().close()
        self._net.close()
