"""Collectives over several machines: inside each machine first, then between machines.

With L ranks on each of M machines, flat data is cut into L columns of M blocks. First each machine
sums: its rank ``l`` gets the machine's sum of column ``l``. That rank sends block ``m`` to rank
``l`` of machine ``m``, and adds the blocks that it receives. Results go back the same way. Every
byte crosses once each way, and a rank sends 1/L of the bytes of its machine. Machines with
different numbers of ranks have one column, which the first rank of each machine carries.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyringar.comm.collective_call import CollectiveCall, tensors_of
from pyringar.comm.rank_info import RankInfo
from pyringar.comm.reference import default_float_mode, divide, fold, wide
from pyringar.comm.sum_orders import tree
from pyringar.distributed.convert import copy_all, has_plain_memory
from pyringar.distributed.machines import Column, MachineLayout, WaitFunction
from pyringar.errors import ArgumentError, RingarError

# Elements of a piece. While it crosses between machines, the next piece is summed inside.
PIECE_ELEMENTS = 2**20
# Ranks compare a digest of the call's description. Errors show the first bytes of the description.
_DIGEST_BYTES = 8
_TOLD_BYTES = 128
_OVER = object()

Steps = Iterator[None]


@dataclass
class Between:
    """The collectives of ranks on several machines."""

    machines: MachineLayout
    members: Sequence[RankInfo]
    inside: Any  # the communicator of this machine; its ranks count from 0
    host: Any  # the communicator of this machine for CPU tensors
    column: Column
    order: str  # addition of machines' sums: "any" in sequence, "tree" as a binary tree
    is_told: bool = False  # True: other ranks know the running call; the caller resets it

    def run(self, call: CollectiveCall, what: str) -> None:
        getattr(self, f"_{call.operation}")(call, what)

    def _all_reduce(self, call: CollectiveCall, what: str) -> None:
        tensors, op = tensors_of(call.outputs), call.op
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(wide(tensor.dtype), []).append(tensor)
        flats = [_flat(group) for group in groups.values()]  # before comparing: memory may run out
        self.compare(what)
        for flat, group in zip(flats, groups.values(), strict=True):
            pieces = list(torch.split(flat, self.piece_elements())) if len(flat) else []
            if short := -len(flat) % len(self.members):
                last, pieces[-1] = pieces[-1], pad(pieces[-1], (0, short))
            _run_overlapped(self._reduce_piece(piece, op) for piece in pieces)
            if short:
                copy_all([(last, pieces[-1][: len(last)])])
            if flat.data_ptr() != group[0].data_ptr():
                parts = torch.split(flat, [tensor.numel() for tensor in group])
                copy_all([(t, p.view(t.shape)) for t, p in zip(group, parts, strict=True)])

    def _reduce_scatter(self, call: CollectiveCall, what: str) -> None:
        self.compare(what)
        rows = call.inputs.detach().contiguous().view(len(self.members), -1)
        result = torch.empty_like(rows[0])
        step = self._row_elements()
        pieces = zip(torch.split(result, step), torch.split(rows, step, 1), strict=True)
        _run_overlapped(self._scatter_piece(*piece, call.op) for piece in pieces)
        copy_all([(call.outputs, result.view(call.outputs.shape))])

    def _all_gather(self, call: CollectiveCall, what: str) -> None:
        self.compare(what)
        own = call.inputs.detach().contiguous().resolve_neg().view(-1)
        rows = own.new_empty(len(self.members), len(own))
        step = self._row_elements()
        pieces = zip(torch.split(rows, step, 1), torch.split(own, step), strict=True)
        _run_overlapped(self._gather_piece(*piece) for piece in pieces)
        copy_all([(call.outputs, rows.view(call.outputs.shape))])

    def _broadcast(self, call: CollectiveCall, what: str) -> None:
        [tensor], root = tensors_of(call.outputs), call.root
        data = tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        data = data.view(-1).view(torch.uint8)
        padded = pad(data, (0, -len(data) % len(self.members)))
        self.compare(what)
        pieces = torch.split(padded, 4 * self.piece_elements()) if len(data) else []
        _run_overlapped(self._broadcast_piece(piece, root) for piece in pieces)
        if self.machines.rank != root:
            copy_all([(tensor, padded[: len(data)].view(tensor.dtype).view(tensor.shape))])

    def _barrier(self, _: CollectiveCall, what: str) -> None:
        self.compare(what)

    def _row_elements(self) -> int:
        return max(1, PIECE_ELEMENTS // len(self.members))

    def piece_elements(self) -> int:
        return self._row_elements() * len(self.members)

    # Generators of a piece's steps: each yields before it waits for another machine.

    def _reduce_piece(self, piece: Tensor, op: str) -> Steps:
        add_up = self._begin_scatter(piece, op)
        yield
        share = self._begin_gather(add_up(), piece)
        yield
        share()

    def _scatter_piece(self, result: Tensor, rows: Tensor, op: str) -> Steps:
        machines = self.machines
        flat = rows[machines.block_order].resolve_neg().to(wide(rows.dtype)).view(-1)
        add_up = self._begin_scatter(flat, op)
        yield
        own = add_up()
        if not machines.are_equal:  # here a block has rows for all local ranks
            self.call_inside(lambda: self.inside.broadcast(own, 0))
            own = own.view(len(machines.here), -1)[machines.local_rank]
        copy_all([(result, own)])

    def _gather_piece(self, rows: Tensor, own: Tensor) -> Steps:
        machines, block = self.machines, own
        if not machines.are_equal:
            block = own.new_empty(len(machines.here) * len(own))
            self.call_inside(lambda: self._group_of(own).all_gather(block, own))
        flat = own.new_empty(rows.shape)
        share = self._begin_gather(block, flat.view(-1))
        yield
        share()
        rows[machines.block_order] = flat

    def _broadcast_piece(self, piece: Tensor, root: int) -> Steps:
        machines = self.machines
        source = next(node for node, ranks in enumerate(machines.nodes) if root in ranks)
        is_source = machines.node == source
        if is_source:
            self.call_inside(lambda: self.inside.broadcast(piece, machines.here.index(root)))
        part = piece
        if machines.num_columns > 1:
            part = piece.chunk(machines.num_columns)[machines.local_rank].clone()
        sent = dict.fromkeys(machines.others, part) if is_source else {}
        arrived = self.column.exchange(sent, {} if is_source else {source: part})
        yield
        arrived()
        if not is_source:
            self._share_inside(piece, part)

    def _begin_scatter(self, flat: Tensor, op: str) -> Callable[[], Tensor]:
        """Begin to sum ``flat`` over all ranks; may overwrite ``flat``.

        The returned function waits, and returns this rank's block (undefined if it has no block).
        """
        parts = self._blocks(self._sum_inside(flat, "sum" if op == "mean" else op))
        own = parts.pop(self.machines.node)
        if not self.machines.is_carrier:
            return lambda: own
        received = {node: torch.empty_like(own) for node in parts}
        arrived = self.column.exchange(parts, received)

        def add_up() -> Tensor:
            arrived()
            by_machine = received | {self.machines.node: own}
            return self._folded([by_machine[node] for node in sorted(by_machine)], op)

        return add_up

    def _begin_gather(self, own: Tensor, flat: Tensor) -> WaitFunction:
        """Begin to gather the blocks of all ranks into ``flat``; the returned function waits."""
        num_columns = self.machines.num_columns
        column = flat if num_columns == 1 else flat.new_empty(len(flat) // num_columns)
        received = self._blocks(column)
        received.pop(self.machines.node).copy_(own)
        arrived = self.column.exchange(dict.fromkeys(self.machines.others, own), received)

        def share() -> None:
            arrived()
            self._share_inside(flat, column)

        return share

    def _blocks(self, column: Tensor) -> dict[int, Tensor]:
        sizes = [len(column) * len(ranks) // len(self.members) for ranks in self.machines.nodes]
        return dict(enumerate(torch.split(column, sizes)))

    def _folded(self, parts: list[Tensor], op: str) -> Tensor:
        with default_float_mode() as cut:

            def add(into: Tensor, term: Tensor) -> Tensor:
                for one, other in zip(cut(into), cut(term), strict=True):
                    fold(one, other, op)
                return into

            is_tree = self.order == "tree"
            total = tree(parts, add) if is_tree else functools.reduce(add, parts)
            if op == "mean":
                divide(total, len(self.members), cut)
        return total

    def _sum_inside(self, flat: Tensor, op: str) -> Tensor:
        if (num_columns := self.machines.num_columns) > 1:
            column = flat.new_empty(len(flat) // num_columns)
            self.call_inside(lambda: self.inside.reduce_scatter(column, flat, op))
            return column
        if len(self.machines.here) > 1:
            self.call_inside(lambda: self.inside.all_reduce(flat, op))
        return flat

    def _share_inside(self, flat: Tensor, column: Tensor) -> None:
        """Copy all columns, or the only column, of this machine to ``flat`` of each local rank."""
        if self.machines.num_columns > 1:
            self.call_inside(lambda: self._group_of(flat).all_gather(flat, column))
        elif len(self.machines.here) > 1:
            self.call_inside(lambda: self._group_of(flat).broadcast(flat, 0))

    def _group_of(self, tensor: Tensor) -> Any:
        return self.host if tensor.is_cpu else self.inside

    def call_inside(self, call: Callable[[], object]) -> None:
        """Run ``call`` on the communicator of this machine; its errors name the machine."""
        machines = self.machines
        try:
            call()
        except RingarError as error:
            raise type(error)(
                f"on machine {machines.node} of {len(machines.nodes)}, which has ranks "
                f"{machines.numbers(machines.here)}: {error}"
            ) from error

    def compare(self, what: str) -> None:
        """Compare the calls of all ranks; ArgumentError on all ranks names two differing calls."""
        own = _told(what)
        table = own.new_empty(len(self.members), len(own))
        self.is_told = True
        _run_overlapped([self._gather_piece(table, own)])
        for member, theirs in zip(self.members, table, strict=True):
            if not torch.equal(theirs[:_DIGEST_BYTES], own[:_DIGEST_BYTES]):
                words = bytes(theirs[_DIGEST_BYTES:].tolist()).decode(errors="replace").rstrip()
                raise ArgumentError(
                    f"ranks call different things: {self.members[self.machines.rank].name} {what}; "
                    f"{member.name} {words}"
                )


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, 16-bit floats as float32. A single contiguous tensor is not copied."""
    first = tensors[0]
    is_flat = first.is_contiguous() and has_plain_memory(first)
    if len(tensors) == 1 and is_flat and first.dtype == wide(first.dtype):
        return first.data.view(-1)
    parts = [tensor.detach().resolve_neg().reshape(-1) for tensor in tensors]
    return torch.cat([part.to(wide(part.dtype)) for part in parts])


def _run_overlapped(pieces: Iterable[Steps]) -> None:
    """Run the steps of all pieces interleaved; each piece is one step ahead of the next."""
    window: list[Steps] = []
    for piece in pieces:
        window = [steps for steps in [piece, *window] if next(steps, _OVER) is not _OVER]
    while window:
        window = [steps for steps in window if next(steps, _OVER) is not _OVER]


def _told(words: str) -> Tensor:
    text = words.encode()
    digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    told = bytearray((digest + text)[:_TOLD_BYTES].ljust(_TOLD_BYTES))
    return torch.frombuffer(told, dtype=torch.uint8)
