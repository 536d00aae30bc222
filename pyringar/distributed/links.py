"""What a rank's data moves by, inside its machine and to others; errors name who failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.member import Member
from pyringar.distributed.machines import Machines
from pyringar.distributed.own_stream import OwnStream
from pyringar.distributed.wire import Inter, Message, MessageError, Wait, compare
from pyringar.errors import CollectiveTimeout, PeerLostError, RingarError

__all__ = ["Links"]


class Links:
    """A rank's connections: a communicator of its machine's ranks, and an inter to other machines.

    Args:
        machines: Who is where.
        members: All ranks, for messages.
        intra: The communicator of this machine; its ranks count from 0.
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
        inter: Inter | None,
        stream: OwnStream | None,
    ) -> None:
        self.is_told = False
        self.intra = intra
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

    def meet_inside(self) -> None:
        """Return when the ranks of this machine have come."""
        self.inside(self.intra.barrier)

    def inside(self, call: Callable[[], object]) -> None:
        """Call the machine's own communicator; its errors count ranks from 0."""
        self.is_told = True
        machines = self._machines
        try:
            call()
        except RingarError as error:
            raise type(error)(
                f"on machine {machines.node} of {len(machines.nodes)}, whose ranks "
                f"{machines.here} count from 0 in what follows: {error}"
            ) from error

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
        """Begin to ask the other machines whether they call the same; what is returned raises."""

        def exchange(sent: Sequence[Message], received: Sequence[Message]) -> Wait:
            return self.exchange(what, sent, received)

        peers = [] if self._inter is None else self._machines.peers
        return compare(what, peers, exchange, lambda peer: self._members[peer].name)

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
        lost = set(self._inter.lost() if self._inter is not None else ()) & set(ranks)
        if lost:
            names = ", ".join(self._members[rank].name for rank in sorted(lost))
            raise PeerLostError(f"{names} is gone, of another machine ({self.where(sorted(lost))})")

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

    def set_timeout(self, seconds: float) -> None:
        """Let calls that begin from now on wait for other ranks as long as this."""
        self.intra.set_timeout(seconds)
        if self._inter is not None:
            self._inter.set_timeout(seconds)

    def abort(self) -> None:
        """Tell those who wait for this rank, in the machine and on others."""
        self.intra.abort()
        if self._inter is not None:
            self._inter.abort()

    def close(self) -> None:
        """Leave both."""
        with nullcontext() if self._inter is None else closing(self._inter):
            self.intra.close()
