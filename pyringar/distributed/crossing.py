"""Let one piece of data cross between machines: sums there, results back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyringar.comm.float_mode import default_float_mode
from pyringar.comm.reference import divide, fold
from pyringar.distributed.convert import copy_all
from pyringar.distributed.links import Links
from pyringar.distributed.machines import Machines
from pyringar.distributed.wire import Message, Wait

__all__ = ["Crossing", "Spare"]

# Lanes of the wire: sums go to their owners, results come back.
_THERE, _BACK = 0, 1


class Spare:
    """Memory of calls that are over, for the next: to get it from the system costs as a copy does.

    Args:
        most_bytes: Tensors that are larger are let go.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._idle: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """Return bytes: the smallest that are idle and enough, or new ones."""
        enough = [at for at, tensor in enumerate(self._idle) if len(tensor) >= nbytes]
        if not enough:
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._idle.pop(min(enough, key=lambda at: len(self._idle[at])))

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Take tensors of `take` back; the largest are kept, no more than one call uses."""
        self._idle.extend(t for t in tensors if len(t) <= self._most_bytes)
        self._idle.sort(key=len)
        del self._idle[: -3 * max(1, len(tensors))]


class Crossing:
    """One piece of data. A *block* is flat, with equal parts for the ranks of one machine.

    Args:
        machines: Who is where.
        links: What data moves by.
        spare: Where memory comes from; None: from torch.
        what: The call in words.
        blocks: One for each machine.
    """

    def __init__(
        self,
        machines: Machines,
        links: Links,
        spare: Spare | None,
        what: str,
        blocks: Sequence[Tensor],
    ) -> None:
        self._machines = machines
        self._links = links
        self._spare = spare
        self._what = what
        self._blocks = blocks
        self._numel = len(blocks[machines.node]) // len(machines.here)
        self._taken: list[Tensor] = []
        self._parts: dict[int, Tensor] = {}  # of this rank, by machine
        self._slots: dict[int, Tensor] = {}  # results of those that this rank carries, by machine
        self._waits: dict[int, list[Wait]] = {_THERE: [], _BACK: []}

    # -- sums there --------------------------------------------------------------------------------

    def scatter(self, op: str, agreed: Wait, *, will_gather: bool = False) -> None:
        """Begin to reduce the blocks, which are left as they are; `sum_up` ends it.

        Args:
            op: The reduction.
            agreed: Returns when the other machines are known to call the same.
            will_gather: Expect results, too.
        """
        machines = self._machines
        coming = {node: [self._expected_sum(node)] for node in machines.others}
        if self._spare is not None:  # who expects a message early is sent it without being asked
            self._exchange([], [m for some in coming.values() for m in some], _THERE)
            coming = {}
            if will_gather:
                results = [self._expected_results(node) for node in machines.others]
                self._exchange([], [m for some in results for m in some], _BACK)
        inside = "sum" if op == "mean" else op
        for node in machines.others:
            sums = self._sum_inside(node, inside)
            self._links.look()
            agreed()  # so that the other side has the same sizes
            sent = list(zip(machines.carried(node), sums, strict=False))
            self._exchange(sent, coming.get(node, []), _THERE)
        (self._parts[machines.node],) = self._sum_inside(machines.node, inside)
        self._links.look()

    def sum_up(self, op: str) -> Tensor:
        """Return this rank's part of the sum, when those of all machines have come."""
        self._arrive(_THERE)
        in_order = [self._parts[node] for node in range(len(self._machines.nodes))]
        return _reduced(in_order, op, self._machines.world_size)

    def _expected_sum(self, node: int) -> Message:
        part = self._parts[node] = self._take(self._numel)
        return self._machines.carrier(node), part

    # -- results back ------------------------------------------------------------------------------

    def gather(self, own: Tensor) -> None:
        """Begin to put every rank's part into its place of the blocks; `end` ends it."""
        machines = self._machines
        for node in machines.others:
            received = [] if node in self._slots else self._expected_results(node)
            self._exchange([(machines.carrier(node), own)], received, _BACK)
        self._links.share_inside(self._blocks[machines.node], own)

    def end(self) -> None:
        """Wait for what has begun; then memory is for the next."""
        self._arrive(_BACK)
        for node in self._slots:
            self._share_inside(node)
        if self._spare is not None:
            self._spare.give(self._taken)

    def _expected_results(self, node: int) -> list[Message]:
        slots = self._slots[node] = self._take(self._machines.num_slots(node), self._numel)
        return list(zip(self._machines.carried(node), slots, strict=False))

    # -- helpers -----------------------------------------------------------------------------------

    def _exchange(self, sent: Sequence[Message], received: Sequence[Message], lane: int) -> None:
        self._waits[lane].append(self._links.exchange(self._what, sent, received, lane))

    def _arrive(self, lane: int) -> None:
        waits, self._waits[lane] = self._waits[lane], []
        for wait in waits:
            wait()

    def _take(self, *shape: int) -> Tensor:
        like = self._blocks[0]
        if self._spare is None:
            return like.new_empty(shape)
        nbytes = torch.Size(shape).numel() * like.itemsize
        self._taken.append(self._spare.take(nbytes))
        return self._taken[-1][:nbytes].view(like.dtype).view(shape)

    def _sum_inside(self, node: int, op: str) -> Tensor:
        """Return this machine's sums of the parts that this rank carries, a row for each."""
        machines = self._machines
        num, local = machines.num_slots(node), len(machines.here)
        block = self._blocks[node]
        if not machines.is_even(node):
            spread = block.new_zeros(local, num, self._numel)
            for slot, some in enumerate(torch.split(block.view(-1, self._numel), local)):
                spread[: len(some), slot].copy_(some)
            block = spread.view(-1)
        sums = self._take(num, self._numel)
        self._links.sum_inside(sums.view(-1), block, op)
        return sums

    def _share_inside(self, node: int) -> None:
        """Put the rows that each rank here carries into their places of a block."""
        machines, slots = self._machines, self._slots[node]
        if machines.is_even(node):
            self._links.share_inside(self._blocks[node], slots.view(-1))
            return
        local = len(machines.here)
        spread = self._take(local, *slots.shape)
        self._links.share_inside(spread.view(-1), slots.view(-1))
        rows = torch.split(self._blocks[node].view(-1, self._numel), local)
        copy_all([(some, spread[: len(some), slot]) for slot, some in enumerate(rows)])


def _reduced(parts: Sequence[Tensor], op: str, count: int) -> Tensor:
    """Return the first of these, with the others folded in, in order; a mean of ``count``."""
    total = parts[0]
    with default_float_mode() as pieces:
        for part in parts[1:]:
            for into, term in zip(pieces(total), pieces(part), strict=True):
                fold(into, term, op)
        if op == "mean":
            divide(total, count, pieces)
    return total
