"""Check tensors in plain torch: for ``naive`` and ``sharded``, and machines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyringar.choices import kind_of
from pyringar.comm.arguments import DTYPES, check_lists, check_parts
from pyringar.comm.arrays import as_tensor, is_array
from pyringar.comm.collective_call import CollectiveCall, tensors_of
from pyringar.errors import ArgumentError, RingarError, UnsupportedError


class PlainGroup:
    """Check what ``naive`` and ``sharded`` are given; refuse all that needs the engine.

    Args:
        devices: One per rank.
        error: Raised for calls that need the engine.
    """

    def __init__(self, devices: Sequence[torch.device], error: RingarError) -> None:
        self._devices = devices
        self._error = error
        self._is_closed = False

    def check_call(self, operation: str, given: Any) -> None:
        """Refuse all but one tensor, or one list, per rank, alike in length, shapes and dtypes."""
        if operation == "all_reduce":
            self._check_ranks("tensors", given)
            self._check_tensors({f"tensors[{rank}]": [t] for rank, t in enumerate(given)})
            return
        self._check_ranks("lists", given)
        check_lists(given)
        self._check_tensors({f"lists[{rank}]": tensors for rank, tensors in enumerate(given)})

    def check_usable(self) -> None:
        """Refuse everything once it is closed."""
        if self._is_closed:
            raise RingarError("the communicator is closed")

    def _check_ranks(self, name: str, given: Any) -> None:
        self.check_usable()
        if not isinstance(given, (list, tuple)) or len(given) != len(self._devices):
            count = f" of {len(given)}" if isinstance(given, (list, tuple)) else ""
            raise ArgumentError(
                f"{name} is {kind_of(given)}{count}, expected one per rank, {len(self._devices)} "
                "in all"
            )

    def _check_tensors(self, lists: dict[str, Any]) -> None:
        named: dict[str, Tensor] = {}
        first: list[Tensor] = []
        for device, (rank, given) in zip(self._devices, lists.items(), strict=True):
            for i, value in enumerate(given):
                name = rank if rank.startswith("tensors") else f"{rank}[{i}]"
                tensor = as_tensor(value, name) if is_array(value) else value
                check_tensor(name, tensor, device)
                _check_distinct(name, tensor)
                if len(first) == i:
                    first.append(tensor)
                for what in ("shape", "dtype"):
                    found, wanted = getattr(tensor, what), getattr(first[i], what)
                    if found != wanted:
                        raise ArgumentError(
                            f"{name} has {what} {found}, but rank 0 has {wanted}; all ranks must "
                            "agree"
                        )
                named[name] = tensor
        check_disjoint(named)

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what the engine ran: nothing."""
        return {}

    def close(self) -> bool:
        """Refuse all further calls; nothing runs in the background."""
        self._is_closed = True
        return True

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise type(self._error)(str(self._error))

    run = bind = _refuse


def check_tensors_of_rank(
    call: CollectiveCall, device: torch.device, world_size: int
) -> list[Tensor]:
    """Check the tensors of a call of one local rank; return the tensors that it may write.

    Raises:
        ArgumentError, UnsupportedError: As `BaseCommunicator.all_reduce`.
    """
    if call.operation == "barrier":
        return []
    is_list = call.operation == "all_reduce" and isinstance(call.outputs, (list, tuple))
    written = tensors_of(call.outputs) if is_list else [call.outputs]
    name = "outputs" if call.has_inputs else "tensors"
    named = {f"{name}[{i}]" if is_list else name: tensor for i, tensor in enumerate(written)}
    for name, tensor in named.items():
        check_tensor(name, tensor, device)
        check_no_overlap(name, tensor)
    check_disjoint(named)
    if call.has_inputs:
        check_tensor("inputs", call.inputs, device, is_written=False)
        check_parts(call.operation, call.outputs, call.inputs, world_size)
    return written


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Raise ArgumentError for an expanded tensor: its elements share addresses."""
    if tensor.is_contiguous():
        return
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(
            f"{name} of shape {tuple(tensor.shape)} overlaps itself (an expanded tensor?); "
            "expected every element at its own address"
        )


def check_tensor(name: str, tensor: Any, device: torch.device, *, is_written: bool = True) -> None:
    """Refuse all but a dense tensor on ``device``; if it is written, also one with a gradient."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is {kind_of(tensor)}, expected a dense tensor")
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{name} has layout {tensor.layout}, expected a dense tensor")
    if tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} has dtype {tensor.dtype}; supported are "
            + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        )
    if tensor.device != device:
        raise ArgumentError(f"{name} is on {tensor.device}, expected {device}, the rank's device")
    if is_written and tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} requires grad, and autograd would not see this in-place change; call it under "
            "torch.no_grad(), or pass .detach()"
        )


def _check_distinct(name: str, tensor: Tensor) -> None:
    by_stride = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if not by_stride.is_contiguous() and len(torch.unique(_addresses(tensor))) < tensor.numel():
        raise ArgumentError(f"{name} has elements that share memory")


def check_disjoint(named: dict[str, Tensor]) -> None:
    """Refuse tensors that share a byte; between the elements of one, others may lie."""
    spans = [(*_span(tensor), name) for name, tensor in named.items() if tensor.numel()]
    spans.sort(key=lambda span: span[0])
    for i, (_, end, before) in enumerate(spans):
        for _, _, name in itertools.takewhile(lambda span: span[0] < end, spans[i + 1 :]):  # noqa: B023
            if torch.isin(_bytes(named[name]), _bytes(named[before])).any():
                raise ArgumentError(f"{name} shares memory with {before}")


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _addresses(tensor: Tensor) -> Tensor:
    addresses = torch.arange(*_span(tensor), tensor.element_size())
    return addresses.as_strided(tensor.shape, tensor.stride()).flatten()


def _bytes(tensor: Tensor) -> Tensor:
    """Return where every byte of every element is."""
    return (_addresses(tensor)[:, None] + torch.arange(tensor.element_size())).flatten()
