"""The collectives of a process group, as calls of the engine or of gloo.

A call first goes to the engine unchecked. An engine that refuses the tensors has sent nothing. Then
the call is repeated with stand-in tensors of other dtype or layout, or goes to gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pyringar.comm.arguments import OPS, check_parts
from pyringar.comm.plain_group import check_no_overlap
from pyringar.distributed.convert import (
    BITWISE,
    NATIVE,
    SUM,
    Copy,
    Described,
    StandIn,
    copy_all,
    count_changes,
    for_copy,
    for_reduction,
    reduction_name,
)
from pyringar.distributed.delegated import Delegated, flat
from pyringar.distributed.torch_works import DelegatedCall, PendingWork, one_or_all
from pyringar.errors import ArgumentError, UnsupportedError


class _Call(NamedTuple):
    """The communicator's works of one collective, and the copies to make after they succeed."""

    parts: list[Any]
    copies: list[Copy]


def _options(kind: str, given: Any) -> Any:
    if hasattr(given, "asyncOp"):
        return given
    options = getattr(c10d, kind)()
    if given is not None:
        options.reduceOp = given
    return options


def _of_pairs(
    operation: str,
    begin: Callable[..., None],
    options: str,
    *names: str,
    results: Callable[[Any], Any] = list,
) -> Callable[..., Any]:
    """Make a method that takes an output and an input, or a list of each.

    ``begin`` adds the works and copies of one pair to a `_Call`. ``names`` are possible names of
    the method in another backend. ``results`` turns outputs into the results of the work.
    """

    def method(self: Any, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        opts = _options(options, opts)
        tensors = [*flat(inputs), *flat(outputs)]
        if self._are_elsewhere(tensors):
            return self._hand_over(operation, tensors, (outputs, inputs, opts), names=names)
        if isinstance(inputs, Tensor) or isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"{operation}: {len(outputs)} outputs and {len(inputs)} inputs, expected one each"
            )
        call = _Call([], [])
        for output, input in zip(outputs, inputs, strict=True):
            begin(self, output, input, opts, call)
        return self._finished(call, results(outputs), opts)

    return method


class Collectives(Delegated):
    """The collectives of torch.distributed, with torch's names and arguments.

    CPU tensors have any layout without overlap and any dtype that torch.distributed takes. Tensors
    on other devices go to the group's backend for that device. ``opts`` are torch's options, a
    ``ReduceOp`` or a root. A list may be a single tensor. A ``timeout`` is ignored: the timeout of
    the group counts. A call with ``asyncOp=False`` that the engine runs returns None.

    A call or the ``wait()`` of its work raises ArgumentError on every rank if sizes, dtypes or
    calls differ between ranks (calls of gloo are not compared); UnsupportedError if these tensors
    cannot be sent; PeerLostError or CollectiveTimeout, which names the lost or late rank.

    Cost: that of `pyringar.ProcessCommunicator`, or of `HierarchicalCommunicator` on several
    machines. Lists of tensors are copied once more than the ``_into_tensor`` and ``_tensor`` forms.
    """

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor in place over all ranks. Tensors of a list are not added together."""
        try:
            reduce_op, is_async = opts.reduceOp, opts.asyncOp
        except AttributeError:
            opts = _options("AllreduceOptions", opts)
            reduce_op, is_async = opts.reduceOp, opts.asyncOp
        try:
            op = "sum" if reduce_op == SUM else reduction_name(reduce_op, "all_reduce")
            if is_async:
                return self._pending((self._comm.all_reduce(tensors, op, async_op=True),), tensors)
            if not self._comm._run_prepared(tensors, op, None, None):
                self._comm.all_reduce(tensors, op)
        except (ArgumentError, UnsupportedError) as error:
            return self._all_reduce_others(tensors, opts, error)
        return None

    allreduce_coalesced = allreduce

    def _all_reduce_others(self, given: Any, opts: Any, error: Exception) -> Any:
        tensors = [given] if isinstance(given, Tensor) else list(given)
        if self._are_elsewhere(tensors):
            return self._hand_over("all_reduce", tensors, (tensors, opts), names=("allreduce",))
        op = reduction_name(opts.reduceOp, "all_reduce")
        stand_ins = [for_reduction(tensor, op) for tensor in tensors]
        call = _Call([], [])
        detached = [stand_in.tensor for stand_in in stand_ins]
        if op in OPS and [t.dtype for t in tensors] == [t.dtype for t in detached]:
            if not any(tensor.requires_grad for tensor in tensors):
                raise error
            # One call for all tensors, to match ranks with tensors that do not require grad.
            call.parts.append(self._comm.all_reduce(detached, op, async_op=True))
            return self._finished(call, tensors, opts)
        for tensor, stand_in in zip(tensors, stand_ins, strict=True):
            self._reduce_stand_in(stand_in, Described.of(f"all_reduce ({op})", tensor), call)
        return self._finished(call, tensors, opts)

    def _reduce_stand_in(
        self, stand_in: StandIn, what: Described, call: _Call, *more: Copy
    ) -> None:
        tensor, op, copy = stand_in
        if copy is not None:
            self._copy_in_turn([(copy[1], copy[0])], call)
        if op in OPS:
            call.parts.append(self._comm._begin_as(what, "all_reduce", [tensor], op=op))
        else:
            self._fold_bits(tensor, op, what, call)
        call.copies.extend([*([copy] if copy is not None else []), *more])

    def _fold_bits(self, tensor: Tensor, op: str, what: Described, call: _Call) -> None:
        """Gather the tensors of all ranks and reduce them locally, for bitwise ops."""
        gathered = tensor.new_empty(self._comm.world_size, *tensor.shape)
        call.parts.append(self._comm._begin_as(what, "all_gather", gathered, tensor))
        call.copies.append((tensor, gathered[0]))

        @torch.inference_mode()  # allows writes to inference tensors
        def fold() -> None:
            total, *others = gathered
            for part in others:
                BITWISE[op](total, part, out=total)

        call.parts.append(self._comm._submit_step(fold))

    def reduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor into the tensor of the root. Cost: that of `allreduce`."""
        opts = _options("ReduceOptions", opts)
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if self._are_elsewhere(tensors):
            return self._hand_over("reduce", tensors, (tensors, opts))
        op, root = reduction_name(opts.reduceOp, "reduce"), opts.rootRank
        call = _Call([], [])
        for tensor in tensors:
            check_no_overlap("tensor", tensor)
            flat = self._flat_copy([tensor], call)
            into = [(tensor.detach(), flat.view(tensor.shape))] if self._comm.rank == root else []
            what = Described.of(f"reduce ({op}) to rank {self._comm._number(root)}", tensor)
            self._reduce_stand_in(for_reduction(flat, op), what, call, *into)
        return self._finished(call, tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        if not hasattr(opts, "rootRank"):
            root, opts = opts, c10d.BroadcastOptions()
            opts.rootRank = 0 if root is None else root
        if opts.rootTensor:
            raise UnsupportedError(
                f"broadcast: rootTensor is {opts.rootTensor}, expected 0: every tensor of a list "
                "is copied into its counterpart on the other ranks"
            )
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root = opts.rootRank
        if not opts.asyncOp and len(tensors) == 1 and _is_plain(tensors[0]):
            self._comm.broadcast(tensors[0], root)
            return None
        if self._are_elsewhere(tensors):
            return self._hand_over("broadcast", tensors, (tensors, opts))
        call = _Call([], [])
        for tensor in tensors:
            self._broadcast_one(tensor, root, call)
        return self._finished(call, tensors, opts)

    def _broadcast_one(self, tensor: Tensor, root: int, call: _Call) -> None:
        check_no_overlap("tensor", tensor)
        stand_in, whole = for_copy(tensor)
        if whole is not None and self._comm.rank == root:
            self._copy_in_turn([(whole, tensor.detach())], call)
        elif whole is not None:
            call.copies.append((tensor.detach(), whole))
        if tensor.dtype in NATIVE:
            call.parts.append(self._comm.broadcast(stand_in, root, async_op=True))
        else:
            what = Described.of(f"broadcast from rank {self._comm._number(root)}", tensor)
            call.parts.append(self._comm._begin_as(what, "broadcast", stand_in, root=root))

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait until all ranks have called barrier and this rank's earlier calls have ended.

        It does not wait for messages or for GPUs.
        """
        if getattr(opts, "asyncOp", False):
            parts = self._fallback.under_way()
            return self._pending((*parts, self._comm.barrier(async_op=True)), [])
        self._fallback.finish()
        self._comm.barrier()
        return None

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Run `barrier` with a separate ``timeout``; errors name a missing rank."""
        limit = getattr(timeout, "timeout", timeout)  # torch may pass BarrierOptions
        is_limited = limit is not None and limit > timedelta(0)
        self._comm.barrier(async_op=True).wait(limit.total_seconds() if is_limited else None)

    def _gather_into(self, output: Tensor, input: Tensor, opts: Any, call: _Call) -> None:
        check_parts("all_gather", output, input, self._comm.world_size)
        check_no_overlap("output", output)
        into, whole = for_copy(output)
        if whole is not None:
            call.copies.append((output.detach(), whole))
        part, source = for_copy(input, apart=_share_memory(input, output))
        if source is not None:
            self._copy_in_turn([(source, input.detach())], call)
        if output.dtype in NATIVE:
            call.parts.append(self._comm.all_gather(into, part, async_op=True))
        else:
            what = Described.of("all_gather", output)
            call.parts.append(self._comm._begin_as(what, "all_gather", into, part))

    def _gather_row(self, row: Sequence[Tensor], input: Tensor, opts: Any, call: _Call) -> None:
        rank = self._comm.rank
        self._check_row(row, "all_gather")
        self._check_own_part("all_gather", "input", input, "tensor_list", row)
        for i, tensor in enumerate(row):
            check_no_overlap(f"tensor_list[{i}]", tensor)
        if all(t.numel() == input.numel() for t in row):
            flat = input.new_empty(len(row) * input.numel())
            self._gather_into(flat, input, opts, call)
            pieces = flat.chunk(len(row)) if flat.numel() else []
            call.copies.extend(
                (t.detach(), p.view(t.shape)) for t, p in zip(row, pieces, strict=False)
            )
            return
        self._copy_in_turn([(row[rank].detach(), input.detach().reshape(row[rank].shape))], call)
        for root, tensor in enumerate(row):
            self._broadcast_one(tensor, root, call)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Concatenate the ``input`` of all ranks in rank order into ``output``.

        ``input`` has the same size and dtype on all ranks. It may be part of ``output``.
        """
        if not _is_async(opts) and _are_plain(output, input):
            self._comm.all_gather(output, input)
            return None
        work = self._gather_single(output, input, opts)
        if isinstance(work, PendingWork):
            work._results = lambda: self._pieces_of(output)
        return work

    def _pieces_of(self, output: Tensor) -> list[Tensor]:
        return list(output.chunk(self._comm.world_size)) if output.dim() else [output]

    _gather_single = _of_pairs("all_gather", _gather_into, "AllgatherOptions", "_allgather_base")
    _allgather_base = all_gather_single
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _of_pairs(
        "all_gather_into_tensor_coalesced",
        _gather_into,
        "AllgatherOptions",
        "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
    )
    # outputs[i][r] receives inputs[i] of rank r. The sizes of ranks may differ.
    allgather = _of_pairs(
        "all_gather", _gather_row, "AllgatherOptions", "allgather", results=one_or_all
    )

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather ``inputs[i]`` of rank ``r`` into ``outputs[r][i]`` of every rank."""
        self._check_row(outputs, "all_gather_coalesced")
        work = self.allgather(list(zip(*outputs, strict=True)), inputs, opts)
        if isinstance(work, PendingWork):
            work._results = one_or_all(outputs)
        return work

    def _scatter_from(self, output: Tensor, input: Tensor, opts: Any, call: _Call) -> None:
        op = reduction_name(opts.reduceOp, "reduce_scatter")
        check_parts("reduce_scatter", output, input, self._comm.world_size)
        check_no_overlap("output", output)
        is_native = input.dtype in NATIVE and op in OPS
        if is_native and input.is_contiguous() and not _share_memory(input, output):
            flat = input.detach().view(-1)
        else:
            flat = self._flat_copy([input], call)
        if is_native:
            call.parts.append(self._comm.reduce_scatter(output.detach(), flat, op, async_op=True))
        else:
            self._scatter_slice(output, flat, self._comm.rank * output.numel(), op, call)

    def _scatter_row(self, output: Tensor, row: Sequence[Tensor], opts: Any, call: _Call) -> None:
        rank, op = self._comm.rank, reduction_name(opts.reduceOp, "reduce_scatter")
        self._check_row(row, "reduce_scatter")
        self._check_own_part("reduce_scatter", "output", output, "input_list", row)
        check_no_overlap("output", output)
        flat = self._flat_copy(row, call)
        if all(t.numel() == output.numel() for t in row):
            self._scatter_from(output, flat, opts, call)
        else:
            begin = sum(t.numel() for t in row[:rank])
            self._scatter_slice(output, flat, begin, op, call)

    def _scatter_slice(
        self, output: Tensor, flat: Tensor, begin: int, op: str, call: _Call
    ) -> None:
        """All-reduce the temporary tensor ``flat``, then copy a slice of it to ``output``."""
        target = output.detach()
        part = flat[begin : begin + target.numel()].view(target.shape)
        what = Described.of(f"reduce_scatter ({op})", flat)
        self._reduce_stand_in(for_reduction(flat, op), what, call, (target, part))

    def _flat_copy(self, tensors: Sequence[Tensor], call: _Call) -> Tensor:
        sizes = [t.numel() for t in tensors]
        flat = tensors[0].new_empty(sum(sizes))
        pieces = zip(torch.split(flat, sizes), tensors, strict=True)
        self._copy_in_turn([(piece.view(t.shape), t.detach()) for piece, t in pieces], call)
        return flat

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        opts = _options("ReduceScatterOptions", opts)
        op = reduction_name(opts.reduceOp, "reduce_scatter")
        if not opts.asyncOp and op in OPS and _are_plain(output, input):
            self._comm.reduce_scatter(output, input, op)
            return None
        return self._scatter_single(output, input, opts)

    _scatter_single = _of_pairs(
        "reduce_scatter", _scatter_from, "ReduceScatterOptions", "_reduce_scatter_base"
    )
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _of_pairs(
        "reduce_scatter_tensor_coalesced",
        _scatter_from,
        "ReduceScatterOptions",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
    )
    # outputs[i] of rank r receives the sum of inputs[i][r]. The sizes of ranks may differ.
    reduce_scatter = _of_pairs(
        "reduce_scatter", _scatter_row, "ReduceScatterOptions", "reduce_scatter"
    )

    def start_coalescing(self, *_: Any) -> None:
        """Collect the works of later calls for `end_coalescing`; the calls run at once."""
        self._batch = []

    def end_coalescing(self, *_: Any) -> Any:
        works, self._batch = self._batch or [], None
        parts = [getattr(work, "_parts", [DelegatedCall(work)]) for work in works]
        return self._pending([part for each in parts for part in each], [])

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def _copy_in_turn(self, copies: Sequence[Copy], call: _Call) -> None:
        """Queue copies in the engine's thread, between the earlier and the later calls."""
        if copies:
            count_changes([into for into, _ in copies])
            call.parts.append(self._comm._submit_step(lambda: copy_all(copies)))

    def _finished(self, call: _Call, results: Any, opts: Any) -> Any:
        parts, copies = call
        count_changes([into for into, _ in copies])

        def finish() -> None:
            if not any(part.exception() for part in parts):
                copy_all(copies)

        every = [*parts, self._comm._submit_step(finish)] if copies else parts
        work = self._pending(every, results)
        if _is_async(opts):
            return work
        work.wait()
        return None

    def _check_row(self, row: Sequence[Any], operation: str) -> None:
        if len(row) != self._comm.world_size:
            raise ArgumentError(
                f"{operation}: a list has {len(row)} tensors, expected "
                f"{self._comm.world_size}, one per rank"
            )

    def _check_own_part(
        self, operation: str, name: str, part: Tensor, list_name: str, row: Sequence[Tensor]
    ) -> None:
        own = row[self._comm.rank]
        if own.numel() != part.numel() or any(t.dtype != part.dtype for t in row):
            raise ArgumentError(
                f"{operation}: {name} is {tuple(part.shape)} of {part.dtype}, expected as "
                f"{list_name}[{self._comm.rank}], {tuple(own.shape)} of {own.dtype}, and the dtype "
                f"of all {len(row)}"
            )


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype in NATIVE
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.layout is torch.strided
    )


def _share_memory(input: Tensor, output: Tensor) -> bool:
    return input.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()


def _are_plain(output: Tensor, input: Tensor) -> bool:
    return _is_plain(output) and _is_plain(input) and not _share_memory(input, output)


def _is_async(opts: Any) -> bool:
    return opts is None or bool(opts.asyncOp)
