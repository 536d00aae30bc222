"""Reduce over several machines: what is summed where, in which order, and what crosses.

With L ranks on each of M machines, flat data is cut into L columns of M blocks. A machine sums
inside first: its rank ``l`` gets its sum of column ``l``. That rank sends block ``m`` to rank ``l``
of machine ``m``, and adds the blocks that come, in the order of the machines or as a tree. Results
go back the same way. So every byte crosses once each way, and a rank sends 1/L of its machine's
bytes. Machines with different numbers of ranks have one column, which their first ranks carry.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyringar.comm.float_mode import default_float_mode
from pyringar.comm.member import Member
from pyringar.comm.orders import tree
from pyringar.comm.reference import divide, fold, wide
from pyringar.distributed.column import Column, Wait
from pyringar.distributed.convert import copy_all, has_plain_memory
from pyringar.distributed.machines import Machines
from pyringar.errors import ArgumentError, RingarError

__all__ = ["Between"]

# Of all ranks' data: while one piece crosses, the next is summed inside.
PIECE_ELEMENTS = 2**20
# What ranks tell each other of a call: a digest of its words, and the words for messages, cut.
_DIGEST_BYTES = 8
_TOLD_BYTES = 128
_OVER = object()

Steps = Iterator[None]


class Between:
    """The collectives of ranks on several machines.

    Args:
        machines: The place of this rank.
        members: All ranks, for messages.
        inside: The communicator of this machine; its ranks count from 0.
        host: The same, for tensors on the CPU.
        column: None for a rank that meets no rank of another machine.
        order: In which machines' sums are added: ``"any"``, that of the machines, or ``"tree"``.

    Attributes:
        is_told: Whether other ranks know of the call that runs. The caller clears it.
    """

    def __init__(
        self,
        machines: Machines,
        members: Sequence[Member],
        inside: Any,
        host: Any,
        column: Column | None,
        order: str,
    ) -> None:
        self.is_told = False
        self._machines = machines
        self._members = members
        self._inside = inside
        self._host = host
        self._column = column
        self._order = order
        self._num_blocks = machines.num_columns * len(machines.nodes)

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensors: Sequence[Tensor], op: str, what: str) -> None:
        """Reduce a list in place; ``what`` is the call in words, equal for equal calls alone."""
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(wide(tensor.dtype), []).append(tensor)
        flats = [_flat(group) for group in groups.values()]  # first: memory may run out
        self.compare(what)
        for flat, group in zip(flats, groups.values(), strict=True):
            pieces = list(torch.split(flat, self._piece_elements())) if len(flat) else []
            if short := -len(flat) % self._num_blocks:
                last, pieces[-1] = pieces[-1], pad(pieces[-1], (0, short))
            _run_overlapped(self._reduce_piece(piece, op) for piece in pieces)
            if short:
                copy_all([(last, pieces[-1][: len(last)])])
            if flat.data_ptr() != group[0].data_ptr():
                parts = torch.split(flat, [tensor.numel() for tensor in group])
                copy_all([(t, p.view(t.shape)) for t, p in zip(group, parts, strict=True)])

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str, what: str) -> None:
        """Reduce ``input``; this rank's part of it, by rank, comes into ``output``."""
        self.compare(what)
        rows = input.detach().contiguous().view(len(self._members), -1)
        result = torch.empty_like(rows[0])
        _run_overlapped(
            self._scatter_piece(result[columns], rows[:, columns], op)
            for columns in _slices(rows, self._piece_elements())
        )
        copy_all([(output, result.view(output.shape))])

    def all_gather(self, output: Tensor, input: Tensor, what: str) -> None:
        """Put all ranks' ``input`` into ``output``, by rank."""
        self.compare(what)
        own = input.detach().contiguous().resolve_neg().view(-1)
        rows = own.new_empty(len(self._members), len(own))
        _run_overlapped(
            self._gather_piece(rows[:, columns], own[columns])
            for columns in _slices(rows, self._piece_elements())
        )
        copy_all([(output, rows.view(output.shape))])

    def broadcast(self, tensor: Tensor, root: int, what: str) -> None:
        """Copy the tensor of rank ``root`` to all ranks; each column carries a part."""
        is_root = self._machines.here[self._machines.local_rank] == root
        data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if is_root:
            data.copy_(tensor.detach())
        self.compare(what)
        nbytes = data.numel() * data.itemsize
        padded = pad(data.view(-1).view(torch.uint8), (0, -nbytes % self._num_blocks))
        pieces = torch.split(padded, 4 * self._piece_elements()) if nbytes else []
        _run_overlapped(self._broadcast_piece(piece, root) for piece in pieces)
        if not is_root:
            copy_all([(tensor, padded[:nbytes].view(tensor.dtype).view(tensor.shape))])

    def num_pieces(self, numel: int) -> int:
        """Return in how many pieces an all_reduce of so many elements crosses."""
        return -(-numel // self._piece_elements())

    def _piece_elements(self) -> int:
        """Return how many elements a piece has: as many in each block."""
        return max(1, PIECE_ELEMENTS // self._num_blocks) * self._num_blocks

    # -- pieces: each runs to where it must wait for other machines --------------------------------

    def _reduce_piece(self, piece: Tensor, op: str) -> Steps:
        blocks = [len(piece) // self._num_blocks] * len(self._machines.nodes)
        add_up = self._begin_scatter(piece, blocks, op)
        yield
        share = self._begin_gather(add_up(), piece, blocks)
        yield
        share()

    def _scatter_piece(self, result: Tensor, rows: Tensor, op: str) -> Steps:
        """Sum the rows of all ranks, one for each rank; this rank's comes into ``result``."""
        machines = self._machines
        flat = rows[machines.block_order].resolve_neg().to(wide(rows.dtype)).view(-1)
        add_up = self._begin_scatter(flat, self._blocks_of(result), op)
        yield
        own = add_up()
        if not machines.are_equal:  # its block holds the rows of all ranks here
            self.call_inside(lambda: self._inside.broadcast(own, 0))
            own = own.view(-1, len(result))[machines.local_rank]
        copy_all([(result, own)])

    def _gather_piece(self, rows: Tensor, own: Tensor) -> Steps:
        """Put ``own`` of all ranks into their rows."""
        machines, blocks = self._machines, self._blocks_of(own)
        block = own
        if not machines.are_equal:
            block = own.new_empty(blocks[machines.node])
            self.call_inside(lambda: self._inside.all_gather(block, own))
        flat = own.new_empty(rows.shape)
        share = self._begin_gather(block, flat.view(-1), blocks)
        yield
        share()
        rows[machines.block_order] = flat

    def _broadcast_piece(self, piece: Tensor, root: int) -> Steps:
        machines = self._machines
        source = machines.where(root)
        is_source = machines.node == source
        if is_source:
            self.call_inside(lambda: self._inside.broadcast(piece, machines.here.index(root)))
        part = piece
        if machines.num_columns > 1:
            part = piece.chunk(machines.num_columns)[machines.local_rank].clone()
        sent = dict.fromkeys(machines.others, part) if is_source else {}
        arrived = self._exchange(sent, {} if is_source else {source: part})
        yield
        arrived()
        if not is_source:
            self._share_inside(piece, part)

    def _blocks_of(self, part: Tensor) -> list[int]:
        """Return the sizes of a column's blocks where each rank has a part of this size."""
        num_columns = self._machines.num_columns
        return [len(part) * len(ranks) // num_columns for ranks in self._machines.nodes]

    # -- between machines --------------------------------------------------------------------------

    def _begin_scatter(self, flat: Tensor, blocks: Sequence[int], op: str) -> Callable[[], Tensor]:
        """Begin to sum ``flat``, which may be written: blocks of these sizes for each column.

        Return a function that waits, and returns the sum of this rank's block. Of a rank in no
        column it returns any block.
        """
        machines = self._machines
        sums = torch.split(self._sum_inside(flat, "sum" if op == "mean" else op), list(blocks))
        own = sums[machines.node]
        if not machines.is_carrier:
            return lambda: own
        parts = {node: torch.empty_like(own) for node in machines.others}
        arrived = self._exchange({node: sums[node] for node in machines.others}, parts)

        def add_up() -> Tensor:
            arrived()
            by_machine = parts | {machines.node: own}
            return self._folded([by_machine[node] for node in sorted(by_machine)], op)

        return add_up

    def _begin_gather(self, own: Tensor, flat: Tensor, blocks: Sequence[int]) -> Wait:
        """Begin to put the blocks of all ranks into ``flat``; what is returned waits for it."""
        machines = self._machines
        column = flat if machines.num_columns == 1 else flat.new_empty(sum(blocks))
        places = dict(enumerate(torch.split(column, list(blocks))))
        arrived: Wait = _nothing_to_wait_for
        if machines.is_carrier:
            places.pop(machines.node).copy_(own)
            arrived = self._exchange(dict.fromkeys(machines.others, own), places)

        def share() -> None:
            arrived()
            self._share_inside(flat, column)

        return share

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> Wait:
        if self._column is None:
            return _nothing_to_wait_for
        self.is_told = True
        return self._column.exchange(sent, received)

    def _folded(self, parts: list[Tensor], op: str) -> Tensor:
        """Return the first part, with the others folded in; a mean is divided."""
        with default_float_mode() as cut:

            def add(into: Tensor, term: Tensor) -> Tensor:
                for one, other in zip(cut(into), cut(term), strict=True):
                    fold(one, other, op)
                return into

            is_tree = self._order == "tree"
            total = tree(parts, add) if is_tree else functools.reduce(add, parts)
            if op == "mean":
                divide(total, len(self._members), cut)
        return total

    # -- inside a machine --------------------------------------------------------------------------

    def _sum_inside(self, flat: Tensor, op: str) -> Tensor:
        """Return this machine's sum of this rank's column."""
        machines = self._machines
        if len(machines.here) == 1:
            return flat
        if machines.num_columns == 1:
            self.call_inside(lambda: self._inside.all_reduce(flat, op))
            return flat
        column = flat.new_empty(len(flat) // machines.num_columns)
        self.call_inside(lambda: self._inside.reduce_scatter(column, flat, op))
        return column

    def _share_inside(self, flat: Tensor, column: Tensor) -> None:
        """Put all columns into ``flat``, which is the column itself where there is one."""
        if self._machines.num_columns > 1:
            self.call_inside(lambda: self._inside.all_gather(flat, column))
        elif len(self._machines.here) > 1:
            self.call_inside(lambda: self._inside.broadcast(flat, 0))

    def call_inside(self, call: Callable[[], object]) -> None:
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

    def compare(self, what: str) -> None:
        """Return when all ranks are known to call the same.

        Raises:
            ArgumentError: Calls differ: names both, on every rank.
        """
        machines, own = self._machines, _told(what)
        table = own.repeat(len(self._members), 1)
        rows = torch.split(table, [len(ranks) for ranks in machines.nodes])
        here = rows[machines.node]
        if len(machines.here) > 1:
            self.call_inside(lambda: self._host.all_gather(here, own))
        sent = dict.fromkeys(machines.others, here)
        self._exchange(sent, {node: rows[node] for node in machines.others})()
        if not machines.are_equal and len(machines.here) > 1:
            self.call_inside(lambda: self._host.broadcast(table, 0))
        for rank, theirs in zip(itertools.chain(*machines.nodes), table, strict=True):
            if not torch.equal(theirs[:_DIGEST_BYTES], own[:_DIGEST_BYTES]):
                words = bytes(theirs[_DIGEST_BYTES:].tolist()).decode(errors="replace").rstrip()
                raise ArgumentError(
                    f"ranks call different things: this rank calls {what}, and "
                    f"{self._members[rank].name} {words}"
                )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements end to end, 16-bit floats as float32; not copied if they are that."""
    first = tensors[0]
    is_flat = first.is_contiguous() and has_plain_memory(first)
    if len(tensors) == 1 and is_flat and first.dtype == wide(first.dtype):
        return first.data.view(-1)
    parts = [tensor.detach().resolve_neg().reshape(-1) for tensor in tensors]
    return torch.cat([part.to(wide(part.dtype)) for part in parts])


def _slices(rows: Tensor, piece_elements: int) -> list[slice]:
    """Cut rows into pieces of some columns each."""
    step, width = max(1, piece_elements // len(rows)), rows.shape[1]
    return [slice(begin, min(begin + step, width)) for begin in range(0, width, step)]


def _run_overlapped(pieces: Iterable[Steps]) -> None:
    """Run pieces in order, each a step ahead of the next: one is summed while others cross."""
    window: list[Steps] = []
    for piece in pieces:
        window = [steps for steps in [piece, *window] if next(steps, _OVER) is not _OVER]
    while window:
        window = [steps for steps in window if next(steps, _OVER) is not _OVER]


def _nothing_to_wait_for() -> None:
    """Wait for nothing: there is no other machine, or this rank is in no column."""


def _told(words: str) -> Tensor:
    """Return what ranks tell each other of a call."""
    text = words.encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    told = bytearray((digest + text)[:_TOLD_BYTES].ljust(_TOLD_BYTES))
    return torch.frombuffer(told, dtype=torch.uint8)
