"""One rank per process: the collectives of `Communicator` for this process's own tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyringar.comm.arguments import (
    ORDERS,
    check_choice,
    check_plan,
    check_ring_order,
    check_timeout,
    op_name,
)
from pyringar.comm.auto import choose
from pyringar.comm.base import EngineCommunicator
from pyringar.comm.exits import close_at_exit
from pyringar.comm.member import Member
from pyringar.comm.rendezvous import Rendezvous
from pyringar.comm.shared_tensors import memory_of
from pyringar.comm.stores import checked_store
from pyringar.comm.topology import Plan, check_device
from pyringar.comm.work import Work
from pyringar.engine import load
from pyringar.errors import ArgumentError, RingarError, UnsupportedError

__all__ = ["ProcessCommunicator"]

ALGORITHMS = ("auto", "direct", "ring")
_CHECKS = ("", "digest")

Tensors = Tensor | Sequence[Tensor]


class ProcessCommunicator(EngineCommunicator):
    """This process's rank in a group of processes on one machine, which reduce together.

    All ranks make the same calls in the same order. Calls that differ are found before data moves
    and raise on every rank; so does a rank that dies or stays away.

    With tensors on GPUs (``device``), ranks may share one. A call is enqueued on the current
    stream, after what is there; the host waits until the other ranks have enqueued theirs, never
    for a device. It cannot be captured in a CUDA graph.

    Args:
        store: A torch.distributed store that all ranks share. None: that of torch.distributed if it
            is initialised, else torchrun's.
        rank: This process's rank; only with ``store``.
        world_size: Number of ranks; only with ``store``.
        name: Tells groups on one store apart. Groups of one name must be made in the same order by
            all ranks.
        algorithm: ``"auto"``, ``"direct"`` or ``"ring"`` for every call that names none itself.
        order: ``"rank"`` promises the bits of ``((x0 + x1) + x2) + ...`` (a NaN stays a NaN, its
            payload and sign are not promised); ``"any"`` allows the ring's own order. Bits are
            equal on all ranks and in every run either way.
        timeout: Seconds that a call waits for a rank which makes no progress, and this constructor
            for all. A call in which all ranks move may take longer.
        device: Where this rank's tensors are: a GPU of this process, or the CPU (None). On all
            ranks a GPU, or on none.
        compares_shapes: Refuse tensors of other shapes than on other ranks. False: as many elements
            will do, and correspond by index; on the CPU only.

    Raises:
        ArgumentError: Wrong arguments; no store; ranks on several machines (names them); a device
            that is not there, or ranks on GPUs and on the CPU.
        CudaError: CUDA refuses to show memory to other processes, or to map theirs.
        CollectiveTimeout: Ranks did not come in time (names them).
        PeerLostError: A rank died, or the store is gone.
        RingarError: A rank cannot make or map the shared memory; all ranks name it, and why.
        UnsupportedError: This is not Linux; GPUs that cannot read each other's memory (every pair
            is tried with real data); ``algorithm="ring"`` on GPUs.

    A failed communicator refuses further calls with the reason; a new one can be made by the same
    processes. With ``PYRINGAR_CHECK=digest`` in the environment, ranks compare a digest of every
    result, and an error names the two that differ.

    A store may be one that was used before: what another attempt to meet left there, by processes
    dead or alive, is not taken for a rank of this one (:mod:`pyringar.comm.rendezvous`).

    Cost: a megabyte and a half of shared memory per rank; nothing has a name in a file system, so
    nothing stays behind, whatever is killed when. On a GPU 64 MiB of its memory beside that, which
    :meth:`close` frees once the other ranks have closed too.
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
    ) -> None:
        self._algorithm = check_choice("algorithm", algorithm, ALGORITHMS)
        self._order = check_choice("order", order, ORDERS)
        self._timeout_s = check_timeout(timeout)
        self._device = check_device("cpu" if device is None else device, "device")
        self._resolve(None, None)
        if not isinstance(name, str):
            raise ArgumentError(f"name is {name!r}, expected a string")
        check = os.environ.get("PYRINGAR_CHECK", "")
        if check not in _CHECKS:
            raise ArgumentError(f"PYRINGAR_CHECK is {check!r}, expected 'digest', or nothing")
        store, self._rank, self._world_size = checked_store(store, rank, world_size)
        self._name = name
        # Before the clock starts: they may have to be compiled.
        engine = load.engine()
        options: dict[str, Any] = {}
        if self._device.type == "cuda":
            engine = load.cuda_engine()
            options["device"] = self._device.index
        elif not compares_shapes:
            options["compares_shapes"] = False
        with Rendezvous(
            *(store, self._rank, self._world_size, name, self._timeout_s),
            kind=self._device.type,
            engine=engine,
        ) as meeting:
            self._members = meeting.exchange_members()
            _check_one_node(self._members)
            _check_one_check(self._members)
            _check_one_kind(self._members)
            memory, token = meeting.share_memory()
            self._group = engine.ProcessGroup(
                memory=memory,
                rank=self._rank,
                world_size=self._world_size,
                token=token,
                timeout_s=self._timeout_s,
                checks_digests=check == "digest",
                **options,
            )
            meeting.wait_until_mapped(self._group.absent_ranks)
            self._store = meeting.store
        self._group.seal()
        if self._device.type == "cuda":
            self._group.connect()
        self._in_flight = {}
        self._num_regions = 0
        # Tells the others that this rank has left, sooner than they would find its process gone.
        close_at_exit(
            *(self, ProcessCommunicator.close),
            abort=ProcessCommunicator.abort,
            progress=ProcessCommunicator._progress,
        )

    def _progress(self) -> tuple[int, int] | None:
        """Return what changes with each call, and each piece of one that any rank has done."""
        num = sum(not native.is_completed() for native in tuple(self._in_flight))
        return (num, self._group.progress()) if num else None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def store(self) -> Any:
        """The part of the torch.distributed store that belongs to this group and to no other."""
        return self._store

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

    def check_peers(self, ranks: Sequence[int]) -> None:
        """Raise what the next call would, as far as it is known. Never waits.

        Args:
            ranks: Those that must be there.

        Raises:
            PeerLostError: One of them is gone or has left: names it.
            RingarError: The group failed before, with that error's class; or it is closed.
        """
        self._group.check_peers(ranks)

    def abort(self) -> None:
        """Fail what runs, here and on the other ranks, then :meth:`close`.

        Calls and works under way end soon with a :class:`RingarError` that names this rank.
        """
        if self._group.abort():
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
                index; on GPUs, dense tensors must have the same strides on all ranks. float64,
                float32, float16, bfloat16, int8, uint8, int32 or int64.
            op: As in :meth:`Communicator.all_reduce`.
            algorithm: Instead of the communicator's.
            order: Instead of the communicator's.
            async_op: Return a :class:`Work` at once and reduce in the background; no ``resize_``
                until it is done, see there.

        Raises:
            ArgumentError: Names the tensor and value that is wrong; nothing was changed, and no
                rank was told. Or ranks call different things: names both, on every rank; tensors
                are as they were, and the communicator refuses further calls.
            UnsupportedError: A layout or dtype that the engine does not handle; a stream that is
                captured in a CUDA graph.
            PeerLostError, CollectiveTimeout: A rank is gone, or late: names it, its process, host
                and last call. Tensors may be half reduced; the communicator refuses further calls.

        Where ranks' tensors lie otherwise (in other strides; registered, but not at one place), the
        call is announced twice and the data packed in the order of its index.

        Cost: data goes through slots that fit the caches, in pieces of up to 256 KiB (of two ranks:
        128 KiB). Two ranks, and up to 32 KiB any number, reduce everything each: a wait per piece,
        ``(k + 1) N`` bytes read and ``2 N`` written by every rank. Else each reduces a slice: two
        waits per piece, ``(3 - 2 / k) N`` read and ``2 N`` written. GPUs have slots of 16 MiB and
        change over at 256 KiB. Registered tensors: two waits, ``2 k N`` in all.
        """
        chosen = self._resolve(algorithm, order)
        native = self._group.all_reduce(
            tensors, op_name(op), chosen, self._in_flight if async_op else None
        )
        return self._begun(native) if async_op else None

    def all_reduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """:meth:`all_reduce` of a list; nothing is flattened, tensors are packed as they are read.

        Args:
            tensors: As in :meth:`all_reduce`.
            op: As in :meth:`all_reduce`.
            algorithm: As in :meth:`all_reduce`.
            order: As in :meth:`all_reduce`.
            async_op: As in :meth:`all_reduce`.

        Raises:
            ArgumentError, UnsupportedError, PeerLostError, CollectiveTimeout: As there.
        """
        if not isinstance(tensors, (list, tuple)):
            raise ArgumentError(
                f"all_reduce_coalesced: tensors is a {type(tensors).__name__}, expected a list"
            )
        return self.all_reduce(tensors, op, algorithm=algorithm, order=order, async_op=async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Any = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduce ``input`` over all ranks and leave this rank's part of the result in ``output``.

        Args:
            output: ``n`` elements.
            input: ``world_size * n`` elements, left as they are; part ``r``, in index order, is for
                rank ``r``.
            op: As in :meth:`all_reduce`.
            async_op: Return a :class:`Work` at once and reduce in the background.

        Raises:
            ArgumentError, UnsupportedError, PeerLostError, CollectiveTimeout: As
                :meth:`all_reduce`.
        """
        native = self._group.reduce_scatter(
            output, input, op_name(op), self._in_flight if async_op else None
        )
        return self._begun(native) if async_op else None

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work | None:
        """Put all ranks' ``input``, end to end in rank order, into ``output``.

        Args:
            output: ``world_size * n`` elements.
            input: ``n`` elements, left as they are.
            async_op: Return a :class:`Work` at once and copy in the background.

        Raises:
            ArgumentError, UnsupportedError, PeerLostError, CollectiveTimeout: As
                :meth:`all_reduce`.
        """
        native = self._group.all_gather(output, input, self._in_flight if async_op else None)
        return self._begun(native) if async_op else None

    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's.

        Args:
            tensor: As in :meth:`all_reduce`.
            root: The rank whose tensor is copied.
            async_op: Return a :class:`Work` at once and copy in the background.

        Raises:
            ArgumentError, UnsupportedError, PeerLostError, CollectiveTimeout: As
                :meth:`all_reduce`.
        """
        is_rank = isinstance(root, int) and not isinstance(root, bool)
        if not is_rank or not 0 <= root < self._world_size:
            raise ArgumentError(
                f"broadcast: root is {root!r}, expected a rank from 0 to {self._world_size - 1}"
            )
        native = self._group.broadcast(tensor, root, self._in_flight if async_op else None)
        return self._begun(native) if async_op else None

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when all ranks have called it.

        On GPUs all ranks' current streams go on after all of them have come here; the host does not
        wait for them.

        Args:
            async_op: Return a :class:`Work` at once and meet in the background.

        Raises:
            ArgumentError, PeerLostError, CollectiveTimeout: As :meth:`all_reduce`.
        """
        native = self._group.barrier(self._in_flight if async_op else None)
        return self._begun(native) if async_op else None

    def _submit_step(self, step: Callable[[], object]) -> Work:
        """Call ``step`` in the engine's thread, after all calls made before and before later ones.

        It must neither call this communicator nor wait for its works.
        """
        return Work(self._group.submit_step(step), {})

    def bind(
        self,
        tensors: Tensors,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
    ) -> Callable[[], None]:
        """Check an :meth:`all_reduce` once, to call it again and again on the same tensors.

        Args:
            tensors: As in :meth:`all_reduce`; kept alive by what is returned, and never looked at
                again: no ``resize_``, no new ``.data``.
            op: As in :meth:`all_reduce`.
            algorithm: As in :meth:`all_reduce`.
            order: As in :meth:`all_reduce`.

        Returns:
            A callable without arguments that reduces ``tensors``; all ranks must call theirs.
        """
        bound: Callable[[], None] = self._group.bind(
            tensors, op_name(op), self._resolve(algorithm, order)
        )
        return bound

    # -- registered tensors ------------------------------------------------------------------------

    def register(self, tensor: Tensor) -> None:
        """Show a tensor of :func:`shared_empty` to all ranks; every rank calls it with its own.

        From then on :meth:`all_reduce` of tensors in that memory (the tensor, its views) reduces
        them where they lie, if on all ranks they lie at the same place of it.

        Args:
            tensor: Lies in memory of :func:`shared_empty`, of one size on all ranks.

        Raises:
            ArgumentError: It does not, or sizes differ; on every rank if on one.
            RingarError: A rank could not map it; on every rank.
            UnsupportedError: This rank's tensors are on a GPU.
            PeerLostError, CollectiveTimeout: As :meth:`all_reduce`.
        """
        if self._device.type != "cpu":
            raise UnsupportedError(
                f"register: this rank's tensors are on {self._device}, memory of shared_empty() is "
                "the CPU's"
            )
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"register: tensor is {tensor!r}, expected a tensor")
        memory = memory_of(tensor)
        pid = self._members[self._rank].pid
        own = [0, 0, 0] if memory is None else [pid, memory.fd, memory.nbytes]
        gathered = torch.empty(3 * self._world_size, dtype=torch.int64)
        self.all_gather(gathered, torch.tensor(own))
        rows: list[list[int]] = gathered.view(-1, 3).tolist()
        for rank, (_, _, nbytes) in enumerate(rows):
            if nbytes == 0 or nbytes != rows[0][2]:
                raise ArgumentError(
                    f"register: the tensor of rank {rank} lies in {nbytes} bytes of shared memory, "
                    f"that of rank 0 in {rows[0][2]}; expected tensors of shared_empty() of one "
                    "size on all ranks"
                )
        region = self._num_regions
        self._num_regions += 1
        problem: RingarError | None = None
        try:
            self._group.add_region(region, [(p, fd) for p, fd, _ in rows], memory)
        except RingarError as error:
            problem = error
        could_not = torch.empty(self._world_size, dtype=torch.int64)
        self.all_gather(could_not, torch.tensor([int(problem is not None)]))
        if could_not.any():
            self._group.remove_region(region)
            if problem is None:
                culprit = self._members[int(could_not.argmax())].name
                problem = RingarError(f"register: {culprit} could not map the others' memory")
            raise problem
        forget = weakref.finalize(memory, _remove_region, weakref.ref(self._group), region)
        # The process's end unmaps it anyway, after calls in the background that still reduce there.
        forget.atexit = False

    # -- groups, plans, statistics -----------------------------------------------------------------

    def new_group(self, ranks: Sequence[int]) -> ProcessCommunicator | None:
        """A communicator of some of the ranks; every rank of this one calls it, with equal ranks.

        Args:
            ranks: Ranks of this communicator; their order gives the new ranks.

        Returns:
            The new communicator, or None for a rank that is not among ``ranks``.

        Raises:
            ArgumentError: Ranks that are none, or twice the same.
        """
        is_listed = isinstance(ranks, Sequence) and not isinstance(ranks, str)
        chosen = list(ranks) if is_listed else []
        if any(isinstance(r, bool) or not isinstance(r, int) for r in chosen) or not all(
            0 <= r < self._world_size for r in chosen
        ):
            raise ArgumentError(
                f"ranks is {ranks!r}, expected ranks from 0 to {self._world_size - 1}"
            )
        if not chosen or len(set(chosen)) != len(chosen):
            raise ArgumentError(f"ranks is {ranks!r}, expected different ranks, at least one")
        if self._rank not in chosen:
            return None
        return ProcessCommunicator(
            self._store,
            chosen.index(self._rank),
            len(chosen),
            name=f"{self._name}/{'-'.join(map(str, chosen))}",
            algorithm=self._algorithm,
            order=self._order,
            timeout=self._timeout_s,
            device=self._device,
        )

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """Return what an all_reduce of ``nbytes`` per rank would do, and why.

        Args:
            nbytes: Bytes of one rank's tensors, which are not registered.
            dtype: Their dtype.

        Returns:
            The plan; ``algorithm`` is as in :meth:`stats`.
        """
        check_plan(nbytes, dtype)
        chosen, reason = self._algorithm, "asked for"
        if self._algorithm == "auto":
            chosen, reason = choose("processes", self._order, nbytes)
        plan = self._group.plan(nbytes, str(dtype).removeprefix("torch."), chosen)
        return Plan.in_processes(
            plan["algorithm"], plan["num_pieces"], reason, self._world_size, nbytes
        )

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what ran: ``{"exchange" | "direct" | "ring" | "registered": {"calls", ...}}``.

        ``exchange`` is ``direct`` for small tensors, and what other collectives do.
        """
        stats: dict[str, dict[str, float]] = self._group.stats()
        return stats

    def __repr__(self) -> str:
        return (
            f"ProcessCommunicator(rank {self._rank} of {self._world_size}, name={self._name!r}, "
            f"algorithm={self._algorithm!r}, order={self._order!r}, timeout={self._timeout_s:g} s, "
            f"device={str(self._device)!r})"
        )

    def _resolve(self, algorithm: str | None, order: str | None) -> str:
        """Return ``"direct"`` or ``"ring"``."""
        if algorithm is None:
            algorithm = self._algorithm
        else:
            check_choice("algorithm", algorithm, ALGORITHMS)
        order = self._order if order is None else check_choice("order", order, ORDERS)
        if algorithm == "ring" and self._device.type != "cpu":
            raise UnsupportedError(
                f"algorithm is 'ring' and this rank's device {self._device}: ranks in processes of "
                "their own have no ring on GPUs; take 'auto' or 'direct'"
            )
        check_ring_order(algorithm, order, "'direct'")
        return choose("processes", order, 0)[0] if algorithm == "auto" else algorithm


def _remove_region(group: weakref.ref[Any], region: int) -> None:
    alive = group()
    if alive is not None:
        alive.remove_region(region)


def _check_one_check(members: Sequence[Member]) -> None:
    odd = [member for member in members if member.check != members[0].check]
    if odd:
        raise ArgumentError(
            f"PYRINGAR_CHECK is {members[0].check!r} for {members[0].name} and {odd[0].check!r} "
            f"for {odd[0].name}, expected the same for all ranks"
        )


def _check_one_kind(members: Sequence[Member]) -> None:
    odd = [member for member in members if member.kind != members[0].kind]
    if odd:
        raise ArgumentError(
            f"device is a {members[0].kind} device for {members[0].name} and a {odd[0].kind} "
            f"device for {odd[0].name}, expected GPUs for all ranks, or for none"
        )


def _check_one_node(members: Sequence[Member]) -> None:
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(member.node, []).append(member.rank)
    if len(nodes) > 1:
        where = "; ".join(f"ranks {ranks} on {members[ranks[0]].host}" for ranks in nodes.values())
        if len({member.host for member in members}) < len(nodes):
            where += (
                "; process numbers or clocks of their own, or no /proc, make one of a container"
            )
        raise ArgumentError(
            f"the ranks are on {len(nodes)} machines ({where}), a ProcessCommunicator is for one; "
            "take pyringar.distributed.HierarchicalCommunicator, or make one per machine"
        )
