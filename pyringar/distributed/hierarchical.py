"""Reduce over several machines: shared memory inside each, every byte once between them.

Each rank of a machine owns one part of the data. Parts are summed inside the machine, cross the
wire as the sum of their machine, and come back to all its ranks: with L ranks per machine a rank
hands 1 / L of its bytes to the network.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
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
from pyringar.comm.float_mode import default_float_mode
from pyringar.comm.jobs import Job, Jobs
from pyringar.comm.member import Member, check_agreed, check_equal_nodes, ranks_by_node
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.comm.reference import divide, wide
from pyringar.comm.rendezvous import Rendezvous
from pyringar.comm.shown import never_fails
from pyringar.comm.stores import checked_store
from pyringar.comm.topology import Plan
from pyringar.comm.work import Work
from pyringar.distributed.convert import copy_all, count_changes
from pyringar.distributed.own_stream import OwnStream, StreamJob
from pyringar.distributed.packing import check_tensor, describe, own_bytes, pack
from pyringar.distributed.wire import (
    Inter,
    PinnedInter,
    TorchInter,
    Wait,
    check_place,
    compare,
)
from pyringar.errors import ArgumentError, CollectiveTimeout, PeerLostError, RingarError

__all__ = ["HierarchicalCommunicator", "communicator_for"]

_PIECE_BYTES = 4 * 2**20
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
    backend: str = "gloo",
    device: str | torch.device | int | None = None,
) -> ProcessCommunicator | HierarchicalCommunicator:
    """Make the communicator for this job: of one machine, or of several.

    Args:
        algorithm: For every call that names none itself; on several machines ``"auto"``.
        order: Of the sum; on several machines ``"any"``.
        backend: Between machines.

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
                *(meeting, members, place), algorithm=algorithm, order=order, timeout=timeout
            )
    if algorithm != "auto" or order != "any":
        raise ArgumentError(
            f"algorithm is {algorithm!r} and order {order!r}, but the ranks are on {num_nodes} "
            "machines, whose sums are added to each other: expected 'auto' and 'any'"
        )
    return HierarchicalCommunicator._of_meeting(meeting, members, backend, timeout, place)


class HierarchicalCommunicator(OwnRank):
    """This process's rank in a group of processes on several machines, which reduce together.

    It uses a `pyringar.ProcessCommunicator` inside each machine; between machines, groups of
    torch.distributed, which need not be initialised: one for each local rank, of the ranks that
    have it on the machines. A machine is what has one ``node_id()``; ``PYRINGAR_NODE_ID`` overrides
    it.

    With tensors on GPUs (``device``) a call comes after what is on the current stream, and what
    comes there after the call, or after its work's ``wait()``, sees the result: nobody need
    synchronise. It cannot be captured in a CUDA graph. No GPU has run this, and NCCL has not been
    tried: docs/gpu.md.

    Args:
        inter: What crosses the wire, instead of groups of torch.distributed. With ``device`` it is
            given tensors there, and the CPU's, too; `pyringar.distributed.wire.PinnedInter` makes
            it of one for the CPU's.
        backend: Of these groups. ``"gloo"`` adds on the CPU; tensors on a GPU reach it through
            pinned host memory, in a thread that waits for the GPU. ``"nccl"`` adds on the GPU, and
            nobody waits for it: a rank that is lost once its call was enqueued is told by the next
            call, and results may be void until then.
        timeout: Seconds that a call waits for a rank which makes no progress, and this constructor
            for all. Between machines it is the other backend's, whose deadline may be for a call.
        piece_bytes: While so much of a rank's data crosses the wire, as much is reduced inside.
        device: Where this rank's tensors are: a GPU of this process, or the CPU (None). On all
            ranks a GPU, or on none.

    Raises:
        ArgumentError: Machines with different numbers of ranks, which are named: there is no part
            of the data for each. A backend other than gloo without torch.distributed; NCCL in a
            torch without it, or with tensors on the CPU.

    See `pyringar.ProcessCommunicator` for the other arguments and errors.

    Bits are equal on all ranks. Machines are added to each other after the ranks inside them, so
    they are not those of one machine with all ranks, but differ by rounding. 16-bit floats travel
    as float32 and are rounded once; means divide once, at the end.

    Cost: every byte is packed, summed inside the machine, and crosses the wire once per machine:
    with L ranks per machine on M machines a rank hands ``N / L`` bytes to the backend, whose ring
    sends ``2 (M - 1) / M`` of them. One small message more per call tells whether machines call the
    same thing. A GPU keeps a packed copy of the data during a call; with gloo, two pieces' parts
    have pinned buffers, and the thread waits once for each piece.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        inter: Inter | None = None,
        backend: str = "gloo",
        name: str = "default",
        timeout: float = 30.0,
        piece_bytes: int = _PIECE_BYTES,
        device: str | torch.device | int | None = None,
    ) -> None:
        if not is_count(piece_bytes, 1):
            raise ArgumentError(f"piece_bytes is {piece_bytes!r}, expected a number of bytes")
        place = check_place(device, backend)
        store, rank, world_size = checked_store(store, rank, world_size)
        with Rendezvous(
            store, rank, world_size, name, check_timeout(timeout), place.type
        ) as meeting:
            members = meeting.exchange_members()
        self._join(meeting, members, inter, backend, timeout, piece_bytes, place)

    @classmethod
    def _of_meeting(
        cls,
        meeting: Rendezvous,
        members: list[Member],
        backend: str,
        timeout: float,
        device: torch.device,
    ) -> HierarchicalCommunicator:
        """Return the communicator of ``members``, who have met already."""
        self = cls.__new__(cls)
        self._join(meeting, members, None, backend, timeout, _PIECE_BYTES, device)
        return self

    def _join(
        self,
        meeting: Rendezvous,
        members: list[Member],
        inter: Inter | None,
        backend: str,
        timeout: float,
        piece_bytes: int,
        device: torch.device,
    ) -> None:
        """Connect to the ranks of this machine, and to those on the others."""
        self._rank, self._world_size, self._store = meeting.rank, meeting.world_size, meeting.store
        self._name, self._timeout_s, self._piece_bytes = meeting.name, timeout, piece_bytes
        self._nodes = nodes = ranks_by_node(members)
        check_agreed(members)
        check_equal_nodes(nodes, members)
        self._node = next(i for i, ranks in enumerate(nodes) if self._rank in ranks)
        self._local_rank = nodes[self._node].index(self._rank)
        self._intra = ProcessCommunicator(
            *(self._store, self._local_rank, len(nodes[0])),
            name=f"machine {self._node}",
            timeout=timeout,
            device=device,
        )
        self._device = device
        self._stream = OwnStream(device) if device.type == "cuda" else None
        # NCCL reads what is on the GPU: the host waits for nothing, and sees no loss in time.
        self._looks = self._stream is not None and backend != "nccl"
        if inter is None and len(nodes) > 1:
            columns = list(zip(*nodes, strict=True))
            inter = TorchInter(self._store, columns, self._rank, backend, timeout)
            inter = PinnedInter(inter) if self._looks else inter
        self._inter = inter
        self._jobs = Jobs("machines")
        weakref.finalize(self, self._jobs.end).atexit = False
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_closed = False
        self._is_told = False  # whether other ranks know of the call that runs
        self._stats = {"hierarchical": {"calls": 0, "bytes": 0, "busy_s": 0.0}}
        self._stats["inter"] = {"calls": 0, "bytes": 0}
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
        return self._local_rank

    @property
    def nodes(self) -> list[list[int]]:
        """The ranks of every machine, in the order in which machines are added."""
        return [list(ranks) for ranks in self._nodes]

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
            order: ``"any"``, or not given: machines are added after ranks.

        Raises:
            ArgumentError: A tensor or value that is wrong; nothing was changed. Or ranks or
                machines call different things; tensors are as they were, and the communicator
                refuses further calls.
            UnsupportedError: A dtype or layout that cannot be reduced; a stream that is captured in
                a CUDA graph. Nothing was changed.
            PeerLostError, CollectiveTimeout: A rank or machine is gone, or late. Tensors are as
                they were, but not with NCCL; the communicator refuses further calls.

        See `pyringar.Communicator.all_reduce` for the dtypes and the other arguments.
        """
        check_choice("algorithm", "auto" if algorithm is None else algorithm, ("auto",))
        check_choice("order", "any" if order is None else order, ("any",))
        given: list[Any] = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        for i, tensor in enumerate(given):
            check_tensor(f"tensors[{i}]", tensor, self._device)
        name = op_name(op)
        what = f"all_reduce ({name}) of {describe(given)} in pieces of {self._piece_bytes} bytes"
        return self._submit(what, partial(self._reduce, given, name, what), given, async_op)

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
        what = f"broadcast from rank {root} of " + describe([tensor])
        call = partial(self._copy, tensor, root, what)
        return self._submit(what, call, [tensor], async_op, is_written=root != self._rank)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when all ranks have called it.

        On GPUs all ranks' current streams go on after all of them have come here.

        See `all_reduce` for ``async_op`` and errors.
        """

        def meet() -> None:
            self._inside(self._intra.barrier)
            if self._stream is not None:  # other machines' streams cannot wait for this one
                self._stream.finish()
            self._compare("barrier")()
            self._inside(self._intra.barrier)

        return self._submit("barrier", meet, [], async_op)

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """Return what an all_reduce of ``nbytes`` per rank would do, and why.

        See `pyringar.Communicator.plan` for arguments and errors.
        """
        check_plan(nbytes, dtype)
        pieces = len(self._pieces(nbytes // dtype.itemsize, dtype))
        return Plan(
            algorithm="hierarchical",
            order="machine",
            steps=3 * pieces,
            traffic_bytes=6 * self._world_size * nbytes,
            reason=f"{len(self._nodes)} machines of {len(self._nodes[0])} ranks: reduced inside, "
            "then between, then shared inside",
        )

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what ran so far.

        ``hierarchical`` counts calls and one rank's bytes, ``inter`` what this rank handed to the
        backend between machines.
        """
        with self._lock:
            return {name: dict(row) for name, row in self._stats.items()}

    # -- life --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if it is closed or has failed. See `pyringar.ProcessCommunicator.check`."""
        self._check_not_failed()
        self._intra.check()

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
        with nullcontext() if self._inter is None else closing(self._inter):
            self._intra.close()

    def abort(self) -> None:
        """Fail what runs, here and on the other ranks, then `close`."""
        if is_inherited(self):
            return
        self._break_off(RingarError(f"rank {self._rank} has aborted the group"))
        self.close()

    def _progress(self) -> tuple[float, float] | None:
        """Return what changes with each call, and each piece that crosses the wire."""
        num = self._jobs.num_under_way()
        return (num, self._stats["inter"]["calls"]) if num else None

    def _break_off(self, why: BaseException) -> None:
        """Make the call that runs fail, and those that wait for it."""
        if self._failure is None:
            self._failure = why
        self._intra.abort()  # those who wait for this rank are told, in the machine
        if self._inter is not None:  # and on the others
            self._inter.abort()

    @never_fails
    def __repr__(self) -> str:
        closed = "closed, " if self._is_closed else ""
        return (
            f"HierarchicalCommunicator({closed}rank {self._rank} of {self._world_size}, machine "
            f"{self._node} of {len(self._nodes)}, name={self._name!r}, "
            f"timeout={self._timeout_s:g} s, device={str(self._device)!r})"
        )

    # -- one call, on the communicator's own thread ------------------------------------------------

    def _submit(
        self,
        what: str,
        call: Callable[[], None],
        tensors: Sequence[Tensor],
        async_op: bool,
        is_written: bool = True,
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
        if is_written:
            count_changes(tensors)
        in_words = f"{what} of rank {self._rank} of {self._world_size}"
        run = partial(self._run, what, call)
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

    def _run(self, what: str, call: Callable[[], None]) -> None:
        self._check_not_failed()
        began = time.perf_counter()
        self._is_told = False
        try:
            with torch.no_grad():
                call()
        except BaseException as error:
            if self._failure is None and not self._is_told:
                raise  # such as no memory: there was no call
            self._break_off(error)
            if self._failure is error:
                raise
            why = str(self._failure) or type(self._failure).__name__
            raise RingarError(f"{what} was broken off: {why}") from error
        with self._lock:
            row = self._stats["hierarchical"]
            row["calls"] += 1
            row["busy_s"] += time.perf_counter() - began

    def _inside(self, call: Callable[[], object]) -> None:
        """Call the machine's own communicator; its errors count ranks from 0."""
        self._is_told = True
        try:
            call()
        except RingarError as error:
            raise type(error)(
                f"on machine {self._node} of {len(self._nodes)}, whose ranks "
                f"{self._nodes[self._node]} count from 0 in what follows: {error}"
            ) from error

    def _outside(self, what: str, call: Callable[[Inter], Wait]) -> Wait:
        """Begin a call between machines; errors of its own and of its wait are lost peers."""
        if self._inter is None:
            return lambda: None
        self._is_told = True
        inter = self._inter
        arrived = self._named(what, lambda: call(inter))
        return lambda: self._named(what, arrived)

    def _named(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (torch.AcceleratorError, torch.OutOfMemoryError):  # this rank's own GPU
            raise
        except RuntimeError as error:
            others = [ranks[self._local_rank] for ranks in self._nodes]
            text = (
                f"{what} over {len(self._nodes)} machines: rank {self._rank} waited for ranks "
                f"{[rank for rank in others if rank != self._rank]} of the other machines: {error}"
            )
            is_late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            raise (CollectiveTimeout if is_late else PeerLostError)(text) from error

    def _reduce(self, tensors: list[Tensor], op: str, what: str) -> None:
        # Before others are told: there may be no memory.
        packed = pack(tensors, len(self._nodes[0]))
        agreed = self._compare(what)
        for flat, _, _ in packed:
            self._reduce_flat(flat, "sum" if op == "mean" else op, what, agreed)
            if op == "mean":
                with default_float_mode() as pieces:
                    divide(flat, self._world_size, pieces)
        agreed()
        self._look()
        for _, views, mine in packed:  # not before all is well
            copy_all(list(zip(mine, views, strict=True)))
        with self._lock:
            self._stats["hierarchical"]["bytes"] += sum(t.numel() * t.itemsize for t in tensors)

    def _look(self) -> None:
        """On a GPU, wait for it, and raise if a rank of the machine was lost before it was done.

        Until then such a call ends without its data, which must neither cross nor be kept.
        """
        if self._stream is not None and self._looks:
            self._stream.finish()
            self._inside(partial(self._intra.check_peers, ()))

    def _reduce_flat(self, flat: Tensor, op: str, what: str, agreed: Wait) -> None:
        """Reduce in pieces: while one crosses the wire, the next is reduced inside."""
        crossing: tuple[Tensor, Tensor, Wait] | None = None
        for begin, end in self._pieces(flat.numel(), flat.dtype):
            piece = flat[begin:end]
            part = flat.new_empty(len(piece) // len(self._nodes[0]))
            self._inside(partial(self._intra.reduce_scatter, part, piece, op))
            self._look()
            agreed()  # machines call the same, so that the other side has the same sizes
            arrived = self._cross(part, op, what)
            if crossing is not None:
                self._share(*crossing)
            crossing = (piece, part, arrived)
        if crossing is not None:
            self._share(*crossing)

    def _cross(self, part: Tensor, op: str, what: str) -> Wait:
        if self._inter is not None:
            with self._lock:
                self._stats["inter"]["calls"] += 1
                self._stats["inter"]["bytes"] += part.numel() * part.itemsize
        return self._outside(what, lambda inter: inter.all_reduce(part, op))

    def _share(self, piece: Tensor, part: Tensor, arrived: Wait) -> None:
        arrived()
        self._inside(lambda: self._intra.all_gather(piece, part))

    def _pieces(self, numel: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        size = len(self._nodes[0])
        step = max(1, self._piece_bytes // (wide(dtype).itemsize * size)) * size
        total = -(-numel // size) * size
        return [(begin, min(begin + step, total)) for begin in range(0, total, step)]

    def _compare(self, what: str) -> Wait:
        """Begin to ask the other machines whether they call the same; what is returned raises."""
        if self._inter is None:
            return lambda: None
        return compare(
            what,
            lambda asked: self._outside(what, lambda inter: inter.all_reduce(asked, "max")),
            f"rank {self._rank} on machine {self._node}",
        )

    def _copy(self, tensor: Tensor, root: int, what: str) -> None:
        data = own_bytes(tensor, filled=self._rank == root)
        self._compare(what)()
        node = next(i for i, ranks in enumerate(self._nodes) if root in ranks)
        local_root = self._nodes[node].index(root)
        if self._node == node:
            self._inside(lambda: self._intra.broadcast(data, local_root))
        if self._local_rank == local_root:
            self._outside(what, lambda inter: inter.broadcast(data, node))()
        if self._node != node:
            self._inside(lambda: self._intra.broadcast(data, local_root))
        self._look()
        if self._rank != root:
            copy_all([(tensor, data.view(tensor.dtype).view(tensor.shape))])


_: type[RankCommunicator] = HierarchicalCommunicator  # mypy holds it to the same calls
