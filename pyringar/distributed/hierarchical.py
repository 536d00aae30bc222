"""Reduce over several machines: shared memory inside each, every byte once between them.

A machine sums inside first; what crosses the wire is the sum of a machine, and comes back to all
its ranks: with L ranks per machine a rank sends 1 / L of its bytes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import check_choice
from pyringar.comm.arguments import (
    check_list,
    check_plan,
    check_root,
    check_timeout,
    is_count,
    op_name,
)
from pyringar.comm.base import OwnRank, RankCommunicator
from pyringar.comm.exits import close_at_exit, is_inherited
from pyringar.comm.jobs import Job, Jobs
from pyringar.comm.member import Member, check_agreed, ranks_by_node
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.comm.rendezvous import Rendezvous
from pyringar.comm.stores import checked_store
from pyringar.comm.topology import Plan
from pyringar.comm.work import Work
from pyringar.distributed.between import Between
from pyringar.distributed.convert import count_changes
from pyringar.distributed.links import Links
from pyringar.distributed.machines import Machines
from pyringar.distributed.own_stream import OwnStream, StreamJob
from pyringar.distributed.packing import check_tensor, describe
from pyringar.distributed.sockets import SocketInter
from pyringar.distributed.wire import Inter, PinnedInter, TorchInter, check_place
from pyringar.errors import ArgumentError, RingarError

__all__ = ["HierarchicalCommunicator", "communicator_for"]

_PIECE_BYTES = 8 * 2**20
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
    backend: str = "tcp",
    device: str | torch.device | int | None = None,
    compares_shapes: bool = True,
) -> ProcessCommunicator | HierarchicalCommunicator:
    """Make the communicator for this job: of one machine, or of several.

    Args:
        algorithm: For every call that names none itself; on several machines ``"auto"``.
        order: Of the sum; on several machines ``"any"`` or ``"tree"``.
        backend: Between machines.
        compares_shapes: As the communicators have it.

    Raises:
        ArgumentError: An algorithm or order that several machines do not have.

    See `HierarchicalCommunicator` for the other arguments and errors.
    """
    place = check_place(device, backend)
    store, rank, world_size = checked_store(store, rank, world_size)
    with Rendezvous(store, rank, world_size, name, check_timeout(timeout), place.type) as meeting:
        members = meeting.exchange_members()
        num_nodes = len(ranks_by_node(members))
        if num_nodes == 1:
            return ProcessCommunicator._of_meeting(
                *(meeting, members, place),
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
    return HierarchicalCommunicator._of_meeting(
        *(meeting, members, backend, timeout, place, order), compares_shapes=compares_shapes
    )


class HierarchicalCommunicator(OwnRank):
    """This process's rank in a group of processes on several machines, which reduce together.

    It uses a `pyringar.ProcessCommunicator` inside each machine, and TCP connections between
    machines, which may have different numbers of ranks. ``GLOO_SOCKET_IFNAME`` names the network,
    as for gloo; without it others find this machine on its way to ``MASTER_ADDR``, or by its name.
    A machine is what has one ``node_id()``; ``PYRINGAR_NODE_ID`` overrides it. torch.distributed
    need not be initialised.

    With tensors on GPUs (``device``) a call comes after what is on the current stream, and what
    comes there after the call, or after its work's ``wait()``, sees the result: nobody need
    synchronise. It cannot be captured in a CUDA graph. Single GPUs have run this, between ranks
    that shared them; NCCL has not been tried: docs/gpu.md.

    Args:
        inter: What connects machines (`pyringar.distributed.wire.Inter`), instead of ``backend``.
            With ``device`` it is given tensors there, and the CPU's, too;
            `pyringar.distributed.wire.PinnedInter` makes it of one for the CPU's.
        backend: ``"tcp"``: connections of its own; tensors on a GPU reach them through pinned host
            memory, in a thread that waits for the GPU. Another: groups of torch.distributed, which
            must be initialised; with ``"nccl"`` data goes from GPU to GPU and nobody waits: a rank
            that is lost once its call was enqueued is told by the next call, and results may be
            void until then.
        order: ``"any"``: each machine's sum, then the sum of these; ``"tree"``: the bits of one
            machine with all ranks, for machines of equally many, a power of two, that follow each
            other.
        timeout: Seconds that a call waits for a rank which makes no progress, and this constructor
            for all.
        piece_bytes: While so much of a rank's data crosses the wire, as much is reduced inside.
        device: Where this rank's tensors are: a GPU of this process, or the CPU (None). On all
            ranks a GPU, or on none.
        compares_shapes: Refuse tensors of other shapes than on other ranks. False: as many elements
            will do, and correspond by index.

    Raises:
        ArgumentError: A backend other than ``"tcp"`` without torch.distributed; NCCL in a torch
            without it, or with tensors on the CPU; no such network.

    See `pyringar.ProcessCommunicator` for the other arguments and errors.

    Bits are equal on all ranks. On each machine ranks are added in their order, then the sums of
    the machines, in the order of their first ranks: ``(x0 + x1) + (x2 + x3)`` on two of two. That
    depends on where ranks are, and on nothing else; it differs by rounding from one machine with
    all ranks, unless ``order`` is ``"tree"``. 16-bit floats travel as float32 and are rounded once;
    means divide once, at the end.

    Cost: every byte is summed inside the machine, and crosses the wire once per machine: with L
    ranks on each of M machines a rank sends ``2 (M - 1) / M`` of ``N / L`` bytes. 256 bytes more
    per call, to all inside and to each rank that it meets, say whether all call the same. One
    contiguous tensor on the CPU is reduced where it lies; others are packed first, as all are on a
    GPU. Memory for three pieces is kept. Where machines have different numbers of ranks data is
    copied once more.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        inter: Inter | None = None,
        backend: str = "tcp",
        name: str = "default",
        order: str = "any",
        timeout: float = 30.0,
        piece_bytes: int = _PIECE_BYTES,
        device: str | torch.device | int | None = None,
        compares_shapes: bool = True,
    ) -> None:
        if not is_count(piece_bytes, 1):
            raise ArgumentError(f"piece_bytes is {piece_bytes!r}, expected a number of bytes")
        place = check_place(device, backend)
        store, rank, world_size = checked_store(store, rank, world_size)
        with Rendezvous(
            store, rank, world_size, name, check_timeout(timeout), place.type
        ) as meeting:
            members = meeting.exchange_members()
        self._compares_shapes = compares_shapes
        self._join(meeting, members, backend, timeout, place, order, inter, piece_bytes)

    @classmethod
    def _of_meeting(
        cls, meeting: Rendezvous, members: list[Member], *place: Any, compares_shapes: bool
    ) -> HierarchicalCommunicator:
        """Return the communicator of ``members``, who have met already."""
        self = cls.__new__(cls)
        self._compares_shapes = compares_shapes
        self._join(meeting, members, *place)
        return self

    def _join(
        self,
        meeting: Rendezvous,
        members: list[Member],
        backend: str,
        timeout: float,
        device: torch.device,
        order: str,
        inter: Inter | None = None,
        piece_bytes: int = _PIECE_BYTES,
    ) -> None:
        """Connect to the ranks of this machine, and to those on the others."""
        self._rank, self._world_size, self._store = meeting.rank, meeting.world_size, meeting.store
        self._name, self._timeout_s = meeting.name, timeout
        in_order = "" if order == "any" else f" in {order} order"
        self._in_pieces = f"{in_order} in pieces of {piece_bytes} bytes"
        check_agreed(members)
        self._members = members
        self._machines = machines = Machines.of(ranks_by_node(members), self._rank)
        machines.check_order(order)
        self._order = order
        self._intra = ProcessCommunicator(
            *(self._store, machines.local_rank, len(machines.here)),
            name=f"machine {machines.node}",
            order=order,
            timeout=timeout,
            device=device,
        )
        host = self._intra
        if device.type != "cpu" and len(machines.here) > 1:  # what ranks say waits for no GPU
            host = ProcessCommunicator(
                *(self._store, machines.local_rank, len(machines.here)),
                name=f"words of machine {machines.node}",
                timeout=timeout,
                device="cpu",
            )
        self._device = device
        self._stream = OwnStream(device) if device.type == "cuda" else None
        # NCCL reads what is on the GPU: the host waits for nothing, and sees no loss in time.
        looks = self._stream if backend != "nccl" else None
        if inter is None and len(machines.nodes) > 1:
            wire: Inter
            if backend == "tcp":
                wire = SocketInter(self._store, self._rank, machines.peers, timeout)
            else:
                wire = TorchInter(machines.columns, self._rank, backend, timeout)
            inter = wire if looks is None else PinnedInter(wire)
        self._links = Links(machines, members, self._intra, host, inter, looks)
        self._between = Between(
            machines, self._links, piece_bytes, on_gpu=self._stream is not None, order=order
        )
        self._jobs = Jobs("machines")
        weakref.finalize(self, self._jobs.end).atexit = False
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._stats = {"calls": 0, "bytes": 0, "busy_s": 0.0}
        close_at_exit(  # gloo's threads must end before
            *(self, HierarchicalCommunicator.close),
            abort=HierarchicalCommunicator.abort,
            progress=HierarchicalCommunicator._progress,
        )

    @property
    def device(self) -> torch.device:
        """Return the device of this rank's tensors."""
        return self._device

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its machine."""
        return self._machines.local_rank

    @property
    def members(self) -> tuple[Member, ...]:
        """Every rank's process and host, in rank order."""
        return tuple(self._members)

    @property
    def timeout_s(self) -> float:
        """Seconds that a call waits for other ranks."""
        return self._timeout_s

    def set_timeout(self, timeout: float) -> None:
        """Let waits for other ranks that begin from now on last as long as this.

        Args:
            timeout: Seconds.

        Raises:
            ArgumentError: It is no positive number of seconds.
        """
        self._timeout_s = check_timeout(timeout)
        self._links.set_timeout(self._timeout_s)

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of every machine, in the order in which machines are added."""
        return [list(ranks) for ranks in self._machines.nodes]

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
            tensors: One tensor, or a list of them, on this rank's device, that do not overlap:
                equal on all ranks in number, dtype and sizes; any strides.
            algorithm: ``"auto"``, or not given.
            order: The communicator's, or not given.

        Raises:
            ArgumentError: A tensor or value that is wrong; nothing was changed. Or ranks or
                machines call different things; tensors are as they were, and the communicator
                refuses further calls.
            UnsupportedError: A dtype or layout that cannot be reduced; a stream that is captured in
                a CUDA graph. Nothing was changed.
            PeerLostError, CollectiveTimeout: A rank or machine is gone, or late: names ranks and
                machine. Tensors may be half reduced; the communicator refuses further calls.

        See `pyringar.Communicator.all_reduce` for the dtypes and the other arguments.
        """
        check_choice("algorithm", "auto" if algorithm is None else algorithm, ("auto",))
        check_choice("order", self._order if order is None else order, (self._order,))
        given: list[Any] = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        for i, tensor in enumerate(given):
            check_tensor(f"tensors[{i}]", tensor, self._device)
        name = op_name(op)
        what = f"all_reduce ({name}) of {self._describe(given)}{self._in_pieces}"
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

        Args:
            output: ``n`` elements.
            input: ``world_size * n`` elements, left as they are; part ``r``, in index order, is for
                rank ``r``.

        See `all_reduce` for the other arguments and errors.

        Cost: with L of k ranks on each machine a rank sends ``(k - L) n / L`` elements to others.
        """
        self._check_parts("reduce_scatter", output, input, output, input)
        name = op_name(op)
        what = f"reduce_scatter ({name}) of {self._describe([input])}"
        call = partial(self._between.reduce_scatter, output, input, name, what)
        return self._submit(what, call, [input, output], [output], async_op)

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work | None:
        """Put all ranks' ``input``, end to end in rank order, into ``output``.

        Args:
            output: ``world_size * n`` elements.
            input: ``n`` elements, left as they are.

        See `all_reduce` for the other arguments and errors.

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
        check_tensor("output", output, self._device)
        check_tensor("input", input, self._device, is_written=False)
        size = self._world_size
        if part.dtype != whole.dtype or part.numel() * size != whole.numel():
            raise ArgumentError(
                f"{operation}: input has {input.numel()} elements of {input.dtype} and output "
                f"{output.numel()} of {output.dtype}; expected one dtype, and "
                f"{'input' if whole is input else 'output'} {size} times as long"
            )

    def _describe(self, tensors: Sequence[Tensor]) -> str:
        return describe(tensors, with_shapes=self._compares_shapes)

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's.

        Args:
            tensor: One tensor, as `all_reduce` takes it.
            root: The rank whose tensor is copied.

        See `all_reduce` for the other arguments and errors.

        Cost: ``N`` bytes to every other machine.
        """
        check_root(root, self._world_size)
        check_tensor("tensor", tensor, self._device)
        what = f"broadcast from rank {root} of {self._describe([tensor])}{self._in_pieces}"
        call = partial(self._between.broadcast, tensor, root, what)
        written = [tensor] if root != self._rank else []
        return self._submit(what, call, [tensor], written, async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when all ranks have called it.

        On GPUs all ranks' current streams go on after all of them have come here.

        See `all_reduce` for ``async_op`` and errors.
        """

        def meet() -> None:
            if self._stream is not None:  # the other ranks' streams cannot wait for this one
                self._stream.finish()
            self._links.compare("barrier")()  # nobody knows before all have come

        return self._submit("barrier", meet, [], [], async_op)

    def _submit_step(self, step: Callable[[], object]) -> Work:
        """Call ``step`` after all calls made before, and before later ones.

        It must neither call this communicator nor wait for its works.
        """
        return Work(self._jobs.submit(step, "step"), {}, "step")

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """Return what an all_reduce of ``nbytes`` per rank would do, and why.

        See `pyringar.Communicator.plan` for arguments and errors.
        """
        check_plan(nbytes, dtype)
        pieces = self._between.num_pieces(nbytes // dtype.itemsize, dtype)
        return Plan(
            algorithm="hierarchical",
            order="machine" if self._order == "any" else self._order,
            steps=4 * pieces,
            traffic_bytes=6 * self._world_size * nbytes,
            reason=f"{self._machines}: reduced inside, then between, then shared inside",
        )

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what ran so far.

        ``hierarchical`` counts calls and one rank's bytes, ``inter`` what this rank sent to other
        machines, in how many exchanges.
        """
        with self._lock:
            return {"hierarchical": dict(self._stats), "inter": dict(self._links.sent())}

    # -- life --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if it is closed or has failed. See `pyringar.ProcessCommunicator.check`."""
        self._check_not_failed()
        self._intra.check()

    def check_peers(self, ranks: Sequence[int]) -> None:
        """Raise what the next call would, as far as it is known. Never waits.

        Args:
            ranks: Those that must be there.

        See `pyringar.ProcessCommunicator.check_peers` for errors.
        """
        self._check_not_failed()
        self._links.check_peers(ranks)

    def _tell(self, error: RuntimeError) -> None:
        """Tell the other ranks of this machine why this one gives up."""
        self._links.tell(error)

    def close(self) -> None:
        """Wait for what runs in the background, then leave the group. May be called again.

        Other ranks that go on calling get a `PeerLostError`. What a signal handler raises,
        such as KeyboardInterrupt, ends the wait, and calls with it. A handler may close a
        communicator for which this thread waits: the call then fails.
        """
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
        self._links.close()

    def abort(self) -> None:
        """Fail what runs, here and on the other ranks, then `close`."""
        if is_inherited(self):
            return
        self._break_off(RingarError(f"rank {self._rank} has aborted the group"))
        self.close()

    def _progress(self) -> tuple[float, float] | None:
        """Return what changes with each call, and all that crosses the wire."""
        num = self._jobs.num_under_way()
        return (num, self._links.progress()) if num else None

    def _break_off(self, why: BaseException) -> None:
        """Make the call that runs fail, and those that wait for it."""
        if self._failure is None:
            self._failure = why
        self._links.abort(str(self._failure) or type(self._failure).__name__)

    def __repr__(self) -> str:
        closed = "closed, " if self._is_closed else ""
        return (
            f"HierarchicalCommunicator({closed}rank {self._rank} of {self._world_size}, machine "
            f"{self._machines.node} of {len(self._machines.nodes)}, name={self._name!r}, "
            f"timeout={self._timeout_s:g} s, device={str(self._device)!r})"
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
        if self._stream is not None:
            self._stream.refuse_capture(what)
        count_changes(written)
        in_words = f"{what} of rank {self._rank} of {self._world_size}"
        run = partial(self._run, what, call, sum(t.numel() * t.itemsize for t in tensors))
        job: Job | StreamJob
        if self._stream is None:
            job = host = self._jobs.submit(run, in_words)
        else:
            job = self._stream.submit(self._jobs, run, tensors, in_words)
            host = job.host
        if async_op:
            return Work(job, {}, what)
        try:
            job.wait()
        except BaseException as error:
            if not host.is_completed():  # interrupted: it must not write behind the caller's back
                self._break_off(error)
                with suppress(RingarError):
                    job.wait()
            raise
        return None

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, RingarError) else RingarError
            why = str(self._failure) or type(self._failure).__name__
            raise kind(f"this communicator failed before and cannot be used again: {why}")

    def _run(self, what: str, call: Callable[[], None], nbytes: int) -> None:
        self._check_not_failed()
        began = time.perf_counter()
        self._links.is_told = False
        try:
            with torch.no_grad():
                call()
        except BaseException as error:
            if self._failure is None and not self._links.is_told:
                raise  # such as no memory: there was no call
            self._break_off(error)
            if self._failure is error:
                raise
            why = str(self._failure) or type(self._failure).__name__
            raise RingarError(f"{what} was broken off: {why}") from error
        with self._lock:
            self._stats["calls"] += 1
            self._stats["bytes"] += nbytes
            self._stats["busy_s"] += time.perf_counter() - began


_: type[RankCommunicator] = HierarchicalCommunicator  # mypy holds it to the same calls
