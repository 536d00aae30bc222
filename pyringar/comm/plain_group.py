"""Checks of tensors in plain torch, for algorithms and transports without the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import (
    DTYPE_NAMES,
    DTYPES,
    SHARED_MEMORY_HINT,
    check_lists,
    check_parts,
    is_list,
)
from pyringar.comm.arrays import as_tensor, is_array
from pyringar.comm.collective_call import CollectiveCall, tensors_of
from pyringar.errors import ArgumentError, CompilerNotFoundError, RingarError, UnsupportedError


class PlainGroup:
    """Replacement for the engine group, for ``naive`` and ``sharded`` without a compiler.

    All other calls raise CompilerNotFoundError with ``reason``.
    """

    def __init__(self, devices: Sequence[torch.device], reason: str) -> None:
        self._devices = devices
        self._reason = reason
        self._is_closed = False

    def check_call(self, operation: str, given: Any) -> None:
        """Raise unless all ranks have valid tensors of equal number, shape and dtype."""
        self.check_usable()
        are_tensors = operation == "all_reduce"
        name = "tensors" if are_tensors else "lists"
        if not is_list(given) or len(given) != len(self._devices):
            count = f" of {len(given)}" if is_list(given) else ""
            raise ArgumentError(
                f"{name} is {kind_of(given)}{count}, expected one per rank, {len(self._devices)} "
                "in all"
            )
        rows = [[tensor] for tensor in given] if are_tensors else given
        if not are_tensors:
            check_lists(given)
        named: dict[str, Tensor] = {}
        first_row: list[Tensor] = []
        for rank, (row, device) in enumerate(zip(rows, self._devices, strict=True)):
            for i, value in enumerate(row):
                where = f"{name}[{rank}]" if are_tensors else f"{name}[{rank}][{i}]"
                tensor = as_tensor(value, where) if is_array(value) else value
                check_tensor(where, tensor, device)
                check_no_overlap(where, tensor)
                named[where] = tensor
                if rank == 0:
                    first_row.append(tensor)
                for what in ("shape", "dtype"):
                    found, wanted = getattr(tensor, what), getattr(first_row[i], what)
                    if found != wanted:
                        raise ArgumentError(
                            f"{where} has {what} {found}, but rank 0 has {wanted}; all ranks must "
                            "agree"
                        )
        check_disjoint(named)

    def check_usable(self) -> None:
        if self._is_closed:
            raise RingarError("the communicator is closed")

    def stats(self) -> dict[str, dict[str, float]]:
        return {}

    def close(self) -> bool:
        self._is_closed = True
        return True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise CompilerNotFoundError(self._reason)

    run = bind = _refuse


def check_tensors_of_rank(
    call: CollectiveCall, device: torch.device, world_size: int
) -> list[Tensor]:
    """Check the tensors of this rank's call; return the tensors that it may write."""
    if call.operation == "barrier":
        return []
    are_many = call.operation == "all_reduce" and is_list(call.outputs)
    written = tensors_of(call.outputs) if are_many else [call.outputs]
    name = "outputs" if call.has_inputs else "tensors"
    named = {f"{name}[{i}]" if are_many else name: tensor for i, tensor in enumerate(written)}
    for name, tensor in named.items():
        check_tensor(name, tensor, device)
        check_no_overlap(name, tensor)
    check_disjoint(named)
    if call.has_inputs:
        check_tensor("inputs", call.inputs, device, is_written=False)
        check_parts(call.operation, call.outputs, call.inputs, world_size)
    return written


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Raise ArgumentError if two elements of the tensor share an address."""
    if tensor.is_contiguous() or _is_nested(tensor):
        return
    layout = zip(tensor.stride(), tensor.shape, strict=True)
    is_expanded = any(step == 0 and size > 1 for step, size in layout)
    if is_expanded or len(torch.unique(_addresses(tensor))) < tensor.numel():
        raise ArgumentError(
            f"{name} of shape {tuple(tensor.shape)} overlaps itself (an expanded tensor?); "
            "expected every element at its own address"
        )


def _is_nested(tensor: Tensor) -> bool:
    """Return whether strides alone prove that no elements overlap.

    Each stride must exceed the extent of the dimensions with smaller strides.
    """
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return False
        reach += (size - 1) * step
    return True


def check_tensor(name: str, tensor: Any, device: torch.device, *, is_written: bool = True) -> None:
    """Raise unless ``tensor`` is dense and on ``device``; if written, it may not require grad."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is {kind_of(tensor)}, expected a dense tensor")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{name} has layout {tensor.layout}, expected a dense tensor")
    if tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} has dtype {tensor.dtype}; supported are {', '.join(DTYPE_NAMES)}"
        )
    if tensor.device != device:
        raise ArgumentError(f"{name} is on {tensor.device}, expected {device}, the rank's device")
    if is_written and tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} requires grad, and autograd would not see this in-place change; call it under "
            "torch.no_grad(), or pass .detach()"
        )


def check_disjoint(named: dict[str, Tensor]) -> None:
    """Raise ArgumentError if two tensors share a byte. Interleaved elements are allowed."""
    spans = [(*_span(tensor), name) for name, tensor in named.items() if tensor.numel()]
    spans.sort(key=lambda span: span[0])
    for i, (_, end, before) in enumerate(spans):
        for _, _, name in itertools.takewhile(lambda span: span[0] < end, spans[i + 1 :]):  # noqa: B023
            if torch.isin(_bytes(named[name]), _bytes(named[before])).any():
                raise ArgumentError(f"{name} shares memory with {before}; {SHARED_MEMORY_HINT}")


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _addresses(tensor: Tensor) -> Tensor:
    addresses = torch.arange(*_span(tensor), tensor.element_size(), device="cpu")
    return addresses.as_strided(tensor.shape, tensor.stride()).flatten()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the address of every byte of every element."""
    item = torch.arange(tensor.element_size(), device="cpu")
    return (_addresses(tensor)[:, None] + item).flatten()
