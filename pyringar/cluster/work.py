"""Works of a cluster's calls: who waits for one lets other ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyringar.cluster.calls import Call, devices_of, seconds_of
from pyringar.distributed.work import PendingWork


class ThreadWork(PendingWork):
    """The work of calls that a rank has begun, and of steps that have ended."""

    def __init__(self, parts: Sequence[Any], results: Any) -> None:
        self._calls = [part for part in parts if isinstance(part, Call)]
        super().__init__(None, self._calls, results)  # type: ignore[arg-type]  # needs no completer
        self._devices = devices_of(t for t in tree_leaves(results) if isinstance(t, Tensor))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until it is done. See `PendingWork.wait`."""
        for call in self._calls:
            call.wait(seconds_of(timeout))
        return True

    def get_future(self) -> Any:
        """Wait, and return a future of the tensors; raise what a call failed with.

        A future that is not complete waits in C++, and lets no other rank run.
        """
        # In backward DistributedDataParallel asks, and the program does not know of it.
        is_asked = torch._C._current_graph_task_id() == -1
        for call in self._calls:
            call.wait(what="get_future" if is_asked else "")
        return super().get_future()

    def _source_rank(self) -> int:
        return int(self._calls[0].details["from"])
