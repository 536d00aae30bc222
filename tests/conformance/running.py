"""Run a `CallSpec` on any transport, and compare the results with the oracle."""

import contextlib
import sys
import time
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from call_cases import ALL_REDUCES, BROADCASTS, LISTS, ROOTED
from oracle import assert_words

import pyringar as pr

PYTHON = ("naive", "sharded")  # algorithms in plain torch
BOUND = ("bind", "bind_coalesced")


@contextlib.contextmanager
def float_mode(flushes):
    torch.set_flush_denormal(flushes)
    try:
        yield
        assert (sys.float_info.min / 2 == 0) == flushes, "the caller's float mode was changed"
    finally:
        torch.set_flush_denormal(False)


def held(call, placed):
    if call.holds == "arrays":
        return [one.array() if one.can_be_array else one.tensor for one in placed]
    tensors = [one.tensor for one in placed]
    return tuple(tensors) if call.holds == "tuples" else tensors


def options_of(call):
    if call.by_communicator:
        return {}
    return {"algorithm": call.algorithm, "order": call.order}


def order_of(call, algorithm):
    if call.order in ("tree", "exact"):
        return call.order
    return "ring" if algorithm == "ring" and call.k > 1 else "rank"


def run(comm, call, placed, first, many, last):
    """Run the call; restore the inputs before a repetition.

    If this process has one rank, the arguments belong to it, else they are lists over all ranks.

    Args:
        first: The first tensor.
        many: All tensors.
        last: The output of reduce_scatter or all_gather.
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
            # A list with one tensor runs as a prepared call, like the tensor itself.
            given = many if number == 1 and isinstance(comm, pr.ProcessCommunicator) else first
            comm.all_reduce(given, call.op, **options_of(call))
        return
    is_async = call.entry.startswith("async")
    if call.entry in ALL_REDUCES:
        work = comm.all_reduce(first, call.op, **options_of(call), async_op=is_async)
    elif call.entry in LISTS:
        work = comm.all_reduce_coalesced(many, call.op, **options_of(call), async_op=is_async)
    elif call.entry == "reduce in place":
        work = comm.reduce(first, call.op, call.root)
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


def rewrite(placed):
    for one in placed:
        one.rewrite()


def check_rank(call, rank, placed, order, *, by_index=False):
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


def check_versions(call, placed):
    for one in placed:
        is_counted = one.tensor._version > one.first_version
        assert is_counted == one.field.is_written, f"{call}: version of {one.part}"


def check_same(call, digests, *, is_on_gpu=False):
    if call.entry in (*ROOTED, "reduce_scatter"):
        return
    is_written_by_torch = call.algorithm in PYTHON or is_on_gpu
    if is_written_by_torch and any(part.has_negated for part in call.parts):
        return  # torch's negation changes the bits of a NaN, so ranks may differ
    assert len(set(digests)) == 1, f"ranks differ in bits: {call}"


@dataclass
class CallOutcome:
    """Error and duration of a rank's call, and the state afterwards."""

    error: str
    text: str
    seconds: float
    at: float
    is_untouched: bool = True
    again: str = ""


def outcome_of(call):
    began = time.monotonic()
    try:
        call()
        error: tuple[str, str] = ("none", "")
    except pr.RingarError as caught:
        error = (type(caught).__name__, str(caught))
    now = time.monotonic()
    return CallOutcome(*error, now - began, now)
