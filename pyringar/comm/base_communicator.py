"""The public calls of every communicator: names, arguments, checks, plans and errors.

A subclass is a transport: it moves the data. `BaseCommunicator` says what a transport implements.
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

# Errors of close() about calls that had returned, on GPUs.
LATE_ERRORS = (CollectiveTimeout, PeerLostError)

PLAIN_ALGORITHMS = ("naive", "sharded")  # in plain torch
_ROOTED_SUMS = {"reduce", "reduce_coalesced"}
_OTHERS = {"reduce_scatter", "all_gather", "bind", "bind_coalesced", *_ROOTED_SUMS}
_PLAIN_ONLY = "knows all_reduce and all_reduce_coalesced only; take auto, fused, direct or ring"
# The operations that an algorithm does not know, and the rest of their error.
_MISSING = {
    "ring": (_ROOTED_SUMS, "has no root; take auto or direct"),
    **dict.fromkeys(PLAIN_ALGORITHMS, (_OTHERS, _PLAIN_ONLY)),
}


def decline(*_call: object) -> bool:
    """Return False: the call was not run."""
    return False


class BaseCommunicator:
    """A group of ranks that reduce together.

    A list group drives all ranks from one process: each call takes one tensor per rank, in rank
    order. A group with one local rank takes its tensor bare: all ranks make equal calls in order.

    A transport is a subclass. It sets ``_world_size`` and implements ``_run``, and ``_bind_call``,
    ``_make_plan``, ``_check``, ``_abort`` and ``_close`` if it has them. ``_refused`` maps features
    that it lacks, methods or text such as ``"algorithm is 'ring'"``, to the caller's alternatives.
    """

    _world_size: int
    _refused: Mapping[str, str] = {}
    _takes_bare_tensors = False
    _algorithm: Algorithm = "auto"
    _order: Order = "any"
    _auto, _why = "direct", ""  # the algorithm of "auto", and the reason for it
    _default = ("direct", "rank")  # algorithm and order of calls that name neither
    _has_gpus = False
    _timeout_s = 30.0
    _is_closed = False
    _handle = ""  # of this communicator in graphs; "": graphs cannot hold its calls
    # Runs an all_reduce, (tensors, op, algorithm, order, are_lists=False) -> bool. False: not run.
    _run_prepared: Callable[..., bool] = staticmethod(decline)
    _run_barrier: Callable[[], None] | None = None  # a prepared barrier

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def guarantee(self) -> Guarantee:
        """Changes that keep the bits of calls which name no order."""
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
        """Reduce tensors over all ranks, in place: every rank gets the result.

        Args:
            tensors: List group: one tensor per rank. One local rank: its tensor, or a list of its
                tensors. float64, float32, float16, bfloat16, int8, uint8, int32 or int64. Shapes
                and dtypes agree over ranks. Layouts may differ if no elements overlap: elements
                belong together by index. GPUs of several processes need equal strides.
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"prod"`` or a
                ``torch.distributed.ReduceOp``. Means divide once, at the end; integers towards 0.
            algorithm: Overrides the communicator's.
            order: Overrides the communicator's.
            async_op: Return a `Work` and reduce in the background. ``naive``, ``sharded`` and a
                short ``fused`` call reduce before they return.

        Raises:
            ArgumentError: Names the index and value that is wrong; nothing was changed, and no
                other rank was told. Or processes made different calls: names both, on every rank.
            UnsupportedError: A layout, device, dtype, algorithm or operation that this
                communicator does not offer. Names the alternative.
            CollectiveTimeout, PeerLostError: A rank was late, or its process is gone: names it and
                the rank that waited. Tensors may be half reduced.

        After an error that other ranks know of, the communicator refuses all calls.

        Cost for k ranks with N bytes each: ``fused`` reads and writes every byte once, ``2 k N``.
        ``ring`` takes ``2 (k - 1)`` steps; each rank sends ``2 (k - 1) / k`` of its bytes.
        Processes: two ranks, or up to 32 KiB, read ``(k + 1) N`` and write ``2 N`` per rank, with
        one wait per piece; else ``(3 - 2 / k) N`` and ``2 N``, with two waits. List groups and
        GPUs pack tensors with gaps, and permuted tensors unless they lie alike on all ranks.
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
            lists: List group: ``lists[rank][i]``. One local rank: ``lists[i]``. Tensor ``i`` agrees
                over ranks as in `all_reduce`. No two tensors share memory.

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
        """Reduce ``inputs`` over all ranks and leave part ``r`` of the result on rank ``r``.

        Args:
            outputs: One tensor per rank; one local rank: its tensor. ``n`` elements each.
            inputs: Alike, ``world_size * n`` elements each; not changed. Part ``r`` is elements
                ``r * n`` to ``(r + 1) * n`` in index order.

        See `all_reduce` for the other arguments and errors. Cost: ``fused`` reads ``k N`` and
        writes ``N`` bytes. ``ring`` takes ``k - 1`` steps.
        """
        return self._run(self._checked("reduce_scatter", outputs, inputs, op), async_op=async_op)

    def all_gather(
        self, outputs: Tensors, inputs: Tensors, *, async_op: bool = False
    ) -> Work | None:
        """Put all ranks' ``inputs``, end to end in rank order, into every rank's output.

        Args:
            outputs: One tensor per rank; one local rank: its tensor. ``world_size * n`` elements.
            inputs: Alike, ``n`` elements each; not changed.

        See `all_reduce` for the other arguments and errors. Cost: ``fused`` reads ``k n`` and
        writes ``k k n`` elements. ``ring`` takes ``k - 1`` steps.
        """
        return self._run(self._checked("all_gather", outputs, inputs), async_op=async_op)

    def broadcast(self, tensors: Tensors, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy the tensor of rank ``root`` into every other rank's.

        Args:
            tensors: One tensor per rank; one local rank: its tensor.
            root: The rank whose tensor is copied.

        See `all_reduce` for the other arguments and errors. Cost: one pass, ``N`` bytes read and
        ``(k - 1) N`` written, whatever the algorithm. Each of several GPUs copies a slice.
        """
        return self._run(self._checked("broadcast", tensors, root=root), async_op=async_op)

    def broadcast_coalesced(
        self, lists: Lists, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Copy the tensors of rank ``root`` into every other rank's, all in one call.

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
            output: Of the inputs' shape and dtype: ``inputs[root]`` itself, or in other memory.
            inputs: One tensor per rank, not changed. List groups only.
            root: The rank on whose device ``output`` is.
            algorithm: Overrides the communicator's; not ``ring``, ``naive`` or ``sharded``.

        See `all_reduce` for the other arguments, errors and bits. Cost: reads ``k N`` and writes
        ``N`` bytes. Each of several GPUs reduces a slice and writes it to the root: with a rank on
        each no link carries more than ``2 N`` bytes each way.
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
        """Reduce many tensors per rank into the tensors of one rank, all in one call.

        Args:
            outputs: Tensor ``i`` is ``lists[root][i]`` itself, or shares no memory with another.
            lists: ``lists[rank][i]``, as in `all_reduce_coalesced`. List groups only.

        See `reduce` for the other arguments and errors. Cost: one dispatch for all tensors.
        """
        call = self._checked("reduce_coalesced", outputs, lists, op, algorithm, order, root=root)
        return self._run(call, async_op=async_op)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when all ranks have called it. For groups with one local rank.

        On GPUs the ranks' current streams wait for each other, and the host does not wait for
        them. See `all_reduce` for ``async_op`` and errors.
        """
        if self._run_barrier is None or async_op:
            return self._run(self._checked("barrier", []), async_op=async_op)
        self._run_barrier()
        return None

    # -- bound calls -------------------------------------------------------------------------------

    def bind(
        self,
        tensors: Tensors,
        op: Op = "sum",
        *,
        algorithm: Algorithm | None = None,
        order: Order | None = None,
    ) -> Callable[[], None]:
        """Check an `all_reduce` once, to call it again and again on the same tensors.

        Args:
            tensors: As for `all_reduce`. The returned callable keeps them alive.
            algorithm: Overrides the communicator's; not ``naive`` or ``sharded``.

        Returns:
            A callable without arguments that reduces ``tensors`` in place; all ranks must call
            theirs. It raises ArgumentError and reduces nothing if a tensor has another address,
            shape, stride or dtype than when it was bound, as after ``resize_``, ``share_memory_``,
            ``set_``, a new ``.data`` or ``torch.multiprocessing``. Bind again then. It does not
            notice a new ``requires_grad``, a storage that shrank in place, or freed NumPy memory.

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
        """Check an `all_reduce_coalesced` once, to call it again and again on the same tensors.

        Args:
            lists: As for `all_reduce_coalesced`. The returned callable keeps their tensors alive.

        See `bind` for the other arguments, the callable and errors.
        """
        operation = self._of_lists("bind_coalesced", lists)
        call = self._checked("bind_coalesced", lists, None, op, algorithm, order)
        return self._bind_call(call._replace(operation=operation))

    # -- state, plans, statistics ------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the communicator is closed or a call has failed; wait for nothing.

        It checks nothing while another thread is in a call of a list group.

        Raises:
            CollectiveTimeout, PeerLostError: A rank was late or lost, also in a past call on a GPU.
            RingarError: The communicator is closed, or was aborted.
        """
        self._check()

    def abort(self) -> None:
        """End running calls at once; every later call raises.

        Groups with one local rank: running calls fail on all ranks with an error that names this
        rank, and this rank closes. List groups on GPUs: waiting kernels end. Tensors of aborted
        calls hold any values. May be called from any thread.

        Raises:
            UnsupportedError: A list group without GPUs: calls on the CPU end by themselves.
        """
        self._check_offered("abort")
        self._abort("")

    def close(self) -> None:
        """Wait for calls in the background, then end all threads. May be called again.

        Every later call raises `RingarError`. Ranks in other processes that go on calling get a
        `PeerLostError`. An exception from a signal handler ends the wait within 0.2 s, except for
        list groups on GPUs: use `abort` from another thread. Calls that have not begun then fail.

        Raises:
            CollectiveTimeout, PeerLostError: On GPUs, a rank was late or lost in one of the last
                calls, or a GPU still runs: its tensors are kept. A second close() raises nothing.
        """
        self._close()

    def plan(self, nbytes: int, dtype: torch.dtype = torch.float32) -> Plan:
        """Describe an all_reduce of ``nbytes`` per rank: algorithm, order, traffic, reason.

        Args:
            nbytes: Bytes of one rank's tensors.
            dtype: Their dtype.

        Raises:
            ArgumentError: ``nbytes`` is no number of bytes, or ``dtype`` is none that is reduced.
        """
        self._check_offered("plan")
        check_plan(nbytes, dtype)
        return self._make_plan(nbytes, dtype)

    def stats(self) -> dict[str, dict[str, float]]:
        """Return the number of calls so far: ``{algorithm: {"calls", "bytes", "busy_s"}}``.

        ``bytes`` counts one rank's data. GPUs have no ``busy_s``; ``naive`` and ``sharded`` count
        calls only. Processes: ``exchange`` is ``direct`` for small tensors, and all other
        collectives. Several machines: ``inter`` counts exchanges and bytes between machines.
        """
        return self._stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The error of the block matters more than a call that was late because of it.
        with nullcontext() if error is None else suppress(*LATE_ERRORS):
            self.close()

    # -- what a transport implements ---------------------------------------------------------------

    def _run(
        self, call: CollectiveCall, *, async_op: bool = False, what: object = ""
    ) -> Work | None:
        """Run a call, whose tensors are not checked yet, and return None, or in the background.

        ``what`` describes the call that this one stands for. Ranks compare it, messages show it.
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
        """Return the order of additions; raise if this algorithm cannot keep ``order``."""
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
        """Return the call, after checking all arguments but the tensors."""
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
        """Return the operation that reduces these lists; list groups check them later."""
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
