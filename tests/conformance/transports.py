"""The transports of docs/promises.md. All run the same calls.

`ListTransport` drives all ranks from this process, a `RankTransport` runs a function on every rank.
To add a transport, subclass `RankTransport` and add it to `TRANSPORTS`.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import oracle
import torch
import torch.distributed as dist
from call_cases import ALL_REDUCES, BROADCASTS, LISTS, ROOTED, SHARES, Placed
from naive_transport import NaiveTransport
from oracle import NATIVE, limit_bytes, piece_elems
from rank_processes import RankGroup, another, connect, join, rank_groups
from running import (
    BOUND,
    PYTHON,
    check_rank,
    check_same,
    check_versions,
    float_mode,
    held,
    options_of,
    order_of,
    run,
)

import pyringar as pr
from pyringar.comm.process_communicator import ALGORITHMS as PROCESS_ALGORITHMS

Function = Callable[..., Any]


class ListTransport:
    """All ranks of a `Communicator`; this process makes each call for all ranks."""

    algorithms = ("auto", *NATIVE, *PYTHON)
    entries = ("book", *ALL_REDUCES, *LISTS, *ROOTED, *BROADCASTS, *SHARES)
    world_sizes = (1, 2, 3, 5, 8)
    made_orders = ()
    num_random_calls = 250

    def __init__(self, device):
        self.device = device
        self.orders = ("any", "rank", "tree") + (("exact",) if device == "cpu" else ())
        self._made = contextlib.ExitStack()
        self.comm_of = functools.cache(self._make)

    def _make(self, k, algorithm="auto", order="any"):
        made = pr.Communicator([self.device] * k, algorithm=algorithm, order=order)
        return self._made.enter_context(made)

    def close(self):
        self._made.close()

    def on_ranks(self, k, function, **arguments):
        """Run a function on every rank, each in a thread."""
        return LockstepCalls(self.comm_of(k)).run(function, arguments)

    def on_new_ranks(self, k, function, timeout=20.0, **given):
        with pr.Communicator([self.device] * k, timeout=timeout) as comm:
            return LockstepCalls(comm).run(function, given)

    def can_run(self, call):
        if call.order == "exact" and ("exact" not in self.orders or call.op not in ("sum", "mean")):
            return False
        if call.entry == "book":  # pr.allreduce() has no order and no algorithm
            return call.order == "any" and call.algorithm == "auto"
        if call.entry in SHARES and not call.by_communicator:
            return False
        if call.algorithm == "ring":
            return call.order == "any" and call.entry not in ROOTED
        if call.algorithm in PYTHON:
            is_known = call.entry in (*ALL_REDUCES, *LISTS) and call.entry not in BOUND
            return is_known and call.order in ("any", "rank")
        return True

    def borders(self, dtype, k):
        block = limit_bytes("fused_block") // dtype.itemsize
        return [2 * block, k * piece_elems(dtype, k), 3 * k * piece_elems(dtype, k)]

    def check(self, calls):
        for call in calls:
            self._check_call(call)

    def _check_call(self, call):
        assert self.can_run(call), call
        rows = [
            [Placed(field, call.k, self.device) for field in call.fields(rank)]
            for rank in range(call.k)
        ]
        options = (call.algorithm, call.order) if call.by_communicator else ()
        with float_mode(call.flushes):
            run_on_lists(self.comm_of(call.k, *options), call, rows)
        if call.k > 1 and call.holds != "arrays":
            for row in rows:
                check_versions(call, row)
        order = order_of(call, "auto" if call.entry in BROADCASTS else call.algorithm)
        all_found = [check_rank(call, rank, row, order) for rank, row in enumerate(rows)]
        check_same(call, all_found, is_on_gpu=self.device != "cpu")

    def reduced(self, tensors, op="sum", **options):
        mine = [tensor.to(self.device, copy=True) for tensor in tensors]
        self.comm_of(len(mine)).all_reduce(mine, op, **options)
        return [tensor.cpu() for tensor in mine]


def run_on_lists(comm, call, rows):
    firsts = held(call, [row[0] for row in rows if row])
    lists = [held(call, row[: len(call.parts)]) for row in rows]
    if call.entry == "book":
        given = list(firsts)
        assert pr.allreduce(firsts, call.op) is None
        assert all(a is b for a, b in zip(firsts, given, strict=True)), "the list was changed"
    elif call.entry in ROOTED:
        assert run_rooted(comm, call, rows, lists) is None
    else:
        outputs = held(call, [row[1] for row in rows]) if call.entry in SHARES else None
        run(comm, call, [one for row in rows for one in row], firsts, lists, outputs)


def run_rooted(comm, call, rows, lists):
    inputs, outputs = rows[call.root][: len(call.parts)], iter(rows[call.root][len(call.parts) :])
    written = held(
        call, [one if call.is_in_place(i) else next(outputs) for i, one in enumerate(inputs)]
    )
    options = {"root": call.root, **options_of(call)}
    if call.entry == "reduce_coalesced":
        return comm.reduce_coalesced(written, lists, call.op, **options)
    return comm.reduce(written[0], [mine[0] for mine in lists], call.op, **options)


class LockstepCalls:
    """Run each rank of a `Communicator` in a thread; one thread makes each call for all ranks."""

    def __init__(self, comm):
        self.comm, self.k = comm, comm.world_size
        self._barrier = threading.Barrier(self.k, timeout=30)
        self._given: list[tuple[Any, ...]] = [()] * self.k
        self._outcome: tuple[Any, BaseException | None] = (None, None)

    def run(self, function, arguments):
        def run_rank(rank):
            comm = LockstepRank(self, rank)
            try:
                state = SimpleNamespace(rank=rank, world_size=self.k, comm=comm)
                state.device = self.comm.devices[rank]
                return function(state, **arguments)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.k) as threads:
            return list(threads.map(run_rank, range(self.k)))

    def call(self, rank, name, given, options):
        self._given[rank] = given
        if self._barrier.wait() == 0:
            columns = [list(column) for column in zip(*self._given, strict=True)]
            is_own = [isinstance(column[0], (torch.Tensor, list, tuple)) for column in columns]
            joined = [c if own else c[0] for c, own in zip(columns, is_own, strict=True)]
            try:
                self._outcome = getattr(self.comm, name)(*joined, **options), None
            except BaseException as error:
                self._outcome = None, error
        self._barrier.wait()
        value, error = self._outcome
        if error is not None:
            raise error
        return value


class LockstepRank:
    def __init__(self, together, rank):
        self._together, self._rank = together, rank

    def __getattr__(self, name):
        return lambda *given, **options: self._together.call(self._rank, name, given, options)


class RankTransport:
    """Base of transports on which every rank makes its calls.

    Attributes:
        rows: Ids of docs/promises.md, separated by blanks, for a transport without a column there.
        made_orders: Orders that only the constructor of a communicator accepts.
        writes_with_torch: torch writes the results, and its negation changes the bits of a NaN.
    """

    rows = ""
    algorithms: tuple[str, ...] = ("auto",)
    orders: tuple[str, ...] = ("any",)
    made_orders: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    world_sizes = (1, 2, 3, 4)
    writes_with_torch = False
    num_random_calls = 80

    def on_ranks(self, k, function, **arguments):
        """Return ``function(state, **arguments)`` of each rank.

        ``state`` has ``rank``, ``world_size`` and ``comm``, which has the methods of
        `pr.ProcessCommunicator`.
        """
        raise NotImplementedError

    def on_new_ranks(self, k, function, timeout=20.0, **given):
        """Like `on_ranks`, but on a new group that may fail."""
        raise NotImplementedError

    def close(self): ...

    def can_run(self, call):
        if call.entry in SHARES and not call.by_communicator:  # these calls take no order
            return False
        return call.algorithm in self.algorithms and call.order in self.orders

    def borders(self, dtype, k):
        return []

    def check(self, calls):
        for k in sorted({call.k for call in calls}):
            mine = [call for call in calls if call.k == k]
            assert all(self.can_run(call) for call in mine), mine
            by_rank = self.on_ranks(k, check_on_rank, calls=mine)
            for call, *digests in zip(mine, *by_rank, strict=True):
                check_same(call, digests, is_on_gpu=self.writes_with_torch)

    def reduced(self, tensors, op="sum", **options):
        given = {"tensors": list(tensors), "op": op, "options": options}
        return self.on_ranks(len(tensors), reduce_on_rank, **given)


def device_of(state):
    return state.device if hasattr(state, "device") else getattr(state.comm, "device", "cpu")


def reduce_on_rank(state, tensors, op, options):
    mine = tensors[state.rank].to(device_of(state), copy=True)
    state.comm.all_reduce(mine, op, **options)
    return mine.cpu()


def check_on_rank(state, calls):
    return [check_own(state, call) for call in calls]


def comm_on_rank(state, call):
    if not call.by_communicator or isinstance(state.comm, (TorchCalls, NaiveTransport)):
        return state.comm
    choice = {"order": call.order}
    if isinstance(state.comm, pr.ProcessCommunicator):
        choice["algorithm"] = call.algorithm
    made = vars(state).setdefault("by_choice", {})
    key = tuple(choice.values())
    if key not in made:
        made[key] = another(state, timeout=60, device=device_of(state), **choice)
    return made[key]


def check_own(state, call):
    comm = comm_on_rank(state, call)
    placed = [Placed(field, call.k, device_of(state)) for field in call.fields(state.rank)]
    with float_mode(call.flushes and state.rank % 2 == 1):
        mine = held(call, placed[: len(call.parts)])
        first = mine[0] if mine else None
        last = placed[1].tensor if call.entry in SHARES else None
        run(comm, call, placed, first, mine, last)
    if call.k > 1 and call.holds != "arrays":
        check_versions(call, placed)
    order = order_of(call, "direct" if call.entry in SHARES else call.algorithm)
    # If the strides of one tensor differ between ranks, a ring splits all tensors in index order.
    lying = {
        tuple(part.is_permuted(r) and part.strides_used(r) for part in call.parts)
        for r in range(call.k)
    }
    return check_rank(call, state.rank, placed, order, by_index=len(lying) > 1)


class ProcessTransport(RankTransport):
    """Run one process per rank; the processes live as long as the transport."""

    join: Function = staticmethod(join)  # creates the communicator in the rank's process

    def __init__(self):
        self._made = contextlib.ExitStack()
        self.rank_group_of = self._made.enter_context(
            rank_groups(function=type(self).join, timeout=60)
        )

    def close(self):
        self._made.close()

    def on_ranks(self, k, function, **arguments):
        return self.rank_group_of(k).run(function, **arguments)

    def on_new_ranks(self, k, function, timeout=20.0, **given):
        with RankGroup(k) as group:
            group.join(function=type(self).join, timeout=timeout)
            return group.run(function, **given)


class ProcessCommTransport(ProcessTransport):
    """`pr.ProcessCommunicator` with tensors on the CPU."""

    algorithms = PROCESS_ALGORITHMS
    orders = ("any", "rank", "tree", "exact")
    entries = (*ALL_REDUCES, *LISTS, "broadcast", "async broadcast", *SHARES)
    world_sizes = (1, 2, 3, 5)
    num_random_calls = 250

    def can_run(self, call):
        return super().can_run(call) and (call.order != "exact" or call.op in ("sum", "mean"))

    def borders(self, dtype, k):
        exchange, slot = limit_bytes("process_exchange"), limit_bytes("process_slot")
        ahead = limit_bytes("process_reads_ahead") if k == 2 else 0
        return [nbytes // dtype.itemsize for nbytes in (exchange, slot, 4 * slot, ahead) if nbytes]


PIECE = 20_000  # elements of one message between machines
# By world size: the machine of each rank, as one letter.
PLACES = {1: "a", 2: "ab", 3: "aba", 4: "aabb", 5: "abbcc", 8: "aabbccdd"}


def join_machines(state, port, rank, world_size, name, **options):
    from pyringar.distributed import HierarchicalCommunicator, between

    oracle.machines = options.pop("machines", PLACES.get(world_size, ""))
    os.environ["PYRINGAR_NODE_ID"] = oracle.machines[rank]
    between.PIECE_ELEMENTS = PIECE
    state.rank, state.world_size, state.name = rank, world_size, name
    state.store = connect(port)
    state.comm = HierarchicalCommunicator(state.store, rank, world_size, name=name, **options)


class MachinesTransport(ProcessTransport):
    """`HierarchicalCommunicator` on simulated machines (PYRINGAR_NODE_ID)."""

    join = staticmethod(join_machines)
    made_orders = ("tree",)
    entries = ("all_reduce", "async", "repeated", *LISTS[:2], *BROADCASTS[:2], *SHARES)
    world_sizes = (1, 2, 3, 4, 5)
    writes_with_torch = True

    def can_run(self, call):
        if call.order == "tree" and call.by_communicator and call.k in (2, 4, 8):
            call = replace(call, order="any")
        return super().can_run(call) and call.holds != "arrays"

    def borders(self, dtype, k):
        return [PIECE // k * k, 2 * (PIECE // k) * k]


REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


class TorchCalls:
    """Methods of a communicator that call torch.distributed."""

    def all_reduce(self, tensor, op="sum", *, async_op=False, **_):
        return dist.all_reduce(tensor, REDUCE_OPS[op], async_op=async_op)

    def all_reduce_coalesced(self, tensors, op="sum", *, async_op=False, **_):
        future = dist.all_reduce_coalesced(tensors, REDUCE_OPS[op], async_op=async_op)
        if future is None:
            return None
        return SimpleNamespace(wait=lambda: future.wait() is not None, exception=lambda: None)

    def reduce(self, tensor, op, root):
        return dist.reduce(tensor, root, REDUCE_OPS[op])

    def broadcast(self, tensor, root=0, *, async_op=False):
        return dist.broadcast(tensor, root, async_op=async_op)

    def reduce_scatter(self, output, input, op="sum"):
        return dist.reduce_scatter_tensor(output, input, REDUCE_OPS[op])

    def all_gather(self, output, input):
        return dist.all_gather_into_tensor(output, input)

    def barrier(self):
        return dist.barrier()


class TorchTransport(RankTransport):
    """Base of transports that use torch.distributed."""

    entries = (
        "all_reduce",
        "async",
        "repeated",
        *LISTS[:2],
        "reduce in place",
        *BROADCASTS[:2],
        *SHARES,
    )
    world_sizes = (1, 2, 3, 5, 8)
    writes_with_torch = True

    def can_run(self, call):
        is_list = call.entry in LISTS  # torch requires one dtype per list
        has_one_dtype = len({part.dtype for part in call.parts}) == 1
        return super().can_run(call) and call.holds == "tensors" and (has_one_dtype or not is_list)


class LaunchTransport(TorchTransport):
    """Ranks that `pr.launch` runs as threads of this process."""

    communicator: Callable[[], Any] = TorchCalls

    def on_ranks(self, k, function, **arguments):
        return self.on_new_ranks(k, function, **arguments)

    def on_new_ranks(self, k, function, timeout=20.0, **given):
        def program():
            dist.init_process_group()
            state = SimpleNamespace(rank=dist.get_rank(), world_size=k, comm=self.communicator())
            return function(state, **given)

        return pr.launch(program, k, timeout=timeout)


class NaiveLaunchTransport(LaunchTransport):
    """`NaiveTransport` on ranks that `pr.launch` runs as threads."""

    communicator = NaiveTransport
    entries = tuple(entry for entry in TorchTransport.entries if entry not in ROOTED)
    rows = """
    same-bits one-rounding integers dtypes ops order-any layouts layouts-differ negated
    versions all_reduce coalesced reduce_scatter all_gather broadcast async barrier
    """


def join_backend(state, port, rank, world_size, name, timeout):
    import pyringar.distributed  # noqa: F401

    store = dist.PrefixStore(name, connect(port))
    dist.init_process_group(
        "ringar", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )
    state.rank, state.world_size, state.name = rank, world_size, name
    state.store, state.comm = store, TorchCalls()


class BackendTransport(ProcessTransport, TorchTransport):
    """The torch.distributed backend `ringar` with one process per rank."""

    join = staticmethod(join_backend)
    world_sizes = (1, 2, 3, 4)


def join_gpu(state, **options):
    join(state, device="cuda:0", **options)


class CudaProcessTransport(ProcessCommTransport):
    """`pr.ProcessCommunicator` with tensors on a GPU."""

    join = staticmethod(join_gpu)
    device = "cuda:0"
    orders = ("any", "rank", "tree")
    rows = """
    same-bits dtypes ops one-rounding order-any order-rank order-tree layouts layouts-differ
    all_reduce coalesced broadcast reduce_scatter all_gather bind async versions
    """


TRANSPORTS: dict[str, Callable[[], Any]] = {
    "threads": lambda: ListTransport("cpu"),
    "processes": ProcessCommTransport,
    "launch": LaunchTransport,
    "backend": BackendTransport,
    "machines": MachinesTransport,
    "naive": NaiveLaunchTransport,
    "cuda": lambda: ListTransport("cuda:0"),
    "cuda processes": CudaProcessTransport,
}
# Transports without a column in docs/promises.md, and the column that applies to them.
COLUMNS = {"backend": "launch"}
