"""Connect a rank with its counterparts on other machines: gloo for CPU tensors, NCCL for GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.exits import close_at_exit, is_inherited
from pyringar.comm.member import Member
from pyringar.comm.stores import PatientStore
from pyringar.distributed.machines import Machines
from pyringar.distributed.torch_groups import break_off, closed_peers, make_gloo, make_nccl
from pyringar.errors import CollectiveTimeout, PeerLostError, RingarError

__all__ = ["Column", "Notice", "Wait"]

Wait = Callable[[], object]

_CHUNK_BYTES = 16 * 2**20  # each has a deadline of its own
_NOTICE_S = 1.0  # the store may be on the machine that is lost
_MOST_S = 1e6


class Notice:
    """Why the group failed, in its store: written by the first rank that finds out.

    Ranks that give up close their connections, too. The notice names the cause to a rank that has
    met a consequence.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._mark = f"rank {rank}: "

    def write(self, error: BaseException) -> None:
        """Write the error, unless another rank has written one."""
        text = self._mark + (str(error) or type(error).__name__)
        with suppress(RingarError), closing(self._asked()) as store:
            if store.look_up(["failure"]) == [None]:
                store.set("failure", text)

    def read(self) -> str:
        """Return what another rank has written, or nothing. Wait for at most a second."""
        with suppress(RingarError), closing(self._asked()) as store:
            found = store.look_up(["failure"])[0]
            text: str = "" if found is None else found.decode(errors="replace")
            return "" if text.startswith(self._mark) else text
        return ""

    def _asked(self) -> PatientStore:
        return PatientStore(self._store, "failure", 0, time.monotonic() + _NOTICE_S)


class Column:
    """One rank of every machine, connected.

    Raises:
        PeerLostError, CollectiveTimeout: Other machines cannot be reached.
    """

    def __init__(
        self,
        store: Any,
        machines: Machines,
        members: Sequence[Member],
        notice: Notice,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        from torch._C._distributed_c10d import PrefixStore  # not in every build of torch

        self._machines = machines
        self._members = members
        self._notice = notice
        self.set_timeout(timeout_s)
        self.num_chunks = 0  # that have crossed
        self.sent = {"calls": 0, "bytes": 0}
        own = PrefixStore(f"column {machines.local_rank}/", store)
        endpoint = (own, machines.node, len(machines.nodes), self._timeout)
        self._gloo: Any = self._checked(machines.others, make_gloo, *endpoint)
        self._nccl: Any = make_nccl(*endpoint) if device.type == "cuda" else None
        close_at_exit(self, Column.close)

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Wait:
        """Begin to send tensors to machines and receive tensors from machines.

        Args:
            sent: Contiguous tensors by machine, read until the wait is over.
            received: Contiguous tensors by machine, written. Sizes are those that were sent.

        Returns:
            Waits for all of it. On a GPU the current stream waits, and the host does not.

        Raises:
            PeerLostError, CollectiveTimeout: Now or in the wait; names ranks and machines.
        """
        self.sent["calls"] += 1
        self.sent["bytes"] += sum(tensor.numel() * tensor.itemsize for tensor in sent.values())
        if any(tensor.is_cuda for tensor in (*sent.values(), *received.values())):
            return self._exchange_on_gpu(sent, received)
        works = [
            (node, self._checked([node], begin, [chunk], node, 0))
            for begin, messages in ((self._gloo.recv, received), (self._gloo.send, sent))
            for node, tensor in messages.items()
            if tensor.numel()
            for chunk in torch.split(tensor.view(-1), _CHUNK_BYTES // tensor.itemsize)
        ]

        def wait() -> None:
            for node, work in works:
                self._checked([node], work.wait, self._timeout)
                self.num_chunks += 1

        return wait

    def _exchange_on_gpu(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Wait:
        nothing = next(iter((*sent.values(), *received.values()))).new_empty(0)
        nodes = range(len(self._machines.nodes))
        outputs = [received.get(node, nothing) for node in nodes]
        inputs = [sent.get(node, nothing) for node in nodes]
        options = torch._C._distributed_c10d.AllToAllOptions()
        wait: Wait = self._nccl.alltoall(outputs, inputs, options).wait
        return wait

    def _checked(self, nodes: Sequence[int], call: Callable[..., Any], *arguments: Any) -> Any:
        """Call gloo; name ranks and machines in its errors."""
        try:
            return call(*arguments)
        except RingarError:
            raise
        except RuntimeError as error:
            machines, why = self._machines, str(error)
            lost = closed_peers(self._gloo) if hasattr(self, "_gloo") else []
            nodes = lost or nodes
            places = "; ".join(
                f"machine {node}, {self._members[machines.nodes[node][0]].host}, has ranks "
                f"{machines.nodes[node]}"
                for node in nodes
            )
            cause = self._notice.read()
            is_late = "timed out" in why.lower() or "timeout" in why.lower()
            raise (CollectiveTimeout if is_late else PeerLostError)(
                f"rank {machines.column[machines.node]} waited for ranks "
                f"{[machines.column[node] for node in nodes]} of the other machines ({places}): "
                f"{why}{'; ' if cause else ''}{cause}"
            ) from error

    def set_timeout(self, seconds: float) -> None:
        """Let waits that begin from now on last as long as this without a chunk."""
        self._timeout = timedelta(seconds=min(seconds, _MOST_S))

    def abort(self) -> None:
        """Close connections, so that the calls of this rank and of the others fail."""
        if self._gloo is not None:
            break_off(self._gloo)

    def close(self) -> None:
        """Let go of the connections. May be called again."""
        if is_inherited(self):
            return
        self._gloo = None
        if self._nccl is not None:
            with suppress(RuntimeError):  # a rank is lost
                self._nccl.shutdown()
            self._nccl = None
