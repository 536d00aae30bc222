"""The process group of a cluster's ranks: torch.distributed's calls, by torch's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from pyringar.cluster import moves
from pyringar.cluster.calls import Call, seconds_of
from pyringar.cluster.meeting import Meeting
from pyringar.cluster.ranks import Rank
from pyringar.cluster.work import ThreadWork
from pyringar.distributed.backend import PythonGroup, keep_dynamo_out
from pyringar.distributed.convert import check_no_overlap, count_changes, reduction_name
from pyringar.distributed.delegated import given_or_default
from pyringar.distributed.work import one_or_all
from pyringar.errors import ArgumentError, RingarError, UnsupportedError

__all__ = ["ThreadGroup"]


@dataclass
class _Message:
    """One side of a message: ranks are the group's."""

    me: int
    tag: int
    to: int | None = None
    sender: int | None = None
    data: Sequence[Tensor] = ()


def _deliver(calls: Sequence[Call]) -> None:
    sent, received = (call.args for call in calls)
    received.sender = sent.me
    for target, source in zip(received.data, sent.data, strict=True):
        moves.copy(target, source)


class ThreadGroup(PythonGroup):
    """One rank's view of a group.

    Args:
        meeting: Where its calls meet those of the others.
        rank: Whose view it is.
        options: torch's.
    """

    def __init__(self, meeting: Meeting, rank: Rank, options: Any) -> None:
        super().__init__(options)
        self._meeting = meeting
        self._of = rank
        self._batch: list[Any] | None = None
        self._is_destroyed = False

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        opts = _with_op(opts, "AllreduceOptions")
        op = reduction_name(opts.reduceOp, "all_reduce")
        tensors = _as_list(tensors)

        def act(calls: Sequence[Call]) -> None:
            for row in _rows(calls):
                moves.all_reduce(self._engine, row, op)

        return self._meet("all_reduce", tensors, opts, act, op=op, alike=tensors, written=tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Any:
        """Reduce each tensor into the root's."""
        op = reduction_name(opts.reduceOp, "reduce")
        root = opts.rootRank

        def act(calls: Sequence[Call]) -> None:
            for row in _rows(calls):
                moves.copy(row[root], moves.reduced(self._engine, row, op))

        written = tensors if self._rank == root else []
        return self._meet(
            "reduce", tensors, opts, act, op=op, root=root, alike=tensors, written=written
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Reduce ``inputs[i][r]`` into rank ``r``'s ``outputs[i]``; ranks' sizes may differ."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Reduce each input over all ranks; write this rank's part into the output beside it."""
        name = "reduce_scatter_tensor"
        outputs, inputs = _as_list(outputs), _as_list(inputs)
        for output, input in zip(outputs, inputs, strict=True):
            self._check_whole(name, input, output)
        rows = [moves.parts(input.data, self._size) for input in inputs]
        return self._reduce_scatter(name, outputs, rows, opts, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    reduce_scatter_single = _reduce_scatter_base = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, name: str, outputs: Any, rows: Any, opts: Any, inputs: Any = None
    ) -> Any:
        """Reduce ``rows[i][r]`` into rank ``r``'s ``outputs[i]``; ``inputs`` if rows are parts."""
        opts = _with_op(opts, "ReduceScatterOptions")
        op = reduction_name(opts.reduceOp, name)
        for output, row in zip(outputs, rows, strict=True):
            self._check_row(row, name)
            self._check_tensors(name, row)
            moves.check_alike(output, row[self._rank])

        def act(calls: Sequence[Call]) -> None:
            for i in range(len(outputs)):
                columns = zip(*(call.args[1][i] for call in calls), strict=True)
                sums = [moves.reduced(self._engine, list(column), op) for column in columns]
                for call, total in zip(calls, sums, strict=True):
                    moves.copy(call.args[0][i], total)

        return self._meet(
            name,
            outputs,
            opts,
            act,
            op=op,
            args=(_data(outputs), [_data(row) for row in rows]),
            alike=[t for row in rows for t in row] if inputs is None else inputs,
            written=outputs,
        )

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Copy each tensor of the root into every other rank's."""
        tensors = _as_list(tensors)
        opts, root = _with_root(opts, "BroadcastOptions")

        def act(calls: Sequence[Call]) -> None:
            for row in _rows(calls):
                for tensor in row:
                    moves.copy(tensor, row[root])

        written = [] if self._rank == root else tensors
        return self._meet(
            "broadcast", tensors, opts, act, root=root, alike=tensors, written=written
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Put rank ``r``'s input into all ranks' ``outputs[i][r]``; ranks' sizes may differ."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        for row in outputs:
            self._check_row(row, "all_gather")
        return self._all_gather("all_gather", zip(*outputs, strict=True), inputs, opts, outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Put rank ``r``'s ``inputs[i]`` into every rank's ``outputs[r][i]``."""
        self._check_row(outputs, "all_gather_coalesced")
        return self._all_gather("all_gather_coalesced", outputs, inputs, opts, outputs)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Put all ranks' input, end to end in rank order, into the output beside it."""
        name = "all_gather_into_tensor"
        outputs, inputs = _as_list(outputs), _as_list(inputs)
        for output, input in zip(outputs, inputs, strict=True):
            self._check_whole(name, output, input)
        rows = [moves.parts(output.data, self._size) for output in outputs]
        into = zip(*rows, strict=True)
        return self._all_gather(name, into, inputs, opts, [outputs], alike=inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    all_gather_single = _allgather_base = all_gather_single_coalesced

    def _all_gather(
        self, name: str, into: Any, inputs: Any, opts: Any, rows: Any, alike: Any = None
    ) -> Any:
        return self._exchange(
            name,
            into,
            [inputs] * self._size,
            opts,
            shown=inputs,
            alike=alike,
            written=[t for row in rows for t in row],
            results=one_or_all(rows),
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Put rank ``r``'s input into the root's ``outputs[i][r]``."""
        opts, root = _with_root(opts, "GatherOptions")
        for row in outputs:
            self._check_row(row, "gather")
        return self._exchange(
            "gather",
            zip(*outputs, strict=True),
            [inputs if rank == root else [] for rank in range(self._size)],
            opts,
            shown=inputs,
            root=root,
            written=[t for row in outputs for t in row],
            results=outputs[0] if outputs else [],
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Put the root's ``inputs[i][r]`` into rank ``r``'s output."""
        opts, root = _with_root(opts, "ScatterOptions")
        for row in inputs:
            self._check_row(row, "scatter")
        return self._exchange(
            "scatter",
            [outputs if rank == root else [] for rank in range(self._size)],
            list(zip(*inputs, strict=True)) or [[]] * self._size,
            opts,
            shown=outputs,
            root=root,
            written=outputs,
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> Any:
        """Give every rank what the others have for it."""
        self._check_row(outputs, "all_to_all")
        self._check_row(inputs, "all_to_all")
        into, out_of = [[t] for t in outputs], [[t] for t in inputs]
        return self._exchange("all_to_all", into, out_of, opts, shown=inputs, written=outputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Any:
        """Give every rank what the others have for it, in one tensor."""
        into = self._parts(output, out_splits, "output_split_sizes")
        out_of = self._parts(input, in_splits, "input_split_sizes")
        return self._exchange(
            "all_to_all_single",
            [[part] for part in into],
            [[part] for part in out_of],
            opts,
            shown=out_of,
            written=[output],
        )

    all_to_all_single = alltoall_base

    def _parts(self, tensor: Tensor, splits: Any, name: str) -> list[Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not splits:
            if rows % self._size:
                raise ArgumentError(
                    f"all_to_all_single: a tensor has {rows} rows, expected a multiple of "
                    f"{self._size}, or {name}"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise ArgumentError(
                f"all_to_all_single: {name} is {list(splits)}, expected {self._size} numbers that "
                f"add to {rows}"
            )
        return list(torch.split(tensor.data, list(splits)))

    def _exchange(self, name: str, into: Any, out_of: Any, opts: Any, **options: Any) -> Any:
        """Copy tensors between ranks.

        Args:
            name: As torch.distributed calls it.
            into: For each rank of the group, the tensors to be filled with its; empty for none.
            out_of: For each rank of the group, the tensors that go there; empty for none.
            opts: torch's options.
            **options: For `_meet`.
        """

        def act(calls: Sequence[Call]) -> None:
            # Copies: an input may be a part of an output.
            sent = [moves.clones(call.args[1]) for call in calls]
            for me, call in enumerate(calls):
                for other, targets in enumerate(call.args[0]):
                    for target, source in zip(targets, sent[other][me], strict=True):
                        moves.copy(target, source)

        args = [_data(row) for row in into], list(out_of)
        for row in args[1]:
            self._check_tensors(name, row)
        own = [row[self._rank] for row in args if row]  # others' are compared when all have called
        for target, source in zip(*own, strict=True):
            moves.check_alike(target, source)
        return self._meet(name, options.pop("shown"), opts, act, args=args, **options)

    # -- messages and barriers ---------------------------------------------------------------------

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Send to a rank; done when it has received."""
        return self._message("send", tensors, _Message(self._rank, tag, to=rank), [rank])

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Receive from a rank."""
        _check_written(tensors)
        count_changes(tensors)
        return self._message("recv", tensors, _Message(self._rank, tag, sender=rank), [rank])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from whichever rank sends."""
        _check_written(tensors)
        count_changes(tensors)
        others = [rank for rank in range(self._size) if rank != self._rank]
        return self._message("recv", tensors, _Message(self._rank, tag), others)

    recvAnysource = recv_anysource  # noqa: N815  # torch's name in C++

    def _message(self, name: str, tensors: Any, message: _Message, peers: list[int]) -> Any:
        self._check_open(name)
        self._check_tensors(name, tensors)
        message.data = _data(tensors)
        details = {"to": message.to, "from": message.sender, "tag": message.tag or None}
        details = {key: value for key, value in details.items() if value is not None}
        call = Call(self._meeting, self._of, name, tensors, details, _deliver, message, peers)
        self._meeting.cluster.begin(call, lambda: self._meeting.post_message(call))
        return self._noted(ThreadWork([call], list(tensors)))

    def barrier(self, opts: Any = None, *_: Any) -> Any:
        """Return when all ranks have called it."""
        return self._meet("barrier", [], opts, None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it; raise if some do not, naming them."""
        limit_s = seconds_of(getattr(timeout, "timeout", timeout))
        call = self._post("monitored_barrier", [], {}, None, None)
        call.wait(limit_s)

    # -- several calls with one work ---------------------------------------------------------------

    def start_coalescing(self, *_: Any) -> None:
        """Begin calls that `end_coalescing` returns one work for."""
        self._check_open("start_coalescing")
        self._batch = []

    def end_coalescing(self, *_: Any) -> Any:
        """Return the work of all calls since `start_coalescing`."""
        works, self._batch = self._batch or [], None
        return ThreadWork([call for work in works for call in work._parts], [])

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # -- the group itself --------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave it: its calls are refused from then on."""
        self._is_destroyed = True

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the cluster's own counts."""

    @property
    def _device_types(self) -> list[torch.device]:
        names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]

    # -- helpers -----------------------------------------------------------------------------------

    def _engine(self, tensors: Sequence[Tensor]) -> Any:
        return self._meeting.cluster.engine([t.device for t in tensors])

    def _check_open(self, name: str) -> None:
        self._of.check_thread()
        if self._is_destroyed:
            raise RingarError(f"{name}: this process group was destroyed")

    def _check_tensors(self, name: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if name != "all_reduce" and (tensor.layout is not torch.strided or tensor.is_nested):
                raise UnsupportedError(
                    f"{name}: a tensor has layout {tensor.layout}, expected a dense one"
                )
            if tensor.device.type not in ("cpu", "cuda"):
                raise UnsupportedError(
                    f"{name}: ranks that are threads take tensors on the CPU and on CUDA GPUs, "
                    f"this one is on {tensor.device}"
                )

    def _check_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Refuse a tensor that cannot hold ``part`` of every rank, end to end."""
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self._size:
            raise ArgumentError(
                f"{name}: tensors of {whole.numel()} elements of {whole.dtype} and "
                f"{part.numel()} of {part.dtype}, expected one dtype and {self._size} times as many"
            )
        if not whole.is_contiguous():
            raise ArgumentError(f"{name}: strides are {whole.stride()}, expected contiguous ones")

    def _check_row(self, row: Sequence[Any], operation: str) -> None:
        if len(row) != self._size:
            raise ArgumentError(
                f"{operation}: a list has {len(row)} tensors, expected {self._size}, one per rank"
            )

    def _meet(
        self,
        name: str,
        shown: Sequence[Tensor],
        opts: Any,
        act: Callable[[Sequence[Call]], None] | None,
        *,
        args: Any = None,
        alike: Sequence[Tensor] | None = None,
        written: Sequence[Tensor] = (),
        results: Any = None,
        **details: Any,
    ) -> Any:
        """Take part in a collective; return its work, which is done unless it is to be async.

        Args:
            name: What torch.distributed calls it.
            shown: The tensors that the table of calls shows.
            opts: torch's options.
            act: Does it, given all ranks' calls.
            args: This rank's for ``act``; None: the data of ``shown``.
            alike: Must agree with other ranks' in number, sizes and dtype.
            written: What it writes on this rank.
            results: The work's, if not ``written``.
            **details: Must agree with other ranks', too.
        """
        self._check_open(name)
        _check_written(written)
        self._check_tensors(name, [*written, *shown])
        if "op" in details:
            moves.check_reducible([*shown, *(alike or [])], details["op"])
        if alike is not None:
            details["dtypes"] = [str(t.dtype).removeprefix("torch.") for t in alike]
            details["sizes"] = [t.numel() for t in alike]
        count_changes(list(written))
        args = _data(shown) if args is None else args
        call = self._post(name, shown, details, act, args)
        work = ThreadWork([call], list(written) if results is None else results)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return self._noted(work)

    def _post(
        self, name: str, shown: Sequence[Tensor], details: dict[str, Any], act: Any, args: Any
    ) -> Call:
        self._check_open(name)
        call = Call(self._meeting, self._of, name, shown, details, act, args)
        self._meeting.cluster.begin(call, lambda: self._meeting.post(self._rank, call))
        return call

    def _noted(self, work: Any) -> Any:
        if self._batch is not None:
            self._batch.append(work)
        return work


keep_dynamo_out(ThreadGroup, ThreadWork)


def _check_written(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is torch.strided:
            check_no_overlap("tensor", tensor)


def _data(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return their memory: torch does not count what is written there. Sparse ones have none."""
    return [t.data if t.layout is torch.strided else t for t in tensors]


def _rows(calls: Sequence[Call]) -> list[list[Tensor]]:
    return [list(row) for row in zip(*(call.args for call in calls), strict=True)]


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _with_op(opts: Any, kind: str) -> Any:
    return opts if hasattr(opts, "reduceOp") else _options(kind, "reduceOp", opts)


def _with_root(opts: Any, kind: str) -> tuple[Any, int]:
    options = opts if hasattr(opts, "rootRank") else _options(kind, "rootRank", opts)
    return options, options.rootRank


def _options(kind: str, name: str, value: Any) -> Any:
    options = given_or_default(None, kind)
    if value is not None:
        setattr(options, name, value)
    return options
