"""Cut tensors in nested lists, tuples and dicts for the ranks, and put them together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyringar.errors import ArgumentError

__all__ = [
    "batches",
    "check_batches",
    "copy_to",
    "gather",
    "leaves",
    "map_tensors",
    "no_rows",
    "scatter",
]


def map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the same lists, tuples and dicts with ``fn(tensor)`` for every tensor."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, part) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(fn, part) for part in value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(fn, part)) for key, part in value.items())
    return value


def leaves(value: Any) -> list[Any]:
    """Return what lists, tuples and dicts hold, tensors and other things, in order."""
    if isinstance(value, dict):
        return leaves(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def can_rebuild(value: Any) -> bool:
    """Return whether `map_tensors` makes what holds the same, also of classes that users derive."""
    again = leaves(map_tensors(lambda tensor: tensor, value))
    return list(map(id, leaves(value))) == list(map(id, again))


def batches(value: Any) -> list[Tensor]:
    """Return all tensors that have a first dimension, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.ndim]


def check_batches(batches: Sequence[Tensor]) -> Tensor:
    """Return the first of tensors that must agree in their first dimension."""
    if not batches:
        raise ArgumentError(
            "the call has no tensor with a first dimension, expected at least one to cut into "
            "shards"
        )
    if len({len(batch) for batch in batches}) > 1:
        shapes = ", ".join(str(tuple(batch.shape)) for batch in batches)
        raise ArgumentError(
            f"the call has tensors of the shapes {shapes}, expected the same number of samples in "
            "the first dimension of each"
        )
    return batches[0]


def scatter(value: Any, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[Any]:
    """Return a copy of a nested value per rank, with its shard of every tensor, on its device."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def shard(tensor: Tensor, rank: int) -> Tensor:
        if tensor.ndim:
            tensor = tensor.narrow(0, starts[rank], sizes[rank])
        return tensor.to(devices[rank])

    return [map_tensors(partial(shard, rank=rank), value) for rank in range(len(sizes))]


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Put the ranks' outputs together on ``device``."""
    first = outputs[0]
    if isinstance(first, Tensor):
        parts = [output.to(device) for output in outputs]
        return torch.cat(parts) if first.ndim else torch.stack(parts)
    if isinstance(first, dict):
        return type(first)(
            (key, gather([output[key] for output in outputs], device)) for key in first
        )
    if isinstance(first, (list, tuple)):
        columns = [gather(column, device) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if first is None:
        return None
    raise ArgumentError(
        f"module returned a {type(first).__name__}, expected tensors, or lists, tuples and dicts "
        "of them; gather=False returns what the ranks return as a list"
    )


def no_rows(device: torch.device, tensor: Tensor) -> Tensor:
    """Return no rows of an output, for a rank without samples."""
    tensor = tensor.detach()
    return (tensor[:0] if tensor.ndim else torch.zeros_like(tensor)).to(device)


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a copy without a graph; a parameter's is a parameter."""
    twin = tensor.detach().to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, tensor.requires_grad)
    return twin
