"""A communicator over several machines: shared memory inside, gloo or NCCL between machines."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch

from pyringar.choices import ALGORITHMS, Algorithm, Order
from pyringar.comm.arguments import check_timeout
from pyringar.comm.background_work import Work
from pyringar.comm.collective_call import CollectiveCall, tensors_of
from pyringar.comm.exits import close_at_exit, is_inherited
from pyringar.comm.jobs import Jobs
from pyringar.comm.plain_group import check_tensors_of_rank
from pyringar.comm.process_communicator import ProcessCommunicator
from pyringar.comm.rank_communicator import RankCommunicator
from pyringar.comm.rank_info import RankInfo, check_agreed, ranks_by_node
from pyringar.comm.rendezvous import Rendezvous
from pyringar.comm.stores import checked_store
from pyringar.comm.topology import Plan, check_device
from pyringar.distributed.between import Between
from pyringar.distributed.convert import count_changes
from pyringar.distributed.machines import Column, MachineLayout
from pyringar.errors import (
    ArgumentError,
    CollectiveTimeout,
    PeerLostError,
    RingarError,
    UnsupportedError,
)

# Seconds added to timeouts inside a machine, so that a wait for another machine fails first.
_INSIDE_GRACE_S = 1.0


def _meeting(
    store: Any,
    rank: int | None,
    world_size: int | None,
    name: str,
    timeout: float,
    device: torch.device,
    global_ranks: Sequence[int] | None,
) -> Rendezvous:
    store, rank, world_size = checked_store(store, rank, world_size)
    seconds = check_timeout(timeout)
    return Rendezvous(store, rank, world_size, name, seconds, device.type, global_ranks)


def communicator_for(
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    name: str = "default",
    algorithm: Algorithm = "auto",
    order: Order = "any",
    timeout: float = 30.0,
    device: str | torch.device | int | None = None,
    compares_shapes: bool = True,
    global_ranks: Sequence[int] | None = None,
) -> ProcessCommunicator | HierarchicalCommunicator:
    """Make this rank's communicator for a job on one machine or on several.

    Args:
        algorithm: Default for all calls; ``"auto"`` on several machines.

    See `HierarchicalCommunicator` for the other arguments and errors.
    """
    place = check_device("cpu" if device is None else device, "device")
    with _meeting(store, rank, world_size, name, timeout, place, global_ranks) as meeting:
        members = meeting.exchange_members()
        num_nodes = len(ranks_by_node(members))
        if num_nodes == 1:
            one = ProcessCommunicator.__new__(ProcessCommunicator)
            one._configure_rank(meeting.name, algorithm, order, timeout, place)
            one._join(meeting, members, compares_shapes)
            return one
    if algorithm != "auto":
        raise ArgumentError(
            f"algorithm is {algorithm!r}, but the ranks are on {num_nodes} machines: expected "
            "'auto'"
        )
    made = HierarchicalCommunicator.__new__(HierarchicalCommunicator)
    made._join(meeting, members, place, order, timeout, compares_shapes)
    return made


class HierarchicalCommunicator(RankCommunicator):
    """One rank of a group of processes on several machines.

    A `pyringar.ProcessCommunicator` reduces inside each machine. Gloo (CPU tensors) or NCCL (GPUs)
    reduces between machines, over its own connections. ``GLOO_SOCKET_IFNAME`` names the network.

    Each rank with CUDA tensors needs its own GPU. Calls are enqueued on the caller's current
    stream: the host waits for other ranks, never for a GPU. A work completes when its call is
    enqueued. If a rank is lost later, the next call reports it, and results before may be invalid.
    No machine with several GPUs has run this yet.

    Args:
        order: ``"any"`` adds each machine's ranks in rank order, then the machines' sums in the
            order of their first ranks. ``"tree"`` gives the bits of one machine, if each machine
            has consecutive ranks, equally many and a power of two.

    See `pyringar.ProcessCommunicator` for the other arguments and errors.

    Attributes:
        nodes: Ranks of every machine, in the order in which machines are added.

    Cost: with L ranks on each of M machines, a rank sends ``2 (M - 1) / M * N / L`` bytes in an
    all_reduce of N bytes, and 128 bytes to each other machine to compare calls. If machines have
    different numbers of ranks, the first rank of each machine sends all its bytes. Lists, 16-bit
    floats and tensors with gaps are packed first.
    """

    _refused: Mapping[str, str] = {
        **RankCommunicator._refused,
        "bind": "take all_reduce",
        "bind_coalesced": "take all_reduce_coalesced",
        **{f"algorithm is {name!r}": "take 'auto'" for name in ALGORITHMS if name != "auto"},
    }

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        name: str = "default",
        order: Order = "any",
        timeout: float = 30.0,
        device: str | torch.device | int | None = None,
        compares_shapes: bool = True,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        place = check_device("cpu" if device is None else device, "device")
        with _meeting(store, rank, world_size, name, timeout, place, global_ranks) as meeting:
            members = meeting.exchange_members()
        self._join(meeting, members, place, order, timeout, compares_shapes)

    def _join(
        self,
        meeting: Rendezvous,
        members: list[RankInfo],
        device: torch.device,
        order: str,
        timeout: float,
        compares_shapes: bool,
    ) -> None:
        self._rank, self._world_size, self._store = meeting.rank, meeting.world_size, meeting.store
        self._name, self._device, self._members = meeting.name, device, members
        self._global_ranks = meeting.global_ranks
        self._compares_shapes = compares_shapes
        self._configure("auto", order, timeout)
        check_agreed(members)
        self.nodes = ranks_by_node(members)
        self._machines = machines = MachineLayout(self.nodes, self._rank, meeting.global_ranks)
        self._place = f"machine {machines.node} of {len(self.nodes)}, "
        machines.check_order(order)
        self._intra = host = self._inside("machine", device)
        if device.type != "cpu":  # compare calls on the CPU: no wait for a GPU
            host = self._inside("words of machine", torch.device("cpu"))
        self._inside_groups = {host, self._intra}
        self._column = Column(self._store, machines, members, timeout, device, host)
        self._between = Between(machines, members, self._intra, host, self._column, order)
        self._jobs = Jobs("machines")
        weakref.finalize(self, self._jobs.end).atexit = False
        self._failure: BaseException | None = None
        self._is_closed = False
        self._num_calls = 0
        kind = HierarchicalCommunicator
        close_at_exit(self, kind.close, abort=kind.abort, progress=kind._progress)
        self.barrier()  # no rank may exit while others still connect to it

    def _inside(self, name: str, device: torch.device) -> ProcessCommunicator:
        return ProcessCommunicator(
            self._store,
            self._machines.local_rank,
            len(self._machines.here),
            name=f"{name} {self._machines.node}",
            order=self._order,
            timeout=self._timeout_s + _INSIDE_GRACE_S,
            device=device,
            global_ranks=self._machines.numbers(self._machines.here),
        )

    def _run(
        self, call: CollectiveCall, *, async_op: bool = False, what: object = ""
    ) -> Work | None:
        written = check_tensors_of_rank(call, self._device, self._world_size)
        words = str(what) or self._describe(call)
        if is_inherited(self):
            raise RingarError(
                "this communicator was made before fork() and is the parent process's rank. Make a "
                "new one in the child"
            )
        if self._is_closed:
            raise RingarError("this communicator is closed")
        stream = self._current_stream(words)
        is_sent = call.operation == "broadcast" and call.root == self._rank
        count_changes([] if is_sent else written)
        run = partial(self._run_on_thread, words, call, stream)
        job = self._jobs.submit(run, f"{words} of rank {self._number(self._rank)}")
        if async_op:
            return Work(job, {}, words)
        try:
            job.wait()
        except BaseException as error:
            if not job.is_completed():  # interrupted: end the call before it writes
                self._fail_group(error)
                with suppress(RingarError):
                    job.wait()
            raise
        return None

    def _describe(self, call: CollectiveCall) -> str:
        if call.has_root:
            call = call._replace(root=self._number(call.root))
        if call.operation == "barrier":
            return str(call)
        tensors = tensors_of(call.inputs if call.has_inputs else call.outputs)
        numel = sum(tensor.numel() for tensor in tensors)
        is_by_shape = self._compares_shapes
        kinds = repr([(tuple(t.shape) if is_by_shape else t.numel(), t.dtype) for t in tensors])
        digest = hashlib.blake2b(kinds.encode(), digest_size=4).hexdigest()
        dtype = f" {tensors[0].dtype}" if tensors else ""
        order = "" if self._order == "any" else f" in {self._order} order"
        size = f"{numel}{dtype} elements in {len(tensors)} tensors"
        return f"{call} of {size} ({'shapes' if is_by_shape else 'sizes'} {digest}){order}"

    def _order_of(self, algorithm: str, order: str) -> str:
        if order != self._order:
            raise ArgumentError(
                f"order is {order!r}, but this HierarchicalCommunicator adds in the order of its "
                f"constructor, {self._order!r}: make it with communicator_for(order={order!r})"
            )
        return order

    def _submit_step(self, step: Callable[[], object]) -> Work:
        return Work(self._jobs.submit(step, "step"), {}, "step")

    def _make_plan(self, nbytes: int, dtype: torch.dtype) -> Plan:
        pieces = -(-nbytes // dtype.itemsize // self._between.piece_elements())
        return Plan(
            algorithm="hierarchical",
            order="machine" if self._order == "any" else self._order,
            steps=4 * pieces,
            traffic_bytes=6 * self._world_size * nbytes,
            reason=f"{self._machines}: reduced inside, then between, then shared inside",
        )

    def _stats(self) -> dict[str, dict[str, float]]:
        return {"hierarchical": {"calls": self._num_calls}, "inter": dict(self._column.sent)}

    def _set_timeout(self, seconds: float) -> None:
        for group in self._inside_groups:
            group.set_timeout(seconds + _INSIDE_GRACE_S)
        self._column.set_timeout(seconds)

    def _check_peers(self, ranks: Sequence[int]) -> None:
        self._check_not_failed()
        here = self._machines.here
        local = [here.index(rank) for rank in ranks if rank in here]
        self._between.call_inside(lambda: self._intra.check_peers(local))

    def _tell(self, error: RuntimeError) -> None:
        for group in self._inside_groups:
            group._tell(error)

    def _close(self) -> None:
        if is_inherited(self):
            return
        self._is_closed = True
        if self._jobs.is_awaited_here():
            self._fail_group(RingarError("this communicator was closed while a call waited"))
        try:
            self._jobs.close()
        except BaseException as error:
            self._fail_group(error)
            raise
        self._column.close()
        for group in self._inside_groups:
            group.close()

    def _abort(self, why: str) -> None:
        if not is_inherited(self):
            self._fail_group(RingarError(f"rank {self._number(self._rank)} has aborted the group"))
            self.close()

    def _progress(self) -> tuple[int, int] | None:
        num = self._jobs.num_under_way()
        return (num, self._column.num_chunks) if num else None

    def _fail_group(self, why: BaseException) -> None:
        if self._failure is None:
            self._failure = why
            self._column.keep_error(why)  # before other machines see closed connections
        for group in self._inside_groups:
            if isinstance(self._failure, (PeerLostError, CollectiveTimeout)):
                group._tell(self._failure)
            group._abort(_text_of(self._failure))
        self._column.abort()

    def _current_stream(self, what: str) -> Any:
        if self._device.type == "cpu":
            return nullcontext()
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError(
                    f"{what}: ranks on several machines meet on the host in every call, which a "
                    "CUDA graph cannot capture; call it outside of the graph"
                )
        return torch.cuda.stream(torch.cuda.current_stream(self._device))

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, RingarError) else RingarError
            why = _text_of(self._failure)
            raise kind(f"this communicator failed before and cannot be used again: {why}")

    def _run_on_thread(self, what: str, call: CollectiveCall, stream: Any) -> None:
        self._check_not_failed()
        self._between.is_told = False
        try:
            with torch.no_grad(), stream:
                self._between.run(call, what)
        except BaseException as error:
            if self._failure is None and not self._between.is_told:
                raise  # for example memory ran out; no other rank knows of the call
            named = error
            head = f"{what} over {len(self.nodes)} machines: "
            is_told = head in str(error)  # another rank's error has the head already
            if isinstance(error, (PeerLostError, CollectiveTimeout)) and not is_told:
                named = type(error)(f"{head}{error}")
            self._fail_group(named)
            if self._failure is named:
                raise named from error
            raise RingarError(f"{what} was broken off: {_text_of(self._failure)}") from error
        self._num_calls += 1


def _text_of(error: BaseException | None) -> str:
    return str(error) or type(error).__name__
