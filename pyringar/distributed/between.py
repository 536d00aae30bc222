"""Reduce over several machines: what is summed where, in which order, and what crosses the wire.

Every rank owns a part of the data and ends with its sum. A machine sums each part inside first, in
the order of its ranks; the sum of a part that another machine's rank owns is made by one rank here,
its carrier (`Machines.carrier`), which sends it to the owner. The owner adds what the machines have
sent, in the order of the machines. Results go back the same ways: from the owner to its carrier on
each machine, and from there to all inside. So no bit depends on which rank owns what, on pieces, or
on the backend that carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyringar.comm.float_mode import default_float_mode
from pyringar.comm.reference import divide, fold, wide
from pyringar.distributed.convert import copy_all, has_plain_memory
from pyringar.distributed.links import Links
from pyringar.distributed.machines import Machines
from pyringar.distributed.packing import own_bytes, pack
from pyringar.distributed.wire import Wait

__all__ = ["Between"]


class Between:
    """The collectives between machines. A *block* is flat, with equal parts for a machine's ranks.

    Args:
        machines: Who is where.
        links: What data moves by.
        piece_bytes: While so much of an all_reduce is on the wire, as much is reduced inside.
        in_place: Whether results may be written before all of them are known to be good.
    """

    def __init__(
        self, machines: Machines, links: Links, piece_bytes: int, *, in_place: bool
    ) -> None:
        self._machines = machines
        self._links = links
        self._piece_bytes = piece_bytes
        self._in_place = in_place

    # -- the calls ---------------------------------------------------------------------------------

    def all_reduce(self, tensors: Sequence[Tensor], op: str, what: str) -> None:
        """Reduce a list in place; ``what`` is the call in words, equal for equal calls alone."""
        # Before others are told: there may be no memory.
        packed = self._laid_out(tensors)
        agreed = self._links.compare(what)
        for flat, _, _ in packed:
            self._reduce_flat(flat, op, what, agreed)
        agreed()
        self._links.look()
        for _, views, mine in packed:
            copy_all(list(zip(mine, views, strict=True)))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str, what: str) -> None:
        """Reduce ``input``; this rank's part of it, by rank, comes into ``output``."""
        rows = _whole(input.to(wide(input.dtype))).view(self._machines.world_size, -1)
        blocks = [_rows_of(rows, ranks).view(-1) for ranks in self._machines.nodes]
        agreed = self._links.compare(what)
        if output.numel():
            own = self._begin_scatter(blocks, op, what, agreed)()
            self._links.look()
            copy_all([(output, own.view(output.shape))])
        agreed()

    def all_gather(self, output: Tensor, input: Tensor, what: str) -> None:
        """Put all ranks' ``input`` into ``output``, by rank."""
        own = _whole(input).view(-1)
        if own.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
            own = own.clone()
        is_flat = output.is_contiguous() and has_plain_memory(output) and self._in_place
        into = output.data if is_flat else output.new_empty(output.shape)
        self._links.compare(what)()
        if own.numel():
            rows = into.view(self._machines.world_size, -1)
            blocks = [_rows_of(rows, ranks) for ranks in self._machines.nodes]
            self._begin_gather(own, [block.view(-1) for block in blocks], what)()
            self._links.look()
            for block, ranks in zip(blocks, self._machines.nodes, strict=True):
                if not _are_consecutive(ranks):
                    rows[ranks] = block
        if not is_flat:
            copy_all([(output, into)])

    def broadcast(self, tensor: Tensor, root: int, what: str) -> None:
        """Copy the tensor of rank ``root`` along a tree of machines, one rank of each."""
        machines = self._machines
        is_root = machines.rank == root
        data = own_bytes(tensor, filled=is_root)
        self._links.compare(what)()
        if data.numel():
            heads, parent, children = machines.tree(root)
            sending: Wait = _nothing
            if machines.rank == heads[machines.node]:
                if parent is not None:
                    self._links.exchange(what, [], [(heads[parent], data)])()
                sent = [(heads[child], data) for child in children]
                sending = self._links.exchange(what, sent, [])
            self._links.copy_inside(data, machines.here.index(heads[machines.node]))
            sending()
        self._links.look()
        if not is_root:
            copy_all([(tensor, data.view(tensor.dtype).view(tensor.shape))])

    # -- one list, in pieces -----------------------------------------------------------------------

    def num_pieces(self, numel: int, dtype: torch.dtype) -> int:
        """Return in how many pieces an all_reduce of one tensor crosses."""
        return len(self._pieces(-(-numel // self._machines.world_size), dtype))

    def _laid_out(
        self, tensors: Sequence[Tensor]
    ) -> list[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]:
        """Return what `pack` does; one tensor that can be reduced where it lies is not copied."""
        if len(tensors) == 1 and self._in_place:
            tensor = tensors[0]
            is_flat = tensor.is_contiguous() and has_plain_memory(tensor)
            if is_flat and tensor.dtype == wide(tensor.dtype):
                return [(tensor.data.view(-1), [], [])]
        return [*pack(tensors, self._machines.world_size)]

    def _reduce_flat(self, flat: Tensor, op: str, what: str, agreed: Wait) -> None:
        """Reduce in pieces: one is summed inside while the sums, and the results, of two cross."""
        size = self._machines.world_size
        whole = len(flat) - len(flat) % size
        pieces = [flat[a * size : b * size] for a, b in self._pieces(whole // size, flat.dtype)]
        if rest := len(flat) - whole:
            pieces.append(torch.cat([flat[whole:], flat.new_zeros(size - rest)]))
        there: tuple[list[Tensor], Callable[[], Tensor]] | None = None
        back: Wait = _nothing
        for piece in [*pieces, None, None]:
            begun = None
            if piece is not None:
                blocks = self._blocks(piece)
                begun = blocks, self._begin_scatter(blocks, op, what, agreed)
            arrive, back = back, _nothing
            if there is not None:
                back = self._begin_gather(there[1](), there[0], what)
            there = begun
            arrive()
        if rest:
            flat[whole:].copy_(pieces[-1][:rest])

    def _pieces(self, rows: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """Cut so many elements of each rank's."""
        itemsize = wide(dtype).itemsize
        step = max(1, self._piece_bytes // (itemsize * self._machines.world_size))
        return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    def _blocks(self, piece: Tensor) -> list[Tensor]:
        """Return the part of each machine's ranks: who owns what is all the same."""
        one = len(piece) // self._machines.world_size
        return list(piece.split([one * len(ranks) for ranks in self._machines.nodes]))

    # -- the two halves ----------------------------------------------------------------------------

    def _begin_scatter(
        self, blocks: Sequence[Tensor], op: str, what: str, agreed: Wait
    ) -> Callable[[], Tensor]:
        """Begin to reduce a block for each machine; what is returned waits for this rank's part."""
        machines = self._machines
        inside = "sum" if op == "mean" else op
        numel = len(blocks[machines.node]) // len(machines.here)
        parts: dict[int, Tensor] = {}
        waits: list[Wait] = []
        for node in machines.others:
            sums = self._sum_inside(blocks[node], node, inside)
            self._links.look()
            agreed()  # so that the other side has the same sizes
            parts[node] = sums.new_empty(numel)
            sent = list(zip(machines.carried(node), sums, strict=False))
            received = [(machines.carrier(node), parts[node])]
            waits.append(self._links.exchange(what, sent, received))
        (parts[machines.node],) = self._sum_inside(blocks[machines.node], machines.node, inside)
        self._links.look()

        def finish() -> Tensor:
            for wait in waits:
                wait()
            in_order = [parts[node] for node in range(len(machines.nodes))]
            return _reduced(in_order, op, machines.world_size)

        return finish

    def _begin_gather(self, own: Tensor, blocks: Sequence[Tensor], what: str) -> Wait:
        """Begin to put every rank's ``own`` into its place of the blocks."""
        machines = self._machines
        arriving: list[tuple[int, Tensor, Wait]] = []
        for node in machines.others:
            slots = own.new_empty(machines.num_slots(node), len(own))
            received = list(zip(machines.carried(node), slots, strict=False))
            wait = self._links.exchange(what, [(machines.carrier(node), own)], received)
            arriving.append((node, slots, wait))
        self._links.share_inside(blocks[machines.node], own)

        def finish() -> None:
            for node, slots, wait in arriving:
                wait()
                self._share_inside(blocks[node], slots, node)

        return finish

    def _sum_inside(self, block: Tensor, node: int, op: str) -> Tensor:
        """Return this machine's sums of the parts that this rank carries, a row for each."""
        machines = self._machines
        num, local = machines.num_slots(node), len(machines.here)
        rows = block.view(len(machines.nodes[node]), -1)
        if not machines.is_even(node):
            spread = rows.new_zeros(local, num, rows.shape[1])
            for slot, some in enumerate(rows.split(local)):
                spread[: len(some), slot].copy_(some)
            block = spread.view(-1)
        sums = rows.new_empty(num, rows.shape[1])
        self._links.sum_inside(sums.view(-1), block, op)
        return sums

    def _share_inside(self, block: Tensor, slots: Tensor, node: int) -> None:
        """Put the rows that each rank here carries into their places of a block."""
        machines = self._machines
        if machines.is_even(node):
            self._links.share_inside(block, slots.view(-1))
            return
        local = len(machines.here)
        spread = slots.new_empty(local, *slots.shape)
        self._links.share_inside(spread.view(-1), slots.view(-1))
        for slot, some in enumerate(block.view(len(machines.nodes[node]), -1).split(local)):
            some.copy_(spread[: len(some), slot])


def _nothing() -> None:
    """Have nothing to wait for."""


def _whole(tensor: Tensor) -> Tensor:
    """Return it, or a copy, as its memory has it."""
    return tensor.data.resolve_neg().contiguous()


def _are_consecutive(ranks: Sequence[int]) -> bool:
    return list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))


def _rows_of(rows: Tensor, ranks: Sequence[int]) -> Tensor:
    """Return some rows: where they lie, or copied end to end."""
    if _are_consecutive(ranks):
        return rows[ranks[0] : ranks[0] + len(ranks)]
    return rows[list(ranks)]


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
