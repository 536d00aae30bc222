"""`allreduce` without a communicator, and the groups behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pyringar.choices import Op
from pyringar.comm import arrays
from pyringar.comm.arguments import is_list, op_name
from pyringar.comm.base_communicator import decline
from pyringar.comm.collective_call import CollectiveCall
from pyringar.comm.communicator import Communicator, make_group
from pyringar.comm.exits import close_at_exit
from pyringar.comm.handles import handle_of, is_traced

TensorList = Sequence[Tensor]
_FUSED = ("fused", "rank")  # algorithm and order of CPU ranks


class _Default:
    """Groups behind `allreduce`, made at first use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may call allreduce
        self._group: Any = None
        self.run_prepared: Callable[..., bool] = decline
        self.handle = handle_of(self, "of allreduce()")
        self._communicators: dict[
            tuple[int, ...], Communicator
        ] = {}  # keyed by the GPU index of each rank; -1: CPU
        close_at_exit(self, _Default._close, in_child=_Default._forget)

    def group(self) -> Any:
        """Return the group for any number of CPU ranks. Its calls check the tensors."""
        if self._group is None:
            with self._lock:
                if self._group is None:
                    self._group = make_group((), 30.0)
                    self.run_prepared = self._group.prepared(_FUSED, _FUSED)
        return self._group

    def communicator(self, data: TensorList) -> Communicator | None:
        """Return the communicator for these tensors; None: use `group`."""
        if not isinstance(data, (list, tuple)) or not data:
            return None
        # Without CUDA initialised no tensor is on a GPU, but a CuPy array may be.
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not has_cuda and isinstance(data[0], Tensor):
            return None
        tensors = data if all(type(t) is Tensor for t in data) else arrays.as_tensors(data)
        if not all(isinstance(t, Tensor) for t in tensors):
            return None
        gpus = tuple([t.get_device() if t.is_cuda else -1 for t in tensors])
        return None if max(gpus) < 0 else self._communicators.get(gpus) or self._on(gpus)

    def all_reduce(
        self, data: TensorList, op: Any, *, algorithm: str | None = None, order: str | None = None
    ) -> None:
        if (communicator := self.communicator(data)) is not None:
            communicator.all_reduce(data, op)
        else:
            call = CollectiveCall("all_reduce", data, None, op_name(op), *_FUSED)
            self.group().run(call)

    def _on(self, gpus: tuple[int, ...]) -> Communicator:
        with self._lock:
            if gpus not in self._communicators:
                devices = [f"cuda:{gpu}" if gpu >= 0 else "cpu" for gpu in gpus]
                self._communicators[gpus] = Communicator(devices, order="rank")
            return self._communicators[gpus]

    def _forget(self) -> None:
        # Replace the lock: a thread that exists only in the parent may hold it for ever.
        self._lock = threading.RLock()
        self._group, self.run_prepared = None, decline
        self._communicators = {}

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
        for communicator in self._communicators.values():
            communicator.close()


_default = _Default()


def allreduce(data: TensorList, op: Op = "sum") -> None:
    """Reduce a list with one tensor per rank in place: every tensor gets the sum.

    Args:
        data: One tensor per rank, on the CPU or on GPUs. Equal shapes and dtypes; any strides
            without overlap. Any number of ranks.

    See `Communicator.all_reduce` for ``op`` and errors.

    Cost: one pass over memory, ``2 k N`` bytes of traffic (``fused``); between GPUs ``direct``.

    Source: Zhang, Lipton, Li, Smola, "Dive into Deep Learning", multiple GPUs, from scratch.
    """
    if not is_dynamo_compiling() and _default.run_prepared(data, op, None, None):
        return
    if is_traced() and is_list(data):
        from pyringar.comm import operators

        operators.reduce(_default.handle, data, op, None, None)
    else:
        _default.all_reduce(data, op)
