"""Split nested arguments into shards, and gather nested outputs."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pyringar.choices import kind_of
from pyringar.errors import ArgumentError
from pyringar.parallel.shards import cut

__all__ = ["gather", "num_samples", "scatter"]

Named = Sequence[tuple[str, Any]]  # values with their names in messages, such as "args[0]"

_PACKED = "PackedSequence: pass padded tensors and their lengths, and pack them inside the module"


def num_samples(arguments: Named, dim: int) -> int:
    """Return the length along ``dim`` that all tensors of the arguments share.

    Raises:
        ArgumentError: There is no tensor to split, or lengths differ; names the tensors.
    """
    found = [(path, leaf) for name, value in arguments for path, leaf in _leaves(name, value)]
    batches = [(path, leaf) for path, leaf in found if _has_dim(leaf, dim)]
    if not batches:
        raise ArgumentError(
            f"the call has no tensor with a dimension {dim}, expected at least one to split into "
            "shards"
        )
    lengths = {int(leaf.shape[dim]) for _, leaf in batches}
    if len(lengths) > 1:
        shapes = ", ".join(f"{path} {tuple(leaf.shape)}" for path, leaf in batches)
        raise ArgumentError(
            f"the call has tensors of different lengths in dimension {dim}: {shapes}; expected the "
            "same number of samples in each"
        )
    length = lengths.pop()
    for path, leaf in found:
        if not isinstance(leaf, Tensor) and _hides_batch(leaf, length, dim):
            raise ArgumentError(
                f"{path} is {kind_of(leaf)} with a tensor of {length} samples, which cannot be "
                "split; pass the tensor itself, or in a list, tuple, dict or dataclass"
            )
    return length


def scatter(
    arguments: Named, sizes: Sequence[int], devices: Sequence[torch.device], dim: int
) -> list[list[Any]]:
    """Return the arguments of each rank: its shard of every tensor, on its device.

    Containers are copied. Tensors without dimension ``dim``, and objects other than tensors and
    containers, go to all ranks.
    """

    def split(value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            if _has_dim(value, dim):
                return cut(value, sizes, devices, dim)
            return [value.to(device) for device in devices]
        parts = _parts(value)
        if parts is None:
            return [value] * len(sizes)
        columns = {key: split(part) for key, part in parts.items()}
        return [
            _rebuild(value, {key: column[rank] for key, column in columns.items()})
            for rank in range(len(sizes))
        ]

    columns = [split(value) for _, value in arguments]
    return [[column[rank] for column in columns] for rank in range(len(sizes))]


def gather(outputs: Mapping[int, Any], device: torch.device, dim: int) -> Any:
    """Concatenate the ranks' outputs along ``dim`` on ``device``; stack tensors of no dimension.

    Args:
        outputs: By rank.

    Raises:
        ArgumentError: Structures or shapes differ, or there are objects that cannot be gathered;
            names the rank and the place in the output.
    """
    return _gather("output", outputs, device, dim)


def _gather(path: str, outputs: Mapping[int, Any], device: torch.device, dim: int) -> Any:
    first_rank, first = next(iter(outputs.items()))
    for rank, output in outputs.items():
        are_tensors = isinstance(first, Tensor) and isinstance(output, Tensor)
        if not are_tensors and type(output) is not type(first):
            _refuse(path, first_rank, kind_of(first), rank, kind_of(output))
    if isinstance(first, Tensor):
        return _concatenate(path, outputs, device, dim)
    if first is None:
        return None
    parts = {rank: _parts(output) or {} for rank, output in outputs.items()}
    if _parts(first) is None:
        raise ArgumentError(
            f"{path} is {kind_of(first)}, expected tensors, or lists, tuples, dicts and "
            "dataclasses of tensors"
        )
    keys = parts[first_rank].keys()
    for rank, mine in parts.items():
        if mine.keys() != keys:
            _refuse(path, first_rank, f"the keys {[*keys]}", rank, f"the keys {[*mine]}")
    columns = {}
    for key in keys:
        column = {rank: mine[key] for rank, mine in parts.items()}
        columns[key] = _gather(_path(path, first, key), column, device, dim)
    return _rebuild(first, columns)


def _concatenate(
    path: str, outputs: Mapping[int, Tensor], device: torch.device, dim: int
) -> Tensor:
    first_rank, first = next(iter(outputs.items()))
    if first.ndim and not _has_dim(first, dim):
        raise ArgumentError(
            f"{path} has shape {tuple(first.shape)}, expected a dimension {dim} to gather along"
        )
    for rank, output in outputs.items():
        if _other_dims(output, dim) != _other_dims(first, dim):
            _refuse(
                path,
                first_rank,
                f"shape {tuple(first.shape)}",
                rank,
                f"shape {tuple(output.shape)}",
            )
    tensors = [output.to(device) for output in outputs.values()]
    return torch.cat(tensors, dim) if first.ndim else torch.stack(tensors)


def _other_dims(tensor: Tensor, dim: int) -> tuple[int, ...] | None:
    """Return the shape without dimension ``dim``; None for a tensor of no dimension."""
    if tensor.ndim == 0:
        return None
    shape = list(tensor.shape)
    if _has_dim(tensor, dim):
        del shape[dim]
    return tuple(shape)


def _refuse(path: str, first_rank: int, first: str, rank: int, other: str) -> None:
    raise ArgumentError(
        f"{path} has {first} on rank {first_rank} and {other} on rank {rank}, expected the same "
        "structure on every rank"
    )


# -- containers ------------------------------------------------------------------------------------


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by key; None for other objects.

    Raises:
        ArgumentError: A PackedSequence, whose tensors are not one row per sample.
    """
    if isinstance(value, PackedSequence):
        raise ArgumentError(f"the ranks cannot split or gather a {_PACKED}")
    if isinstance(value, (dict, UserDict)):
        return dict(value.items())
    if isinstance(value, (list, tuple, deque, UserList)) and not isinstance(value, torch.Size):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        fields = dataclasses.fields(value)
        return {f.name: getattr(value, f.name) for f in fields if hasattr(value, f.name)}
    return None


def _rebuild(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container like ``value`` that holds ``parts``.

    Raises:
        ArgumentError: The class of the container does not allow it.
    """
    try:
        twin = _rebuilt(value, parts)
        held = _parts(twin) or {}
        is_same = held.keys() == parts.keys() and all(held[key] is parts[key] for key in parts)
        problem = "" if is_same else "a copy does not hold what it is given"
    except Exception as error:  # whatever a class of the user's raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ArgumentError(
            f"a {type(value).__name__} cannot be copied with other tensors in it ({problem}); pass "
            "the tensors in a list, tuple, dict or dataclass"
        )
    return twin


def _rebuilt(value: Any, parts: Mapping[Any, Any]) -> Any:
    if isinstance(value, tuple):
        make: Callable[[Any], Any] = getattr(type(value), "_make", type(value))
        return make(parts.values())
    twin = copy.copy(value)
    if isinstance(value, (dict, UserDict, list, deque, UserList)):
        for key, part in parts.items():
            twin[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(twin, name, part)  # a dataclass may be frozen
    return twin


def _path(path: str, value: Any, key: Any) -> str:
    is_attribute = _parts(value) is not None and dataclasses.is_dataclass(value)
    if hasattr(value, "_fields"):
        return f"{path}.{value._fields[key]}"
    return f"{path}.{key}" if is_attribute else f"{path}[{key!r}]"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts = None if isinstance(value, Tensor) else _parts(value)
    if parts is None:
        yield path, value
        return
    for key, part in parts.items():
        yield from _leaves(_path(path, value, key), part)


def _has_dim(value: Any, dim: int) -> bool:
    return isinstance(value, Tensor) and -value.ndim <= dim < value.ndim


_OPAQUE = (type, ModuleType, FunctionType, nn.Module, str, bytes, range)
_MAX_DEPTH = 4


def _hides_batch(value: Any, length: int, dim: int, depth: int = 0) -> bool:
    """Return whether an object has a tensor of ``length`` samples in its attributes or items."""
    if isinstance(value, Tensor):
        return _has_dim(value, dim) and value.shape[dim] == length
    if isinstance(value, _OPAQUE) or depth == _MAX_DEPTH:
        return False
    inside = list(getattr(value, "__dict__", {}).values())
    inside += [getattr(value, name, None) for name in getattr(value, "__slots__", ())]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, Collection):
        inside += value
    return any(_hides_batch(part, length, dim, depth + 1) for part in inside)
