"""Reduce over several machines: shared memory inside each, gloo or NCCL between them."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import check_choice, kind_of
from pyringar.comm.arguments import (
    DTYPES,
    check_list,
    check_plan,
    check_root,
    check_timeout,
    op_name,
)
from pyringar.comm.base import RankCommunicator
from pyringar.comm.exits import close_at_exit, is_inherited
from pyringar.comm.jobs import Jobs
from pyringar.comm.member import Member, check_agreed, ranks_by_node
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.comm.rendezvous import Rendezvous
from pyringar.comm.stores import checked_store
from pyringar.comm.topology import Plan, check_device
from pyringar.comm.work import Work
from pyringar.distributed.between import Between
from pyringar.distributed.column import Column, Notice
from pyringar.distributed.convert import check_no_overlap, count_changes
from pyringar.distributed.machines import Machines
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    RingarError,
    UnsupportedError,
)

__all__ = ["HierarchicalCommunicator", "communicator_for"]

# Ranks that wait inside for a rank that waits for another machine hear its reason.
_INSIDE_GRACE_S = 1.0
Tensors = Tensor | Sequence[Tensor]


def communicator_for(
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    name: str = "default",
    algorithm: str = "auto",
    order: str = "any",
    timeout: float = 30.0,
    device: str | torch.device | int | None = None,
    compares_shapes: bool = True,
) -> ProcessCommunicator | HierarchicalCommunicator:
    """Make the communicator for this job: of one machine, or of several.

    Args:
        algorithm: For every call that names none itself; on several machines ``"auto"``.

    See `HierarchicalCommunicator` for the other arguments and errors.
    """
    place = check_device("cpu" if device is None else device, "device")
    store, rank, world_size = checked_store(store, rank, world_size)
    with Rendezvous(store, rank, world_size, name, check_timeout(timeout), place.type) as meeting:
        members = meeting.exchange_members()
        num_nodes = len(ranks_by_node(members))
        if num_nodes == 1:
            return ProcessCommunicator._of_meeting(
                meeting,
                members,
                place,
                algorithm=algorithm,
                order=order,
                timeout=timeout,
                compares_shapes=compares_shapes,
            )
    if algorithm != "auto":
        raise ArgumentError(
            f"algorithm is {algorithm!r}, but the ranks are on {num_nodes} machines, whose sums "
            "are added to each other: expected 'auto'"
        )
    made = HierarchicalCommunicator.__new__(HierarchicalCommunicator)
    made._join(meeting, members, place, order, timeout, compares_shapes)
    return made


class HierarchicalCommunicator(RankCommunicator):
    """This process's rank in a group of processes on several machines, which reduce together.

    It uses a `pyringar.ProcessCommunicator` inside each machine, and gloo (tensors on the CPU) or
    NCCL (GPUs) between machines, over connections of its own: ``torch.distributed`` need not be
    initialised. ``GLOO_SOCKET_IFNAME`` names the network.

    With tensors on GPUs each rank needs a GPU of its own. Calls are enqueued on the current stream
    of the caller; the host waits for the other ranks, never for a GPU. A work is completed when its
    call is enqueued. A rank that is lost later is told by the next call; results may be void until
    then. No machine with several GPUs has run this yet.

    Args:
        order: ``"any"``: each machine's sum in rank order, then the sum of these in the order of
            the machines' first ranks; ``"tree"``: the bits of one machine with all ranks, for
            machines of equally many, a power of two, that follow each other.

    See `pyringar.ProcessCommunicator` for the other arguments and errors.

    Attributes:
        device: Of this rank's tensors.
        members: Every rank's process and host, in rank order.
        nodes: The ranks of every machine, in the order in which machines are added.
        timeout_s: Seconds that a call waits for other ranks.

    Cost: with L ranks on each of M machines a rank sends ``2 (M - 1) / M`` of ``N / L`` bytes.
    Where machines have different numbers of ranks, the first rank of each sends all. Another 128
    bytes of each rank say whether all call the same. One contiguous tensor of 32 bits or more is
    reduced where it lies; other tensors are packed first.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        name: str = "default",
        order: str = "any",
        timeout: float = 30.0,
        device: str | torch.device | int | None = None,
        compares_shapes: bool = True,
    ) -> None:
        place = check_device("cpu" if device is None else device, "device")
        store, rank, world_size = checked_store(store, rank, world_size)
        with Rendezvous(
            store, rank, world_size, name, check_timeout(timeout), place.type
        ) as meeting:
            members = meeting.exchange_members()
        self._join(meeting, members, place, order, timeout, compares_shapes)

    def _join(
        self,
        meeting: Rendezvous,
        members: list[Member],
        device: torch.device,
        order: str,
        timeout: float,
        compares_shapes: bool,
    ) -> None:
        """Connect to the ranks of this machine, and to those on the others."""
        self._rank, self._world_size, self._store = meeting.rank, meeting.world_size, meeting.store
        self._name, self.timeout_s, self.device = meeting.name, timeout, device
        self._order, self._compares_shapes = order, compares_shapes
        check_agreed(members)
        self.members = tuple(members)
        self.nodes = ranks_by_node(members)
        self._machines = machines = Machines.of(self.nodes, self._rank)
        machines.check_order(order)
        self._intra = host = self._inside("machine", device)
        if device.type != "cpu":  # what ranks tell each other waits for no GPU
            host = self._inside("words of machine", torch.device("cpu"))
        self._inside_groups = {host, self._intra}
        self._notice = Notice(self._store, self._rank)
        self._column: Column | None = None
        if machines.others and machines.is_carrier:
            self._column = Column(self._store, machines, members, self._notice, timeout, device)
        self._between = Between(machines, members, self._intra, host, self._column, order)
        self._jobs = Jobs("machines")
        weakref.finalize(self, self._jobs.end).atexit = False
        self._failure: BaseException | None = None
        self._is_closed = False
        self._stats = {"calls": 0, "bytes": 0}
        close_at_exit(
            self,
            HierarchicalCommunicator.close,
            abort=HierarchicalCommunicator.abort,
            progress=HierarchicalCommunicator._progress,
        )
        self.barrier()  # a rank that leaves now would look lost to ranks that still connect

    def _inside(self, name: str, device: torch.device) -> ProcessCommunicator:
        return ProcessCommunicator(
            self._store,
            self._machines.local_rank,
            len(self._machines.here),
            name=f"{name} {self._machines.node}",
            order=self._order,
            timeout=self.timeout_s + _INSIDE_GRACE_S,
            device=device,
        )

    def set_timeout(self, timeout: float) -> None:
        """Set the limit of waits that begin from now on. See `ProcessCommunicator.set_timeout`."""
        self.timeout_s = check_timeout(timeout)
        for group in self._inside_groups:
            group.set_timeout(self.timeout_s + _INSIDE_GRACE_S)
        if self._column is not None:
            self._column.set_timeout(self.timeout_s)

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensors: Tensors,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce this rank's tensor, or tensors, over all ranks; every rank then holds the result.

        Args:
            algorithm: ``"auto"``, or not given.
            order: The communicator's, or not given.

        See `pyringar.ProcessCommunicator.all_reduce` for the other arguments and errors, which name
        machines, too. Calls are compared between machines before data moves.
        """
        check_choice("algorithm", "auto" if algorithm is None else algorithm, ("auto",))
        check_choice("order", self._order if order is None else order, (self._order,))
        given: list[Any] = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        for i, tensor in enumerate(given):
            _check_tensor(f"tensors[{i}]", tensor, self.device)
        name = op_name(op)
        what = f"all_reduce ({name}) of {self._describe(given)}{self._in_order()}"
        call = partial(self._between.all_reduce, given, name, what)
        return self._submit(what, call, given, given, async_op)

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce a list. See `all_reduce` for arguments and errors."""
        check_list("all_reduce_coalesced", tensors)
        return self.all_reduce(tensors, op, algorithm=algorithm, order=order, async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Any = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduce ``input`` over all ranks and leave this rank's part of the result in ``output``.

        See `pyringar.ProcessCommunicator.reduce_scatter` for arguments and errors.

        Cost: with L of k ranks on each machine a rank sends ``(k - L) n / L`` elements to others.
        """
        self._check_parts("reduce_scatter", output, input, output, input)
        name = op_name(op)
        what = f"reduce_scatter ({name}) of {self._describe([input])}{self._in_order()}"
        call = partial(self._between.reduce_scatter, output, input, name, what)
        return self._submit(what, call, [input, output], [output], async_op)

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work | None:
        """Put all ranks' ``input``, end to end in rank order, into ``output``.

        See `pyringar.ProcessCommunicator.all_gather` for arguments and errors.

        Cost: with M machines of L ranks a rank sends ``(M - 1) n`` elements to others.
        """
        self._check_parts("all_gather", output, input, input, output)
        what = f"all_gather of {self._describe([input])}"
        call = partial(self._between.all_gather, output, input, what)
        return self._submit(what, call, [output, input], [output], async_op)

    def _check_parts(
        self, operation: str, output: Tensor, input: Tensor, part: Tensor, whole: Tensor
    ) -> None:
        """Refuse what cannot be written, and sizes and dtypes that do not belong together."""
        _check_tensor("output", output, self.device)
        _check_tensor("input", input, self.device, is_written=False)
        size = self._world_size
        if part.dtype != whole.dtype or part.numel() * size != whole.numel():
            raise ArgumentError(
                f"{operation}: input has {input.numel()} elements of {input.dtype} and output "
                f"{output.numel()} of {output.dtype}; expected one dtype, and "
                f"{'input' if whole is input else 'output'} {size} times as long"
            )

    def _describe(self, tensors: Sequence[Tensor]) -> str:
        """Return words that are equal for lists of equal sizes, or shapes, and dtypes alone."""
        numel = sum(tensor.numel() for tensor in tensors)
        is_by_shape = self._compares_shapes
        kinds = repr([(tuple(t.shape) if is_by_shape else t.numel(), t.dtype) for t in tensors])
        digest = hashlib.blake2b(kinds.encode(), digest_size=4).hexdigest()
        dtype = f" {tensors[0].dtype}" if tensors else ""
        shapes = "shapes" if is_by_shape else "sizes"
        return f"{numel}{dtype} elements in {len(tensors)} tensors ({shapes} {digest})"

    def _in_order(self) -> str:
        return "" if self._order == "any" else f" in {self._order} order"

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's.

        See `pyringar.ProcessCommunicator.broadcast` for arguments and errors.

        Cost: ``N`` bytes to every other machine, ``N / L`` from each of L ranks.
        """
        check_root(root, self._world_size)
        _check_tensor("tensor", tensor, self.device)
        what = f"broadcast from rank {root} of {self._describe([tensor])}"
        call = partial(self._between.broadcast, tensor, root, what)
        written = [tensor] if root != self._rank else []
        return self._submit(what, call, [tensor], written, async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """See `ProcessCommunicator.barrier`. On GPUs only the hosts wait."""
        call = partial(self._between.compare, "barrier")
        return self._submit("barrier", call, [], [], async_op)

    def _submit_step(self, step: Callable[[], object]) -> Work:
        """Call ``step``, which waits for no work, after earlier calls and before later ones."""
        return Work(self._jobs.submit(step, "step"), {}, "step")

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """See `pyringar.ProcessCommunicator.plan`."""
        check_plan(nbytes, dtype)
        pieces = self._between.num_pieces(nbytes // dtype.itemsize)
        return Plan(
            algorithm="hierarchical",
            order="machine" if self._order == "any" else self._order,
            steps=4 * pieces,
            traffic_bytes=6 * self._world_size * nbytes,
            reason=f"{self._machines}: reduced inside, then between, then shared inside",
        )

    def stats(self) -> dict[str, dict[str, float]]:
        """Return the calls and bytes of this rank, and its exchanges with other machines."""
        sent = {"calls": 0, "bytes": 0} if self._column is None else self._column.sent
        return {"hierarchical": dict(self._stats), "inter": dict(sent)}

    # -- life --------------------------------------------------------------------------------------

    def check_peers(self, ranks: Sequence[int]) -> None:
        """See `ProcessCommunicator.check_peers`. Knows the ranks of this machine alone."""
        self._check_not_failed()
        here = self._machines.here
        local = [here.index(rank) for rank in ranks if rank in here]
        self._between.call_inside(lambda: self._intra.check_peers(local))

    def _tell(self, error: RuntimeError) -> None:
        """Tell the other ranks of this machine why this one gives up."""
        for group in self._inside_groups:
            group._tell(error)

    def close(self) -> None:
        """See `pyringar.ProcessCommunicator.close`."""
        if is_inherited(self):
            return
        self._is_closed = True
        if self._jobs.is_awaited_here():
            self._break_off(RingarError("this communicator was closed while a call waited"))
        try:
            self._jobs.close()
        except BaseException as error:
            self._break_off(error)
            raise
        if self._column is not None:
            self._column.close()
        for group in self._inside_groups:
            group.close()

    def abort(self) -> None:
        """Fail what runs, here and on the other ranks, then `close`."""
        if is_inherited(self):
            return
        self._break_off(RingarError(f"rank {self._rank} has aborted the group"))
        self.close()

    def _progress(self) -> tuple[int, int] | None:
        """Return the calls that run and the chunks that have crossed."""
        num = self._jobs.num_under_way()
        return (num, self._column.num_chunks if self._column is not None else 0) if num else None

    def _break_off(self, why: BaseException) -> None:
        """Make the call that runs fail, and those that wait for it."""
        if self._failure is None:
            self._failure = why
            self._notice.write(why)  # before other machines see connections close
        for group in self._inside_groups:
            if isinstance(self._failure, (PeerLostError, CollectiveTimeout)):
                group._tell(self._failure)
            group._abort(_text_of(self._failure))
        if self._column is not None:
            self._column.abort()

    def __repr__(self) -> str:
        closed = "closed, " if self._is_closed else ""
        return (
            f"HierarchicalCommunicator({closed}rank {self._rank} of {self._world_size}, machine "
            f"{self._machines.node} of {len(self._machines.nodes)}, name={self._name!r}, "
            f"timeout={self.timeout_s:g} s, device={str(self.device)!r})"
        )

    # -- one call, on the communicator's own thread ------------------------------------------------

    def _submit(
        self,
        what: str,
        call: Callable[[], None],
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        async_op: bool,
    ) -> Work | None:
        if is_inherited(self):
            raise RingarError(
                "this communicator was made before fork() and is the parent process's rank. Make a "
                "new one in the child"
            )
        if self._is_closed:
            raise RingarError("this communicator is closed")
        if self.device.type == "cuda":
            call = self._on_current_stream(what, call)
        count_changes(written)
        in_words = f"{what} of rank {self._rank} of {self._world_size}"
        run = partial(self._run, what, call, sum(t.numel() * t.itemsize for t in tensors))
        job = self._jobs.submit(run, in_words)
        if async_op:
            return Work(job, {}, what)
        try:
            job.wait()
        except BaseException as error:
            if not job.is_completed():  # interrupted: it must not write behind the caller's back
                self._break_off(error)
                with suppress(RingarError):
                    job.wait()
            raise
        return None

    def _on_current_stream(self, what: str, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that enqueues on the caller's stream, from any thread."""
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"{what}: ranks on several machines meet on the host in every call, which a "
                    "CUDA graph cannot capture; call it outside of the graph"
                )
        stream = torch.cuda.current_stream(self.device)

        def enqueue() -> None:
            with torch.cuda.stream(stream):
                call()

        return enqueue

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, RingarError) else RingarError
            why = _text_of(self._failure)
            raise kind(f"this communicator failed before and cannot be used again: {why}")

    def _run(self, what: str, call: Callable[[], None], nbytes: int) -> None:
        self._check_not_failed()
        self._between.is_told = False
        try:
            with torch.no_grad():
                call()
        except BaseException as error:
            if self._failure is None and not self._between.is_told:
                raise  # such as no memory: there was no call
            named = error
            if isinstance(error, (PeerLostError, CollectiveTimeout)):
                named = type(error)(f"{what} over {len(self.nodes)} machines: {error}")
            self._break_off(named)
            if self._failure is named:
                raise named from error
            raise RingarError(f"{what} was broken off: {_text_of(self._failure)}") from error
        self._stats["calls"] += 1
        self._stats["bytes"] += nbytes


def _check_tensor(name: str, tensor: Any, device: torch.device, *, is_written: bool = True) -> None:
    """Refuse a tensor that cannot be reduced or, if it is not written, moved."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{name} is {kind_of(tensor)}, expected a tensor")
    if tensor.device != device:
        raise ArgumentError(f"{name} is on {tensor.device}, expected {device}, this rank's device")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"{name} is {tensor.layout} {tensor.dtype}, expected strided and one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    if not is_written:
        return
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ArgumentError(
            f"{name} requires grad, and autograd would not see this in-place change; call it under "
            "torch.no_grad(), or pass .detach()"
        )
    check_no_overlap(name, tensor)


def _text_of(error: BaseException | None) -> str:
    return str(error) or type(error).__name__
