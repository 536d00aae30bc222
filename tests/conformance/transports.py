"""The transports that must keep the same promises, each running the same calls.

`Lists` drives all ranks from this process: CPU threads, or one GPU under the marker ``cuda``.
`Processes` sends calls to ranks in processes of their own, which live for the whole session.
Rank 0 compares its results with the oracle; all other ranks must have its very bits, where all
ranks get the same.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import zlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from calls import (
    ALL_REDUCES,
    BROADCASTS,
    LISTS,
    ROOTED,
    SHARES,
    Call,
    Placed,
)
from oracle import DTYPES, NATIVE, assert_words, limit_bytes, piece_elems
from ranks import another, crews

import pyringar as pr
from pyringar.comm.process_communicator import ALGORITHMS as PROCESS_ALGORITHMS

PYTHON = ("naive", "sharded")  # algorithms in plain torch, which know all_reduce only
BOUND = ("bind", "bind_coalesced")


@contextlib.contextmanager
def float_mode(flushes: bool) -> Iterator[None]:
    torch.set_flush_denormal(flushes)
    try:
        yield
        assert (sys.float_info.min / 2 == 0) == flushes, "the caller's float mode was changed"
    finally:
        torch.set_flush_denormal(False)


def held(call: Call, placed: Sequence[Placed]) -> Any:
    if call.holds == "arrays":
        return [one.array() if one.can_be_array else one.tensor for one in placed]
    tensors = [one.tensor for one in placed]
    return tuple(tensors) if call.holds == "tuples" else tensors


def options_of(call: Call) -> dict[str, Any]:
    if call.by_communicator:
        return {}
    return {"algorithm": call.algorithm, "order": call.order}


def order_of(call: Call, algorithm: str) -> str:
    if call.order in ("tree", "exact"):
        return call.order
    return "ring" if algorithm == "ring" and call.k > 1 else "rank"


# -- all ranks in this process ---------------------------------------------------------------------


class Lists:
    algorithms = ("auto", *NATIVE, *PYTHON)
    entries = ("book", *ALL_REDUCES, *LISTS, *ROOTED, *BROADCASTS, *SHARES)
    world_sizes = (1, 2, 3, 5, 8)
    dtypes = DTYPES

    def __init__(self, device: str) -> None:
        self.device = device
        self.orders = ("any", "rank", "tree") + (("exact",) if device == "cpu" else ())
        self._made = contextlib.ExitStack()
        self.comm_of = functools.cache(self._make)

    def _make(self, k: int, algorithm: str = "auto", order: str = "any") -> pr.Communicator:
        made = pr.Communicator([self.device] * k, algorithm=algorithm, order=order)
        return self._made.enter_context(made)

    def close(self) -> None:
        self._made.close()

    def can_run(self, call: Call) -> bool:
        if call.order == "exact" and ("exact" not in self.orders or call.op not in ("sum", "mean")):
            return False
        if call.entry == "book":  # which names neither
            return call.order == "any" and call.algorithm == "auto"
        if call.entry in SHARES and not call.by_communicator:
            return False
        if call.algorithm == "ring":
            return call.order == "any" and call.entry not in ROOTED
        if call.algorithm in PYTHON:
            is_known = call.entry in (*ALL_REDUCES, *LISTS) and call.entry not in BOUND
            return is_known and call.order in ("any", "rank")
        return True

    def borders(self, dtype: torch.dtype, k: int) -> list[int]:
        block = limit_bytes("fused_block") // dtype.itemsize
        return [2 * block, k * piece_elems(dtype, k), 3 * k * piece_elems(dtype, k)]

    def check(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._check_call(call)

    def _check_call(self, call: Call) -> None:
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

    def reduced(self, tensors: Sequence[torch.Tensor], op: str = "sum", **options: Any) -> Any:
        mine = [tensor.to(self.device, copy=True) for tensor in tensors]
        self.comm_of(len(mine)).all_reduce(mine, op, **options)
        return [tensor.cpu() for tensor in mine]


def run(comm: Any, call: Call, placed: Sequence[Placed], first: Any, many: Any, last: Any) -> None:
    """Make the call, of any transport, with its fields; they are written anew for a second one.

    Args:
        first: The first tensor; of lists, of each rank.
        many: All tensors; of lists, a list for each rank.
        last: The output of a call between whole tensors and shares; of lists, of each rank.
    """
    if call.entry in BOUND:
        bind, given = (comm.bind, first) if call.entry == "bind" else (comm.bind_coalesced, many)
        bound = bind(given, call.op, **options_of(call))
        assert bound() is None
        rewrite(placed)
        assert bound() is None
        return
    if call.entry == "repeated":
        for number in range(3):
            rewrite(placed)
            # A list of one process's tensor takes the short way, too.
            given = many if number == 1 and isinstance(comm, pr.ProcessCommunicator) else first
            comm.all_reduce(given, call.op, **options_of(call))
        return
    is_async = call.entry.startswith("async")
    if call.entry in ALL_REDUCES:
        work = comm.all_reduce(first, call.op, **options_of(call), async_op=is_async)
    elif call.entry in LISTS:
        work = comm.all_reduce_coalesced(many, call.op, **options_of(call), async_op=is_async)
    elif call.entry == "broadcast_coalesced":
        work = comm.broadcast_coalesced(many, call.root)
    elif call.entry in BROADCASTS:
        work = comm.broadcast(first, call.root, async_op=is_async)
    elif call.entry == "reduce_scatter":
        work = comm.reduce_scatter(last, first, call.op)
    else:
        work = comm.all_gather(last, first)
    assert (work is not None) == is_async
    if work is not None:
        assert work.wait() is True
        assert work.exception() is None


def rewrite(placed: Sequence[Placed]) -> None:
    for one in placed:
        one.rewrite()


def run_on_lists(comm: pr.Communicator, call: Call, rows: list[list[Placed]]) -> None:
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


def run_rooted(comm: pr.Communicator, call: Call, rows: list[list[Placed]], lists: Any) -> Any:
    inputs, outputs = rows[call.root][: len(call.parts)], iter(rows[call.root][len(call.parts) :])
    written = held(
        call, [one if call.is_in_place(i) else next(outputs) for i, one in enumerate(inputs)]
    )
    options = {"root": call.root, **options_of(call)}
    if call.entry == "reduce_coalesced":
        return comm.reduce_coalesced(written, lists, call.op, **options)
    return comm.reduce(written[0], [mine[0] for mine in lists], call.op, **options)


# -- comparing -------------------------------------------------------------------------------------


def check_rank(
    call: Call, rank: int, placed: Sequence[Placed], order: str, *, by_index: bool = False
) -> int:
    digest = 0
    for one in placed:
        found = one.read()
        is_shared = one.field.is_written and call.entry not in (*ROOTED, "reduce_scatter")
        if rank == 0 or not is_shared:
            wanted = call.wanted(rank, one.field, order, by_index=by_index)
            assert_words(found, wanted, one.part.kind, call)
            if call.is_copy(one.field) and not one.part.has_negated:
                assert np.array_equal(found, wanted), f"the bits of a NaN were changed: {call}"
        if one.field.is_written or call.entry in BROADCASTS:
            digest = zlib.crc32(found.tobytes(), digest)
    return digest


def check_versions(call: Call, placed: Sequence[Placed]) -> None:
    for one in placed:
        is_told = one.tensor._version > one.first_version
        assert is_told == one.field.is_written, f"{call}: version of {one.part}"


def check_same(call: Call, digests: Sequence[int], *, is_on_gpu: bool = False) -> None:
    if call.entry in (*ROOTED, "reduce_scatter"):
        return
    is_written_by_torch = call.algorithm in PYTHON or is_on_gpu
    if is_written_by_torch and any(part.has_negated for part in call.parts):
        return  # torch's negation makes another NaN of one
    assert len(set(digests)) == 1, f"ranks differ in bits: {call}"


# -- a process per rank ----------------------------------------------------------------------------


class Processes:
    algorithms = PROCESS_ALGORITHMS
    orders = ("any", "rank", "tree", "exact")
    entries = (*ALL_REDUCES, *LISTS, "broadcast", "async broadcast", *SHARES)
    world_sizes = (1, 2, 3, 4)
    dtypes = DTYPES

    def __init__(self) -> None:
        self._made = contextlib.ExitStack()
        self.crew_of = self._made.enter_context(crews(timeout=60))

    def close(self) -> None:
        self._made.close()

    def can_run(self, call: Call) -> bool:
        if call.order == "exact" and call.op not in ("sum", "mean"):
            return False
        if call.entry in SHARES and not call.by_communicator:
            return False
        return call.algorithm != "ring" or call.order == "any"

    def borders(self, dtype: torch.dtype, k: int) -> list[int]:
        exchange, slot = limit_bytes("process_exchange"), limit_bytes("process_slot")
        ahead = limit_bytes("process_reads_ahead") if k == 2 else 0
        return [nbytes // dtype.itemsize for nbytes in (exchange, slot, 4 * slot, ahead) if nbytes]

    def check(self, calls: Sequence[Call]) -> None:
        for k in sorted({call.k for call in calls}):
            mine = [call for call in calls if call.k == k]
            assert all(self.can_run(call) for call in mine), mine
            by_rank = self.crew_of(k).run(check_on_rank, calls=mine)
            for call, *digests in zip(mine, *by_rank, strict=True):
                check_same(call, digests)

    def reduced(self, tensors: Sequence[torch.Tensor], op: str = "sum", **options: Any) -> Any:
        crew = self.crew_of(len(tensors))
        return crew.run(reduce_on_rank, tensors=list(tensors), op=op, options=options)


def reduce_on_rank(
    state: SimpleNamespace, tensors: list[torch.Tensor], op: str, options: dict[str, Any]
) -> torch.Tensor:
    mine = tensors[state.rank]
    state.comm.all_reduce(mine, op, **options)
    return mine


def check_on_rank(state: SimpleNamespace, calls: Sequence[Call]) -> list[int]:
    return [check_own(state, call) for call in calls]


def comm_on_rank(state: SimpleNamespace, call: Call) -> pr.ProcessCommunicator:
    if not call.by_communicator:
        return state.comm
    if not hasattr(state, "by_choice"):
        state.by_choice = {}
    choice = {"algorithm": call.algorithm, "order": call.order}
    key = tuple(choice.values())
    if key not in state.by_choice:
        state.by_choice[key] = another(state, timeout=60, **choice)
    return state.by_choice[key]


def check_own(state: SimpleNamespace, call: Call) -> int:
    placed = [Placed(field, call.k) for field in call.fields(state.rank)]
    comm = comm_on_rank(state, call)
    with float_mode(call.flushes and state.rank % 2 == 1):
        mine = held(call, placed[: len(call.parts)])
        first = mine[0] if mine else None
        last = placed[1].tensor if call.entry in SHARES else None
        run(comm, call, placed, first, mine, last)
    if call.k > 1 and call.holds != "arrays":
        check_versions(call, placed)
    order = order_of(call, "direct" if call.entry in SHARES else call.algorithm)
    # One tensor that lies otherwise on another rank, and all of the call are taken by index.
    lying = {
        tuple(part.is_permuted(r) and part.strides_used(r) for part in call.parts)
        for r in range(call.k)
    }
    return check_rank(call, state.rank, placed, order, by_index=len(lying) > 1)


TRANSPORTS = {
    "threads": lambda: Lists("cpu"),
    "processes": Processes,
    "gpu": lambda: Lists("cuda:0"),
}
