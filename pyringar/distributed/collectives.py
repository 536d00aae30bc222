"""The calls of a process group: to the engine where it can, else with other tensors, else to gloo.

A call goes to the engine as it is. Only if that refuses it, before anything was sent, it is looked
at: that keeps every check out of the way of the calls that need none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pyringar.call import OPS
from pyringar.distributed.convert import NATIVE, for_copy, for_reduction
from pyringar.distributed.delegated import Delegated, WatchedPart, by_any_name, given_or_default
from pyringar.distributed.inner import InnerBackends
from pyringar.distributed.work import Completer, DoneWork, Part, PendingWork
from pyringar.errors import ArgumentError, UnsupportedError

__all__ = ["Collectives"]

_SUM = dist.ReduceOp.SUM
_OP_NAMES: list[tuple[Any, str]] = [
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
]

Finish = Callable[[], object]


def _op_name(reduce_op: Any, operation: str) -> str:
    if reduce_op == _SUM:
        return "sum"
    for theirs, ours in _OP_NAMES:
        if reduce_op == theirs:
            return ours
    raise UnsupportedError(
        f"{operation}: backend ringar does not know {getattr(reduce_op, 'op', reduce_op)}"
    )


class Collectives(Delegated):
    """What torch calls, by torch's names and with its arguments.

    Tensors lie on the CPU, in any layout without overlap, and have any dtype that torch.distributed
    takes; on other devices they go to the group's backend for that device.

    Raises, in every call or its work's ``wait()``:
        ArgumentError: Sizes, dtypes or calls differ between ranks: says how, on every rank.
        UnsupportedError: There is no way to do this with these tensors; no rank was told.
        PeerLostError, CollectiveTimeout: A rank is gone, or late: names it.

    Cost: as :class:`pyringar.ProcessCommunicator`'s calls. Lists of tensors to gather into or
    scatter from are copied once more than the ``_into_tensor`` and ``_tensor`` forms.
    """

    def _init_collectives(self, comm: Any, inner: InnerBackends, completer: Completer) -> None:
        self._comm = comm
        self._inner = inner
        self._completer = completer

    # -- all_reduce --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place.

        Args:
            tensors: A list of tensors, or one.
            opts: ``AllreduceOptions``, or a ``ReduceOp``.
            timeout: The group's own counts.
        """
        if opts is None or not hasattr(opts, "reduceOp"):
            opts = _reduce_options(c10d.AllreduceOptions(), opts)
        reduce_op = opts.reduceOp
        try:
            op = "sum" if reduce_op == _SUM else _op_name(reduce_op, "all_reduce")
            if opts.asyncOp:
                return self._pending((self._comm.all_reduce(tensors, op, async_op=True),), tensors)
            self._comm.all_reduce(tensors, op)
        except (ArgumentError, UnsupportedError) as error:
            return self._all_reduce_others(tensors, opts, error)
        return DoneWork(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """:meth:`allreduce` of a list in one call."""
        return self.allreduce(tensors, opts)

    def _all_reduce_others(self, given: Any, opts: Any, error: Exception) -> Any:
        tensors = [given] if isinstance(given, Tensor) else list(given)
        if _are_elsewhere(tensors):
            return self._inner.for_tensors(tensors, "all_reduce").allreduce(tensors, opts)
        op = _op_name(opts.reduceOp, "all_reduce")
        stand_ins = [for_reduction(tensor, op) for tensor in tensors]
        if _are_same(tensors, [s.tensor for s in stand_ins]) and op in OPS:
            raise error
        finishes = [s.finish for s in stand_ins if s.finish is not None]
        parts: list[Part] = []
        for stand_in in stand_ins:
            if stand_in.op in OPS:
                parts.append(self._comm.all_reduce(stand_in.tensor, stand_in.op, async_op=True))
            else:
                parts.append(self._gloo_all_reduce(stand_in.tensor, opts, finishes))
        return self._finished(parts, given, finishes, opts)

    def _gloo_all_reduce(self, tensor: Tensor, opts: Any, finishes: list[Finish]) -> Part:
        whole = tensor.contiguous()
        if whole is not tensor:
            finishes.insert(0, lambda: tensor.copy_(whole))
        gloo = self._inner.for_tensors([whole], "all_reduce")
        part = WatchedPart(
            self._comm, "all_reduce", self._others(), lambda: gloo.allreduce([whole], opts)
        )
        self._inner.add(part)
        return part

    # -- broadcast, barrier ------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Copy each tensor of the root into every other rank's.

        Args:
            tensors: A list of tensors, or one.
            opts: ``BroadcastOptions``, or the root's rank.
            timeout: The group's own counts.
        """
        if not hasattr(opts, "rootRank"):
            root, opts = opts, c10d.BroadcastOptions()
            opts.rootRank = 0 if root is None else root
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root = opts.rootRank
        if not opts.asyncOp and len(tensors) == 1 and _is_plain(tensors[0]):
            self._comm.broadcast(tensors[0], root)
            return DoneWork(tensors)
        if _are_elsewhere(tensors):
            return self._inner.for_tensors(tensors, "broadcast").broadcast(tensors, opts)
        parts, finishes = [], []
        is_written = self._comm.rank != root
        for tensor in tensors:
            stand_in, finish = for_copy(tensor, is_written=is_written)
            parts.append(self._comm.broadcast(stand_in, root, async_op=True))
            if finish is not None:
                finishes.append(finish)
        return self._finished(parts, tensors, finishes, opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Return when all ranks have called it. Says nothing about work on GPUs."""
        if getattr(opts, "asyncOp", False):
            return self._pending((self._comm.barrier(async_op=True),), [])
        self._comm.barrier()
        return DoneWork([])

    # -- all_gather --------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Put all ranks' ``input``, end to end in rank order, into ``output``.

        Args:
            output: As many elements as all inputs together.
            input: Of one size and dtype on all ranks; may be its part of ``output``.
            opts: ``AllgatherOptions``.
        """
        if not _is_async(opts) and _is_plain(output) and _is_plain(input):
            self._comm.all_gather(output, _apart(input, output))
            return DoneWork(output)
        if _are_elsewhere([output, input]):
            inner = self._inner.for_tensors([input], "all_gather")
            return inner._allgather_base(output, input, given_or_default(opts, "AllgatherOptions"))
        parts: list[Part] = []
        finishes: list[Finish] = []
        self._gather_into(output, input, parts, finishes)
        return self._finished(parts, output, finishes, opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """:meth:`all_gather_single` of each pair."""
        _check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced")
        if _are_elsewhere([*outputs, *inputs]):
            inner = self._inner.for_tensors(inputs, "all_gather_into_tensor_coalesced")
            return by_any_name(
                inner, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
            )(outputs, inputs, given_or_default(opts, "AllgatherOptions"))
        parts: list[Part] = []
        finishes: list[Finish] = []
        for output, input in zip(outputs, inputs, strict=True):
            self._gather_into(output, input, parts, finishes)
        return self._finished(parts, outputs, finishes, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Put rank ``r``'s input into every rank's ``outputs[i][r]``.

        Args:
            outputs: A list per input: a tensor per rank; their sizes may differ between ranks.
            inputs: A list of tensors.
            opts: ``AllgatherOptions``.
            timeout: The group's own counts.
        """
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        _check_pairs(outputs, inputs, "all_gather")
        if _are_elsewhere(inputs):
            inner = self._inner.for_tensors(inputs, "all_gather")
            return inner.allgather(outputs, inputs, given_or_default(opts, "AllgatherOptions"))
        parts: list[Part] = []
        finishes: list[Finish] = []
        for row, input in zip(outputs, inputs, strict=True):
            self._check_row(row, "all_gather")
            self._gather_row(row, input, parts, finishes)
        return self._finished(parts, outputs, finishes, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Put rank ``r``'s ``inputs[i]`` into every rank's ``outputs[r][i]``."""
        self._check_row(outputs, "all_gather_coalesced")
        by_input = [[row[i] for row in outputs] for i in range(len(inputs))]
        work = self.allgather(by_input, inputs, opts)
        return work

    def _gather_into(
        self, output: Tensor, input: Tensor, parts: list[Part], finishes: list[Finish]
    ) -> None:
        if output.dtype != input.dtype:
            raise ArgumentError(
                f"all_gather: output has dtype {output.dtype} and input {input.dtype}"
            )
        whole, finish = for_copy(output, is_written=True)
        part, _ = for_copy(_apart(input, output), is_written=False)
        parts.append(self._comm.all_gather(whole, part, async_op=True))
        if finish is not None:
            finishes.append(finish)

    def _gather_row(
        self, row: Sequence[Tensor], input: Tensor, parts: list[Part], finishes: list[Finish]
    ) -> None:
        rank = self._comm.rank
        if row[rank].numel() != input.numel() or any(t.dtype != input.dtype for t in row):
            raise ArgumentError(
                f"all_gather: input is {tuple(input.shape)} of {input.dtype}, expected as "
                f"tensor_list[{rank}], {tuple(row[rank].shape)} of {row[rank].dtype}, and the "
                f"dtype of all {len(row)}"
            )
        if all(t.numel() == input.numel() for t in row):
            flat = torch.empty(len(row) * input.numel(), dtype=input.dtype)
            self._gather_into(flat, input, parts, finishes)
            pieces = flat.chunk(len(row)) if flat.numel() else []
            targets = [t.detach() for t in row]
            finishes.append(
                lambda: [t.copy_(p.view(t.shape)) for t, p in zip(targets, pieces, strict=False)]
            )
            return
        row[rank].detach().copy_(input.detach().reshape(row[rank].shape))
        for root, tensor in enumerate(row):
            stand_in, finish = for_copy(tensor, is_written=root != rank)
            parts.append(self._comm.broadcast(stand_in, root, async_op=True))
            if finish is not None:
                finishes.append(finish)

    # -- reduce_scatter ----------------------------------------------------------------------------

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Reduce ``input`` over all ranks and leave this rank's part in ``output``.

        Args:
            output: ``n`` elements.
            input: ``size * n`` elements; part ``r`` is for rank ``r``.
            opts: ``ReduceScatterOptions``.
        """
        opts = given_or_default(opts, "ReduceScatterOptions")
        op = _op_name(opts.reduceOp, "reduce_scatter")
        if not opts.asyncOp and op in OPS and _is_plain(output) and _is_plain(input):
            self._comm.reduce_scatter(output, _apart(input, output), op)
            return DoneWork(output)
        if _are_elsewhere([output, input]):
            inner = self._inner.for_tensors([input], "reduce_scatter")
            return inner._reduce_scatter_base(output, input, opts)
        parts: list[Part] = []
        finishes: list[Finish] = []
        self._scatter_from(output, input, op, opts, parts, finishes)
        return self._finished(parts, output, finishes, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        """:meth:`reduce_scatter_single` of each pair."""
        opts = given_or_default(opts, "ReduceScatterOptions")
        _check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced")
        if _are_elsewhere([*outputs, *inputs]):
            inner = self._inner.for_tensors(inputs, "reduce_scatter_tensor_coalesced")
            return by_any_name(
                inner, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
            )(outputs, inputs, opts)
        op = _op_name(opts.reduceOp, "reduce_scatter_tensor_coalesced")
        parts: list[Part] = []
        finishes: list[Finish] = []
        for output, input in zip(outputs, inputs, strict=True):
            self._scatter_from(output, input, op, opts, parts, finishes)
        return self._finished(parts, outputs, finishes, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Any:
        """Reduce ``inputs[i][r]`` over all ranks into rank ``r``'s ``outputs[i]``.

        Args:
            outputs: A list of tensors.
            inputs: A list per output: a tensor per rank; their sizes may differ between ranks.
            opts: ``ReduceScatterOptions``, or a ``ReduceOp``.
            timeout: The group's own counts.
        """
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        if not hasattr(opts, "reduceOp"):
            opts = _reduce_options(c10d.ReduceScatterOptions(), opts)
        _check_pairs(outputs, inputs, "reduce_scatter")
        if _are_elsewhere(outputs):
            return self._inner.for_tensors(outputs, "reduce_scatter").reduce_scatter(
                outputs, inputs, opts
            )
        op = _op_name(opts.reduceOp, "reduce_scatter")
        parts: list[Part] = []
        finishes: list[Finish] = []
        for output, row in zip(outputs, inputs, strict=True):
            self._check_row(row, "reduce_scatter")
            self._scatter_row(output, row, op, opts, parts, finishes)
        return self._finished(parts, outputs, finishes, opts)

    def _scatter_from(
        self,
        output: Tensor,
        input: Tensor,
        op: str,
        opts: Any,
        parts: list[Part],
        finishes: list[Finish],
    ) -> None:
        size = self._comm.world_size
        if output.dtype != input.dtype or output.numel() * size != input.numel():
            raise ArgumentError(
                f"reduce_scatter: input has {input.numel()} elements of {input.dtype} and output "
                f"{output.numel()} of {output.dtype}; expected one dtype and {size} times as many"
            )
        flat = _apart(input, output).detach().reshape(-1)
        if flat.dtype in NATIVE and op in OPS:
            parts.append(self._comm.reduce_scatter(output.detach(), flat, op, async_op=True))
            return
        n = output.numel()
        self._scatter_slice(output, flat.clone(), self._comm.rank * n, op, opts, parts, finishes)

    def _scatter_row(
        self,
        output: Tensor,
        row: Sequence[Tensor],
        op: str,
        opts: Any,
        parts: list[Part],
        finishes: list[Finish],
    ) -> None:
        rank = self._comm.rank
        if row[rank].numel() != output.numel() or any(t.dtype != output.dtype for t in row):
            raise ArgumentError(
                f"reduce_scatter: output is {tuple(output.shape)} of {output.dtype}, expected as "
                f"input_list[{rank}], {tuple(row[rank].shape)} of {row[rank].dtype}, and the dtype "
                f"of all {len(row)}"
            )
        flat = torch.cat([t.detach().reshape(-1) for t in row])
        if all(t.numel() == output.numel() for t in row):
            self._scatter_from(output, flat, op, opts, parts, finishes)
        else:
            begin = sum(t.numel() for t in row[:rank])
            self._scatter_slice(output, flat, begin, op, opts, parts, finishes)

    def _scatter_slice(
        self,
        output: Tensor,
        flat: Tensor,
        begin: int,
        op: str,
        opts: Any,
        parts: list[Part],
        finishes: list[Finish],
    ) -> None:
        """All-reduce ``flat``, which is ours, and copy a slice of it: for what is rare."""
        stand_in = for_reduction(flat, op)
        if stand_in.op in OPS:
            parts.append(self._comm.all_reduce(stand_in.tensor, stand_in.op, async_op=True))
        else:
            options = _reduce_options(c10d.AllreduceOptions(), opts.reduceOp)
            parts.append(self._gloo_all_reduce(stand_in.tensor, options, finishes))
        if stand_in.finish is not None:
            finishes.append(stand_in.finish)
        target = output.detach()
        finishes.append(
            lambda: target.copy_(flat[begin : begin + target.numel()].view(target.shape))
        )

    # -- helpers -----------------------------------------------------------------------------------

    def _pending(self, parts: Sequence[Part], results: Any, finish: Finish | None = None) -> Any:
        return PendingWork(self._completer, parts, results, finish)

    def _finished(
        self, parts: Sequence[Part], results: Any, finishes: list[Finish], opts: Any
    ) -> Any:
        """The work of these parts; waited for already if the caller does not ask for it later."""

        def finish() -> None:
            for step in finishes:
                step()

        work = self._pending(parts, results, finish)
        if not _is_async(opts):
            work.wait()
        return work

    def _check_row(self, row: Sequence[Any], operation: str) -> None:
        if len(row) != self._comm.world_size:
            raise ArgumentError(
                f"{operation}: a list has {len(row)} tensors, expected "
                f"{self._comm.world_size}, one per rank"
            )


def _is_plain(tensor: Tensor) -> bool:
    """Whether the engine takes it as it is."""
    return (
        tensor.dtype in NATIVE
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.layout is torch.strided
    )


def _apart(input: Tensor, output: Tensor) -> Tensor:
    """``input``, or a copy: callers may pass a part of ``output``, or the other way round."""
    is_part = input.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    return input.detach().clone() if is_part else input


def _are_elsewhere(tensors: Sequence[Tensor]) -> bool:
    """Whether they are another backend's: on another device, or not strided."""
    return any(t.device.type != "cpu" or t.layout is not torch.strided for t in tensors)


def _are_same(tensors: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> bool:
    """Whether standing in changed nothing that the engine looks at."""
    return all(
        s.dtype == t.dtype and not t.requires_grad for t, s in zip(tensors, stand_ins, strict=True)
    )


def _is_async(opts: Any) -> bool:
    return opts is None or bool(opts.asyncOp)


def _reduce_options(options: Any, reduce_op: Any) -> Any:
    if reduce_op is not None:
        options.reduceOp = reduce_op
    return options


def _check_pairs(outputs: Sequence[Any], inputs: Sequence[Any], operation: str) -> None:
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"{operation}: {len(outputs)} outputs and {len(inputs)} inputs, expected one each"
        )
