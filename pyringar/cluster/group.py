"""The process group of ranks that are threads: the calls of the backend over a `Transport`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pyringar.cluster.calls import seconds_of
from pyringar.cluster.meeting import Meeting
from pyringar.cluster.ranks import Rank
from pyringar.cluster.transport import DEVICES, Transport
from pyringar.cluster.work import ThreadWork
from pyringar.distributed.backend import PythonGroup, keep_dynamo_out
from pyringar.distributed.collectives import Collectives
from pyringar.distributed.convert import Copy, copy_all
from pyringar.errors import UnsupportedError

__all__ = ["ThreadGroup"]


class ThreadGroup(Collectives, PythonGroup):
    """One rank's view of a group."""

    _own_devices = DEVICES

    def __init__(self, meeting: Meeting, rank: Rank, options: Any) -> None:
        PythonGroup.__init__(self, options)
        self._of = rank
        self._comm: Any = Transport(meeting, rank, self._rank)
        self._fallback: Any = self._comm
        self._reduce_plain = lambda *_: False
        self._batch = None

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it; raise if some do not, naming them."""
        call = self._comm.begin("monitored_barrier", [], None, async_op=True)
        call.wait(seconds_of(getattr(timeout, "timeout", timeout)))

    def _hand_over(self, operation: str, tensors: Sequence[Tensor], *args: Any, **more: Any) -> Any:
        for tensor in tensors:
            if tensor.layout is not torch.strided and operation != "all_reduce":
                raise UnsupportedError(
                    f"{operation}: a tensor has layout {tensor.layout}, expected a dense one"
                )
        return super()._hand_over(operation, tensors, *args, **more)

    def _watched(
        self,
        operation: str,
        begin: Callable[[], Any],
        copies: Sequence[Copy],
        *_peers: Any,
        **_more: Any,
    ) -> list[Any]:
        call = begin()
        call.then(lambda: copy_all(copies))
        return [call]

    def _pending(self, parts: Sequence[Any], results: Any) -> Any:
        return self._noted(ThreadWork(self._of, parts, results))

    def shutdown(self) -> None:
        """Leave it: its calls are refused from then on."""
        self._comm.close()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the cluster's own counts."""

    @property
    def _device_types(self) -> list[torch.device]:
        names = DEVICES if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]


keep_dynamo_out(ThreadGroup, ThreadWork)
