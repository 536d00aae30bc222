"""Split tensors in nested containers into shards, and concatenate the ranks' outputs."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pyringar.choices import kind_of
from pyringar.errors import ArgumentError
from pyringar.parallel.shards import Devices, cut

_PACKED = "PackedSequence: pass padded tensors and their lengths, and pack them inside the module"


def num_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any], dim: int) -> int:
    """Return the batch size: the length of all tensors along ``dim``, or raise ArgumentError."""
    tensors: _Found = []
    objects: _Found = []
    for name, value in [("args", args), *kwargs.items()]:
        _collect((None, value, name), value, tensors, objects)
    for path, tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise ArgumentError(f"{_name(path)} is a {kind} tensor, expected a dense one to split")
    batches = [(path, tensor) for path, tensor in tensors if _has_dim(tensor, dim)]
    if not batches:
        raise ArgumentError(
            f"the call has no tensor with a dimension {dim}, expected at least one to split into "
            "shards"
        )
    length = int(batches[0][1].shape[dim])
    if any(tensor.shape[dim] != length for _, tensor in batches):
        shapes = ", ".join(f"{_name(path)} {tuple(tensor.shape)}" for path, tensor in batches)
        raise ArgumentError(
            f"the call has tensors of different lengths in dimension {dim}: {shapes}; expected the "
            "same number of samples in each"
        )
    for path, value in objects:
        if _hides_batch(value, length, dim):
            raise ArgumentError(
                f"{_name(path)} is {kind_of(value)} with a tensor of {length} samples, which "
                "cannot be split; pass the tensor itself, or in a list, tuple, dict or dataclass"
            )
    return length


def scatter(value: Any, sizes: Sequence[int], devices: Devices, dim: int) -> list[Any]:
    """Return one value per rank, with the rank's shard of every tensor, on the rank's device.

    Containers are copied. All ranks get tensors without dimension ``dim`` and all other objects.
    """
    if isinstance(value, Tensor):
        if _has_dim(value, dim):
            return cut(value, sizes, devices, dim)
        return [value.to(device) for device in devices]
    parts = _parts(value)
    if parts is None:
        return [value] * len(sizes)
    columns = {key: scatter(part, sizes, devices, dim) for key, part in parts.items()}
    return [
        _rebuild(value, {key: column[rank] for key, column in columns.items()})
        for rank in range(len(sizes))
    ]


def move(value: Any, device: torch.device) -> Any:
    """Move the tensors of a value to ``device``; return the value itself if none moves."""
    if isinstance(value, Tensor):
        return value.to(device)
    parts = None if isinstance(value, PackedSequence) else _parts(value)
    if parts is None:
        return value
    moved = {key: move(part, device) for key, part in parts.items()}
    is_same = all(moved[key] is part for key, part in parts.items())
    return value if is_same else _rebuild(value, moved)


def gather(outputs: Mapping[int, Any], device: torch.device, dim: int) -> Any:
    """Concatenate the ranks' outputs along ``dim``; stack 0-dimensional tensors."""
    return _gather((None, None, "output"), outputs, device, dim)


def _gather(path: _Path, outputs: Mapping[int, Any], device: torch.device, dim: int) -> Any:
    first_rank, first = next(iter(outputs.items()))
    for rank, output in outputs.items():
        are_tensors = isinstance(first, Tensor) and isinstance(output, Tensor)
        if not are_tensors and type(output) is not type(first):
            _refuse(path, first_rank, kind_of(first), rank, kind_of(output))
    if isinstance(first, Tensor):
        return _concat(path, outputs, device, dim)
    if first is None:
        return None
    parts = {rank: _parts(output) or {} for rank, output in outputs.items()}
    if _parts(first) is None:
        raise ArgumentError(
            f"{_name(path)} is {kind_of(first)}, expected tensors, or lists, tuples, dicts and "
            "dataclasses of tensors"
        )
    keys = parts[first_rank].keys()
    for rank, mine in parts.items():
        if mine.keys() != keys:
            _refuse(path, first_rank, f"the keys {[*keys]}", rank, f"the keys {[*mine]}")
    columns = {}
    for key in keys:
        column = {rank: mine[key] for rank, mine in parts.items()}
        columns[key] = _gather((path, first, key), column, device, dim)
    return _rebuild(first, columns)


def _concat(path: _Path, outputs: Mapping[int, Tensor], device: torch.device, dim: int) -> Tensor:
    first_rank, first = next(iter(outputs.items()))
    if first.ndim and not _has_dim(first, dim):
        raise ArgumentError(
            f"{_name(path)} has shape {tuple(first.shape)}, expected a dimension {dim} to gather "
            "along"
        )
    for rank, output in outputs.items():
        if _other_dims(output, dim) != _other_dims(first, dim):
            ours, theirs = (f"shape {tuple(tensor.shape)}" for tensor in (first, output))
            _refuse(path, first_rank, ours, rank, theirs)
    tensors = [output.to(device) for output in outputs.values()]
    return torch.cat(tensors, dim) if first.ndim else torch.stack(tensors)


def _other_dims(tensor: Tensor, dim: int) -> tuple[int, ...] | None:
    if tensor.ndim == 0:
        return None
    shape = list(tensor.shape)
    if _has_dim(tensor, dim):
        del shape[dim]
    return tuple(shape)


def _refuse(path: _Path, first_rank: int, first: str, rank: int, other: str) -> None:
    raise ArgumentError(
        f"{_name(path)} has {first} on rank {first_rank} and {other} on rank {rank}, expected the "
        "same structure on every rank"
    )


_ITEMS = (dict, UserDict, list, tuple, deque, UserList)


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the items of a container by key, or None for other objects."""
    if isinstance(value, PackedSequence):
        raise ArgumentError(f"the ranks cannot split or gather a {_PACKED}")
    if isinstance(value, (dict, UserDict)):
        return dict(value.items())
    if isinstance(value, _ITEMS) and not isinstance(value, torch.Size):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        fields = dataclasses.fields(value)
        return {f.name: getattr(value, f.name) for f in fields if hasattr(value, f.name)}
    return None


def _rebuild(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Copy a container with other items, or raise ArgumentError if its class prevents that."""
    try:
        twin = _rebuilt(value, parts)
        held = _parts(twin) or {}
        is_same = held.keys() == parts.keys() and all(held[key] is parts[key] for key in parts)
        problem = "" if is_same else "a copy does not hold the items it was given"
    except Exception as error:  # a user's class may raise anything
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
    if isinstance(value, _ITEMS):
        for key, part in parts.items():
            twin[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(twin, name, part)  # a dataclass may be frozen
    return twin


# Path of a value: the path of its container, the container, the key of the value.
_Path: TypeAlias = "tuple[_Path | None, Any, Any]"
_Found: TypeAlias = "list[tuple[_Path, Any]]"


def _name(path: _Path) -> str:
    outer, container, key = path
    if outer is None:
        return str(key)
    fields = getattr(type(container), "_fields", None)
    if isinstance(container, tuple) and fields is not None:
        return f"{_name(outer)}.{fields[key]}"
    if isinstance(container, _ITEMS):
        return f"{_name(outer)}[{key!r}]"
    return f"{_name(outer)}.{key}"


def _collect(path: _Path, value: Any, tensors: _Found, objects: _Found) -> None:
    if isinstance(value, Tensor):
        tensors.append((path, value))
        return
    parts = _parts(value)
    if (
        gc.is_tracked(value) and type(value) not in _PLAIN
    ):  # value may refer to more tensors than its items
        objects.append((path, value))
    for key, part in (parts or {}).items():
        _collect((path, value, key), part, tensors, objects)


def _has_dim(value: Any, dim: int) -> bool:
    return isinstance(value, Tensor) and -value.ndim <= dim < value.ndim


_PLAIN = (dict, list, tuple, OrderedDict, defaultdict, deque, Counter)
# Objects without batches, which the search for tensors skips.
_CODE = (type, ModuleType, FunctionType, MethodType, FrameType, partial)
_MODEL = (nn.Module, nn.Parameter, torch.optim.Optimizer)
_MAX_OBJECTS = 1_000  # bounds the time for large containers, such as a vocabulary


def _hides_batch(value: Any, length: int, dim: int) -> bool:
    """Return True if an attribute of an object leads to a tensor of ``length`` samples.

    Searches the nearest `_MAX_OBJECTS` objects, except the items of the object itself.
    """
    skipped = {id(part) for part in (_parts(value) or {}).values()}
    limit = len(skipped) + _MAX_OBJECTS
    queue = deque([value])
    while queue and len(skipped) < limit:
        found = queue.popleft()
        if id(found) in skipped or not gc.is_tracked(found) or isinstance(found, _CODE + _MODEL):
            continue
        skipped.add(id(found))
        if not isinstance(found, Tensor):
            queue.extend(gc.get_referents(found)[:_MAX_OBJECTS])
        elif _has_dim(found, dim) and found.shape[dim] == length:
            return True
    return False
