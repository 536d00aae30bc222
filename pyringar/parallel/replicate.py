"""Copies of a module, one per rank, that share nothing; and what they must share to agree again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import kind_of
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.shards import Device

__all__ = ["copy_buffers", "copy_parameters", "replicate"]


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Copy a module to every rank; the copies hold the same bits and share no memory.

    All of them are copies, rank 0's too: ``module`` is left as it is, and may be trained, moved or
    dropped without the replicas noticing.

    Args:
        module: Parameters and buffers may lie on any device. What is shared inside it (tied
            weights) is shared inside every copy. ``requires_grad``, training mode, memory formats
            and the module's own hooks are kept; gradients and hooks of parameters are not.
        devices: One device per rank; ranks may share one.

    Returns:
        One module per rank, on its device. Tensors that are neither parameters nor buffers are
        copied, but stay on their device, as with ``module.to()``.

    Raises:
        ArgumentError: A lazy parameter that has not seen an input yet, a tensor on the meta device
            (both named), no module, or a device that is not there.
        UnsupportedError: The module cannot be deep-copied; says why.

    Cost: one copy of the module's memory per rank, and no other. Once: copies of later changes are
    never made.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module is {kind_of(module)}, expected a torch.nn.Module")
    targets = check_devices(devices)
    for name, tensor in _named_tensors(module):
        _check_initialised(name, tensor)
    return [_copy(module, device) for device in targets]


def copy_buffers(replicas: Sequence[nn.Module], root: int = 0) -> None:
    """Give all ranks the buffers of one, such as the running statistics of its batch norms.

    Args:
        replicas: Modules as `replicate` makes them.
        root: The rank whose buffers all others get.
    """
    _copy_from(root, [list(replica.buffers()) for replica in replicas])


def copy_parameters(replicas: Sequence[nn.Module], root: int = 0) -> None:
    """Give all ranks the parameters of one, as after it was initialised again.

    Args:
        replicas: Modules as `replicate` makes them.
        root: The rank whose parameters all others get.
    """
    _copy_from(root, [list(replica.parameters()) for replica in replicas])


@torch.no_grad()
def _copy_from(root: int, tensors: Sequence[Sequence[Tensor]]) -> None:
    for rank, mine in enumerate(tensors):
        if rank != root:
            for target, source in zip(mine, tensors[root], strict=True):
                target.copy_(source)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_initialised(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ArgumentError(
            f"module has the lazy parameter '{name}', which has no shape and no values yet: call "
            "the module once on a sample, so that all replicas start from the same numbers"
        )
    if tensor.is_meta:
        raise ArgumentError(
            f"module has '{name}' on the meta device, expected one with values to copy"
        )


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Make a deep copy whose parameters and buffers are on ``device`` from the start.

    ``module.to(device)`` after a plain deep copy would hold the memory twice on the first device,
    and would cut the tie between modules that share a buffer.
    """
    made: dict[int, Any] = {}  # deepcopy takes from here what it finds
    for _, tensor in _named_tensors(module):
        twin = tensor.detach().to(device, copy=True)
        if isinstance(tensor, nn.Parameter):
            made[id(tensor)] = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        else:
            made[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(module, made)
    # RuntimeError: tensors inside a graph (old weight norm); TypeError: locks, files, generators.
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"module, a {type(module).__name__}, cannot be copied ({error})"
        ) from error
