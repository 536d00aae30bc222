"""The process group of ranks that are threads.

The last rank that makes a call reads and writes the tensors of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyringar.cluster.rank_calls import GroupCalls, RankCall, devices_of, plain_torch, seconds_of
from pyringar.cluster.rank_threads import RankThread
from pyringar.comm.arguments import check_parts
from pyringar.comm.background_work import Work
from pyringar.comm.collective_call import CollectiveCall, tensors_of
from pyringar.comm.plain_group import check_disjoint, check_no_overlap
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.distributed.backend import PythonGroup, keep_dynamo_out
from pyringar.distributed.collectives import Collectives
from pyringar.distributed.convert import (
    NATIVE,
    Copy,
    Described,
    copy_all,
    count_changes,
    reduction_name,
)
from pyringar.distributed.torch_works import PendingWork
from pyringar.errors import ArgumentError, RingarError, UnsupportedError

_DEVICES = ("cpu", "cuda")
Calls = Sequence[RankCall]


class Transport(RankCommunicator):
    """Runs the calls of one rank that is a thread; ``index`` is its rank in the group.

    It has the methods of `pyringar.ProcessCommunicator`, and gloo's methods for the calls that
    the backend ``ringar`` delegates to gloo.
    """

    def __init__(self, meeting: GroupCalls, of: RankThread, index: int) -> None:
        self._meeting, self._of = meeting, of
        self._rank, self._world_size = index, len(meeting.ranks)
        self._global_ranks = meeting.ranks
        self._last: RankCall | None = None

    def begin(
        self,
        name: str,
        tensors: Sequence[Tensor],
        act: Callable[[Calls], None] | None,
        *,
        args: Any = None,
        written: Sequence[Tensor] = (),
        are_alike: bool = True,
        what: Described | None = None,
        async_op: bool = False,
        **details: Any,
    ) -> Any:
        """Begin a collective; return the call if ``async_op``, else None after its end.

        The last rank runs ``act`` with the calls of all ranks and their ``args`` (default: the data
        of ``tensors``). ``act`` writes the tensors ``written`` of this rank. ``details`` must be
        equal on all ranks; with ``are_alike`` also sizes and dtypes. ``what`` describes the call if
        ``tensors`` are stand-ins.
        """
        self._check_open(name)
        for tensor in written:
            check_no_overlap("tensor", tensor)
        check_disjoint({f"tensors[{i}]": tensor for i, tensor in enumerate(written)})
        count_changes(list(written))
        args = _data(tensors) if args is None else args
        call = RankCall(self._meeting, self._of, name, tensors, details, act, args)
        call.are_alike = are_alike
        if what is not None:
            call.what, call.details = what.call, {}
            call.shapes, call.dtypes = [(what.numel,)], [what.dtype]
        self._meeting.cluster.begin(call, lambda: self._meeting.post(self._rank, call))
        self._last = call
        if async_op:
            return call
        call.wait()
        return None

    def _check_open(self, name: str) -> None:
        self._of.check_thread()
        if self._is_closed:
            raise RingarError(f"{name}: this process group was destroyed")

    def _run(self, call: CollectiveCall, *, async_op: bool = False, what: Any = None) -> Any:
        outputs = tensors_of(call.outputs)
        inputs = tensors_of(call.inputs) if call.has_inputs else []
        if call.has_inputs:
            check_parts(call.operation, call.outputs, call.inputs, self._world_size)
        elif call.operation == "all_reduce":
            _check_reducible(outputs)
        elif call.operation == "broadcast":  # check the root, too, which only reads it
            check_no_overlap("tensor", outputs[0])
        details: dict[str, Any] = {"op": call.op} if call.is_reduction else {}
        details |= {"root": call.root} if call.has_root else {}
        act = {
            "all_reduce": self._all_reduce_rows,
            "reduce_scatter": self._reduce_scatter_rows,
            "all_gather": _all_gather,
            "broadcast": _broadcast,
            "barrier": None,
        }[call.operation]
        return self.begin(
            call.operation,
            inputs or outputs,
            act and partial(act, call),
            args=(_data(outputs), _data(inputs)),
            written=[] if call.operation == "broadcast" and call.root == self._rank else outputs,
            what=what,
            async_op=async_op,
            **details,
        )

    def _all_reduce_rows(self, call: CollectiveCall, calls: Calls) -> None:
        for row in zip(*(each.args[0] for each in calls), strict=True):
            self._reduce(row, call.op)

    def _reduce_scatter_rows(self, call: CollectiveCall, calls: Calls) -> None:
        row = [each.args[1][0].reshape(-1).clone() for each in calls]
        self._reduce(row, call.op)
        for rank, (each, total) in enumerate(zip(calls, row, strict=True)):
            _copy(each.args[0][0], total.tensor_split(len(row))[rank])

    def _reduce(self, row: Sequence[Tensor], op: Any) -> None:
        alike = [tensor.reshape(row[0].shape) for tensor in row]
        self._meeting.cluster.engine([tensor.device for tensor in row]).all_reduce(alike, op)
        for tensor, result in zip(row, alike, strict=True):
            _copy(tensor, result)

    def _submit_step(self, step: Callable[[], object]) -> Any:
        if self._last is not None:
            self._last.then(step)
            return self._last
        with plain_torch():
            step()
        return Work(None, {}, "step")

    def for_device(self, device: str, operation: str) -> Transport:
        if device not in _DEVICES:
            raise UnsupportedError(
                f"{operation}: ranks that are threads take tensors on the CPU and on CUDA GPUs, "
                f"this one is on {device}"
            )
        return self

    def finish(self) -> None:
        """Do nothing: no call runs in the background."""

    def under_way(self) -> list[Any]:
        return []

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = reduction_name(opts.reduceOp, "all_reduce")
        if op != "sum":
            raise UnsupportedError(f"all_reduce: op is {op!r}, expected 'sum' for sparse tensors")

        def act(calls: Calls) -> None:
            for row in zip(*(call.args for call in calls), strict=True):
                total = reduce(torch.add, row)
                for tensor in row:
                    tensor.copy_(total)

        return self.begin("all_reduce", tensors, act, args=tensors, async_op=True, op=op)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        out_of = [inputs if rank == opts.rootRank else [] for rank in range(self._world_size)]
        into = self._by_rank("gather", outputs)
        return self._exchange("gather", into, out_of, inputs, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        into = [outputs if rank == opts.rootRank else [] for rank in range(self._world_size)]
        out_of = self._by_rank("scatter", inputs)
        return self._exchange("scatter", into, out_of, outputs, root=opts.rootRank)

    def alltoall(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        into, out_of = (self._by_rank("all_to_all", [row]) for row in (outputs, inputs))
        return self._exchange("all_to_all", into, out_of, inputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: Any, in_splits: Any, *_: Any
    ) -> Any:
        into = self._parts(output, out_splits, "output_split_sizes")
        out_of = self._parts(input, in_splits, "input_split_sizes")
        return self._exchange("all_to_all_single", into, out_of, [input])

    def _by_rank(self, name: str, rows: Sequence[Sequence[Tensor]]) -> list[Any]:
        size = self._world_size
        for number in {len(row) for row in rows} - {size}:
            raise ArgumentError(
                f"{name}: a list has {number} tensors, expected {size}, one per rank"
            )
        return [[row[rank] for row in rows] for rank in range(size)]

    def _parts(self, tensor: Tensor, splits: Any, name: str) -> list[Any]:
        num_rows, size = tensor.shape[0] if tensor.dim() else 0, self._world_size
        splits = list(splits) or [num_rows // size] * size
        if len(splits) != size or sum(splits) != num_rows:
            raise ArgumentError(
                f"all_to_all_single: {name} is {splits}, expected {size} numbers that add to "
                f"{num_rows}"
            )
        return [[part] for part in torch.split(tensor, splits)]

    def _exchange(
        self, name: str, into: Any, out_of: Any, shown: Sequence[Tensor], **details: Any
    ) -> Any:
        """Copy ``out_of[r]`` to rank ``r``, and receive its tensors into ``into[r]``.

        Both lists may be empty for a rank.
        """

        def act(calls: Calls) -> None:
            # Copy the inputs first, because an input may share memory with an output.
            sent = [[[t.clone() for t in row] for row in call.args[1]] for call in calls]
            pairs = [
                (targets, sent[rank][me])
                for me, call in enumerate(calls)
                for rank, targets in enumerate(call.args[0])
            ]
            _copy_all(pairs)

        args = [_data(row) for row in into], [_data(row) for row in out_of]
        details |= {"are_alike": False, "async_op": True}
        return self.begin(name, shown, act, args=args, **details)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> RankCall:
        return self._message("send", tensors, tag, [rank], {"to": rank})

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> RankCall:
        return self._message("recv", tensors, tag, [rank], {"from": rank})

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RankCall:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return self._message("recv", tensors, tag, others, {})

    def _message(
        self, name: str, tensors: Any, tag: int, peers: list[int], details: dict[str, int]
    ) -> RankCall:
        self._check_open(name)
        details |= {"tag": tag} if tag else {}
        args = self._rank, _data(tensors)
        call = RankCall(self._meeting, self._of, name, tensors, details, _deliver, args, peers)
        self._meeting.cluster.begin(call, lambda: self._meeting.post_message(call))
        return call


class ThreadWork(PendingWork):
    """The torch Work that one rank gets for its calls."""

    def __init__(self, parts: Sequence[Any], results: Any) -> None:
        self._calls = [part for part in parts if isinstance(part, RankCall)]
        super().__init__(None, self._calls, results)  # type: ignore[arg-type]  # no completer
        self._devices = devices_of(t for t in tree_leaves(results) if isinstance(t, Tensor))

    def wait(self, timeout: timedelta | None = None) -> bool:
        for call in self._calls:
            call.wait(seconds_of(timeout))
        return True

    def get_future(self) -> Any:
        """Wait for the calls, and return a complete future of the tensors.

        An incomplete future would wait in C++, where no other rank can run.
        """
        # Inside backward, DistributedDataParallel calls get_future: errors must not name it.
        is_asked = torch._C._current_graph_task_id() == -1
        for call in self._calls:
            call.wait(what="get_future" if is_asked else "")
        return super().get_future()

    def _source_rank(self) -> int:
        return int(self._calls[0].details["from"])


def _check_reducible(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        is_here = tensor.device.type in _DEVICES and tensor.layout is torch.strided
        if not is_here or tensor.dtype not in NATIVE:
            raise UnsupportedError(f"all_reduce: {tensor.dtype} needs a stand-in")


def _all_gather(_: CollectiveCall, calls: Calls) -> None:
    device = calls[0].args[0][0].device
    whole = torch.cat([each.args[1][0].reshape(-1).to(device) for each in calls])
    for each in calls:
        _copy(each.args[0][0], whole)


def _broadcast(call: CollectiveCall, calls: Calls) -> None:
    for each in calls:
        _copy(each.args[0][0], calls[call.root].args[0][0])


class ThreadGroup(Collectives, PythonGroup):
    """A torch ProcessGroup of ranks that are threads, on one rank."""

    _own_devices = _DEVICES

    def __init__(self, meeting: GroupCalls, rank: RankThread, options: Any) -> None:
        PythonGroup.__init__(self, options)
        self._of = rank
        self._comm: Any = Transport(meeting, rank, self._rank)
        self._fallback: Any = self._comm
        self._batch = None

    def meet(self, operation: str) -> None:
        """Wait for the other ranks; ``operation`` names the function that makes the group."""
        self._of.num_calls -= 1  # begin() adds 1, but tables count only the calls of groups
        self._comm.begin(operation, [], None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        call = self._comm.begin("monitored_barrier", [], None, async_op=True)
        call.wait(seconds_of(getattr(timeout, "timeout", timeout)))

    def _hand_over(self, operation: str, tensors: Sequence[Tensor], *args: Any, **more: Any) -> Any:
        for tensor in tensors:
            if tensor.layout is not torch.strided and operation != "all_reduce":
                raise UnsupportedError(
                    f"{operation}: a tensor has layout {tensor.layout}, expected a dense one"
                )
        return super()._hand_over(operation, tensors, *args, **more)

    def _watched(
        self,
        operation: str,
        begin: Callable[[], Any],
        copies: Sequence[Copy],
        *_peers: Any,
        **_more: Any,
    ) -> list[Any]:
        call = begin()
        call.then(lambda: copy_all(copies))
        return [call]

    def _pending(self, parts: Sequence[Any], results: Any) -> Any:
        return self._noted(ThreadWork(parts, results))

    def shutdown(self) -> None:
        self._comm.close()

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, because the timeout of `pyringar.launch` applies."""

    @property
    def _device_types(self) -> list[torch.device]:
        names = _DEVICES if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]


def _deliver(calls: Calls) -> None:
    sent, received = calls
    received.details["from"] = sent.args[0]
    _copy_all([(received.args[1], sent.args[1])])


def _data(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return aliases of the tensors; writing to them does not change torch's version count."""
    return [tensor.data for tensor in tensors]


def _copy_all(rows: Iterable[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
    """Copy lists of sources into lists of targets; raise before any copy if a pair differs."""
    pairs = [pair for targets, sources in rows for pair in zip(targets, sources, strict=True)]
    for target, source in pairs:
        if target.numel() != source.numel() or target.dtype != source.dtype:
            raise ArgumentError(
                f"a tensor of {source.numel()} elements of {source.dtype} is sent to a tensor of "
                f"{target.numel()} elements of {target.dtype}; expected the same"
            )
    for target, source in pairs:
        _copy(target, source)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy the elements in logical order, unless source and target share memory."""
    if target.data_ptr() != source.data_ptr() or target.device != source.device:
        target.copy_(source.reshape(target.shape))


keep_dynamo_out(ThreadGroup, ThreadWork)
