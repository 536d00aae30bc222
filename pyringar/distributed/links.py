"""Move a rank's data inside its machine and to others; errors name who failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.member import Member
from pyringar.distributed.machines import Machines
from pyringar.distributed.own_stream import OwnStream
from pyringar.distributed.wire import (
    Inter,
    Message,
    MessageError,
    Wait,
    compare,
    told,
    words_told,
)
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, RingarError

__all__ = ["Links"]


class Links:
    """A rank's connections: a communicator of its machine's ranks, and an inter to other machines.

    Args:
        machines: Who is where.
        members: All ranks, for messages.
        intra: The communicator of this machine; its ranks count from 0.
        host: The same ranks', for tensors on the CPU: `intra`, if it takes these.
        inter: What crosses the wire; None: there is one machine.
        stream: On which calls are enqueued, if what ends on a GPU must be looked at before it is
            used: until then a call that lost a rank ends without its data. Else None.

    Attributes:
        is_told: Whether other ranks know of the call that runs. Whoever begins one clears it.
    """

    def __init__(
        self,
        machines: Machines,
        members: Sequence[Member],
        intra: Any,
        host: Any,
        inter: Inter | None,
        stream: OwnStream | None,
    ) -> None:
        self.is_told = False
        self.intra = intra
        self._host = host
        self._machines = machines
        self._members = members
        self._inter = inter
        self._stream = stream
        self._lock = threading.Lock()
        self._sent = {"calls": 0, "bytes": 0}

    # -- inside ------------------------------------------------------------------------------------

    def sum_inside(self, output: Tensor, input: Tensor, op: str) -> None:
        """Reduce over the ranks of this machine; rank ``l`` there gets part ``l``."""
        self.inside(lambda: self.intra.reduce_scatter(output, input, op))

    def share_inside(self, output: Tensor, input: Tensor) -> None:
        """Gather from the ranks of this machine."""
        self.inside(lambda: self.intra.all_gather(output, input))

    def copy_inside(self, tensor: Tensor, local_root: int) -> None:
        """Broadcast on this machine."""
        self.inside(lambda: self.intra.broadcast(tensor, local_root))

    def inside(self, call: Callable[[], object]) -> None:
        """Call the machine's own communicator; its errors count ranks from 0."""
        self.is_told = True
        machines = self._machines
        try:
            call()
        except RingarError as error:
            raise type(error)(
                f"on machine {machines.node} of {len(machines.nodes)}, whose ranks "
                f"{machines.here} count from 0 in what follows: {error}{self._gone_elsewhere()}"
            ) from error

    def _gone_elsewhere(self) -> str:
        """Return who on other machines has left: the cause, if a rank here has met that first."""
        lost = sorted(self._lost())
        return f"; ranks {lost} have closed connections ({self.where(lost)})" if lost else ""

    def _lost(self) -> set[int]:
        return set() if self._inter is None else set(self._inter.lost())

    def look(self) -> None:
        """Wait for this rank's GPU where it must be, and raise if what it holds now is void."""
        if self._stream is not None:
            self._stream.finish()
            self.inside(lambda: self.intra.check_peers(()))

    # -- between -----------------------------------------------------------------------------------

    def exchange(self, what: str, sent: Sequence[Message], received: Sequence[Message]) -> Wait:
        """Begin to send to other machines and receive; what is returned waits. See `Inter`.

        Raises PeerLostError or CollectiveTimeout, then and in the wait: names ranks and machines.
        """
        inter = self._inter
        if inter is None or not (sent or received):
            return lambda: None
        self.is_told = True
        peers = sorted({peer for peer, _ in (*sent, *received)})
        arrived = self._named(what, peers, lambda: inter.exchange(sent, received))
        with self._lock:
            self._sent["calls"] += 1
            self._sent["bytes"] += sum(tensor.numel() * tensor.itemsize for _, tensor in sent)
        return lambda: self._named(what, peers, arrived)

    def compare(self, what: str) -> Wait:
        """Begin to ask all ranks whether they call the same; what is returned raises if not.

        If ranks of this machine do not, this raises already, when the other machines know.
        """
        different = self._different_here(what)

        def exchange(sent: Sequence[Message], received: Sequence[Message]) -> Wait:
            return self.exchange(what, sent, received)

        peers = [] if self._inter is None else self._machines.peers
        agreed = compare(different or what, peers, exchange, lambda peer: self._members[peer].name)
        if not different:
            return agreed
        error = ArgumentError(f"ranks call {different}")
        try:
            agreed()
        except RingarError as theirs:
            raise error from theirs
        raise error

    def _different_here(self, what: str) -> str:
        """Return what two ranks of this machine call if it is not the same, else nothing."""
        here = self._machines.here
        if len(here) == 1:
            return ""
        own = told(what)
        memory = bytearray(len(here) * len(own))
        gathered, given = (torch.frombuffer(m, dtype=torch.uint8) for m in (memory, own))
        self.inside(lambda: self._host.all_gather(gathered, given))
        rows = [memory[at : at + len(own)] for at in range(0, len(memory), len(own))]
        for rank, row in zip(here, rows, strict=True):
            if row != rows[0]:
                return (
                    f"different things: rank {here[0]} {words_told(rows[0])}; "
                    f"rank {rank} {words_told(row)}"
                )
        return ""

    def _named(self, what: str, peers: Sequence[int], call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (torch.AcceleratorError, torch.OutOfMemoryError):  # this rank's own GPU
            raise
        except RuntimeError as error:
            if isinstance(error, MessageError):
                peers = [error.peer]
            machines = self._machines
            text = (
                f"{what} over {len(machines.nodes)} machines: rank {machines.rank} waited for "
                f"ranks {list(peers)} of the other machines ({self.where(peers)}): {error}"
            )
            is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            raise (CollectiveTimeout if is_late else PeerLostError)(text) from error

    def check_peers(self, ranks: Sequence[int]) -> None:
        """Raise for ranks that are known to be gone. Never waits."""
        machines = self._machines
        here = machines.here
        self.inside(
            lambda: self.intra.check_peers([here.index(rank) for rank in ranks if rank in here])
        )
        lost = sorted(self._lost() & set(ranks))
        if lost:
            names = ", ".join(self._members[rank].name for rank in lost)
            raise PeerLostError(f"{names} is gone, of another machine ({self.where(lost)})")

    def where(self, ranks: Sequence[int]) -> str:
        """Return the machines on which these are, for messages."""
        nodes = sorted({self._machines.where(rank) for rank in ranks})
        return "; ".join(
            f"machine {node}, {self._members[self._machines.nodes[node][0]].host}, has ranks "
            f"{self._machines.nodes[node]}"
            for node in nodes
        )

    # -- life --------------------------------------------------------------------------------------

    def sent(self) -> dict[str, int]:
        """Return how often something was sent to other machines, and how many bytes."""
        with self._lock:
            return dict(self._sent)

    def progress(self) -> int:
        """Return what changes as data moves to and from other machines. Never waits."""
        return 0 if self._inter is None else self._inter.progress()

    def set_timeout(self, seconds: float) -> None:
        """Let calls that begin from now on wait for other ranks as long as this."""
        for group in self._inside_groups():
            group.set_timeout(seconds)
        if self._inter is not None:
            self._inter.set_timeout(seconds)

    def tell(self, error: RuntimeError) -> None:
        """Tell those who wait inside why this rank gives up."""
        for group in self._inside_groups():
            group._tell(error)

    def abort(self, why: str) -> None:
        """Tell those who wait for this rank, in the machine, where they hear why, and on others."""
        for group in self._inside_groups():
            group._abort(why)
        if self._inter is not None:
            self._inter.abort()

    def close(self) -> None:
        """Leave all."""
        with ExitStack() as all_of_them:
            if self._inter is not None:
                all_of_them.callback(self._inter.close)
            for group in self._inside_groups():
                all_of_them.callback(group.close)

    def _inside_groups(self) -> list[Any]:
        return [self.intra] if self._host is self.intra else [self._host, self.intra]
