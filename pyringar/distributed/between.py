"""Reduce over several machines: what is summed where, in which order, and what crosses the wire.

Every rank owns a part of the data and ends with its sum. A machine sums each part inside first, in
the order of its ranks, or as a tree of them; the sum of a part that another machine's rank owns is
made by one rank here, its carrier (`Machines.carrier`), which sends it to the owner. The owner adds
what the machines have sent, in the order of the machines, or as a tree of them. Results go back the
same ways: from the owner to its carrier on each machine, and from there to all inside. So no bit
depends on which rank owns what, on pieces, or on the backend that carries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyringar.comm.reference import wide
from pyringar.distributed.convert import copy_all, has_plain_memory
from pyringar.distributed.crossing import Crossing, Spare
from pyringar.distributed.links import Links
from pyringar.distributed.machines import Machines
from pyringar.distributed.packing import own_bytes, pack
from pyringar.distributed.wire import Wait

__all__ = ["Between"]

# Smaller ones take longer to meet over than to send.
_LEAST_PIECE_BYTES = 2**20


class Between:
    """The collectives of ranks on several machines.

    Args:
        machines: Who is where.
        links: What data moves by.
        piece_bytes: While so much of an all_reduce is on the wire, as much is reduced inside.
        on_gpu: Whether tensors are on one: there data may turn out to be void, so that nothing is
            written before all is known to be good.
        order: In which machines' sums are added: ``"any"``, that of the machines, or ``"tree"``.
    """

    def __init__(
        self, machines: Machines, links: Links, piece_bytes: int, *, on_gpu: bool, order: str
    ) -> None:
        self._machines = machines
        self._links = links
        self._piece_bytes = piece_bytes
        self._in_place = not on_gpu
        self._spare = None if on_gpu else Spare(4 * piece_bytes)
        self._order = order

    def _crossing(self, what: str, blocks: Sequence[Tensor]) -> Crossing:
        return Crossing(self._machines, self._links, self._spare, what, blocks, self._order)

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
            crossing = self._crossing(what, blocks)
            crossing.scatter(op, agreed)
            own = crossing.sum_up(op)
            self._links.look()
            copy_all([(output, own.view(output.shape))])
            crossing.end()
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
            crossing = self._crossing(what, [block.view(-1) for block in blocks])
            crossing.gather(own)
            crossing.end()
            self._links.look()
            for block, ranks in zip(blocks, self._machines.nodes, strict=True):
                if not _are_consecutive(ranks):
                    copy_all([(rows[rank], row) for rank, row in zip(ranks, block, strict=True)])
        if not is_flat:
            copy_all([(output, into)])

    def broadcast(self, tensor: Tensor, root: int, what: str) -> None:
        """Copy the tensor of rank ``root`` along a tree of machines, one rank of each."""
        is_root = self._machines.rank == root
        data = own_bytes(tensor, filled=is_root)
        self._links.compare(what)()
        if data.numel():
            self._pass_on(data, root, what)
        self._links.look()
        if not is_root:
            copy_all([(tensor, data.view(tensor.dtype).view(tensor.shape))])

    def _pass_on(self, data: Tensor, root: int, what: str) -> None:
        """Broadcast bytes in pieces: those who wait for the last one see the others come."""
        machines = self._machines
        heads, parent, children = machines.tree(root)
        head = heads[machines.node]
        leaving: list[Wait] = []
        for piece in torch.split(data, self._piece_bytes):
            if machines.rank == head:
                if parent is not None:
                    self._links.exchange(what, [], [(heads[parent], piece)])()
                sent = [(heads[child], piece) for child in children]
                leaving.append(self._links.exchange(what, sent, []))
            self._links.copy_inside(piece, machines.here.index(head))
        for has_left in leaving:
            has_left()

    # -- one list, in pieces -----------------------------------------------------------------------

    def num_pieces(self, numel: int, dtype: torch.dtype) -> int:
        """Return in how many pieces an all_reduce of one tensor crosses."""
        rows, rest = divmod(numel, self._machines.world_size)
        return len(self._pieces(rows, dtype)) + (rest > 0)

    def _laid_out(
        self, tensors: Sequence[Tensor]
    ) -> list[tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]]:
        """Return what `pack` does; one tensor that can be reduced where it lies is not copied.

        Lengths depend on what ranks have compared alone: tensors may lie in another way elsewhere.
        """
        if len(tensors) == 1 and self._in_place:
            tensor = tensors[0]
            is_flat = tensor.is_contiguous() and has_plain_memory(tensor)
            if is_flat and tensor.dtype == wide(tensor.dtype):
                return [(tensor.data.view(-1), [], [])]
        return pack(tensors)

    def _reduce_flat(self, flat: Tensor, op: str, what: str, agreed: Wait) -> None:
        """Reduce in pieces: one is summed inside while the sums, and the results, of two cross."""
        size = self._machines.world_size
        whole = len(flat) - len(flat) % size
        pieces = [flat[a * size : b * size] for a, b in self._pieces(whole // size, flat.dtype)]
        if rest := len(flat) - whole:
            pieces.append(torch.cat([flat[whole:], flat.new_zeros(size - rest)]))
        there: Crossing | None = None
        back: Crossing | None = None
        for piece in [*pieces, None, None]:
            begun = None
            if piece is not None:
                begun = self._crossing(what, self._blocks(piece))
                begun.scatter(op, agreed)
            arriving, back = back, there
            if back is not None:
                back.gather(back.sum_up(op))
            there = begun
            if arriving is not None:
                arriving.end()
        if rest:
            copy_all([(flat[whole:], pieces[-1][:rest])])

    def _pieces(self, rows: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """Cut so many elements of each rank's: in four at least, unless pieces get too small."""
        row_bytes = wide(dtype).itemsize * self._machines.world_size
        least_bytes = max(rows * row_bytes // 4, _LEAST_PIECE_BYTES)
        step = max(1, min(self._piece_bytes, least_bytes) // row_bytes)
        return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]

    def _blocks(self, piece: Tensor) -> list[Tensor]:
        """Return the part of each machine's ranks, or one for all: any may own any of it."""
        if self._machines.are_equal:
            return [piece]
        one = len(piece) // self._machines.world_size
        return list(torch.split(piece, [one * len(ranks) for ranks in self._machines.nodes]))


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
