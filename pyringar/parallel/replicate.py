"""replicate: copies of a module, one per rank, that share no memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.choices import kind_of
from pyringar.comm.topology import check_devices
from pyringar.errors import ArgumentError, UnsupportedError
from pyringar.parallel.shards import Device


def replicate(module: nn.Module, devices: Sequence[Device]) -> list[nn.Module]:
    """Return one deep copy of a module per rank, with equal bits and no shared memory.

    Args:
        module: Stays unchanged. Parameters and buffers may be on any device. Copies keep tied
            weights, ``requires_grad``, training mode, memory formats and module hooks, and the
            class, attributes and ``grad_dtype`` of parameters. Copies have no gradients and no
            parameter hooks.
        devices: One device per rank; ranks may share a device.

    Returns:
        One module per rank, on the rank's device; rank 0 gets a copy, too. Tensors that are neither
        parameters nor buffers are copied, but stay on their device, as with ``module.to()``.

    Raises:
        ArgumentError: A lazy parameter without a shape, a tensor on the meta device, an object that
            is not a module, or a missing device.
        UnsupportedError: ``copy.deepcopy`` fails, or returns parameters that are no leaves, share
            memory with ``module`` or have another class, as for scripted modules.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"module is {kind_of(module)}, expected a torch.nn.Module")
    targets = check_devices(devices)
    for name, tensor in _named_tensors(module):
        if nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                f"module has the lazy parameter '{name}', which has no shape and no values yet: "
                "call the module once on a sample, so that all replicas start from the same numbers"
            )
        if tensor.is_meta:
            raise ArgumentError(f"module has '{name}' on the meta device, expected values to copy")
    return [_copy(module, device) for device in targets]


@torch.no_grad()
def copy_buffers(replicas: Sequence[nn.Module]) -> None:
    """Copy the buffers of rank 0, such as running statistics, to all ranks."""
    for replica in replicas[1:]:
        for target, source in zip(replica.buffers(), replicas[0].buffers(), strict=True):
            target.copy_(source)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    # A deep copy and then `to(device)` would need the memory twice on the first device, and would
    # untie a buffer that two modules share. So give deepcopy the copied tensors in its memo.
    tensors = [tensor for _, tensor in _named_tensors(module)]
    try:
        made: dict[int, Any] = {id(tensor): _twin(tensor, device) for tensor in tensors}
        for tensor in tensors:
            made[id(tensor)].__dict__.update(copy.deepcopy(tensor.__dict__, made))
        replica = copy.deepcopy(module, made)
    # deepcopy cannot copy non-leaf tensors (old weight norm), locks, files or generators.
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"module, a {type(module).__name__}, cannot be copied ({error})"
        ) from error
    _check_copy(module, replica)
    return replica


def _twin(tensor: Tensor, device: torch.device) -> Tensor:
    data = tensor.detach().to(device, copy=True)
    if not isinstance(tensor, nn.Parameter):
        return data.requires_grad_(tensor.requires_grad)
    if type(data) is Tensor:  # the class of a parameter may have another constructor
        twin = Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    else:
        twin = nn.Parameter(data, requires_grad=tensor.requires_grad)
    grad_dtype = getattr(tensor, "grad_dtype", None)  # exists in torch 2.14 and later
    if grad_dtype != getattr(twin, "grad_dtype", None):
        twin.grad_dtype = grad_dtype
    return twin


def _check_copy(module: nn.Module, replica: nn.Module) -> None:
    copies = dict(_named_tensors(replica))
    for name, tensor in _named_tensors(module):
        twin = copies.pop(name, None)
        if twin is None:
            wrong = "it is missing"
        elif not twin.is_leaf:
            wrong = "it is not a leaf"
        elif twin.requires_grad != tensor.requires_grad:
            wrong = f"its requires_grad is {twin.requires_grad}"
        elif type(twin) is not type(tensor):
            wrong = f"it is a {type(twin).__name__}, not a {type(tensor).__name__}"
        elif tensor.numel() and twin.data_ptr() == tensor.data_ptr():
            wrong = "it shares the memory of the original"
        else:
            continue
        owner = dict(module.named_modules())[name.rpartition(".")[0]]
        raise UnsupportedError(
            f"module has '{name}' in a {type(owner).__name__}, which copy.deepcopy does not copy "
            f"right: {wrong}. Replicate the module before torch.jit, or without its own "
            "__deepcopy__"
        )
