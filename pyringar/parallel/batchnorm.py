"""Batch norm over the samples of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.rank_runs import meet

_BatchNorm = nn.modules.batchnorm._BatchNorm


def synchronise_batchnorm(replicas: Sequence[nn.Module]) -> int:
    """Make the batch norms of replicas use the statistics of all ranks' samples.

    Training then gives the results of one module on the whole batch, up to rounding. Forward passes
    must run in `run_in_lockstep`. Only the ``forward`` of each batch norm is replaced. Returns the
    number of batch norms per replica.

    Cost per batch norm: one pass over the input, two numbers per channel moved between devices in
    each direction, one synchronisation of all ranks.
    """
    layers = [dict(_batchnorms(replica)) for replica in replicas]
    for name in layers[0]:
        layer = _Layer(name, [mine[name] for mine in layers])
        for rank, batchnorm in enumerate(layer.siblings()):
            vars(batchnorm)["forward"] = _Forward(layer, rank)
    return len(layers[0])


def check_batchnorm(module: nn.Module) -> None:
    """Raise UnsupportedError if a batch norm of the module overrides ``forward``."""
    for name, part in _batchnorms(module):
        if type(part).forward is not _BatchNorm.forward or "forward" in vars(part):
            raise UnsupportedError(
                f"batchnorm is 'sync', but '{name}' is a {type(part).__name__}, which "
                "overrides forward; expected nn.BatchNorm1d, 2d or 3d"
            )


def _batchnorms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    return ((n, part) for n, part in module.named_modules() if isinstance(part, _BatchNorm))


class _Forward:
    """The ``forward`` of a synchronised batch norm; copies and pickles get the original."""

    def __init__(self, layer: _Layer, rank: int) -> None:
        self._layer, self._rank = layer, rank

    def __call__(self, X: Tensor) -> Tensor:
        return self._layer.forward(self._rank, X)

    def __reduce__(self) -> tuple[Any, ...]:
        batchnorm = self._layer.siblings()[self._rank]
        return partial, (type(batchnorm).forward, batchnorm)


class _Layer:
    """One batch norm of the module: its replicas on all ranks."""

    def __init__(self, name: str, siblings: Sequence[_BatchNorm]) -> None:
        self._name = name
        # Weak: a cycle with the replaced `forward` would keep the replicas alive.
        self._siblings: list[Any] = [weakref.ref(batchnorm) for batchnorm in siblings]

    def siblings(self) -> list[_BatchNorm]:
        return [ref() for ref in self._siblings]

    def forward(self, rank: int, X: Tensor) -> Tensor:
        batchnorm = self.siblings()[rank]
        if not batchnorm.training and batchnorm.running_mean is not None:
            return type(batchnorm).forward(batchnorm, X)
        batchnorm._check_input_dim(X)  # type: ignore[no-untyped-call]
        if X.shape[1] != batchnorm.num_features or not X.is_floating_point():
            raise ArgumentError(
                f"'{self._name}' got shape {tuple(X.shape)} and {X.dtype}, expected "
                f"{batchnorm.num_features} channels of floating point"
            )
        mean, inverse_std = meet(self._name, X, self._statistics)
        # Subtract the mean first: x * scale + shift cancels badly for a large mean.
        Y = (X.to(mean.dtype) - _as_channels(mean, X)) * _as_channels(inverse_std, X)
        if batchnorm.weight is not None:
            Y = Y * _as_channels(batchnorm.weight, X)
        if batchnorm.bias is not None:
            Y = Y + _as_channels(batchnorm.bias, X)
        return Y.to(X.dtype)

    def _statistics(self, inputs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the mean and 1 / standard deviation of the whole batch, on each input's device.

        Differentiable. Combines the ranks' means and variances as in Chan, Golub, LeVeque 1979.
        """
        home = inputs[0].device
        counts = [X.numel() // X.shape[1] for X in inputs]
        total = sum(counts)
        if total < 2:
            raise ArgumentError(
                f"'{self._name}' got the shape {tuple(inputs[0].shape)} in all, expected more than "
                "one value per channel in training mode"
            )
        parts = [_moments(X, home) for X in inputs]
        mean = reduce(add, [m * (n / total) for (m, _), n in zip(parts, counts, strict=True)])
        means = _fan_out(mean, 2 * len(parts))
        centred = zip(parts, counts, means[: len(parts)], strict=True)
        var = reduce(add, [(v + (m - own).square()) * (n / total) for (m, v), n, own in centred])
        for batchnorm in self.siblings():
            _update_running(batchnorm, mean, var, total)
        inverse_stds = _fan_out(torch.rsqrt(var + self.siblings()[0].eps), len(parts))
        return [
            (own.to(X.device), inverse_std.to(X.device))
            for X, own, inverse_std in zip(inputs, means[len(parts) :], inverse_stds, strict=True)
        ]


class _FanOut(torch.autograd.Function):
    """Copy a tensor; backward adds the copies' gradients in a fixed order.

    Autograd adds the gradients of several uses in the order of their arrival, which varies.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_copies: int) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for _ in range(num_copies))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce(add, grads), None


_fan_out: Any = _FanOut.apply  # Any: torch 2.13 has no type for `apply`


def _moments(X: Tensor, home: torch.device) -> tuple[Tensor, Tensor]:
    """Return the biased mean and variance per channel, at least float32, on ``home``."""
    dims = [dim for dim in range(X.ndim) if dim != 1]
    wide = X if X.dtype == torch.float64 else X.float()
    var, mean = torch.var_mean(wide, dims, correction=0)
    return mean.to(home), var.to(home)


def _as_channels(vector: Tensor, X: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (X.ndim - 2))


@torch.no_grad()
def _update_running(batchnorm: _BatchNorm, mean: Tensor, var: Tensor, n: int) -> None:
    var = var * (n / (n - 1))
    share = batchnorm.momentum  # None: cumulative average
    if batchnorm.num_batches_tracked is not None:
        batchnorm.num_batches_tracked.add_(1)
        if share is None:
            share = 1 / float(batchnorm.num_batches_tracked)
    for running, now in ((batchnorm.running_mean, mean), (batchnorm.running_var, var)):
        if running is not None and share is not None:
            running.mul_(1 - share).add_(now.to(running), alpha=share)
