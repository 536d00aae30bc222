"""The machine of each rank, and the connections between machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import ORDERS, check_choice
from pyringar.comm.exits import close_at_exit, is_inherited
from pyringar.comm.rank_info import RankInfo
from pyringar.comm.stores import PatientStore
from pyringar.distributed.fallback import (
    abort_calls,
    closed_peers,
    gloo_text,
    make_gloo,
    make_nccl,
)
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, RingarError

WaitFunction = Callable[[], object]

_CHUNK_BYTES = 16 * 2**20  # maximum bytes of a message; each has a separate deadline
_STORE_S = 1.0  # timeout of the store, which may be on a lost machine


class MachineLayout:
    """The ranks of every machine, and the machine and local rank of this process.

    If machines have equally many ranks, the ranks with equal local rank form a column, which
    transfers an equal share of the data. Else the first rank of each machine transfers all data.
    """

    def __init__(self, nodes: list[list[int]], rank: int, global_ranks: Sequence[int]) -> None:
        self.nodes = nodes  # the ranks of every machine, in the order in which machines are added
        self.rank = rank
        self.global_ranks = global_ranks
        self.node = next(i for i, ranks in enumerate(nodes) if rank in ranks)  # this machine
        self.others = [node for node in range(len(nodes)) if node != self.node]
        self.here = nodes[self.node]
        self.local_rank = self.here.index(rank)
        self.are_equal = len({len(ranks) for ranks in nodes}) == 1
        self.num_columns = len(self.here) if self.are_equal else 1
        self.is_carrier = self.local_rank < self.num_columns
        # Flat data holds one block per rank, ordered by column, then by machine.
        columns = zip(*nodes, strict=True) if self.are_equal else nodes
        self.block_order = [rank for column in columns for rank in column]

    def numbers(self, ranks: Sequence[int]) -> list[int]:
        """Return the numbers of the ranks in messages."""
        return [self.global_ranks[rank] for rank in ranks]

    def check_order(self, order: str) -> None:
        check_choice("order", order, ORDERS)
        ranks = [rank for node in self.nodes for rank in node]
        size = len(self.here)
        are_subtrees = self.are_equal and size & (size - 1) == 0 and ranks == sorted(ranks)
        is_possible = order == "any" or (order == "tree" and are_subtrees)
        if not is_possible and self.others:
            raise ArgumentError(
                f"order is {order!r} and the ranks are on {len(self.nodes)} machines: "
                f"{', '.join(str(self.numbers(node)) for node in self.nodes)}; "
                "expected 'any', or 'tree' where each machine has consecutive ranks, equally many "
                "and a power of two"
            )

    def __str__(self) -> str:
        sizes = sorted({len(ranks) for ranks in self.nodes})
        return f"{len(self.nodes)} machines of {' or '.join(map(str, sizes))} ranks"


class Column:
    """Connections between the ranks of one column; empty on a rank that transfers no data.

    All methods raise PeerLostError or CollectiveTimeout. It names ranks and machines, and quotes
    the first error of the group, because a rank that fails closes its connections to other ranks.
    """

    def __init__(
        self,
        store: Any,
        machines: MachineLayout,
        members: Sequence[RankInfo],
        timeout_s: float,
        device: torch.device,
        inside: Any,
    ) -> None:
        from torch._C._distributed_c10d import PrefixStore  # missing in some builds of torch

        self._machines = machines
        self._members = members
        self._inside = inside  # the communicator of this machine
        self._store = store
        self.set_timeout(timeout_s)
        self.num_chunks = 0  # chunks sent or received so far
        self.sent = {"calls": 0, "bytes": 0}
        self._gloo: Any = None
        self._nccl: Any = None
        if machines.others and machines.is_carrier:
            own = PrefixStore(f"column {machines.local_rank}/", store)
            endpoint = (own, machines.node, len(machines.nodes), self._timeout)
            self._gloo = self._checked(machines.others, make_gloo, *endpoint)
            if device.type == "cuda":
                self._nccl = make_nccl(*endpoint)
        close_at_exit(self, Column.close)

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> WaitFunction:
        """Begin to send and receive contiguous tensors; both mappings have machines as keys.

        The returned function blocks the host for CPU tensors, the current stream for CUDA tensors.
        """
        if self._gloo is None:
            return lambda: None
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

    def _exchange_on_gpu(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> WaitFunction:
        nothing = next(iter((*sent.values(), *received.values()))).new_empty(0)
        nodes = range(len(self._machines.nodes))
        outputs = [received.get(node, nothing) for node in nodes]
        inputs = [sent.get(node, nothing) for node in nodes]
        options = torch._C._distributed_c10d.AllToAllOptions()
        wait: WaitFunction = self._nccl.alltoall(outputs, inputs, options).wait
        return wait

    def _checked(self, nodes: Sequence[int], call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RingarError:
            raise
        except RuntimeError as error:
            machines, why = self._machines, gloo_text(error)
            nodes = closed_peers(self._gloo) or nodes
            places = "; ".join(
                f"machine {node}, {self._members[machines.nodes[node][0]].host}, has ranks "
                f"{machines.numbers(machines.nodes[node])}"
                for node in nodes
            )
            own = machines.global_ranks[machines.rank]
            peers = machines.numbers([machines.nodes[node][machines.local_rank] for node in nodes])
            cause = self.keep_error()
            is_silent = cause is None
            cause = cause or self._told_inside()
            is_late = "timed out" in why.lower() or "timeout" in why.lower()
            text = f"rank {own} waited for ranks {peers} of the other machines ({places})"
            if " waited for " in cause:  # cause names the lost or late rank
                text = f"{cause}; connections to {places} were closed"
                cause = ""
            elif is_silent:
                cause = "the store does not answer, so another rank may be the cause"
            raise (CollectiveTimeout if is_late else PeerLostError)(
                f"{text}: {why}{'; ' if cause else ''}{cause}"
            ) from error

    def _told_inside(self) -> str:
        """Return the error of this machine's communicator, in case the store is lost."""
        try:
            self._inside.check_peers([])
        except RingarError as error:
            return str(error)
        return ""

    def keep_error(self, error: BaseException | None = None) -> str | None:
        """Write the first error of the group to the store.

        Return the first error if it is another rank's, else ""; None if the store does not answer.
        """
        mark = f"rank {self._machines.global_ranks[self._machines.rank]}: "
        store = PatientStore(self._store, "failure", 0, time.monotonic() + _STORE_S)
        with suppress(RingarError), closing(store):
            found = store.look_up(["failure"])[0]
            if found is not None:
                text: str = found.decode(errors="replace")
                return "" if text.startswith(mark) else text
            if error is not None:
                store.set("failure", mark + (str(error) or type(error).__name__))
            return ""
        return None

    def set_timeout(self, seconds: float) -> None:
        self._timeout = timedelta(seconds=min(seconds, 1e6))

    def abort(self) -> None:
        abort_calls(self._gloo)

    def close(self) -> None:
        if is_inherited(self):
            return
        self._gloo = None
        if self._nccl is not None:
            with suppress(RuntimeError):  # raised if a rank is lost
                self._nccl.shutdown()
            self._nccl = None
