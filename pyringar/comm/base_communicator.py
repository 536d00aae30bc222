"""The public methods of all communicators, and the interface of transports.

A transport is a subclass of `BaseCommunicator` that moves the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from pyringar.choices import ALGORITHMS, ORDERS, Algorithm, Op, Order, check_choice
from pyringar.comm.arguments import (
    are_lists,
    check_plan,
    check_root,
    check_timeout,
    is_list,
    op_name,
)
from pyringar.comm.background_work import Work
from pyringar.comm.collective_call import WITH_ROOT, WITHOUT_ALGORITHM, CollectiveCall
from pyringar.comm.handles import is_traced
from pyringar.comm.sum_orders import Guarantee, engine_order
from pyringar.comm.topology import Plan
from pyringar.errors import CollectiveTimeout, PeerLostError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self

Tensors = Tensor | Sequence[Tensor]
Lists = Sequence[Tensor] | Sequence[Sequence[Tensor]]

# Errors that close() raises for calls on GPUs that have already returned.
LATE_ERRORS = (CollectiveTimeout, PeerLostError)

PLAIN_ALGORITHMS = ("naive", "sharded")  # algorithms written in plain torch
_ROOTED_SUMS = {"reduce", "reduce_coalesced"}
_OTHERS = {"reduce_scatter", "all_gather", "bind", "bind_coalesced", *_ROOTED_SUMS}
_PLAIN_ONLY = "knows all_reduce and all_reduce_coalesced only; take auto, fused, direct or ring"
# For each algorithm the operations that it does not support, and the end of the error message.
_MISSING = {
    "ring": (_ROOTED_SUMS, "has no root; take auto or direct"),
    **dict.fromkeys(PLAIN_ALGORITHMS, (_OTHERS, _PLAIN_ONLY)),
}


def decline(*_call: object) -> bool:
    """Return False: the call was not run."""
    return False


class BaseCommunicator:
    """Base of all communicators.

    A list group drives all ranks from one process: each call takes a list with one tensor per
    rank. In a group with one local rank each call takes this rank's tensor, and all ranks make the
    same calls in the same order.

    A transport sets ``_world_size`` and implements ``_run``. ``_bind_call``, ``_make_plan``,
    ``_check``, ``_abort`` and ``_close`` are optional. ``_refused`` maps a missing method, or a
    text such as ``"algorithm is 'ring'"``, to the advice in the error message.
    """

    _world_size: int
    _refused: Mapping[str, str] = {}
    _takes_bare_tensors = False
    _algorithm: Algorithm = "auto"
    _order: Order = "any"
    _auto, _why = "direct", ""  # the algorithm that "auto" selects, and the reason
    _default = ("direct", "rank")  # algorithm and order of calls without these arguments
    _has_gpus = False
    _timeout_s = 30.0
    _is_closed = False
    _handle = ""  # identifies the communicator in graphs; "": graphs cannot hold its calls
    # (tensors, op, algorithm, order, are_lists=False) -> bool: runs a prepared all_reduce, or
    # returns False without running it.
    _run_prepared: Callable[..., bool] = staticmethod(decline)
    _run_barrier: Callable[[], None] | None = None  # a prepared barrier, if there is one

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def guarantee(self) -> Guarantee:
        """The changes under which results of the default order keep their bits."""
        return Guarantee.of(self._order)

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensors: Tensors,
        op: Op = "sum",
        *,
        algorithm: Algorithm | None = None,
        order: Order | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce tensors over all ranks in place. Every rank gets the result.

        Args:
            tensors: List group: one tensor per rank. One local rank: its tensor, or a list of its
                tensors. float64, float32, float16, bfloat16, int8, uint8, int32 or int64. Shapes
                and dtypes are equal on all ranks. Strides may differ, but elements may not
                overlap; GPUs of several processes need equal strides.
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"`` or a
                ``torch.distributed.ReduceOp``. A mean divides the sum once; integer means round
                towards 0.
            algorithm: Overrides the communicator's algorithm.
            order: Overrides the communicator's order.
            async_op: Reduce in the background and return a `Work`. ``naive``, ``sharded`` and
                small ``fused`` calls finish before they return.

        Raises:
            ArgumentError: A tensor or argument is wrong: names its index and value. No tensor has
                changed and no other rank is affected. Or ranks in processes made different calls:
                names both calls, on every rank.
            UnsupportedError: This communicator does not support the layout, device, dtype,
                algorithm or operation. Names an alternative.
            CollectiveTimeout, PeerLostError: A rank was late, or its process died: names this rank
                and the rank that waited. Tensors may be partly reduced.

        After an error that concerns several ranks, the communicator refuses all calls.

        Cost for k ranks with N bytes each: ``fused`` reads and writes every byte once, ``2 k N``.
        ``ring`` takes ``2 (k - 1)`` steps; each rank sends ``2 (k - 1) / k`` of its bytes.
        Processes: with two ranks, or up to 32 KiB, a rank reads ``(k + 1) N`` and writes ``2 N``
        bytes and waits once per piece; else it reads ``(3 - 2 / k) N``, writes ``2 N`` and waits
        twice. List groups and GPUs pack tensors with gaps. They also pack permuted tensors, unless
        strides are equal on all ranks.
        """
        is_eager = not async_op and not is_dynamo_compiling()
        if is_eager and self._run_prepared(tensors, op, algorithm, order):
            return None
        return self._all_reduce("all_reduce", tensors, op, algorithm, order, async_op)

    def all_reduce_coalesced(
        self,
        lists: Lists,
        op: Op = "sum",
        *,
        algorithm: Algorithm | None = None,
        order: Order | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce many tensors per rank in one call, such as all gradients of all replicas.

        Args:
            lists: List group: ``lists[rank][i]``. One local rank: ``lists[i]``. Shape and dtype of
                tensor ``i`` are equal on all ranks. No two tensors share memory.

        See `all_reduce` for the other arguments and errors. Cost: one dispatch for all tensors.
        """
        operation = self._of_lists("all_reduce_coalesced", lists)
        are_lists = operation == "all_reduce_coalesced"
        is_eager = not async_op and not is_dynamo_compiling()
        if is_eager and self._run_prepared(lists, op, algorithm, order, are_lists):
            return None
        return self._all_reduce(operation, lists, op, algorithm, order, async_op)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Tensors, op: Op = "sum", *, async_op: bool = False
    ) -> Work | None:
        """Reduce ``inputs`` over all ranks; rank ``r`` gets part ``r`` of the result.

        Args:
            outputs: One tensor per rank; one local rank: its tensor. ``n`` elements each.
            inputs: One tensor per rank; one local rank: its tensor. ``world_size * n`` elements
                each, not changed. Part ``r`` is elements ``r * n`` to ``(r + 1) * n``.

        See `all_reduce` for the other arguments and errors. Cost: ``fused`` reads ``k N`` and
        writes ``N`` bytes. ``ring`` takes ``k - 1`` steps.
        """
        return self._run(self._checked("reduce_scatter", outputs, inputs, op), async_op=async_op)

    def all_gather(
        self, outputs: Tensors, inputs: Tensors, *, async_op: bool = False
    ) -> Work | None:
        """Concatenate the ``inputs`` of all ranks, in rank order, into every output.

        Args:
            outputs: One tensor per rank; one local rank: its tensor. ``world_size * n`` elements.
            inputs: One tensor per rank; one local rank: its tensor. ``n`` elements, not changed.

        See `all_reduce` for the other arguments and errors. Cost: ``fused`` reads ``k n`` and
        writes ``k k n`` elements. ``ring`` takes ``k - 1`` steps.
        """
        return self._run(self._checked("all_gather", outputs, inputs), async_op=async_op)

    def broadcast(self, tensors: Tensors, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` to all other ranks.

        Args:
            tensors: One tensor per rank; one local rank: its tensor.
            root: The source rank.

        See `all_reduce` for the other arguments and errors. Cost with every algorithm: ``N`` bytes
        read and ``(k - 1) N`` written, in one pass. Each of several GPUs copies a slice.
        """
        return self._run(self._checked("broadcast", tensors, root=root), async_op=async_op)

    def broadcast_coalesced(
        self, lists: Lists, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Copy many tensors of rank ``root`` to all other ranks in one call.

        Args:
            lists: ``lists[rank][i]``, as in `all_reduce_coalesced`. List groups only.

        See `broadcast` for the other arguments and errors. Cost: one dispatch for all tensors.
        """
        return self._run(self._checked("broadcast_coalesced", lists, root=root), async_op=async_op)

    def reduce(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Op = "sum",
        *,
        root: int = 0,
        algorithm: Algorithm | None = None,
        order: Order | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``inputs`` over all ranks into one tensor on the device of rank ``root``.

        Args:
            output: ``inputs[root]`` itself, or a tensor of the same shape and dtype in separate
                memory.
            inputs: One tensor per rank, not changed. List groups only.
            root: The rank that gets the result, on its device.
            algorithm: Overrides the communicator's; not ``ring``, ``naive`` or ``sharded``.

        See `all_reduce` for the other arguments, errors and bits. Cost: reads ``k N`` and writes
        ``N`` bytes. Each of several GPUs reduces a slice and writes it to the root; with one rank
        per GPU a link carries at most ``2 N`` bytes each way.
        """
        call = self._checked("reduce", output, inputs, op, algorithm, order, root=root)
        return self._run(call, async_op=async_op)

    def reduce_coalesced(
        self,
        outputs: Sequence[Tensor],
        lists: Sequence[Sequence[Tensor]],
        op: Op = "sum",
        *,
        root: int = 0,
        algorithm: Algorithm | None = None,
        order: Order | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce many tensors per rank to one rank in one call.

        Args:
            outputs: ``outputs[i]`` is ``lists[root][i]`` itself or a tensor in separate memory.
            lists: ``lists[rank][i]``, as in `all_reduce_coalesced`. List groups only.

        See `reduce` for the other arguments and errors. Cost: one dispatch for all tensors.
        """
        call = self._checked("reduce_coalesced", outputs, lists, op, algorithm, order, root=root)
        return self._run(call, async_op=async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all ranks have called `barrier`. For groups with one local rank.

        On GPUs the current streams of the ranks wait for each other; the host does not wait.
        See `all_reduce` for ``async_op`` and errors.
        """
        if self._run_barrier is None or async_op:
            return self._run(self._checked("barrier", []), async_op=async_op)
        self._run_barrier()
        return None

    # -- prepared calls ----------------------------------------------------------------------------

    def bind(
        self,
        tensors: Tensors,
        op: Op = "sum",
        *,
        algorithm: Algorithm | None = None,
        order: Order | None = None,
    ) -> Callable[[], None]:
        """Prepare an `all_reduce` that is called many times on the same tensors.

        Args:
            tensors: As for `all_reduce`. The returned callable keeps them alive.
            algorithm: Overrides the communicator's algorithm; not ``naive`` or ``sharded``.

        Returns:
            A callable without arguments that reduces ``tensors`` in place. Every rank must call
            its callable. It raises ArgumentError and reduces nothing if the address, shape, stride
            or dtype of a tensor has changed, for example after ``resize_``, ``share_memory_``,
            ``set_``, a new ``.data`` or ``torch.multiprocessing``. Bind again then. It does not
            detect a new ``requires_grad``, a storage that shrank in place, or freed NumPy memory.

        See `all_reduce` for the other arguments and errors. Cost: 0.1 microseconds per tensor.
        """
        call = self._checked("bind", tensors, None, op, algorithm, order)
        return self._bind_call(call._replace(operation="all_reduce"))

    def bind_coalesced(
        self,
        lists: Lists,
        op: Op = "sum",
        *,
        algorithm: Algorithm | None = None,
        order: Order | None = None,
    ) -> Callable[[], None]:
        """Prepare an `all_reduce_coalesced` that is called many times on the same tensors.

        Args:
            lists: As for `all_reduce_coalesced`. The returned callable keeps their tensors alive.

        See `bind` for the other arguments, the callable and errors.
        """
        operation = self._of_lists("bind_coalesced", lists)
        call = self._checked("bind_coalesced", lists, None, op, algorithm, order)
        return self._bind_call(call._replace(operation=operation))

    # -- state, plans, statistics ------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the communicator is closed or a call has failed. Does not wait.

        Checks nothing while another thread is in a call of a list group.

        Raises:
            CollectiveTimeout, PeerLostError: A rank was late or lost, perhaps in an earlier call.
            RingarError: The communicator is closed, or was aborted.
        """
        self._check()

    def abort(self) -> None:
        """End running calls at once; every later call raises.

        With one local rank, running calls fail on all ranks with an error that names this rank,
        and this rank closes. In list groups on GPUs, waiting kernels end. The tensors of aborted
        calls have undefined values. May be called from any thread.

        Raises:
            UnsupportedError: A list group without GPUs, whose calls always end by themselves.
        """
        self._check_offered("abort")
        self._abort("")

    def close(self) -> None:
        """Wait for background calls, then end all threads. May be called again.

        Every later call raises `RingarError`. Later calls of ranks in other processes raise
        `PeerLostError`. An exception from a signal handler ends the wait within 0.2 s; calls that
        have not begun then fail. List groups on GPUs do not react to signals: use `abort` from
        another thread.

        Raises:
            CollectiveTimeout, PeerLostError: On GPUs, a rank was late or lost in one of the last
                calls, or a GPU still runs and its tensors are kept. A second close() does not
                raise.
        """
        self._close()

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """Return the `Plan` of an all_reduce: algorithm, order, steps, traffic and reason.

        Args:
            nbytes: Size of one rank's tensors in bytes.
            dtype: Dtype of the tensors.

        Raises:
            ArgumentError: ``nbytes`` is not a size, or ``dtype`` is not supported.
        """
        self._check_offered("plan")
        check_plan(nbytes, dtype)
        return self._make_plan(nbytes, dtype)

    def stats(self) -> dict[str, dict[str, float]]:
        """Return statistics of past calls: ``{algorithm: {"calls", "bytes", "busy_s"}}``.

        ``bytes`` counts the data of one rank. GPUs have no ``busy_s``; ``naive`` and ``sharded``
        count only calls. With ranks in processes, ``exchange`` counts small all-reduces and all
        other collectives. On several machines, ``inter`` counts exchanges between machines.
        """
        return self._stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Keep the exception of the `with` block, which may have caused the late error of close().
        with nullcontext() if error is None else suppress(*LATE_ERRORS):
            self.close()

    # -- what a transport implements ---------------------------------------------------------------

    def _run(
        self, call: CollectiveCall, *, async_op: bool = False, what: object = ""
    ) -> Work | None:
        """Check the tensors and run the call. Return a `Work` if ``async_op``.

        ``what`` describes the user's call if ``call`` replaces it. Ranks compare this text.
        """
        raise NotImplementedError

    def _bind_call(self, call: CollectiveCall) -> Callable[[], None]:
        raise NotImplementedError

    def _make_plan(self, nbytes: int, dtype: torch.dtype) -> Plan:
        raise NotImplementedError

    def _stats(self) -> dict[str, dict[str, float]]:
        return {}

    def _check(self) -> None:
        raise NotImplementedError

    def _abort(self, why: str) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        self._is_closed = True

    @property
    def _reason(self) -> str:
        return self._why if self._algorithm == "auto" else "asked for"

    def _order_of(self, algorithm: str, order: str) -> str:
        """Return the order of additions. Raise if ``algorithm`` cannot keep ``order``."""
        return engine_order(algorithm, order, has_gpus=self._has_gpus)

    # -- checks ------------------------------------------------------------------------------------

    def _configure(self, algorithm: Any, order: Any, timeout: Any) -> None:
        self._algorithm = self._check_algorithm(algorithm)
        self._order = check_choice("order", order, ORDERS)
        self._timeout_s = check_timeout(timeout)
        self._default = self._resolve(algorithm, order)

    def _check_offered(self, feature: str) -> None:
        if feature in self._refused:
            raise UnsupportedError(
                f"{feature}: a {type(self).__name__} does not offer this; {self._refused[feature]}"
            )

    def _check_algorithm(self, algorithm: Any) -> Algorithm:
        checked = check_choice("algorithm", algorithm, ALGORITHMS)
        self._check_offered(f"algorithm is {algorithm!r}")
        return checked

    def _resolve(self, algorithm: str | None, order: str | None) -> tuple[str, str]:
        chosen = self._algorithm if algorithm is None else self._check_algorithm(algorithm)
        name = self._auto if chosen == "auto" else chosen
        order = self._order if order is None else check_choice("order", order, ORDERS)
        return name, self._order_of(name, order)

    def _checked(
        self,
        operation: str,
        outputs: Any,
        inputs: Any = None,
        op: Any = "sum",
        algorithm: str | None = None,
        order: str | None = None,
        *,
        root: int = 0,
    ) -> CollectiveCall:
        """Check all arguments except the tensors, and return the call."""
        self._check_offered(operation)
        if operation in WITH_ROOT:
            check_root(root, self._world_size, operation)
        if operation in WITHOUT_ALGORITHM:
            return CollectiveCall(operation, outputs, inputs, op, self._auto, "rank", root)
        chosen, added_in = self._default
        if algorithm is not None or order is not None:
            chosen, added_in = self._resolve(algorithm, order)
        missing, why = _MISSING.get(chosen, ((), ""))
        if operation in missing:
            raise UnsupportedError(f"{operation}: algorithm {chosen!r} {why}")
        return CollectiveCall(operation, outputs, inputs, op_name(op), chosen, added_in, root)

    def _of_lists(self, operation: str, lists: Any) -> str:
        """Return the operation that reduces ``lists``."""
        return "all_reduce_coalesced"

    def _all_reduce(
        self,
        operation: str,
        given: Any,
        op: Any,
        algorithm: str | None,
        order: str | None,
        async_op: bool,
    ) -> Work | None:
        if self._handle and not async_op and is_traced():
            is_per_rank = operation == "all_reduce_coalesced"
            if self._takes_bare_tensors and isinstance(given, Tensor):
                given = [given]
            if are_lists(given) if is_per_rank else is_list(given):
                from pyringar.comm import operators

                count = len(given) if is_per_rank else 0
                flat = [tensor for tensors in given for tensor in tensors] if is_per_rank else given
                operators.reduce(self._handle, flat, op, algorithm, order, num_lists=count)
                return None
        call = self._checked(operation, given, None, op, algorithm, order)
        return self._run(call, async_op=async_op)
