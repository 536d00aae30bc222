"""Let one piece of data cross between machines: sums go to their owners, results come back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from pyringar.comm.float_mode import default_float_mode
from pyringar.comm.orders import tree
from pyringar.comm.reference import divide, fold
from pyringar.distributed.convert import copy_all
from pyringar.distributed.links import Links
from pyringar.distributed.machines import Machines
from pyringar.distributed.wire import Message, Wait
from pyringar.errors import CollectiveTimeout, PeerLostError

__all__ = ["Crossing", "Spare"]


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
    """One piece of data.

    Args:
        machines: Who is where.
        links: What data moves by.
        spare: Where memory comes from; None: from torch.
        what: The call in words.
        blocks: One for each machine, flat, with equal parts for its ranks. Or one for all, for
            machines of equal numbers of ranks: parts of the first ranks of all machines, then of
            the second ones, and so on.
        order: In which machines' sums are added: ``"any"``, that of the machines, or ``"tree"``.
    """

    def __init__(
        self,
        machines: Machines,
        links: Links,
        spare: Spare | None,
        what: str,
        blocks: Sequence[Tensor],
        order: str,
    ) -> None:
        self._machines = machines
        self._links = links
        self._spare = spare
        self._what = what
        self._blocks = blocks
        self._order = order
        self._is_whole = len(blocks) < len(machines.nodes)
        self._numel = sum(map(len, blocks)) // machines.world_size
        self._taken: list[Tensor] = []
        self._parts: dict[int, Tensor] = {}  # of this rank, by machine
        self._slots: dict[int, Tensor] = {}  # results of those that this rank carries, by machine
        self._waits: list[Wait] = []

    # -- sums there --------------------------------------------------------------------------------

    def scatter(self, op: str, agreed: Wait) -> None:
        """Begin to reduce the blocks, which are left as they are; `sum_up` ends it.

        Args:
            op: The reduction.
            agreed: Returns when the other machines are known to call the same.
        """
        try:
            self._scatter(op, agreed)
        except PeerLostError:
            # Who finds out that calls differ leaves those who still wait for it inside.
            with suppress(PeerLostError, CollectiveTimeout):
                agreed()
            raise

    def _scatter(self, op: str, agreed: Wait) -> None:
        machines = self._machines
        inside = "sum" if op == "mean" else op
        rows = self._sum_whole(inside) if self._is_whole else None
        for node in machines.others:
            sums = self._sum_inside(node, inside) if rows is None else rows[node : node + 1]
            agreed()  # so that the other side has the same sizes
            part = self._parts[node] = self._take(self._numel)
            sent = list(zip(machines.carried(node), sums, strict=False))
            self._exchange(sent, [(machines.carrier(node), part)])
        own = self._sum_inside(machines.node, inside)[0] if rows is None else rows[machines.node]
        self._parts[machines.node] = own

    def sum_up(self, op: str) -> Tensor:
        """Return this rank's part of the sum, when those of all machines have come."""
        self._arrive()
        in_order = [self._parts[node] for node in range(len(self._machines.nodes))]
        return _reduced(in_order, op, self._machines.world_size, self._order)

    # -- results back ------------------------------------------------------------------------------

    def gather(self, own: Tensor) -> None:
        """Begin to put every rank's part into its place of the blocks; `end` ends it."""
        machines = self._machines
        if self._is_whole:
            rows = self._rows = self._take(len(machines.nodes), self._numel)
            rows[machines.node].copy_(own)
            self._slots = {node: rows[node : node + 1] for node in machines.others}
        for node in machines.others:
            if not self._is_whole:
                self._slots[node] = self._take(machines.num_slots(node), self._numel)
            received = list(zip(machines.carried(node), self._slots[node], strict=False))
            self._exchange([(machines.carrier(node), own)], received)
        if not self._is_whole:
            self._links.share_inside(self._blocks[machines.node], own)

    def end(self) -> None:
        """Wait for what has begun; then memory is for the next."""
        self._arrive()
        if self._is_whole:
            self._links.share_inside(self._blocks[0], self._rows.view(-1))
        else:
            for node in self._slots:
                self._share_inside(node)
        if self._spare is not None:
            self._spare.give(self._taken)

    # -- helpers -----------------------------------------------------------------------------------

    def _exchange(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        self._waits.append(self._links.exchange(self._what, sent, received))

    def _arrive(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    def _take(self, *shape: int) -> Tensor:
        like = self._blocks[0]
        if self._spare is None:
            return like.new_empty(shape)
        nbytes = torch.Size(shape).numel() * like.itemsize
        self._taken.append(self._spare.take(nbytes))
        return self._taken[-1][:nbytes].view(like.dtype).view(shape)

    def _sum_whole(self, op: str) -> Tensor:
        """Return this machine's sums for the ranks of this one's column, a row for each."""
        rows = self._take(len(self._machines.nodes), self._numel)
        self._links.sum_inside(rows.view(-1), self._blocks[0], op)
        self._links.look()
        return rows

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
        self._links.look()
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


def _reduced(parts: list[Tensor], op: str, count: int, order: str) -> Tensor:
    """Return the first of these, with the others folded in, in order; a mean of ``count``.

    All may be written.
    """
    with default_float_mode() as pieces:

        def add(into: Tensor, term: Tensor) -> Tensor:
            for one, other in zip(pieces(into), pieces(term), strict=True):
                fold(one, other, op)
            return into

        total = tree(parts, add) if order == "tree" else functools.reduce(add, parts)
        if op == "mean":
            divide(total, count, pieces)
    return total
