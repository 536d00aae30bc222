"""The communicator: which ranks there are, which algorithm runs, and the collectives themselves.

One process drives all ranks: every call takes one tensor (or list) per rank, in rank order.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyringar.choices import ALGORITHMS, ORDERS, check_choice
from pyringar.comm import arrays, reference
from pyringar.comm.arguments import (
    are_lists,
    check_max_blocks,
    check_plan,
    check_root,
    check_timeout,
    is_list,
    op_name,
)
from pyringar.comm.auto import choose
from pyringar.comm.base import EngineCommunicator, handle_of, is_traced
from pyringar.comm.orders import engine_order
from pyringar.comm.plain_group import PlainGroup
from pyringar.comm.topology import Plan, Topology, check_devices
from pyringar.comm.work import Work
from pyringar.engine import load
from pyringar.errors import ArgumentError, CompilerNotFoundError, UnsupportedError

__all__ = ["Communicator", "Work"]

# Algorithms in plain torch. They know lists of tensors only, not the other collectives.
_PYTHON_ALGORITHMS = ("sharded", "naive")

TensorList = Sequence[Tensor]

logger = logging.getLogger(__name__)


def _make_group(devices: tuple[torch.device, ...], timeout_s: float, limits: dict[str, int]) -> Any:
    if all(device.type == "cpu" for device in devices):
        return load.engine().Group(len(devices), timeout_s)
    indices = [-1 if device.type == "cpu" else device.index for device in devices]
    group = load.cuda_engine().Group(indices, timeout_s, **limits)
    if not group.has_peers():
        logger.warning(
            "the GPUs %s cannot reach each other's memory: every byte goes through the host's",
            ", ".join(f"cuda:{index}" for index in sorted(set(indices) - {-1})),
        )
    return group


class Communicator(EngineCommunicator):
    """A group of ranks that reduce together.

    Args:
        devices: One device per rank, for example ``["cpu"] * 4``. Ranks may share a device.
        algorithm: ``"auto"``, or one of ``"fused"``, ``"direct"``, ``"ring"``, ``"sharded"``,
            ``"naive"`` for every call that names none itself.
        order: ``"rank"`` promises the bits of ``((x0 + x1) + x2) + ...`` (a NaN stays a NaN, its
            payload and sign are not promised), ``"tree"`` those of a balanced tree, which may be
            the same on 1, 2, 4 or 8 ranks, ``"exact"`` the correctly rounded sum (or the mean made
            of it), on the CPU; ``"any"`` lets the ring add in its own order. `Guarantee` says what
            each keeps. Bits are equal on all ranks and in every run either way.
        timeout: Seconds that a call waits for a rank which makes no progress. A call in which all
            ranks move may take longer.
        max_blocks: Most thread blocks of a call on each GPU; None: as many as help. A ``ring``
            takes at least one for each rank of the device.

    Raises:
        ArgumentError: A device that is not there (names those that are), an unknown algorithm or
            order, a timeout or ``max_blocks`` that is no positive number, ``max_blocks`` where no
            rank is on a GPU.
        BuildError: The engine cannot be built, for ranks on GPUs the CUDA engine. Only if there is
            no compiler, ``naive`` and ``sharded`` do without it, and warn.

    ``auto`` takes ``fused`` where all ranks share a memory, and ``direct`` elsewhere; `plan` says
    which, and why.

    On GPUs a call is enqueued on each device's current stream, and the host does not wait.
    ``async_op`` uses streams of the communicator; ``Work.wait()`` orders the current streams after
    it. Kernels of ``ring`` wait for each other: a ring that timed out raises in the next call, in
    `check` or in `close`, and a ``cudaFree`` in another thread can hold it up until the timeout.
    Ranks in the host's memory beside GPUs are staged: the host then waits.

    A CUDA graph can capture the collectives if all ranks are on GPUs, except a ``ring`` between
    GPUs; else they raise `UnsupportedError`. The current streams of all GPUs must be in the
    capture: let each wait for the captured stream first, and the captured stream for each at the
    end. A graph may be replayed beside other calls, and after `close`.

    Inside ``torch.compile``, `all_reduce` and `all_reduce_coalesced` stay in the graph as an
    operator; other calls break it. `pyringar.ops` returns new tensors instead.

    Several threads may use one communicator; its collectives run one at a time. ``fused`` computes
    on CPUs with torch's OpenMP threads, as many as ``torch.set_num_threads`` says.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device],
        *,
        algorithm: str = "auto",
        order: str = "any",
        timeout: float = 30.0,
        max_blocks: int | None = None,
    ) -> None:
        self._devices = check_devices(devices)
        self._topology = Topology.of(self._devices)
        self._auto, self._why = choose(self._topology.place)
        self._algorithm = check_choice("algorithm", algorithm, ALGORITHMS)
        self._order = check_choice("order", order, ORDERS)
        self._timeout_s = check_timeout(timeout)
        has_gpus = any(device.type != "cpu" for device in self._devices)
        limits = check_max_blocks(max_blocks, has_gpus=has_gpus)
        self._default = self._resolve(algorithm, order)
        try:
            self._group = _make_group(self._devices, self._timeout_s, limits)
        except CompilerNotFoundError as error:
            if self._algorithm not in _PYTHON_ALGORITHMS:
                raise
            logger.warning("%s runs in plain torch, without the engine: %s", algorithm, error)
            self._group = PlainGroup(self._devices, str(error))
        self._in_flight = {}
        self._now = self._group.prepared(*self._default) if self._default[0] not in _PYTHON_ALGORITHMS else None
        what = f"{self._topology}, algorithm={algorithm!r}, order={order!r}"
        self._handle = handle_of(self, what)
        self._python_calls = dict.fromkeys(_PYTHON_ALGORITHMS, 0)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._devices)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of every rank."""
        return self._devices

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensors: TensorList,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce one tensor per rank; every rank's tensor then holds the result.

        Args:
            tensors: ``world_size`` tensors of equal shape and dtype, each in any layout without
                overlap: elements belong together by index. float64, float32, float16, bfloat16,
                int8, uint8, int32 or int64.
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"`` or a
                ``torch.distributed.ReduceOp``. Means divide once, after the sum; those of integers
                towards zero.
            algorithm: Overrides the communicator's.
            order: Overrides the communicator's.
            async_op: Return a `Work` and reduce in the background. ``naive``, ``sharded`` and a
                short ``fused`` call reduce before they return. See `Work` for what must stay until
                it is done.

        Raises:
            ArgumentError: Names the index and value that is wrong; nothing was changed.
            UnsupportedError: A layout, device or dtype that no engine here handles.
            CollectiveTimeout: A rank was late; names who waited for whom. The communicator then
                refuses further calls.

        Cost: ``fused`` reads and writes every byte once, ``2 k N`` in all. ``ring`` takes
        ``2 (k - 1)`` steps, each rank sending ``2 (k - 1) / k`` of its bytes. Tensors with gaps
        are packed first and unpacked after; so are those not in the order of their index, unless
        all ranks' lie alike.
        """
        if not async_op and self._now is not None and not torch.compiler.is_dynamo_compiling() and self._now(tensors, op, algorithm, order):
            return None
        if is_traced() and is_list(tensors) and not async_op:
            from pyringar.comm import operators

            operators.reduce(self._handle, tensors, op, algorithm, order)
            return None
        chosen, order = self._resolve(algorithm, order)
        name = op_name(op)
        if chosen in _PYTHON_ALGORITHMS:
            self._group.check_call("all_reduce", tensors)
            return self._run_in_python("all_reduce", chosen, [[t] for t in tensors], name, async_op)
        native = self._group.run(
            "all_reduce", tensors, None, name, chosen, order, 0,
            self._in_flight if async_op else None
        )
        return self._begun(native, "all_reduce", name, chosen) if async_op else None

    def all_reduce_coalesced(
        self,
        lists: Sequence[TensorList],
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce many tensors per rank in one call, as all gradients of all replicas.

        Args:
            lists: ``lists[rank][i]``; tensor ``i`` agrees over ranks as in `all_reduce`,
                different ``i`` may differ in everything. No two share memory.

        See `all_reduce` for the other arguments and errors.

        Cost: one dispatch for all tensors; packed is only what `all_reduce` would pack.
        """
        if is_traced() and are_lists(lists) and not async_op:
            from pyringar.comm import operators

            flat = [tensor for tensors in lists for tensor in tensors]
            operators.reduce(self._handle, flat, op, algorithm, order, num_lists=len(lists))
            return None
        chosen, order = self._resolve(algorithm, order)
        name = op_name(op)
        if chosen in _PYTHON_ALGORITHMS:
            self._group.check_call("all_reduce_coalesced", lists)
            return self._run_in_python("all_reduce_coalesced", chosen, lists, name, async_op)
        native = self._group.run(
            "all_reduce_coalesced", lists, None, name, chosen, order, 0,
            self._in_flight if async_op else None
        )
        return self._begun(native, "all_reduce_coalesced", name, chosen) if async_op else None

    def reduce_scatter(
        self, outputs: TensorList, inputs: TensorList, op: Any = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduce ``inputs`` over all ranks and leave part ``r`` of the result in ``outputs[r]``.

        Args:
            outputs: One tensor per rank, ``n`` elements each.
            inputs: One tensor per rank, ``world_size * n`` elements each, left as they are; part
                ``r`` are elements ``r * n`` to ``(r + 1) * n`` in index order.

        See `all_reduce` for the other arguments and errors.

        Cost: ``fused`` reads ``k N`` and writes ``N`` bytes; ``ring`` takes ``k - 1`` steps.
        """
        algorithm, order = self._resolve_engine("reduce_scatter")
        native = self._group.run("reduce_scatter",
            outputs, inputs, op_name(op), algorithm, order, 0, self._in_flight if async_op else None
        )
        return self._begun(native, "reduce_scatter", op_name(op), algorithm) if async_op else None

    def all_gather(
        self, outputs: TensorList, inputs: TensorList, *, async_op: bool = False
    ) -> Work | None:
        """Put all ranks' ``inputs``, end to end in rank order, into every rank's output.

        Args:
            outputs: One tensor per rank, ``world_size * n`` elements each.
            inputs: One tensor per rank, ``n`` elements each, left as they are.

        See `all_reduce` for the other arguments and errors.

        Cost: ``fused`` reads ``k n`` and writes ``k k n`` elements; ``ring`` takes ``k - 1`` steps.
        """
        algorithm, _ = self._resolve_engine("all_gather")
        native = self._group.run("all_gather",
            outputs, inputs, "sum", algorithm, "rank", 0, self._in_flight if async_op else None
        )
        return self._begun(native, "all_gather", algorithm) if async_op else None

    def broadcast(
        self, tensors: TensorList, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's.

        Args:
            root: The rank whose tensor is copied.

        See `all_reduce` for the other arguments and errors.

        Cost: one pass, ``N`` bytes read and ``(k - 1) N`` written, whatever the algorithm. Each of
        several GPUs reads a slice from the root and writes it to the other ranks.
        """
        check_root(root, len(self._devices))
        native = self._group.run("broadcast", tensors, None, "sum", "fused", "rank", root, self._in_flight if async_op else None)
        return self._begun(native, "broadcast") if async_op else None

    def broadcast_coalesced(
        self, lists: Sequence[TensorList], root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Copy the tensors of rank ``root`` into every other rank's, all in one call.

        Args:
            lists: ``lists[rank][i]``, as in `all_reduce_coalesced`.

        See `broadcast` for the other arguments and errors.

        Cost: that of one `broadcast` of all bytes, and one dispatch.
        """
        check_root(root, len(self._devices), "broadcast_coalesced")
        native = self._group.run("broadcast_coalesced", lists, None, "sum", "fused", "rank", root, self._in_flight if async_op else None)
        return self._begun(native, "broadcast_coalesced") if async_op else None

    def reduce(
        self,
        output: Tensor,
        inputs: TensorList,
        op: Any = "sum",
        *,
        root: int = 0,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``inputs`` over all ranks into one tensor on the device of rank ``root``.

        Args:
            output: Of the inputs' shape and dtype. It is ``inputs[root]`` itself (in place), or
                shares no memory with an input.
            inputs: One tensor per rank, left as they are.
            root: The rank on whose device ``output`` is.
            algorithm: Overrides the communicator's; ``ring``, ``naive`` and ``sharded`` have no
                reduction to one rank and raise `UnsupportedError`.

        See `all_reduce` for the other arguments and errors, and for the bits of the result.

        Cost: reads ``k N`` and writes ``N`` bytes. Each of several GPUs reduces a slice and writes
        it to the root: with a rank on each no link carries more than ``2 N`` bytes each way.
        """
        chosen, order = self._resolve_reduce("reduce", root, algorithm, order)
        in_flight = self._in_flight if async_op else None
        native = self._group.run("reduce", output, inputs, op_name(op), chosen, order, root, in_flight)
        return self._begun(native, "reduce", op_name(op), chosen) if async_op else None

    def reduce_coalesced(
        self,
        outputs: TensorList,
        lists: Sequence[TensorList],
        op: Any = "sum",
        *,
        root: int = 0,
        algorithm: str | None = None,
        order: str | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce many tensors per rank into the tensors of one rank, all in one call.

        Args:
            outputs: Tensor ``i`` is ``lists[root][i]`` itself, or shares no memory with another.
            lists: ``lists[rank][i]``, as in `all_reduce_coalesced`.

        See `reduce` for the other arguments, errors and bits.

        Cost: that of one `reduce` of all bytes, and one dispatch.
        """
        name = op_name(op)
        chosen, order = self._resolve_reduce("reduce_coalesced", root, algorithm, order)
        in_flight = self._in_flight if async_op else None
        native = self._group.run("reduce_coalesced", outputs, lists, name, chosen, order, root, in_flight)
        return self._begun(native, "reduce_coalesced", name, chosen) if async_op else None

    def bind(
        self,
        tensors: TensorList,
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
    ) -> Callable[[], None]:
        """Check an `all_reduce` once, to call it again and again on the same tensors.

        Args:
            tensors: The returned callable keeps them alive.
            algorithm: Overrides the communicator's; ``naive`` and ``sharded`` cannot be bound.

        Returns:
            A callable without arguments that reduces ``tensors`` in place. It raises ArgumentError
            and reduces nothing if a tensor has other memory, a smaller storage, or another shape,
            stride or dtype than when it was bound: after ``resize_``, ``share_memory_``, ``set_``,
            a new ``.data`` or ``torch.multiprocessing``. Bind again then. It does not look for
            memory of NumPy arrays that ``ndarray.resize`` freed, nor for a new ``requires_grad``.

        See `all_reduce` for the other arguments and errors.

        Cost: beside the reduction, about 0.1 microseconds for each tensor.
        """
        chosen = self._resolve_engine("bind", algorithm, order)
        bound: Callable[[], None] = self._group.bind("all_reduce", tensors, op_name(op), *chosen)
        return bound

    def bind_coalesced(
        self,
        lists: Sequence[TensorList],
        op: Any = "sum",
        *,
        algorithm: str | None = None,
        order: str | None = None,
    ) -> Callable[[], None]:
        """Check an `all_reduce_coalesced` once, to call it again and again on the same tensors.

        Args:
            lists: ``lists[rank][i]``; the returned callable keeps their tensors alive.

        See `bind` for the other arguments, the callable and its cost, and `all_reduce` for errors.
        """
        chosen = self._resolve_engine("bind_coalesced", algorithm, order)
        bound: Callable[[], None] = self._group.bind("all_reduce_coalesced", lists, op_name(op), *chosen)
        return bound

    def _begin_bucket(self, lists: list[list[Tensor]], op: str, after: Any) -> Work | None:
        """Begin an `all_reduce_coalesced`.

        Args:
            after: What says when the tensors are there, of a bucketer's step.
        """
        chosen, order = self._resolve(None, None)
        # What torch reads, to pack it or to reduce it itself, it reads on the current streams.
        is_read_here = chosen in _PYTHON_ALGORITHMS or any(
            tensor.is_neg() or not tensor.is_contiguous() for mine in lists for tensor in mine
        )
        if is_read_here:
            ready, bucket = after
            for rank in range(len(self._devices)):
                ready.make_wait(bucket, rank)
            return self.all_reduce_coalesced(lists, op, async_op=True)
        native = self._group.run("all_reduce_coalesced", lists, None, op, chosen, order, 0, self._in_flight, after)
        return self._begun(native, "all_reduce_coalesced", op, chosen)

    # -- failures ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the communicator is closed or a call has failed; wait for nothing.

        While another thread is in a call it looks at nothing.

        Raises:
            CollectiveTimeout: A rank was late; also in a call that had returned, and has run on a
                GPU by now.
            RingarError: The communicator is closed, or was aborted.
        """
        self._group.check_usable()

    def abort(self) -> None:
        """End what runs on GPUs: kernels that wait leave, and every call raises from now on.

        Tensors of calls that were under way hold anything. May be called from any thread.

        Raises:
            UnsupportedError: No rank is on a GPU; calls on the CPU end by themselves.
        """
        if all(device.type == "cpu" for device in self._devices):
            raise UnsupportedError(
                "abort: no rank is on a GPU, and calls on the CPU end themselves"
            )
        self._group.abort()

    # -- what would run, what ran ------------------------------------------------------------------

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """Describe an all_reduce of ``nbytes`` per rank: algorithm, order, traffic, reason.

        Args:
            nbytes: Bytes of one rank's tensor.
            dtype: Its dtype.

        Raises:
            ArgumentError: An argument is neither.
        """
        check_plan(nbytes, dtype)
        algorithm, order = self._resolve(None, None)
        reason = self._why if self._algorithm == "auto" else "asked for"
        plan = Plan.of(algorithm, reason, self._topology, nbytes, order)
        if algorithm != "fused" or self._topology.place != "host":
            return plan
        traffic_bytes = min(plan.traffic_bytes, sys.maxsize)
        return replace(plan, threads=load.engine().describe_workers(traffic_bytes))

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what ran so far: ``{algorithm: {"calls", "bytes", "busy_s"}}``.

        ``bytes`` counts one rank's data. Algorithms in plain torch count calls only, and on GPUs
        nobody on the host knows ``busy_s``.
        """
        stats: dict[str, dict[str, float]] = self._group.stats()
        for name, calls in self._python_calls.items():
            if calls:
                stats[name] = {"calls": calls}
        return stats

    def __repr__(self) -> str:
        closed = "closed, " if self._is_closed else ""
        return (
            f"Communicator({closed}{self._topology}, algorithm={self._algorithm!r}, "
            f"order={self._order!r}, timeout={self._timeout_s:g} s)"
        )

    # -- helpers -----------------------------------------------------------------------------------

    def _resolve(self, algorithm: str | None, order: str | None) -> tuple[str, str]:
        if algorithm is None and order is None:
            return self._default
        if algorithm is None:
            algorithm = self._algorithm
        else:
            check_choice("algorithm", algorithm, ALGORITHMS)
        order = self._order if order is None else check_choice("order", order, ORDERS)
        if algorithm == "auto":
            algorithm = self._auto
        added_in = engine_order(algorithm, order, has_gpus=self._topology.place != "host")
        if algorithm == "fused" and not self._topology.is_one_memory:
            raise ArgumentError(
                f"algorithm is 'fused', which needs all ranks in one memory; here are "
                f"{self._topology}; take auto, direct or ring"
            )
        return algorithm, added_in

    def _resolve_engine(
        self, what: str, algorithm: str | None = None, order: str | None = None
    ) -> tuple[str, str]:
        chosen, order = self._resolve(algorithm, order)
        if chosen in _PYTHON_ALGORITHMS:
            raise UnsupportedError(
                f"{what}: algorithm {chosen!r} knows all_reduce and all_reduce_coalesced only; "
                "take auto, fused, direct or ring"
            )
        return chosen, order

    def _resolve_reduce(
        self, what: str, root: int, algorithm: str | None, order: str | None
    ) -> tuple[str, str]:
        check_root(root, len(self._devices), what)
        chosen, order = self._resolve_engine(what, algorithm, order)
        if chosen == "ring":
            raise UnsupportedError(f"{what}: algorithm 'ring' has no root; take auto or direct")
        return chosen, order

    def _run_in_python(
        self, what: str, algorithm: str, lists: Sequence[TensorList], op: str, async_op: bool
    ) -> Work | None:
        lists = [arrays.as_tensors(tensors) for tensors in lists]
        if algorithm == "sharded":
            reference.sharded_all_reduce(lists, op)
        else:
            for tensors in zip(*lists, strict=True):
                reference.naive_all_reduce(tensors, op)
        self._python_calls[algorithm] += 1
        return Work(None, {}, what, op, algorithm) if async_op else None
