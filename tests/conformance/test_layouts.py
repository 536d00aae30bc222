"""Layouts: elements correspond by index, and bytes between elements stay unchanged."""

import itertools
from dataclasses import replace
from functools import partial

import hypothesis
import pytest
import torch
from call_cases import LISTS as COALESCED
from call_cases import PLAIN, ROOTED, SHARES, CallSpec, Operand, Strides
from hypothesis import strategies as st
from oracle import DTYPES, OPS, assert_all_ranks, assert_bits, folded, inputs
from promises import promise
from running import PYTHON

import pyringar as pr

F32 = torch.float32
# Shape, strides and offset, mostly of views of a tensor of shape (4, 6, 5, 3).
LAYOUTS = {
    "whole": ((4, 6, 5, 3), (90, 15, 3, 1), 0),
    "channels last": ((4, 3, 6, 5), (90, 1, 15, 3), 0),
    "transposed": ((6, 4, 5, 3), (15, 90, 3, 1), 0),
    "inner slice": ((4, 3, 5, 2), (90, 15, 3, 1), 16),
    "every other": ((2, 2, 5, 2), (180, 45, 3, 2), 0),
    "sliced and permuted": ((3, 4, 3, 5), (6, 90, 1, 15), 15),
    "one element": ((), (), 17),
    "empty slice": ((4, 0, 5, 3), (90, 15, 3, 1), 0),
    "diagonal": ((3, 5), (1, 18), 0),
    "new dims": ((4, 1, 6, 5, 3, 1), (90, 7, 15, 3, 1, 0), 0),
    "offset": ((359,), (1,), 1),
    "columns of wide rows": ((300, 67), (200, 3), 1),
    "large transposed": ((300, 400), (1, 300), 2),
}
MIXES = {
    "transposed": ((4, 4), [(4, 1), (1, 4)]),
    "channels last": ((3, 4, 5, 6), [(120, 30, 6, 1), (120, 1, 24, 4)]),
    "all permuted": ((3, 4, 6), [(1, 3, 12), (1, 18, 3), (24, 1, 4)]),
    "steps beside dense": ((6, 7), [(7, 1), (14, 2)]),
    "columns of wider rows": ((6, 7), [(14, 1), (21, 1)]),
    "large": ((100, 402), [(402, 1), (1, 100), (804, 2)]),
    # Strides of dimensions with one element are arbitrary.
    "one row": ((1, 1, 5), [(5, 9, 1), (77, 999, 1), (0, 0, 1)]),
    "one permuted row": ((1, 4, 3), [(12, 1, 4), (17, 1, 4), (22, 1, 4)]),
    "one element": ((1, 1), [(0, 9), (1, 9), (2, 9)]),
}
LISTS = (*COALESCED, "reduce_coalesced", "broadcast_coalesced")
NEGATED = (Strides(is_negated=True), Strides((2,), 1, is_negated=True), PLAIN)


def calls_of(transport, parts, k, *, entries=None, ops=("sum",)):
    parts = tuple(replace(part, seed=i) for i, part in enumerate(parts))
    calls = [
        CallSpec(entry, k, parts[:1] if entry not in LISTS else parts, op, algorithm, root=k - 1)
        for entry in entries or transport.entries
        for algorithm in transport.algorithms
        for op in ops
    ]
    shared = [
        CallSpec(entry, k, parts[:1], by_communicator=True, algorithm=algorithm)
        for entry in transport.entries
        for algorithm in transport.algorithms
        if entry in SHARES and parts and parts[0].numel % k == 0
    ]
    return [call for call in calls + shared if transport.can_run(call)]


@promise("layouts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_bit_exact(transport, name):
    shape, strides, offset = LAYOUTS[name]
    for dtype, k in ((F32, 3), (torch.int8, 3), (torch.bfloat16, 1)):
        parts = (Operand(dtype, shape, (Strides(strides, offset),)), Operand(torch.float64, (5,)))
        transport.check(calls_of(transport, parts, k))


@promise("layouts")
def test_packed_pieces_are_bit_exact(transport):
    """Ranks in processes pack strided tensors in pieces of at most 1 MiB; a row has 0.4 MB."""
    part = Operand(F32, (2, 3, 100_000), (Strides((700_000, 210_000, 2), 1),))
    transport.check([CallSpec("all_reduce", 2, (part,)), CallSpec("broadcast", 2, (part,), root=1)])


@promise("layouts-differ")
@pytest.mark.parametrize("name", MIXES)
def test_ranks_may_have_different_layouts(transport, name):
    shape, strides = MIXES[name]
    layouts = tuple(Strides(s, offset) for offset, s in enumerate(strides))
    for dtype, mixed in ((F32, layouts), (torch.int64, layouts[::-1])):
        part = Operand(dtype, shape, mixed)
        transport.check(calls_of(transport, (part, Operand(F32, (3,)), part), 3))


@promise("negated")
@pytest.mark.parametrize("dtype", [F32, torch.float16, torch.int64, torch.uint8], ids=str)
def test_negated_views_are_reduced(transport, dtype):
    for layouts in (NEGATED, NEGATED[:1], NEGATED[::-1]):
        part = Operand(dtype, (36,), layouts)
        transport.check(calls_of(transport, (part, part), 3, ops=("sum", "max")))
    permuted = (Strides((1, 2)), Strides((1, 2), is_negated=True), Strides((1, 2)))
    transport.check(calls_of(transport, (Operand(dtype, (2, 3), permuted),), 3))


@promise("mixed-lists")
def test_mixed_dtype_lists_are_reduced(transport):
    shapes = [(20, 1, 3, 3), (20,), (), (0,), (40, 128), (1,), (9001,), (2,) * 7, (0, 3)]
    mixed = tuple(Operand(DTYPES[i % 8], shape) for i, shape in enumerate(shapes * 2))
    entries = [entry for entry in LISTS if entry in transport.entries]
    for parts, k in itertools.product((mixed, (), mixed[:1]), (1, 2, 3)):
        transport.check(calls_of(transport, parts, k, entries=entries))
    many = tuple(Operand(DTYPES[i % 8], (i % 3,)) for i in range(1500))
    calls = calls_of(transport, many, 2, entries=["coalesced"])
    transport.check(
        [call for call in calls if call.algorithm not in PYTHON]
    )  # PYTHON algorithms reduce one tensor at a time: slow


def check_containers(transport, holds):
    parts = tuple(
        Operand(dtype, (36,), (Strides((2,), 1), PLAIN)) for dtype in (F32, torch.float16)
    )
    calls = calls_of(transport, parts, 3)
    if holds == "arrays":
        calls = [call for call in calls if call.entry not in ("reduce in place", "repeated")]
    transport.check([replace(call, holds=holds) for call in calls])


@promise("tuples")
def test_tuples_of_tensors_are_reduced(transport):
    check_containers(transport, "tuples")


@promise("arrays")
def test_numpy_arrays_are_reduced(transport):
    check_containers(transport, "arrays")


@promise("float-mode")
@pytest.mark.usefixtures("two_torch_threads")
def test_flushing_denormals_changes_no_bit(transport):
    for dtype in (F32, torch.float64, torch.float16):
        parts = (Operand(dtype, (36,)), Operand(dtype, (36_000,)))
        calls = calls_of(transport, parts, 3, ops=("sum", "mean"))
        transport.check([replace(call, flushes=True) for call in calls])


@pytest.mark.parametrize("dtype", [torch.float64, F32, torch.float16], ids=str)
def test_misaligned_memory_is_reduced(comm_of, dtype):
    """A tensor on memory of another library may start at any byte."""
    parts = inputs(1009, dtype, 3)
    for algorithm in ("fused", "direct", "ring"):
        buffers = [bytearray(1009 * dtype.itemsize + 1) for _ in range(3)]
        tensors = [torch.frombuffer(b, dtype=dtype, offset=1) for b in buffers]
        assert all(t.data_ptr() % dtype.itemsize for t in tensors)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part)
        comm_of(3).all_reduce(tensors, algorithm=algorithm)
        wanted = folded(parts, "sum", "ring" if algorithm == "ring" else "rank")
        assert_all_ranks(tensors, wanted, algorithm)


@hypothesis.settings(max_examples=200)
@hypothesis.given(data=st.data())
def test_overlap_check_is_exact(comm_of, data):
    ndim = data.draw(st.integers(1, 3))
    shape = [data.draw(st.integers(1, 4)) for _ in range(ndim)]
    strides = [data.draw(st.integers(0, 9)) for _ in range(ndim)]
    starts = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    base = torch.arange(128, dtype=torch.int32)
    views = [base.as_strided(shape, strides, start) for start in starts]
    places = [view.reshape(-1).tolist() for view in views]
    touched = places[0] + places[1]
    if len(set(touched)) == len(touched):
        comm_of(2).all_reduce(views)
        wanted = torch.tensor(places, dtype=torch.int32).sum(0).int()
        for view in views:
            assert_bits(view.reshape(-1), wanted)
        base[touched] = torch.tensor(touched, dtype=torch.int32)
    else:
        with pytest.raises(pr.ArgumentError, match=r"shares memory with|overlaps itself"):
            comm_of(2).all_reduce(views)
    assert torch.equal(base, torch.arange(128, dtype=torch.int32))


BORDERS = [0, 1, 2, 3, 7, 16, 64, 1024, 4096, 8192, 16_384, 32_768]


@st.composite
def random_layouts(draw, shape, *, can_be_negated):
    dims = draw(st.permutations(range(len(shape))))
    steps = st.integers(1, 3) if draw(st.booleans()) else st.just(1)
    strides, reach = [0] * len(shape), 1
    for dim in dims:
        strides[dim] = reach * draw(steps)
        reach = strides[dim] * max(1, shape[dim])
        if shape[dim] == 1:
            strides[dim] = draw(st.integers(0, 50))  # any stride is valid for one element
    is_negated = can_be_negated and draw(st.integers(0, 15)) == 15
    return Strides(tuple(strides), draw(st.integers(0, 3)), is_negated=is_negated)


@st.composite
def random_parts(draw, k, *, seed=0, is_small, num_shares=1):
    small = st.lists(st.integers(0, 6), max_size=4).map(tuple)
    near_borders = st.builds(
        lambda border, offset: (max(0, border + offset),),
        st.sampled_from(BORDERS[:6] if is_small else BORDERS),
        st.integers(-2, 2),
    )
    shape = draw(small | near_borders)
    if num_shares > 1:
        shape = (*shape, num_shares)
    layout = partial(random_layouts, shape, can_be_negated=True)
    lying = draw(st.just((PLAIN,)) | st.tuples(layout()) | st.tuples(*[layout() for _ in range(k)]))
    return Operand(
        draw(st.sampled_from(DTYPES)), shape, lying, seed=4 * draw(st.integers(0, 100)) + seed
    )


@st.composite
def random_calls(draw, transport):
    k = draw(st.sampled_from(transport.world_sizes))
    entry = draw(st.sampled_from(transport.entries))
    op = draw(st.sampled_from(OPS))
    is_plain = entry == "book"
    orders = (*transport.orders, *transport.made_orders)
    order = "any" if is_plain else draw(st.sampled_from(orders))
    algorithm = "auto" if is_plain else draw(st.sampled_from(transport.algorithms))
    is_list = entry in COALESCED or entry.endswith("coalesced")
    num_parts = draw(st.integers(1, 3)) if is_list else 1
    options = {"is_small": order == "exact", "num_shares": k if entry in SHARES else 1}
    parts = [draw(random_parts(k, seed=i, **options)) for i in range(num_parts)]
    call = CallSpec(
        entry,
        k,
        tuple(parts),
        op,
        algorithm,
        order,
        root=draw(st.integers(0, k - 1)),
        by_communicator=entry in SHARES or draw(st.booleans()),
        holds="tensors"
        if entry in ("repeated", *ROOTED)
        else draw(st.sampled_from(["tensors", "tuples", "arrays"])),
        flushes=draw(st.booleans()),
    )
    order = "rank" if "rank" in transport.orders and not is_plain else "any"
    nearest = replace(call, algorithm="auto", order=order)
    plainest = replace(nearest, holds="tensors", parts=call.parts[:1])
    return next(one for one in (call, nearest, plainest) if transport.can_run(one))


@promise("all_reduce", "layouts")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_calls", [None, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_random_calls_are_bit_exact(transport, num_calls):
    @hypothesis.settings(max_examples=num_calls or transport.num_random_calls)
    @hypothesis.given(call=random_calls(transport))
    def check(call):
        transport.check([call])

    check()
