"""One rank per process: the collectives of `Communicator` for this process's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pyringar.choices import ORDERS, check_choice
from pyringar.comm.arguments import (
    check_list,
    check_max_blocks,
    check_plan,
    check_root,
    check_timeout,
    is_list,
    op_name,
)
from pyringar.comm.auto import choose
from pyringar.comm.base import EngineCommunicator, RankCommunicator, handle_of, is_traced
from pyringar.comm.exits import close_at_exit
from pyringar.comm.member import Member, check_agreed, check_one_node
from pyringar.comm.orders import engine_order
from pyringar.comm.rendezvous import Rendezvous
from pyringar.comm.stores import checked_store
from pyringar.comm.topology import Plan, check_device
from pyringar.comm.work import Work
from pyringar.errors import ArgumentError, CollectiveTimeout, UnsupportedError

__all__ = ["ProcessCommunicator"]

ALGORITHMS = ("auto", "direct")
_AUTO, _WHY = choose("processes")

Tensors = Tensor | Sequence[Tensor]


class ProcessCommunicator(EngineCommunicator, RankCommunicator):
    """This process's rank in a group of processes on one machine, which reduce together.

    All ranks make the same calls in the same order. Calls that differ raise on every rank before
    data moves; so does a rank that dies or stays away.

    Ranks may share a GPU. A call is enqueued on the current stream; the host waits until the other
    ranks have enqueued theirs, never for a device. A CUDA graph cannot capture it.

    Args:
        store: A torch.distributed store that all ranks share. None: that of torch.distributed if it
            is initialised, else torchrun's.
        rank: This process's rank; only with ``store``.
        world_size: Number of ranks; only with ``store``.
        name: Tells groups on one store apart. All ranks make groups of one name in the same order.
        algorithm: ``"auto"`` or ``"direct"``, which are the same.
        timeout: Seconds that a call waits for a rank which makes no progress, and this constructor
            for all. A call in which all ranks move may take longer.
        device: Where this rank's tensors are: a GPU of this process, or the CPU (None). On all
            ranks a GPU, or on none.
        compares_shapes: Refuse tensors of other shapes than on other ranks. False: only numbers of
            elements must agree; on the CPU only.
        max_blocks: Most thread blocks of a kernel on this rank's GPU; None: as many as help.

    See `Communicator` for ``order``.

    Raises:
        ArgumentError: Wrong arguments; no store; ranks on several machines (names them); a device
            that is not there, or ranks on GPUs and on the CPU.
        CudaError: CUDA refuses to share memory with other processes.
        CollectiveTimeout: Ranks did not come in time (names them).
        PeerLostError: A rank died, or the store is gone.
        RingarError: A rank could not make or map the shared memory (names it, on all ranks).
        UnsupportedError: This is not Linux; GPUs that cannot read each other's memory (every pair
            is tried with real data); ``algorithm="ring"``.

    A failed communicator refuses further calls with the reason; a new one can be made by the same
    processes. An exception from a signal handler, such as KeyboardInterrupt, ends the call or wait
    within 0.2 s and fails the communicator on all ranks. A handler must not call the communicator
    itself.

    A store may have been used before: ranks ignore the values of earlier attempts to meet.

    Cost: a megabyte of shared memory per rank, anonymous (memfd), so that even SIGKILL leaks
    nothing. On a GPU 64 MiB of its memory beside that, up to 256 MiB where all ranks share
    it. `close` frees them if the other ranks close within 0.2 s; else the next communicator on GPUs
    that this process makes or closes does, or its end.
    """

    def __init__(
        self,
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
        max_blocks: int | None = None,
    ) -> None:
        self._configure(name, algorithm, order, timeout, device)
        has_gpu = self._device.type == "cuda"
        self._limits: dict[str, Any] = check_max_blocks(max_blocks, has_gpus=has_gpu)
        store, rank, world_size = checked_store(store, rank, world_size)
        with Rendezvous(
            store, rank, world_size, name, self._timeout_s, self._device.type
        ) as meeting:
            self._join(meeting, meeting.exchange_members(), compares_shapes)

    @classmethod
    def _of_meeting(
        cls,
        meeting: Rendezvous,
        members: list[Member],
        device: torch.device,
        *,
        algorithm: str,
        order: str,
        timeout: float,
        compares_shapes: bool,
    ) -> ProcessCommunicator:
        self = cls.__new__(cls)
        self._limits = {}
        self._configure(meeting.name, algorithm, order, timeout, device)
        self._join(meeting, members, compares_shapes)
        return self

    def _configure(self, name: Any, algorithm: Any, order: Any, timeout: Any, device: Any) -> None:
        self._algorithm = _check_algorithm(algorithm)
        self._order = check_choice("order", order, ORDERS)
        self._timeout_s = check_timeout(timeout)
        self._device = check_device("cpu" if device is None else device, "device")
        self._resolve(None, None)
        if not isinstance(name, str):
            raise ArgumentError(f"name is {name!r}, expected a string")
        self._name = name

    def _join(self, meeting: Rendezvous, members: list[Member], compares_shapes: bool) -> None:
        self._rank, self._world_size = meeting.rank, meeting.world_size
        self._members = members
        check_one_node(members)
        check_agreed(members)
        options: dict[str, Any] = {}
        if self._device.type == "cuda":
            options |= {"device": self._device.index, **self._limits}
        elif not compares_shapes:
            options["compares_shapes"] = False
        memory = meeting.share_memory()
        self._group = meeting.engine.ProcessGroup(
            memory=memory,
            rank=self._rank,
            world_size=self._world_size,
            token=meeting.token,
            timeout_s=self._timeout_s,
            **options,
        )
        meeting.group = self._group
        meeting.wait_until_mapped(self._group.absent_ranks)
        self._store = meeting.store
        self._group.seal()
        if self._device.type == "cuda":
            self._group.connect()
        # The backend's, too: what it declines goes the general way; on GPUs all does.
        self.reduce_plain = (
            self._group.prepared("direct", self._resolve(None, None))
        )
        self._in_flight = {}
        what = (
            f"rank {self._rank} of {self._world_size}, name={self._name!r}, "
            f"device={str(self._device)!r}, algorithm={self._algorithm!r}, order={self._order!r}"
        )
        self._handle = handle_of(self, what)
        # Tells the others that this rank has left, sooner than they would find its process gone.
        close_at_exit(
            self,
            ProcessCommunicator.close,
            abort=ProcessCommunicator.abort,
            progress=ProcessCommunicator._progress,
        )

    def _progress(self) -> tuple[int, int] | None:
        """Return what changes with each call, and each piece of one that any rank has done."""
        num = sum(not native.is_completed() for native in list(self._in_flight))
        return (num, self._group.progress()) if num else None

    @property
    def device(self) -> torch.device:
        """Return the device of this rank's tensors."""
        return self._device

    @property
    def members(self) -> tuple[Member, ...]:
        """Every rank's process and host, in rank order."""
        return tuple(self._members)

    @property
    def timeout_s(self) -> float:
        """Seconds that a call waits for other ranks."""
        return self._timeout_s

    def set_timeout(self, timeout: float) -> None:
        """Let the calls that begin from now on wait for other ranks as long as this.

        Args:
            timeout: Seconds.

        Raises:
            ArgumentError: It is no positive number of seconds.
        """
        self._timeout_s = check_timeout(timeout)
        self._group.set_timeout(self._timeout_s)

    def check(self) -> None:
        """Raise if the communicator is closed or has failed; wait for nothing.

        Raises:
            PeerLostError, CollectiveTimeout: A rank is gone, or was late; also in a call that had
                returned, and has ended on a GPU without its data.
            RingarError: The communicator is closed.
        """
        self._group.check()

    def check_peers(self, ranks: Sequence[int]) -> None:
        """Raise what the next call would, as far as it is known. Never waits.

        Args:
            ranks: Those that must be there.

        Raises:
            PeerLostError: One of them is gone or has left: names it.
            RingarError: The group failed before, with that error's class; or it is closed.
        """
        self._group.check_peers(ranks)

    def _tell(self, error: RuntimeError) -> None:
        self._group.tell(str(error), isinstance(error, CollectiveTimeout))

    def abort(self) -> None:
        """Fail what runs, here and elsewhere, with an error that names this rank, then `close`."""
        self._abort("")

    def _abort(self, why: str) -> None:
        self._is_closed = True
        if self._group.abort(why):
            self._in_flight.clear()

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
            tensors: One tensor, or a list of them, any layout without overlap, on this rank's
                device: equal on all ranks in number, dtype and sizes. Elements belong together by
                index; on GPUs, dense tensors must have the same strides on all ranks.

        Raises:
            ArgumentError: Names the tensor and value that is wrong; nothing was changed, and no
                rank was told. Or ranks call different things: names both, on every rank; tensors
                are as they were, and the communicator refuses further calls.
            UnsupportedError: A layout or dtype that the engine does not handle; a stream that is
                captured in a CUDA graph.
            PeerLostError, CollectiveTimeout: A rank is gone, or late: names it, its process, host
                and last call. Tensors may be half reduced; the communicator refuses further calls.

        See `Communicator.all_reduce` for the dtypes and the other arguments.

        Cost: data goes through slots that fit the caches, in pieces. Two ranks, and up to 32 KiB
        any number, each reduce everything: one wait per piece, ``(k + 1) N`` bytes read and ``2 N``
        written by every rank. Otherwise each reduces a slice: two waits per piece,
        ``(3 - 2 / k) N`` read and ``2 N`` written.
        """
        if (
            not async_op
            and not is_dynamo_compiling()
            and self.reduce_plain(tensors, op, algorithm, order)
        ):
            return None
        own = [tensors] if isinstance(tensors, Tensor) else tensors
        if is_traced() and is_list(own) and not async_op:
            from pyringar.comm import operators

            operators.reduce(self._handle, own, op, algorithm, order)
            return None
        order = self._resolve(algorithm, order)
        native = self._group.run("all_reduce",
            tensors, None, op_name(op), "direct", order, 0, self._in_flight if async_op else None
        )
        return self._begun(native, "all_reduce", op_name(op)) if async_op else None

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce a list; nothing is flattened, tensors are packed as they are read.

        See `all_reduce` for arguments and errors.
        """
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
        """
        order = self._resolve(None, None)
        native = self._group.run("reduce_scatter",
            output, input, op_name(op), "direct", order, 0, self._in_flight if async_op else None
        )
        return self._begun(native, "reduce_scatter", op_name(op)) if async_op else None

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work | None:
        """Put all ranks' ``input``, end to end in rank order, into ``output``.

        Args:
            output: ``world_size * n`` elements.
            input: ``n`` elements, left as they are.

        See `all_reduce` for the other arguments and errors.
        """
        native = self._group.run("all_gather", output, input, "sum", "direct", "rank", 0, self._in_flight if async_op else None)
        return self._begun(native, "all_gather") if async_op else None

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's.

        Args:
            tensor: One tensor, as `all_reduce` takes it.
            root: The rank whose tensor is copied.

        See `all_reduce` for the other arguments and errors.
        """
        check_root(root, self._world_size)
        native = self._group.run("broadcast", tensor, None, "sum", "direct", "rank", root, self._in_flight if async_op else None)
        return self._begun(native, "broadcast") if async_op else None

    def _begin_as(self, what: object, call: str, *arguments: Any) -> Work | None:
        order = self._resolve(None, None)
        if call == "all_reduce":
            a = (arguments[0], None, arguments[1], "direct", order, 0)
        elif call == "all_gather":
            a = (*arguments, "sum", "direct", "rank", 0)
        else:
            a = (arguments[0], None, "sum", "direct", "rank", arguments[1])
        native = self._group.run(call, *a, self._in_flight, None, str(what))
        return self._begun(native, call)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when all ranks have called it.

        On GPUs all ranks' current streams go on after all of them have come here; the host does not
        wait for them.

        See `all_reduce` for ``async_op`` and errors.
        """
        native = self._group.run("barrier", None, None, "sum", "direct", "rank", 0, self._in_flight if async_op else None)
        return self._begun(native, "barrier") if async_op else None

    def _submit_step(self, step: Callable[[], object]) -> Work:
        """Call ``step`` in the engine's thread, after all calls made before and before later ones.

        It must neither call this communicator nor wait for its works.
        """
        return Work(self._group.submit_step(step), {}, "step")

    def bind(
        self,
        tensors: Tensors,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
    ) -> Callable[[], None]:
        """Check an `all_reduce` once, to call it again and again on the same tensors.

        Args:
            tensors: The returned callable keeps them alive.

        Returns:
            A callable without arguments that reduces ``tensors``; all ranks must call theirs. It
            raises ArgumentError, before the other ranks are told, if a tensor has changed as
            `Communicator.bind` says.

        See `all_reduce` for the other arguments and errors.
        """
        bound: Callable[[], None] = self._group.bind("all_reduce",
            tensors, op_name(op), "direct", self._resolve(algorithm, order)
        )
        return bound

    def bind_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
    ) -> Callable[[], None]:
        """Check an `all_reduce_coalesced` once, to call it again and again on the same tensors.

        See `bind` for arguments, the callable and errors.
        """
        check_list("bind_coalesced", tensors)
        return self.bind(tensors, op, algorithm=algorithm, order=order)

    # -- plans, statistics -------------------------------------------------------------------------

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """Return what an all_reduce of ``nbytes`` per rank would do, and why.

        Args:
            nbytes: Bytes of one rank's tensors.
            dtype: Their dtype.

        Returns:
            The plan; ``algorithm`` is as in `stats`.
        """
        check_plan(nbytes, dtype)
        reason = _WHY if self._algorithm == "auto" else "asked for"
        plan = self._group.plan(nbytes)
        return Plan.in_processes(
            plan["algorithm"],
            plan["num_pieces"],
            reason,
            self._world_size,
            nbytes,
            self._resolve(None, None),
        )

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what ran: ``{"exchange" | "direct": {"calls", ...}}``.

        ``exchange`` is ``direct`` for small tensors, and what other collectives do.
        """
        stats: dict[str, dict[str, float]] = self._group.stats()
        return stats

    def __repr__(self) -> str:
        closed = "closed, " if self._is_closed else ""
        return (
            f"ProcessCommunicator({closed}rank {self._rank} of {self._world_size}, "
            f"name={self._name!r}, algorithm={self._algorithm!r}, order={self._order!r}, "
            f"timeout={self._timeout_s:g} s, device={str(self._device)!r})"
        )

    def _resolve(self, algorithm: str | None, order: str | None) -> str:
        if algorithm is not None:
            _check_algorithm(algorithm)
        order = self._order if order is None else check_choice("order", order, ORDERS)
        return engine_order("direct", order, has_gpus=self._device.type != "cpu")


def _check_algorithm(algorithm: Any) -> str:
    if algorithm == "ring":
        raise UnsupportedError(
            "algorithm is 'ring', which ranks in processes do not have; take 'auto' or 'direct'"
        )
    return check_choice("algorithm", algorithm, ALGORITHMS)


def _decline(*_call: object) -> bool:
    return False
