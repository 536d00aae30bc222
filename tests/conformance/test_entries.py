"""Every method of a group writes the expected tensors, bit for bit."""

import time
from dataclasses import replace

import pytest
import torch
from call_cases import LISTS, SHARES, CallSpec, Operand, Strides
from oracle import limit_bytes
from promises import promise

F32, BF16 = torch.float32, torch.bfloat16


def choices(transport, call, ways=(False, True)):
    made = [
        replace(call, algorithm=algorithm, order=order, by_communicator=by_communicator)
        for algorithm in transport.algorithms
        for order in (*transport.orders, *transport.made_orders)
        for by_communicator in ways
    ]
    return [one for one in made if transport.can_run(one)]


def check_entry(transport, entry):
    for k, (dtype, op) in zip(
        (1, 2, 3, 4),
        ((F32, "mean"), (BF16, "sum"), (F32, "sum"), (torch.int8, "mean")),
        strict=True,
    ):
        for numel, root in ((0, 0), (k, k - 1), (17 * k, k // 2)):
            parts = tuple(Operand(dtype, (numel + i,), seed=i) for i in range(3))
            is_list = entry in LISTS or entry.endswith("coalesced")
            call = CallSpec(entry, k, parts if is_list else parts[:1], op, root=root)
            ways = (False, True) if numel == k or entry in SHARES else (False,)
            transport.check(choices(transport, call, ways))


def entry_test(*rows, entries):
    """Create a test of ``entries`` on all transports that keep ``rows``."""

    @promise(*rows, "versions")
    @pytest.mark.parametrize("entry", entries)
    def test(transport, entry):
        assert entry in transport.entries
        check_entry(transport, entry)

    return test


test_all_reduce = entry_test("all_reduce", entries=["all_reduce", "repeated"])
test_async = entry_test("async", entries=["async", "async coalesced", "async broadcast"])
test_bind = entry_test("bind", entries=["bind", "bind_coalesced"])
test_coalesced = entry_test("coalesced", entries=["coalesced"])
test_reduce = entry_test("reduce", entries=["reduce in place"])
test_reduce_to_output = entry_test("reduce_coalesced", entries=["reduce", "reduce_coalesced"])
test_broadcast = entry_test("broadcast", entries=["broadcast"])
test_broadcast_list = entry_test("broadcast_coalesced", entries=["broadcast_coalesced"])
test_reduce_scatter = entry_test("reduce_scatter", entries=["reduce_scatter"])
test_all_gather = entry_test("all_gather", entries=["all_gather"])


def test_allreduce_function_is_bit_exact(transport_of):
    check_entry(transport_of("threads"), "book")


@promise("ops")
@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_all_methods_run_max_min_prod(transport, op):
    calls = [
        call
        for entry in transport.entries
        for call in choices(
            transport, CallSpec(entry, 3, (Operand(torch.float16, (33,)),), op, root=1)
        )
    ]
    transport.check(calls)


@promise("reduce_scatter", "all_gather")
def test_large_gathers_and_scatters_are_exact(transport):
    calls = []
    for k in (2, 3):
        part = limit_bytes("process_slot") // k // 4
        for numel in (part - 1, part + 1, 4 * part + 3, 70_001):
            for dtype in (F32, torch.uint8):
                for entry in SHARES:
                    gaps = (Strides(), Strides((1,), 1)) if dtype == F32 else (Strides(),)
                    call = CallSpec(
                        entry, k, (Operand(dtype, (k * numel,), gaps),), by_communicator=True
                    )
                    calls += [call, replace(call, algorithm="ring")]
    transport.check([call for call in calls if call.algorithm in transport.algorithms])


@promise("broadcast")
@pytest.mark.parametrize("numel", [100, 200_003])
def test_large_broadcasts_copy_all_bits(transport, numel):
    for entry in ("broadcast", "async broadcast"):
        parts = (Operand(torch.float16, (numel,)),)
        transport.check([CallSpec(entry, k, parts, root=r) for k in (2, 3) for r in range(k)])


@promise("coalesced", "mixed-lists")
def test_list_call_equals_single_calls(transport):
    dtypes = (F32, torch.float64, torch.float16, BF16, torch.int64)
    parts = tuple(
        Operand(dtypes[i % 5], (n,), seed=i) for i, n in enumerate((7200, 0, 1, 70_001, 33))
    )
    for op in ("sum", "max"):
        transport.check(choices(transport, CallSpec("coalesced", 3, parts[:3], op)))
        calls = [
            CallSpec("coalesced", 3, parts, op, algorithm) for algorithm in transport.algorithms
        ]
        transport.check(calls)


def crowd_on_rank(state, calls):
    start = time.monotonic()
    tensor = torch.ones(20_000)
    for _ in range(calls):
        state.comm.all_reduce(tensor, "mean")
        state.comm.barrier()
    assert torch.equal(tensor, torch.ones(20_000))
    return time.monotonic() - start


def test_more_processes_than_cores_stay_fast(joined_rank_group):
    """If waits did not yield the CPU, each would take a time slice: minutes in total."""
    assert max(joined_rank_group(10).run(crowd_on_rank, calls=20)) < 20
